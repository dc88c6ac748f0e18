package tiers_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// formatBlock is a line of testdata/format-*/blocks.jsonl; make-format.sh beside
// those directories has made them.
type formatBlock struct {
	State     string // present, g2 (in DRAM only, until a stop in order), deleted, cleared, expired
	Namespace string
	Hash      string
	Length    int
	Line      string // the payload, over and over
	Parent    string
}

func (b *formatBlock) payload() []byte {
	line := b.Line + "\n"
	return []byte(strings.Repeat(line, b.Length/len(line)+1))[:b.Length]
}

// formatSpace is what namespaces.json has of one.
type formatSpace struct {
	Name    string `json:"name"`
	Digest  string `json:"digest"`
	HashLen int    `json:"hash_len"`
	Epoch   uint32 `json:"epoch"`
	TTLMS   int64  `json:"ttl_ms"`
	Created string `json:"created"`
}

// TestFormats opens the data directories of every released format: every block
// is served, byte by byte, nothing that was deleted is, and the store goes on.
func TestFormats(t *testing.T) {
	withoutRace(t)
	archives, err := filepath.Glob("testdata/format-*/[ck]*.tar.gz") // clean and killed
	if err != nil || len(archives) == 0 {
		t.Fatalf("no archives: %v", err)
	}
	for _, archive := range archives {
		t.Run(strings.TrimPrefix(archive, "testdata/"), func(t *testing.T) {
			t.Parallel()
			dir := unpack(t, archive)
			o := tiers.Options{Dir: dir, Agent: newAgent(t), Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "g3.slab")}}}
			blocks := readBlocks(t, filepath.Join(filepath.Dir(archive), "blocks.jsonl"))
			clean := filepath.Base(archive) == "clean.tar.gz"

			s := openStore(t, o)
			wantSpaces(t, s, filepath.Join(filepath.Dir(archive), "namespaces.json"))
			present := wantBlocks(t, s, blocks, clean)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			wantVerified(t, dir, present)

			s = openStore(t, o)
			if again := wantBlocks(t, s, blocks, clean); again != present {
				t.Errorf("%d blocks after another start, %d before", again, present)
			}
			changed := change(t, s, blocks)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, o)
			present = wantBlocks(t, s, changed, clean)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			wantVerified(t, dir, present)
		})
	}
}

// change deletes a block of each namespace and puts another one, and returns what
// is there then.
func change(t *testing.T, s *tiers.Store, blocks map[string]formatBlock) map[string]formatBlock {
	t.Helper()
	changed := maps.Clone(blocks)
	seen := map[string]bool{}
	for key, b := range blocks {
		if b.State != "present" || seen[b.Namespace] {
			continue
		}
		seen[b.Namespace] = true
		ns, h := spaceAndHash(t, s, b)
		if n, err := s.Delete(t.Context(), ns.ID, ns.HashLen, h[:ns.HashLen]); err != nil || n != 1 {
			t.Fatalf("delete %s: %d, %v", key, n, err)
		}
		b.State = "deleted"
		changed[key] = b
		b.State, b.Line, b.Parent = "present", "a new one", ""
		b.Hash = strings.Repeat("ab", ns.HashLen)
		changed[b.Namespace+"/"+b.Hash] = b
		_, h = spaceAndHash(t, s, b)
		res, _, err := s.Reserve(t.Context(), ns.ID, ns.HashLen, h, int64(b.Length), block.PutOptions{Durable: block.G3})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Fill(t.Context(), res.ID, 0, b.payload()); err != nil {
			t.Fatal(err)
		}
		if err := s.Commit(t.Context(), []uint64{res.ID})[0].Err; err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) < 5 {
		t.Fatalf("blocks in the namespaces %v only", seen)
	}
	return changed
}

// wantBlocks reads all blocks and returns how many are there.
func wantBlocks(t *testing.T, s *tiers.Store, blocks map[string]formatBlock, clean bool) int {
	t.Helper()
	present := 0
	parents := map[string]string{}
	for _, n := range s.Namespaces() {
		entries, _, err := s.List(t.Context(), n.ID, "", 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			parent := ""
			if e.HasPar {
				parent = e.Parent.Hex(n.HashLen)
			}
			parents[n.Desc.Name+"/"+e.Hash.Hex(n.HashLen)] = parent
		}
	}
	for key, b := range blocks {
		ns, h := spaceAndHash(t, s, b)
		var data []byte
		var got block.Payload
		err := s.Get(t.Context(), ns.ID, ns.HashLen, []block.Wanted{{Hash: h}}, block.GetOptions{Verify: true}, func(_ int, p block.Payload) error {
			data, got = bytes.Clone(p.Bytes), p
			return nil
		})
		if err != nil {
			t.Fatalf("get %s: %v", key, err)
		}
		parent, listed := parents[key]
		delete(parents, key)
		hit := got.Reason == block.Hit
		if listed != hit {
			t.Errorf("%s: listed %v, read %v", key, listed, got.Reason)
		}
		switch want := b.State == "present" || b.State == "g2" && clean; {
		case hit && b.State != "present" && b.State != "g2":
			t.Errorf("%s is %s, and back", key, b.State)
		case !hit && want:
			t.Errorf("%s: %v", key, got.Reason)
		case hit && !bytes.Equal(data, b.payload()):
			t.Errorf("%s: other bytes", key)
		case hit && parent != b.Parent:
			t.Errorf("%s: parent %q, want %q", key, parent, b.Parent)
		}
		if hit {
			present++
		}
	}
	if len(parents) > 0 {
		t.Errorf("blocks that nobody put: %v", parents)
	}
	if present < 30 {
		t.Errorf("%d blocks are there", present)
	}
	return present
}

func spaceAndHash(t *testing.T, s *tiers.Store, b formatBlock) (block.Namespace, block.Hash) {
	t.Helper()
	h, _, err := block.ParseHash(b.Hash)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range s.Namespaces() {
		if n.Desc.Name == b.Namespace {
			return n.Namespace, h
		}
	}
	t.Fatalf("no namespace %s", b.Namespace)
	return block.Namespace{}, h
}

func wantSpaces(t *testing.T, s *tiers.Store, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var want []formatSpace
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	got := map[string]formatSpace{}
	for _, n := range s.Namespaces() {
		digest := n.Desc.Digest()
		got[n.Desc.Name] = formatSpace{n.Desc.Name, hex.EncodeToString(digest[:]), n.HashLen, n.Epoch, n.TTL.Milliseconds(), ""}
	}
	for _, w := range want {
		w.Created = ""
		if got[w.Name] != w {
			t.Errorf("namespace %+v, want %+v", got[w.Name], w)
		}
	}
	if len(got) != len(want) || len(want) == 0 {
		t.Errorf("%d namespaces, want %d", len(got), len(want))
	}
}

func wantVerified(t *testing.T, dir string, present int) {
	t.Helper()
	rep, err := tiers.Verify(t.Context(), dir, nil)
	if err != nil || rep.Bad != 0 || rep.Good != int64(present) || len(rep.Problems) > 0 {
		t.Errorf("verify: %+v, %v; want %d good", rep, err, present)
	}
}

// readBlocks reads what was done to blocks, by namespace and hash.
func readBlocks(t *testing.T, path string) map[string]formatBlock {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	blocks := map[string]formatBlock{}
	for d := json.NewDecoder(f); ; {
		var b formatBlock
		if err := d.Decode(&b); errors.Is(err, io.EOF) {
			return blocks
		} else if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		blocks[b.Namespace+"/"+b.Hash] = b
	}
}

// unpack unpacks a data directory and returns where it is. Zeros stay holes.
func unpack(t *testing.T, archive string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return filepath.Join(dir, "data")
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, h.Name)
		if h.FileInfo().IsDir() {
			if err := os.MkdirAll(path, 0o700); err != nil {
				t.Fatal(err)
			}
			continue
		}
		unpackFile(t, path, r, h.Size)
	}
}

func unpackFile(t *testing.T, path string, r io.Reader, size int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	part, zeros := make([]byte, 64<<10), make([]byte, 64<<10)
	for off := int64(0); off < size; {
		n, err := io.ReadFull(r, part[:min(size-off, int64(len(part)))])
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(part[:n], zeros[:n]) {
			if _, err := f.WriteAt(part[:n], off); err != nil {
				t.Fatal(err)
			}
		}
		off += int64(n)
	}
}

// TestStrangeState opens what is not this program's, or not yet: an error says
// so, and every file stays as it is.
func TestStrangeState(t *testing.T) {
	withoutRace(t)
	const opened = "data/catalog"
	for _, c := range []struct {
		name string
		want error
		text string // in the error
		// change makes the state strange. It returns which files are left out of the
		// comparison: those of a catalog that was opened, whose records are compared.
		change func(t *testing.T, o *tiers.Options) (but string)
	}{
		{"newer slab", tiers.ErrVersion, "version 9", func(t *testing.T, o *tiers.Options) string {
			newerSlab(t, o.Slabs[0].Path)
			return opened
		}},
		{"another store's slab", block.ErrInvalid, "another data directory", func(t *testing.T, o *tiers.Options) string {
			other := filepath.Join(t.TempDir(), "other")
			s := openStore(t, tiers.Options{Dir: other, Agent: o.Agent, Slabs: []tiers.SlabSpec{{Path: other + ".slab", Bytes: 32 << 20}}})
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			o.Slabs[0].Path = other + ".slab"
			return opened
		}},
		{"newer Pebble", index.ErrVersion, "pebble: unknown format version: 999", func(t *testing.T, o *tiers.Options) string {
			old, err := filepath.Glob(filepath.Join(o.Dir, "catalog", "marker.format-version.*"))
			if err != nil || len(old) != 1 {
				t.Fatal(old, err)
			}
			if err := os.Rename(old[0], filepath.Join(o.Dir, "catalog", "marker.format-version.000012.999")); err != nil {
				t.Fatal(err)
			}
			return ""
		}},
		{"foreign catalog", block.ErrCorrupt, "letter.txt", func(t *testing.T, o *tiers.Options) string {
			o.Dir = t.TempDir()
			if err := os.Mkdir(filepath.Join(o.Dir, "catalog"), 0o700); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"LOCK", "catalog/LOCK", "catalog/letter.txt"} {
				if err := os.WriteFile(filepath.Join(o.Dir, name), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			return ""
		}},
		{"catalog that lost a marker", block.ErrCorrupt, "remains of a catalog", func(t *testing.T, o *tiers.Options) string {
			all, err := filepath.Glob(filepath.Join(o.Dir, "catalog", "marker.manifest.*"))
			if err != nil || len(all) == 0 {
				t.Fatal(all, err)
			}
			for _, path := range all {
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
			}
			return ""
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := unpack(t, "testdata/format-1/clean.tar.gz")
			o := tiers.Options{Dir: dir, Agent: newAgent(t), DRAM: 64 << 20, Slabs: []tiers.SlabSpec{{Path: filepath.Join(dir, "g3.slab")}}}
			but := c.change(t, &o)
			files := sums(t, but, o.Dir, o.Slabs[0].Path)
			var records map[block.Key]index.Record
			if but != "" {
				records = catalogRecords(t, o.Dir)
			}
			s, err := tiers.Open(context.Background(), o)
			if err == nil {
				s.Close()
				t.Fatal("opened")
			}
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %v with %q", err, c.want, c.text)
			}
			if after := sums(t, but, o.Dir, o.Slabs[0].Path); !maps.Equal(after, files) {
				t.Errorf("files were %v, are %v", files, after)
			}
			if but != "" {
				if after := catalogRecords(t, o.Dir); !maps.Equal(after, records) || len(records) == 0 {
					t.Errorf("%d records, %d before, or others", len(after), len(records))
				}
			}
		})
	}
}

// sums hashes all files below paths but those whose path holds but.
func sums(t *testing.T, but string, paths ...string) map[string]uint64 {
	t.Helper()
	all := map[string]uint64{}
	for _, root := range paths {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || but != "" && strings.Contains(path, but) {
				return err
			}
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			sum := xxh3.New()
			_, err = io.Copy(sum, f)
			all[path] = sum.Sum64()
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// newerSlab gives a slab's superblocks a version that nobody knows yet.
func newerSlab(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 4096)
	for _, at := range []int64{0, 64 << 10} {
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[8] = 9
		binary.LittleEndian.PutUint64(b[4088:], xxhash.Sum64(b[:4088]))
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
}

// catalogRecords are the blocks that a store's catalog has.
func catalogRecords(t *testing.T, dir string) map[block.Key]index.Record {
	t.Helper()
	c, err := index.OpenCatalog(filepath.Join(dir, "catalog"), &index.CatalogOptions{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	all := map[block.Key]index.Record{}
	err = c.Scan(func(r *index.Record) error {
		all[r.Key] = *r
		return nil
	})
	if err := errors.Join(err, c.Close()); err != nil {
		t.Fatal(err)
	}
	return all
}
