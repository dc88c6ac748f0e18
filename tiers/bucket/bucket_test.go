package bucket

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/backends/s3"
	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// service is a real server's bucket.
type service struct{ *object.Backend }

func (s service) Get(ctx context.Context, key string, off int64, dst [][]byte) error {
	_, err := s.Backend.Get(ctx, key, off, dst, false)
	return err
}

func (s service) Put(ctx context.Context, key string, src [][]byte, ifAbsent bool) error {
	_, err := s.Backend.Put(ctx, key, src, ifAbsent)
	if errors.Is(err, object.ErrExists) {
		return fmt.Errorf("%w: %w", ErrExists, err)
	}
	return err
}

func (s service) Delete(ctx context.Context, keys []string) error {
	_, err := s.Backend.Delete(ctx, keys)
	return err
}

// List gives few at a time, so that tests meet cursors.
func (s service) List(ctx context.Context, prefix, cursor string) ([]Object, string, error) {
	page, err := s.Backend.List(ctx, prefix, cursor, 2)
	var objects []Object
	for _, o := range page.Objects {
		objects = append(objects, Object{Key: o.Key, Bytes: o.Bytes, Modified: o.Modified})
	}
	return objects, page.Next, err
}

func newService(t *testing.T) service {
	t.Helper()
	server := servers.StartVersityGW(t)
	server.Bucket(t, "kvtier")
	server.Login(t)
	b, err := s3.New(t.Context(), &s3.Options{URL: "s3://kvtier/some/prefix?path_style=true&region=us-east-1&endpoint=" + server.Endpoint})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return service{b}
}

func open(t *testing.T, s Service, store byte) *Bucket {
	t.Helper()
	b, err := Open(t.Context(), s, "west", [16]byte{store}, packed.Writer{store})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var space = packed.Namespace{HashLen: 16, Desc: block.Descriptor{Name: "n", MaxBlockBytes: 1 << 20}}

// contents are the bytes of block i, header and payload.
func contents(i byte) (header, payload []byte) {
	return bytes.Repeat([]byte{i}, packed.HeaderBytes), bytes.Repeat([]byte{i, ^i}, 1000+int(i))
}

// number numbers objects.
var number atomic.Uint64

// write puts blocks into an object.
func write(t *testing.T, b *Bucket, epoch uint32, expires int64, blocks ...byte) packed.Name {
	t.Helper()
	f := b.New(number.Add(1), space.Desc.Digest(), 16, epoch)
	var parts [][]byte
	for _, i := range blocks {
		header, payload := contents(i)
		if !f.Add(&packed.Member{Hash: block.Hash{i}, Len: uint32(len(payload)), Expires: expires}) {
			t.Fatal("no room")
		}
		parts = append(parts, header, payload)
	}
	name, err := b.Write(t.Context(), f, parts)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// imported is what an import finds alive, each block read back and compared, and the
// objects that cannot be used.
func imported(t *testing.T, b *Bucket) (alive string, failed map[packed.Name]error) {
	t.Helper()
	failed = map[packed.Name]error{}
	var found [256]int
	if err := b.Import(t.Context(), nil, func(o *Found) error {
		if o.Err != nil {
			failed[o.Name] = o.Err
			return nil
		}
		for i, m := range o.Footer.Members {
			if o.Dead[i] {
				continue
			}
			found[m.Hash[0]]++
			header, payload := make([]byte, packed.HeaderBytes), make([]byte, m.Len)
			if err := b.Read(t.Context(), o.Name, m.Offset, [][]byte{header, payload}); err != nil {
				return err
			}
			if h, p := contents(m.Hash[0]); !bytes.Equal(header, h) || !bytes.Equal(payload, p) {
				t.Errorf("block %d comes back with other bytes", m.Hash[0])
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var s strings.Builder
	for i, n := range found {
		for range n {
			fmt.Fprintf(&s, "%d ", i)
		}
	}
	return strings.TrimSpace(s.String()), failed
}

// TestClaim: the first of several clusters that come at once gets the prefix, and its
// stores share it.
func TestClaim(t *testing.T) {
	s := newService(t)
	const clusters = 4
	errs := make([]error, clusters)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() {
			_, errs[i] = Open(t.Context(), s, fmt.Sprintf("c%d", i), [16]byte{byte(i)}, packed.Writer{byte(i)})
		})
	}
	all.Wait()
	owner := -1
	for i, err := range errs {
		switch {
		case err == nil && owner < 0:
			owner = i
		case err == nil:
			t.Errorf("clusters c%d and c%d both own the prefix", owner, i)
		case !errors.Is(err, block.ErrInvalid):
			t.Errorf("cluster c%d: %v", i, err)
		}
	}
	if owner < 0 {
		t.Fatal("nobody owns the prefix")
	}
	name := fmt.Sprintf("c%d", owner)
	if _, err := Open(t.Context(), s, name, [16]byte{99}, packed.Writer{99}); err != nil {
		t.Errorf("another store of the cluster: %v", err)
	}
	_, err := Open(t.Context(), s, "east", [16]byte{99}, packed.Writer{99})
	if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), `"east"`) || !strings.Contains(err.Error(), name) {
		t.Errorf("another cluster: %v", err)
	}
	if _, err := Open(t.Context(), s, "no/name", [16]byte{99}, packed.Writer{99}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("a name that none may have: %v", err)
	}
	newer := bytes.Replace((&packed.Cluster{Name: name}).Encode(), []byte(`"version": 1`), []byte(`"version": 9`), 1)
	if err := s.Put(t.Context(), packed.ClusterKey, [][]byte{newer}, false); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), s, name, [16]byte{99}, packed.Writer{99}); !errors.Is(err, index.ErrVersion) {
		t.Errorf("claimed by a newer program: %v", err)
	}
}

// TestImport: another store finds what was written, and nothing that was deleted.
func TestImport(t *testing.T) {
	s := newService(t)
	b := open(t, s, 1)
	if err := b.Describe(t.Context(), &space); err != nil {
		t.Fatal(err)
	}
	if err := b.Describe(t.Context(), &space); err != nil {
		t.Errorf("described again: %v", err)
	}
	other := open(t, s, 2)
	digest := space.Desc.Digest()
	if got, err := other.Namespace(t.Context(), digest); err != nil || got != space {
		t.Errorf("namespace is %+v, %v", got, err)
	}
	if _, err := other.Namespace(t.Context(), [32]byte{1}); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("a namespace that is none: %v", err)
	}
	step := func(what, want string) {
		t.Helper()
		if got, failed := imported(t, open(t, s, 3)); got != want || len(failed) > 0 {
			t.Errorf("%s: alive are %q, want %q; failed %v", what, got, want, failed)
		}
	}
	deleted := func(b *Bucket, i byte) packed.Deleted {
		return packed.Deleted{Digest: digest, HashLen: 16, Hash: block.Hash{i}, Stamp: b.Stamp()}
	}
	step("empty", "")
	write(t, b, 0, 0, 1, 2, 3)
	write(t, b, 0, 0, 4)
	last := write(t, other, 0, time.Now().Add(time.Hour).Unix(), 5, 6)
	write(t, other, 0, time.Now().Unix(), 7)
	step("written", "1 2 3 4 5 6")
	if err := b.Bury(t.Context(), []packed.Deleted{deleted(b, 2), deleted(b, 4)}, nil); err != nil {
		t.Fatal(err)
	}
	step("deleted", "1 3 5 6")
	write(t, b, 0, 0, 2)
	step("put anew", "1 2 3 5 6")
	if err := other.Remove(t.Context(), []packed.Name{last}); err != nil {
		t.Fatal(err)
	}
	if err := other.Read(t.Context(), last, 0, [][]byte{make([]byte, 10)}); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("a removed object: %v", err)
	}
	step("removed", "1 2 3")
	if err := b.Bury(t.Context(), nil, []packed.Cleared{{Digest: digest, Epoch: 1, Stamp: b.Stamp()}}); err != nil {
		t.Fatal(err)
	}
	step("cleared", "")
	write(t, b, 0, 0, 8) // it was on its way
	write(t, b, 1, 0, 9)
	step("written since", "9")
}

// TestImportOfWhatIsNotWhole: an object that cannot be used is told and keeps nobody
// from the others; tombstones that cannot be read end an import.
func TestImportOfWhatIsNotWhole(t *testing.T) {
	s := newService(t)
	b := open(t, s, 1)
	write(t, b, 0, 0, 1)
	put := func(key string, bytes []byte) {
		t.Helper()
		if err := s.Put(t.Context(), key, [][]byte{bytes}, false); err != nil {
			t.Fatal(err)
		}
	}
	f := b.New(number.Add(1), space.Desc.Digest(), 16, 0)
	header, payload := contents(2)
	f.Add(&packed.Member{Hash: block.Hash{2}, Len: uint32(len(payload))})
	whole := append(append(header, payload...), f.Append(nil)...)
	names := map[string]packed.Name{}
	add := func(what string, bytes []byte) {
		names[what] = packed.NameOf("west", f)
		n := names[what]
		n.ID[0] ^= byte(len(names)) // none is that of the footer
		names[what] = n
		put(n.String(), bytes)
	}
	newer := bytes.Clone(whole)
	trailer := newer[len(newer)-packed.TrailerBytes:]
	trailer[4]++
	binary.LittleEndian.PutUint64(trailer[24:], xxhash.Sum64(trailer[:24]))
	add("another's name", whole)
	add("cut", whole[:len(whole)-1])
	add("short", whole[:7])
	add("newer", newer)
	put("blocks/west/notes.txt", []byte("somebody else's"))
	got, failed := imported(t, open(t, s, 2))
	if got != "1" || len(failed) != len(names) {
		t.Errorf("alive are %q, failed %v", got, failed)
	}
	for what, n := range names {
		want := block.ErrCorrupt
		if what == "newer" {
			want = index.ErrVersion
		}
		if err := failed[n]; !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	key := packed.TombstonesKey("west", 1, packed.ID{})
	put(key, []byte("none"))
	if err := b.Import(t.Context(), nil, func(*Found) error { return nil }); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), key) {
		t.Errorf("damaged tombstones: %v", err)
	}
}
