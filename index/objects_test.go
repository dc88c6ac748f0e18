package index

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

func samplePacked(hashLen int, parent bool) PackedRecord {
	r := PackedRecord{
		Key:     block.Key{NS: 0x01020304, Hash: sampleHash(0x10, hashLen)},
		HashLen: hashLen,
		Sum:     block.Sum{0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf},
		Len:     1 << 20,
		Object:  0x2122232425262728,
		Offset:  0x31323334,
		Gen:     0x1122334455667788,
		Epoch:   5,
		Expires: 1893456000,
	}
	if parent {
		r.HasParent, r.Parent = true, sampleHash(0x50, hashLen)
	}
	return r
}

func sampleObject(hashLen int) ObjectRecord {
	return ObjectRecord{
		Number: 0x2122232425262728, Bucket: 0x4142, NS: 0x01020304, Digest: [32]byte(sampleHash(0xd0, 32)),
		First: sampleHash(0x10, hashLen), HashLen: hashLen, ID: [16]byte{0xc0, 0xc1, 15: 0xcf}, Epoch: 5,
		Stamp: 0x5152535455565758, Bytes: 32 << 20, Members: 31, Live: 17, LiveBytes: 17 << 20,
	}
}

func sampleBucket() BucketRecord {
	return BucketRecord{Number: 258, URL: "s3://bucket/prefix", Cluster: "west-1"}
}

func sampleObjectSweep() ObjectSweepRecord {
	return ObjectSweepRecord{
		Bucket: 258, Writer: [8]byte{1, 2, 7: 8}, Started: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Cursor: "page 7", After: "blocks/west-1/x",
		Listed: 1, Orphans: 2, OrphanBytes: 3, Missing: 4, Lost: 5, Expired: 6, Rewritten: 7, Moved: 8, MovedBytes: 9, Error: "list objects",
	}
}

func packedBytes(r *PackedRecord) (key, value []byte) {
	key = make([]byte, blockKeyPrefix+r.HashLen)
	putBlockKey(key, kindPacked, &r.Key, r.HashLen)
	value = make([]byte, r.valueLen())
	r.putValue(value, key)
	return key, value
}

func TestObjectValuesComeBack(t *testing.T) {
	for _, n := range []int{8, 16, 20, 32} {
		for _, parent := range []bool{false, true} {
			want := samplePacked(n, parent)
			var got PackedRecord
			if err := got.decode(packedBytes(&want)); err != nil || got != want {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
		}
		want := sampleObject(n)
		var got ObjectRecord
		if err := got.decode(want.encode()); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
	for _, want := range []ObjectSweepRecord{sampleObjectSweep(), {Ended: time.Unix(1, 2).UTC(), Started: time.Unix(0, 0).UTC()}} {
		var got ObjectSweepRecord
		if err := got.decode(want.encode()); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
	for _, want := range []BucketRecord{sampleBucket(), {}, {URL: "azure://c"}} {
		var got BucketRecord
		if err := got.decode(want.encode()); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
}

func sampleOwed(hashLen int) OwedRecord {
	o := sampleObject(hashLen)
	return OwedRecord{Bucket: 0x1234, Key: block.Key{NS: o.NS, Hash: o.First}, HashLen: hashLen, Digest: o.Digest, Stamp: o.Stamp}
}

// TestOwed: the tombstones that a bucket is owed come back, those of others do not.
func TestOwed(t *testing.T) {
	c := openCatalog(t, t.TempDir(), nil)
	defer closeCatalog(t, c)
	var want []OwedRecord
	b := c.NewBatch()
	for _, bucket := range []uint16{0, 7, 1<<16 - 1} {
		for _, n := range []int{8, 32} {
			r := sampleOwed(n)
			r.Bucket = bucket
			b.PutOwed(&r)
			want = append(want, r)
		}
	}
	other := sampleOwed(16)
	b.PutOwed(&other)
	b.DropOwed(&other)
	if err := c.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	var all []OwedRecord
	for _, bucket := range []uint16{0, 7, other.Bucket, 1<<16 - 1} {
		if err := c.ScanOwed(bucket, func(r *OwedRecord) error {
			all = append(all, *r)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(all, want) {
		t.Errorf("%+v, want %+v", all, want)
	}
	if r, ok, err := c.GetOwed(7, want[2].Key, want[2].HashLen); err != nil || !ok || r != want[2] {
		t.Errorf("%+v, %v, %v", r, ok, err)
	}
	if _, ok, err := c.GetOwed(other.Bucket, other.Key, other.HashLen); err != nil || ok {
		t.Errorf("what was dropped is there: %v, %v", ok, err)
	}
}

func TestObjectValuesRefused(t *testing.T) {
	p, o := samplePacked(16, true), sampleObject(16)
	pk, pv := packedBytes(&p)
	ok, ov := o.encode()
	for _, c := range []struct {
		name       string
		key, value []byte
		at         int
		set        byte
		decode     func(key, value []byte) error
	}{
		{"packed flags", pk, pv, 1, 2 | flagParent, new(PackedRecord).decode},
		{"packed without its parent", pk, pv, 1, 0, new(PackedRecord).decode},
		{"packed offset", pk, pv, 37, 0x80, new(PackedRecord).decode},
		{"packed length", pk, pv, 21, 1, new(PackedRecord).decode},
		{"object hash length", ok, ov, 1, 20, new(ObjectRecord).decode},
		{"object with more live blocks than it has", ok, ov, 80, 32, new(ObjectRecord).decode},
		{"object with more live bytes than it has", ok, ov, 87, 3, new(ObjectRecord).decode},
	} {
		v := bytes.Clone(c.value[:len(c.value)-checksumBytes])
		v[c.at] = c.set
		if err := c.decode(c.key, seal(c.key, v)); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// FuzzObjectValues is FuzzRecordValue for the records of objects.
func FuzzObjectValues(f *testing.F) {
	for _, n := range []int{8, 32} {
		p, o := samplePacked(n, n == 32), sampleObject(n)
		key, value := packedBytes(&p)
		f.Add(key, value)
		key, value = o.encode()
		f.Add(key, value)
	}
	b := sampleBucket()
	key, value := b.encode()
	f.Add(key, value)
	w := sampleObjectSweep()
	key, value = w.encode()
	f.Add(key, value)
	g := sampleOwed(20)
	key, value = g.encode()
	f.Add(key, value)
	f.Fuzz(func(t *testing.T, key, value []byte) {
		for _, v := range [][]byte{value, seal(key, bytes.Clone(value))} {
			var p PackedRecord
			var o ObjectRecord
			var b BucketRecord
			var w ObjectSweepRecord
			var g OwedRecord
			same := func(what string, err error, encode func() (key, value []byte)) {
				if err != nil {
					if !errors.Is(err, ErrVersion) && !errors.Is(err, block.ErrCorrupt) {
						t.Errorf("%s: unclassified: %v", what, err)
					}
					return
				}
				if k, w := encode(); !bytes.Equal(k, key) || !bytes.Equal(w, v) {
					t.Errorf("%s %x -> %x is accepted, but encoded as %x -> %x", what, key, v, k, w)
				}
			}
			same("packed record", p.decode(key, v), func() ([]byte, []byte) { return packedBytes(&p) })
			same("object record", o.decode(key, v), o.encode)
			same("bucket record", b.decode(key, v), b.encode)
			same("owed record", g.decode(key, v), g.encode)
			same("object sweep record", w.decode(key, v), w.encode)
		}
	})
}

// packedOf is a block of a namespace in an object.
func packedOf(ns block.NamespaceID, i byte, object uint64) *PackedRecord {
	r := samplePacked(16, i%2 == 1)
	r.Key = block.Key{NS: ns, Hash: block.Hash{i}}
	r.Object = object
	return &r
}

// packedIn lists the blocks of a namespace that are in objects, after a hash.
func packedIn(t *testing.T, c *Catalog, ns block.NamespaceID, after []byte) (all []PackedRecord) {
	t.Helper()
	if err := c.ScanPacked(ns, after, func(r *PackedRecord) error {
		all = append(all, *r)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func objectsFrom(t *testing.T, c *Catalog, from uint64) (all []ObjectRecord) {
	t.Helper()
	if err := c.ScanObjects(from, func(o *ObjectRecord) error {
		all = append(all, *o)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestObjectsInTheCatalog: what was committed is there after a crash, beside the records
// of the same blocks on slabs, and each goes on its own.
func TestObjectsInTheCatalog(t *testing.T) {
	disk := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	one, two := sampleObject(16), sampleObject(32)
	two.Number++
	bucket := sampleBucket()
	if err := c.PutBucket(bucket); err != nil {
		t.Fatal(err)
	}
	b := c.NewBatch()
	b.PutObject(&one)
	b.PutObject(&two)
	b.Put(recordOf(1, 2))
	var want []PackedRecord
	for i := range byte(4) {
		r := packedOf(1, i, one.Number)
		b.PutPacked(r)
		want = append(want, *r)
	}
	b.PutPacked(packedOf(2, 0, two.Number))
	if err := c.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	c = openCatalog(t, "cat", &CatalogOptions{FS: disk.CrashClone(vfs.CrashCloneCfg{})})
	defer closeCatalog(t, c)
	if got := packedIn(t, c, 1, nil); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := packedIn(t, c, 1, want[1].Key.Hash[:16]); !reflect.DeepEqual(got, want[2:]) {
		t.Errorf("after the second: got %+v, want %+v", got, want[2:])
	}
	if got := objectsFrom(t, c, 0); !reflect.DeepEqual(got, []ObjectRecord{one, two}) {
		t.Errorf("objects are %+v", got)
	}
	if got := objectsFrom(t, c, one.Number+1); !reflect.DeepEqual(got, []ObjectRecord{two}) {
		t.Errorf("objects after the first are %+v", got)
	}
	if got, err := c.Buckets(); err != nil || !reflect.DeepEqual(got, []BucketRecord{bucket}) {
		t.Errorf("buckets are %+v, %v", got, err)
	}
	if got, ok, err := c.GetPacked(want[3].Key, 16); err != nil || !ok || got != want[3] {
		t.Errorf("got %+v, %v, %v, want %+v", got, ok, err, want[3])
	}
	if got, ok, err := c.GetObject(two.Number); err != nil || !ok || got != two {
		t.Errorf("got %+v, %v, %v, want %+v", got, ok, err, two)
	}
	if got := scan(t, c); len(got) != 1 || got[recordOf(1, 2).Key] != *recordOf(1, 2) {
		t.Errorf("records on slabs are %+v", got)
	}
	b = c.NewBatch()
	b.DropPacked(want[3].Key, 16)
	b.DropObject(two.Number)
	one.Live--
	one.LiveBytes -= 1 << 20
	b.PutObject(&one)
	if err := c.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := c.GetPacked(want[3].Key, 16); ok || err != nil {
		t.Errorf("a dropped block: %v, %v", ok, err)
	}
	if _, ok, err := c.GetObject(two.Number); ok || err != nil {
		t.Errorf("a dropped object: %v, %v", ok, err)
	}
	if got := objectsFrom(t, c, 0); !reflect.DeepEqual(got, []ObjectRecord{one}) {
		t.Errorf("objects are %+v", got)
	}
}

// TestClearedObjects: with a namespace that is cleared or dropped go the records of its
// blocks, those in objects too, and no others. The objects stay known until they are gone.
func TestClearedObjects(t *testing.T) {
	for _, drop := range []bool{false, true} {
		c := openCatalog(t, "cat", &CatalogOptions{FS: vfs.NewMem()})
		n := sampleSpace()
		var err error
		if n.ID, err = c.NewNamespaceID(); err != nil {
			t.Fatal(err)
		}
		if err := c.PutNamespace(n); err != nil {
			t.Fatal(err)
		}
		o := sampleObject(16)
		b := c.NewBatch()
		b.PutObject(&o)
		b.Put(recordOf(n.ID, 1))
		b.PutPacked(packedOf(n.ID, 1, o.Number))
		b.PutPacked(packedOf(n.ID-1, 1, o.Number))
		b.PutPacked(packedOf(n.ID+1, 1, o.Number))
		if err := c.Commit(b, true); err != nil {
			t.Fatal(err)
		}
		if drop {
			err = c.DropNamespace(n.ID)
		} else {
			n.Epoch++
			err = c.ClearNamespace(n)
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := packedIn(t, c, n.ID, nil); len(got) != 0 {
			t.Errorf("drop %v: blocks in objects are %+v", drop, got)
		}
		if got := scan(t, c); len(got) != 0 {
			t.Errorf("drop %v: blocks on slabs are %+v", drop, got)
		}
		for _, other := range []block.NamespaceID{n.ID - 1, n.ID + 1} {
			if got := packedIn(t, c, other, nil); len(got) != 1 {
				t.Errorf("drop %v: blocks of namespace %d are %+v", drop, other, got)
			}
		}
		if got := objectsFrom(t, c, 0); len(got) != 1 {
			t.Errorf("drop %v: objects are %+v", drop, got)
		}
		closeCatalog(t, c)
	}
}

func TestPutBucketRefuses(t *testing.T) {
	c := openCatalog(t, "cat", &CatalogOptions{FS: vfs.NewMem()})
	defer closeCatalog(t, c)
	if err := c.PutBucket(BucketRecord{Cluster: string(make([]byte, maxCluster+1))}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("a cluster name that no record holds: %v", err)
	}
	if got, err := c.Buckets(); err != nil || len(got) != 0 {
		t.Errorf("buckets are %+v, %v", got, err)
	}
}
