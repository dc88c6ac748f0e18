package index

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

var update = flag.Bool("update", false, "write the golden files anew")

func sampleHash(from byte, n int) (h block.Hash) {
	for i := range n {
		h[i] = from + byte(i)
	}
	return h
}

func sampleRecord(hashLen int, parent bool) Record {
	r := Record{
		Key:     block.Key{NS: 0x01020304, Hash: sampleHash(0x10, hashLen)},
		HashLen: hashLen,
		Sum:     block.Sum{0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf},
		Len:     1 << 20,
		Slab:    3,
		Offset:  64<<20 + 4096,
		Slot:    1052672,
		Gen:     0x1122334455667788,
		Epoch:   5,
		Expires: 1893456000,
	}
	if parent {
		r.HasParent, r.Parent = true, sampleHash(0x50, hashLen)
	}
	return r
}

func sampleSpace() block.Namespace {
	return block.Namespace{
		ID: 7, HashLen: 32, Epoch: 2, TTL: time.Hour,
		Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
		Desc: block.Descriptor{
			Name: "llama", Model: "m", Revision: "r1", DType: "bf16", Layout: "nhd", TokensPerBlock: 16,
			BlockBytes: 1 << 16, HashAlgorithm: "sha256", HashSeed: "0", RankLayout: "tp2", KVGroup: "full", Tenant: "a",
		},
	}
}

func sampleSlab() SlabRecord {
	return SlabRecord{Number: 258, ID: [16]byte{1, 2, 3, 15: 16}, Path: "/data/slab0", Bytes: 2 << 30, ExtentBytes: 64 << 20, Device: true, Retired: true}
}

func sampleScrub() ScrubRecord {
	return ScrubRecord{
		State: block.ScrubFailed, Started: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Slab: [16]byte{1, 2, 15: 16}, Offset: 1 << 30,
		Done: 1, Blocks: 2, Damaged: 3, Repaired: 4, Dropped: 5, Stale: 6, Error: "read slab",
	}
}

func recordBytes(r *Record) (key, value []byte) {
	key = appendBlockKey(nil, &r.Key, r.HashLen)
	value = make([]byte, r.valueLen())
	r.putValue(value, key)
	return key, value
}

// TestGolden holds the bytes of each kind of record: a change of them is a new
// version, which reads the old one or refuses it.
func TestGolden(t *testing.T) {
	var got strings.Builder
	line := func(name string, key, value []byte) {
		fmt.Fprintf(&got, "%s\n  %x\n  %x\n", name, key, value)
	}
	for _, n := range []int{8, 16, 20, 32} {
		for _, parent := range []bool{false, true} {
			r := sampleRecord(n, parent)
			key, value := recordBytes(&r)
			line(fmt.Sprintf("record hash=%d parent=%v", n, parent), key, value)
		}
	}
	n := sampleSpace()
	line("namespace", spaceKey(n.ID), encodeSpace(spaceKey(n.ID), &n))
	grave := droppedKey(n.Desc.Digest())
	line("namespace dropped", grave, encodeSpace(grave, &n))
	s := sampleSlab()
	key, value := s.encode()
	line("slab", key, value)
	m := meta{Catalog: catalogVersion, Boot: 9, NextSpace: 8, Store: [16]byte{0xfe, 15: 0xef}}
	line("meta", metaKey, m.encode())
	m.Clean = true
	line("meta clean", metaKey, m.encode())
	m.Catalog, m.Clean = 1, false
	line("meta of version 1", metaKey, m.encode())
	m.Catalog, m.Clean = 2, true
	line("meta of version 2", metaKey, m.encode())
	m.Catalog, m.Clean = 3, true
	line("meta of version 3", metaKey, m.encode())
	m.Catalog = 4
	line("meta of version 4", metaKey, m.encode())
	s.Unswept = true
	key, value = s.encode()
	line("slab unswept", key, value)
	line("tombstones", tombsKey, encodeTombsRecord())
	for _, parent := range []bool{false, true} {
		r := sampleRecord(8, parent)
		r.Pinned = true
		key, value := recordBytes(&r)
		line(fmt.Sprintf("record hash=8 parent=%v pinned", parent), key, value)
	}
	c := sampleScrub()
	line("scrub", scrubKey, c.encode())
	for _, n := range []int{8, 32} {
		p, o := samplePacked(n, n == 32), sampleObject(n)
		key, value := packedBytes(&p)
		line(fmt.Sprintf("packed hash=%d parent=%v", n, p.HasParent), key, value)
		key, value = o.encode()
		line(fmt.Sprintf("object hash=%d", n), key, value)
	}
	b := sampleBucket()
	key, value = b.encode()
	line("bucket", key, value)
	w := sampleObjectSweep()
	key, value = w.encode()
	line("object sweep", key, value)

	path := filepath.Join("testdata", "records.golden")
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
		t.Errorf("records are\n%s\nwant\n%s", got.String(), want)
	}
}

func TestValuesComeBack(t *testing.T) {
	for _, n := range []int{8, 16, 20, 32} {
		for _, parent := range []bool{false, true} {
			want := sampleRecord(n, parent)
			key, value := recordBytes(&want)
			var got Record
			if err := got.decode(key, value); err != nil || got != want {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
		}
	}
	for _, want := range []block.Namespace{sampleSpace(), {ID: 1}} {
		if want.Desc.Name == "" {
			want.Created = time.Time{}
		}
		got, err := decodeSpace(spaceKey(want.ID), encodeSpace(spaceKey(want.ID), &want))
		if err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
	for _, want := range []SlabRecord{sampleSlab(), {}} {
		var got SlabRecord
		if err := got.decode(want.encode()); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
}

// TestDamage flips each bit and cuts each length of a value, and puts it under
// another key.
func TestDamage(t *testing.T) {
	withoutRace(t)
	r, n, s, c := sampleRecord(16, true), sampleSpace(), sampleSlab(), sampleScrub()
	r.Pinned = true
	m := meta{Catalog: catalogVersion, Boot: 1, NextSpace: 1}
	rk, rv := recordBytes(&r)
	sk, sv := s.encode()
	p, o, b := samplePacked(16, true), sampleObject(16), sampleBucket()
	pk, pv := packedBytes(&p)
	ok, ov := o.encode()
	bk, bv := b.encode()
	w := sampleObjectSweep()
	wk, wv := w.encode()
	g := sampleOwed(20)
	gk, gv := g.encode()
	for _, c := range []struct {
		name       string
		key, value []byte
		decode     func(key, value []byte) error
	}{
		{"record", rk, rv, func(k, v []byte) error { return new(Record).decode(k, v) }},
		{"namespace", spaceKey(n.ID), encodeSpace(spaceKey(n.ID), &n), func(k, v []byte) error { _, err := decodeSpace(k, v); return err }},
		{"slab", sk, sv, func(k, v []byte) error { return new(SlabRecord).decode(k, v) }},
		{"packed", pk, pv, func(k, v []byte) error { return new(PackedRecord).decode(k, v) }},
		{"object", ok, ov, func(k, v []byte) error { return new(ObjectRecord).decode(k, v) }},
		{"bucket", bk, bv, func(k, v []byte) error { return new(BucketRecord).decode(k, v) }},
		{"object sweep", wk, wv, func(k, v []byte) error { return new(ObjectSweepRecord).decode(k, v) }},
		{"owed", gk, gv, func(k, v []byte) error { return new(OwedRecord).decode(k, v) }},
		{"meta", metaKey, m.encode(), func(_, v []byte) error { return new(meta).decode(v) }},
		{"scrub", scrubKey, c.encode(), func(_, v []byte) error { return new(ScrubRecord).decode(v) }},
	} {
		if err := c.decode(c.key, c.value); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for bit := range 8 * len(c.value) {
			v := bytes.Clone(c.value)
			v[bit/8] ^= 1 << (bit % 8)
			want := block.ErrCorrupt
			if bit < 8 {
				want = ErrVersion
			}
			if err := c.decode(c.key, v); !errors.Is(err, want) {
				t.Errorf("%s with bit %d flipped: %v, want %v", c.name, bit, err, want)
			}
		}
		for n := range c.value {
			if err := c.decode(c.key, c.value[:n]); !errors.Is(err, block.ErrCorrupt) {
				t.Errorf("%s cut to %d bytes: %v", c.name, n, err)
			}
		}
		if c.name != "meta" && c.name != "scrub" { // of which there is one
			k := bytes.Clone(c.key)
			k[len(k)-1] ^= 1
			if err := c.decode(k, c.value); !errors.Is(err, block.ErrCorrupt) {
				t.Errorf("%s under another key: %v", c.name, err)
			}
		}
	}
	newer := meta{Catalog: catalogVersion + 1}
	if err := new(meta).decode(newer.encode()); !errors.Is(err, ErrVersion) {
		t.Errorf("newer catalog: %v", err)
	}
}

func TestKeysSortByNamespaceThenHash(t *testing.T) {
	var last []byte
	for _, ns := range []block.NamespaceID{0, 1, 255, 256, 1 << 24, 1<<32 - 1} {
		for _, first := range []byte{0, 1, 255} {
			k := block.Key{NS: ns, Hash: block.Hash{first}}
			key := appendBlockKey(nil, &k, 32)
			if bytes.Compare(last, key) >= 0 {
				t.Errorf("%x does not sort after %x", key, last)
			}
			from, to := spaceRange(kindBlock, ns)
			if bytes.Compare(key, from) < 0 || bytes.Compare(key, to) >= 0 {
				t.Errorf("%x is not from %x to %x", key, from, to)
			}
			last = key
		}
	}
}

// FuzzRecordValue decodes anything, once as it is and once with a checksum that
// fits; what is accepted must come out of the encoder again.
func FuzzRecordValue(f *testing.F) {
	for _, n := range []int{8, 32} {
		r := sampleRecord(n, n == 32)
		r.Pinned = n == 8
		key, value := recordBytes(&r)
		f.Add(key, value)
		f.Add(key, value[:len(value)-checksumBytes])
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		for _, v := range [][]byte{value, seal(key, bytes.Clone(value))} {
			var r Record
			if err := r.decode(key, v); err != nil {
				if !errors.Is(err, ErrVersion) && !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("unclassified: %v", err)
				}
				continue
			}
			if k, w := recordBytes(&r); !bytes.Equal(k, key) || !bytes.Equal(w, v) {
				t.Errorf("%x -> %x is accepted, but encoded as %x -> %x", key, v, k, w)
			}
		}
	})
}

// FuzzRecord encodes any record and reads it back.
func FuzzRecord(f *testing.F) {
	f.Add(uint32(1), []byte("hash"), []byte("parent"), true, uint32(4096), uint16(1), int64(8), uint32(8), uint64(1), uint32(1), int64(0), uint8(3), true)
	f.Fuzz(func(t *testing.T, ns uint32, hash, parent []byte, hasParent bool, size uint32, slab uint16, offset int64, slot uint32, gen uint64, epoch uint32, expires int64, hashLen uint8, pinned bool) {
		want := Record{
			HashLen: []int{8, 16, 20, 32}[hashLen%4], HasParent: hasParent, Len: size % (block.MaxBlockBytes + 1), Slab: slab,
			Offset: int64(uint64(offset)%(1<<48)) * 512, Slot: slot, Gen: gen, Epoch: epoch, Expires: expires, Pinned: pinned,
		}
		want.Key.NS = block.NamespaceID(ns)
		copy(want.Key.Hash[:want.HashLen], hash)
		copy(want.Sum[:], hash)
		if hasParent {
			copy(want.Parent[:want.HashLen], parent)
		}
		key, value := recordBytes(&want)
		var got Record
		if err := got.decode(key, value); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	})
}

// FuzzOtherValues is FuzzRecordValue for namespaces, slabs, the meta record and
// the scrub's.
func FuzzOtherValues(f *testing.F) {
	n, s := sampleSpace(), sampleSlab()
	m := meta{Catalog: catalogVersion, Boot: 2, NextSpace: 3}
	f.Add(spaceKey(n.ID), encodeSpace(spaceKey(n.ID), &n))
	grave := droppedKey(n.Desc.Digest())
	f.Add(grave, encodeSpace(grave, &n))
	key, value := s.encode()
	f.Add(key, value)
	f.Add(tombsKey, encodeTombsRecord())
	f.Add(metaKey, m.encode())
	m.Catalog = 1
	f.Add(metaKey, m.encode())
	m.Catalog, m.Clean = 2, true
	f.Add(metaKey, m.encode())
	c := sampleScrub()
	f.Add(scrubKey, c.encode())
	f.Fuzz(func(t *testing.T, key, value []byte) {
		for _, v := range [][]byte{value, seal(key, bytes.Clone(value))} {
			if n, err := decodeSpace(key, v); err == nil && !bytes.Equal(encodeSpace(key, &n), v) {
				t.Errorf("namespace %x -> %x is encoded otherwise", key, v)
			}
			var s SlabRecord
			if s.decode(key, v) == nil {
				if k, w := s.encode(); !bytes.Equal(k, key) || !bytes.Equal(w, v) {
					t.Errorf("slab %x -> %x is encoded otherwise", key, v)
				}
			}
			var m meta
			if m.decode(v) == nil && !bytes.Equal(m.encode(), v) {
				t.Errorf("meta %x is encoded otherwise", v)
			}
			if decodeTombsRecord(key, v) == nil && !bytes.Equal(encodeTombsRecord(), v) && bytes.Equal(key, tombsKey) {
				t.Errorf("record of tombstones %x is encoded otherwise", v)
			}
			var c ScrubRecord
			if c.decode(v) == nil && !bytes.Equal(c.encode(), v) {
				t.Errorf("scrub record %x is encoded otherwise", v)
			}
		}
	})
}

// FuzzScrubRecord encodes any record of a scrub and reads it back.
func FuzzScrubRecord(f *testing.F) {
	f.Add(uint8(4), int64(1), int64(-62135596800), []byte("slab"), int64(1), int64(2), int64(3), "error")
	f.Fuzz(func(t *testing.T, state uint8, started, ended int64, slab []byte, offset, done, stale int64, text string) {
		// Seconds that time.Time holds without overflow.
		at := func(sec int64) time.Time { return time.Unix(sec>>3, sec&7).UTC() }
		want := ScrubRecord{
			State: block.ScrubState(state % (uint8(block.ScrubFailed) + 1)), Started: at(started), Ended: at(ended),
			Offset: offset, Done: done, Stale: stale, Error: text[:min(len(text), MaxScrubError)],
		}
		copy(want.Slab[:], slab)
		var got ScrubRecord
		if err := got.decode(want.encode()); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	})
}
