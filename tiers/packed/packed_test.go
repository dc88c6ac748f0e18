package packed

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

var update = flag.Bool("update", false, "write the golden files anew")

// count is n bytes that count up.
func count[T ~[]byte](from byte, b T) {
	for i := range b {
		b[i] = from + byte(i)
	}
}

// sampleFooter has a different byte in each field, and members of several kinds.
func sampleFooter(hashLen uint8) *Footer {
	f := &Footer{HashLen: hashLen, Epoch: 0x01020304, Stamp: 0x1112131415161718}
	count(0xc0, f.ID[:])
	count(0x80, f.Store[:])
	count(0xd0, f.Digest[:])
	var last block.Hash
	for i := range 3 {
		m := Member{Len: uint32(65536 + i), Gen: 0x2122232425262728 + uint64(i), Expires: 1893456000 * int64(i%2)}
		count(0x10+byte(0x40*i), m.Hash[:hashLen])
		count(0xa0+byte(i), m.Sum[:])
		if i > 0 {
			m.Parent, m.HasParent = last, true
		}
		last = m.Hash
		if !f.Add(&m) {
			panic("no room for three members")
		}
	}
	return f
}

func sampleTombstones() *Tombstones {
	t := &Tombstones{}
	count(0xc0, t.ID[:])
	count(0x80, t.Store[:])
	for i, n := range []uint8{8, 32, 20} {
		d := Deleted{HashLen: n, Stamp: 0x1112131415161718 + uint64(i)}
		count(0xd0+byte(i), d.Digest[:])
		count(0x10+byte(i), d.Hash[:n])
		t.Deleted = append(t.Deleted, d)
	}
	c := Cleared{Epoch: 0x31323334, Stamp: 0x4142434445464748}
	count(0xe0, c.Digest[:])
	t.Cleared = append(t.Cleared, c)
	return t
}

func sampleCluster() *Cluster {
	c := &Cluster{Name: "west-1", Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)}
	count(0x80, c.Store[:])
	return c
}

func sampleNamespace() *Namespace {
	return &Namespace{HashLen: 32, TTL: time.Hour, Desc: block.Descriptor{
		Name: "llama", Model: "m\"<ü", Revision: "r1", DType: "bf16", Layout: "nhd", TokensPerBlock: 16,
		BlockBytes: 1 << 16, HashAlgorithm: "sha256", HashSeed: "0", RankLayout: "tp2", KVGroup: "full", Tenant: "a",
	}}
}

// TestGolden holds the bytes of everything that lies in a bucket: what any released
// version wrote is read by every later one. A change is a new version.
func TestGolden(t *testing.T) {
	var got strings.Builder
	for _, n := range []uint8{8, 32} {
		f := sampleFooter(n)
		fmt.Fprintf(&got, "footer hash=%d size=%d\n%s", n, f.Bytes(), hex.Dump(f.Append(nil)))
		fmt.Fprintf(&got, "%s\n", NameOf("west-1", f))
	}
	ts := sampleTombstones()
	fmt.Fprintf(&got, "tombstones\n%s", hex.Dump(ts.Append(nil)))
	fmt.Fprintf(&got, "%s\n", TombstonesKey("west-1", 0x1112131415161718, ts.ID))
	fmt.Fprintf(&got, "%s\n%s", ClusterKey, sampleCluster().Encode())
	n := sampleNamespace()
	fmt.Fprintf(&got, "%s\n%s", NamespaceKey("west-1", n.Desc.Digest()), n.Encode())

	path := filepath.Join("testdata", "format.golden")
	if *update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("format is\n%s\nwant\n%s", got.String(), want)
	}
}

func TestFooterComesBack(t *testing.T) {
	for _, n := range []uint8{8, 16, 20, 32} {
		want := sampleFooter(n)
		b := want.Append(nil)
		size := want.Bytes()
		if int64(len(b)) != size-want.payloadEnd() {
			t.Errorf("footer of %d bytes behind %d in an object of %d", len(b), want.payloadEnd(), size)
		}
		if got, err := FooterBytes(b[len(b)-TrailerBytes:], size); err != nil || got != int64(len(b)) {
			t.Errorf("footer of %d bytes, %v, want %d", got, err, len(b))
		}
		// The tail that was read is longer than the footer as a rule.
		for _, tail := range [][]byte{b, append(bytes.Repeat([]byte{0xee}, 1000), b...)} {
			if got, err := DecodeFooter(tail, size); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
		}
	}
}

// TestFooterDamage: no flipped bit and no cut goes unnoticed, and a footer is none of
// an object of another length.
func TestFooterDamage(t *testing.T) {
	f := sampleFooter(16)
	b, size := f.Append(nil), f.Bytes()
	for bit := range 8 * len(b) {
		v := bytes.Clone(b)
		v[bit/8] ^= 1 << (bit % 8)
		if _, err := DecodeFooter(v, size); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("bit %d of byte %d flipped: %v", bit%8, bit/8, err)
		}
	}
	for n := range b {
		if _, err := DecodeFooter(b[n+1:], size); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("the last %d bytes of %d: %v", len(b)-n-1, len(b), err)
		}
		if _, err := DecodeFooter(b[:n], size); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("the first %d bytes of %d: %v", n, len(b), err)
		}
	}
	for _, other := range []int64{0, size - 1, size + 1, MaxBytes + 1} {
		if _, err := DecodeFooter(b, other); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("in an object of %d bytes instead of %d: %v", other, size, err)
		}
	}
}

// reseal makes the checksums of a footer right again.
func reseal(b []byte) {
	if len(b) < TrailerBytes {
		return
	}
	le := binary.LittleEndian
	end := len(b) - TrailerBytes
	le.PutUint64(b[end+8:], xxhash.Sum64(b[:end]))
	le.PutUint64(b[end+24:], xxhash.Sum64(b[end:end+24]))
}

func TestFooterRefused(t *testing.T) {
	f := sampleFooter(16)
	size := f.Bytes()
	entry := func(i int) int { return headBytes + i*int(f.entryBytes()) }
	for _, c := range []struct {
		name   string
		change func(b []byte)
		want   error
	}{
		{"newer version", func(b []byte) { b[len(b)-TrailerBytes+4]++ }, index.ErrVersion},
		{"version 0", func(b []byte) { b[len(b)-TrailerBytes+4] = 0 }, index.ErrVersion},
		{"trailer's unused bytes", func(b []byte) { b[len(b)-TrailerBytes+6] = 1 }, block.ErrCorrupt},
		{"length", func(b []byte) { b[len(b)-TrailerBytes]++ }, block.ErrCorrupt},
		{"magic", func(b []byte) { b[0] = 'X' }, block.ErrCorrupt},
		{"magic at the end", func(b []byte) { b[len(b)-16] = 'X' }, block.ErrCorrupt},
		{"hash length", func(b []byte) { b[8] = 15 }, block.ErrCorrupt},
		{"another hash length", func(b []byte) { b[8] = 20 }, block.ErrCorrupt},
		{"head's unused bytes", func(b []byte) { b[84] = 1 }, block.ErrCorrupt},
		{"members", func(b []byte) { b[12]++ }, block.ErrCorrupt},
		{"no members", func(b []byte) { b[12] = 0 }, block.ErrCorrupt},
		{"offset", func(b []byte) { b[entry(1)]++ }, block.ErrCorrupt},
		{"no bytes", func(b []byte) { clear(b[entry(2)+24:][:4]) }, block.ErrCorrupt},
		{"too many bytes", func(b []byte) { b[entry(2)+27] = 0xff }, block.ErrCorrupt},
		{"flags", func(b []byte) { b[entry(1)+28] |= 2 }, block.ErrCorrupt},
		{"entry's unused bytes", func(b []byte) { b[entry(1)+30] = 1 }, block.ErrCorrupt},
		{"parent without flag", func(b []byte) { b[entry(1)+28] = 0 }, block.ErrCorrupt},
		{"the same block twice", func(b []byte) { copy(b[entry(2)+entryFixed:][:16], f.Members[0].Hash[:]) }, block.ErrCorrupt},
	} {
		b := f.Append(nil)
		c.change(b)
		reseal(b)
		if _, err := DecodeFooter(b, size); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// TestAddIsBounded: what Add takes is an object that DecodeFooter takes, and not longer
// than one may be.
func TestAddIsBounded(t *testing.T) {
	for _, c := range []struct{ bytes, members int }{
		{block.MaxBlockBytes, 3}, // the fourth has no room for its header
		{1 << 20, 31},
		{64 << 10, 509},
		{1, MaxMembers},
	} {
		f := &Footer{HashLen: 32}
		for i := 0; ; i++ {
			m := Member{Len: uint32(c.bytes)}
			binary.BigEndian.PutUint32(m.Hash[:], uint32(i))
			before := f.Bytes()
			if !f.Add(&m) {
				if f.Bytes() != before {
					t.Error("a refused member changed the object")
				}
				break
			}
		}
		if len(f.Members) != c.members || f.Bytes() > MaxBytes {
			t.Errorf("blocks of %d: %d in %d bytes, want %d", c.bytes, len(f.Members), f.Bytes(), c.members)
		}
		if _, err := DecodeFooter(f.Append(nil), f.Bytes()); err != nil {
			t.Errorf("blocks of %d: %v", c.bytes, err)
		}
		if n := f.footerBytes(); c.bytes >= 64<<10 && n > TailBytes {
			t.Errorf("blocks of %d: a footer of %d bytes is longer than the tail that is read first", c.bytes, n)
		}
	}
}

// FuzzFooter decodes anything, once as it is and once with checksums that fit; what is
// accepted comes out of the encoder again.
func FuzzFooter(f *testing.F) {
	for _, n := range []uint8{8, 16, 20, 32} {
		s := sampleFooter(n)
		f.Add(s.Append(nil), s.payloadEnd())
	}
	f.Add([]byte{}, int64(0))
	f.Fuzz(func(t *testing.T, b []byte, before int64) {
		whole := bytes.Clone(b)
		reseal(whole)
		for _, b := range [][]byte{b, whole} {
			size := before + int64(len(b))
			got, err := DecodeFooter(b, size)
			if err != nil {
				if !errors.Is(err, index.ErrVersion) && !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("unclassified: %v", err)
				}
				continue
			}
			if again := got.Append(nil); !bytes.HasSuffix(b, again) || got.Bytes() != size {
				t.Errorf("%x of %d bytes is accepted, but encoded as %x of %d", b, size, again, got.Bytes())
			}
		}
	})
}

func TestTombstones(t *testing.T) {
	want := sampleTombstones()
	b := want.Append(nil)
	if got, err := DecodeTombstones(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	for bit := range 8 * len(b) {
		v := bytes.Clone(b)
		v[bit/8] ^= 1 << (bit % 8)
		if _, err := DecodeTombstones(v); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("bit %d of byte %d flipped: %v", bit%8, bit/8, err)
		}
	}
	for n := range b {
		if _, err := DecodeTombstones(b[:n]); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	for _, c := range []struct {
		name   string
		change func(b []byte)
		want   error
	}{
		{"newer version", func(b []byte) { b[8]++ }, index.ErrVersion},
		{"unused bytes", func(b []byte) { b[12] = 1 }, block.ErrCorrupt},
		{"blocks", func(b []byte) { b[48]++ }, block.ErrCorrupt},
		{"far too many blocks", func(b []byte) { b[51] = 0xff }, block.ErrCorrupt},
		{"far too many namespaces", func(b []byte) { b[55] = 0xff }, block.ErrCorrupt},
		{"namespaces", func(b []byte) { b[52]++ }, block.ErrCorrupt},
		{"hash length", func(b []byte) { b[tombstonesFixed+40]++ }, block.ErrCorrupt},
	} {
		v := bytes.Clone(b)
		c.change(v)
		resealTombstones(v)
		if _, err := DecodeTombstones(v); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func resealTombstones(b []byte) {
	if end := len(b) - 8; end >= 0 {
		binary.LittleEndian.PutUint64(b[end:], xxhash.Sum64(b[:end]))
	}
}

// FuzzTombstones is FuzzFooter for batches of tombstones.
func FuzzTombstones(f *testing.F) {
	f.Add(sampleTombstones().Append(nil))
	f.Add(new(Tombstones).Append(nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		whole := bytes.Clone(b)
		resealTombstones(whole)
		for _, b := range [][]byte{b, whole} {
			got, err := DecodeTombstones(b)
			if err != nil {
				if !errors.Is(err, index.ErrVersion) && !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("unclassified: %v", err)
				}
				continue
			}
			if again := got.Append(nil); !bytes.Equal(again, b) {
				t.Errorf("%x is accepted, but encoded as %x", b, again)
			}
		}
	})
}

// TestGraves: what was deleted after it was packed is dead, what was put anew is not.
func TestGraves(t *testing.T) {
	digest, other := [32]byte{1}, [32]byte{2}
	mine, theirs := [16]byte{1}, [16]byte{2}
	a, b := block.Hash{1}, block.Hash{2}
	deleted := func(stamp uint64, h block.Hash) *Tombstones {
		return &Tombstones{Store: mine, Deleted: []Deleted{{Digest: digest, HashLen: 8, Hash: h, Stamp: stamp}}}
	}
	cleared := func(stamp uint64, epoch uint32) *Tombstones {
		return &Tombstones{Store: mine, Cleared: []Cleared{{Digest: digest, Epoch: epoch, Stamp: stamp}}}
	}
	for _, c := range []struct {
		name       string
		tombstones []*Tombstones
		object     Footer
		dead       bool
	}{
		{"none", nil, Footer{Digest: digest, Stamp: 5}, false},
		{"deleted later", []*Tombstones{deleted(6, a)}, Footer{Digest: digest, Stamp: 5}, true},
		{"deleted later, by another store", []*Tombstones{deleted(6, a)}, Footer{Digest: digest, Stamp: 5, Store: theirs}, true},
		{"deleted at the same time", []*Tombstones{deleted(5, a)}, Footer{Digest: digest, Stamp: 5}, true},
		{"put anew", []*Tombstones{deleted(4, a)}, Footer{Digest: digest, Stamp: 5}, false},
		{"put anew and deleted", []*Tombstones{deleted(6, a), deleted(4, a)}, Footer{Digest: digest, Stamp: 5}, true},
		{"another block", []*Tombstones{deleted(6, b)}, Footer{Digest: digest, Stamp: 5}, false},
		{"another namespace's", []*Tombstones{deleted(6, a), cleared(6, 1)}, Footer{Digest: other, Stamp: 5}, false},
		{"cleared later", []*Tombstones{cleared(6, 1)}, Footer{Digest: digest, Stamp: 5, Store: theirs}, true},
		{"cleared before", []*Tombstones{cleared(4, 1)}, Footer{Digest: digest, Stamp: 5, Store: mine, Epoch: 1}, false},
		{"cleared before, by another store", []*Tombstones{cleared(4, 7)}, Footer{Digest: digest, Stamp: 5, Store: theirs}, false},
		// It was on its way up while its namespace was cleared.
		{"of an older epoch", []*Tombstones{cleared(4, 2), cleared(3, 1)}, Footer{Digest: digest, Stamp: 5, Store: mine, Epoch: 1}, true},
	} {
		c.object.HashLen, c.object.Members = 8, []Member{{Hash: a}}
		for range 2 {
			var g Graves
			for _, ts := range c.tombstones {
				g.Add(ts)
			}
			if got := g.Dead(&c.object, 0); got != c.dead {
				t.Errorf("%s: dead is %v, want %v", c.name, got, c.dead)
			}
			slices.Reverse(c.tombstones)
		}
	}
}

func TestClock(t *testing.T) {
	var c Clock
	at := time.Unix(1000, 0)
	first := c.Next(at)
	if first != 1000e9 {
		t.Errorf("first stamp is %d", first)
	}
	for _, now := range []time.Time{at, at.Add(-time.Hour), {}} { // the wall clock stands still, goes back
		if next := c.Next(now); next <= first {
			t.Errorf("%d after %d", next, first)
		} else {
			first = next
		}
	}
	c.See(2000e9)
	if next := c.Next(at); next != 2000e9+1 {
		t.Errorf("after another store's stamp: %d", next)
	}
	c.See(1)
	if next := c.Next(at.Add(time.Hour)); next != uint64(at.Add(time.Hour).UnixNano()) {
		t.Errorf("when the wall clock is ahead again: %d", next)
	}
}
