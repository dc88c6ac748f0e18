package index

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/kvtier/kvtier/index/block"
)

// PackedRecord is what the catalog knows of a block in an object. A block has one such
// record beside its Record, whichever of the two are there. The resident table does not
// list these blocks: there may be far more of them than it could hold.
type PackedRecord struct {
	Key       block.Key
	HashLen   int // bytes of the hashes that count: 8, 16, 20 or 32
	Parent    block.Hash
	HasParent bool
	Sum       block.Sum
	Len       uint32 // payload bytes
	Object    uint64 // ObjectRecord.Number
	Offset    int64  // of the block's slot header in the object
	Gen       uint64 // as in that header
	Epoch     uint32 // of the namespace when the block was put
	Expires   int64  // Unix seconds; 0: never
}

// packedFixed is the length of its value without a parent:
// version, flags, Sum, Len, Object, Offset, Gen, Epoch, Expires, checksum.
const packedFixed = 1 + 1 + 16 + 4 + 8 + 8 + 8 + 4 + 8 + checksumBytes

func (r *PackedRecord) valueLen() int {
	if r.HasParent {
		return packedFixed + r.HashLen
	}
	return packedFixed
}

// putValue writes the record's value into b, which is valueLen bytes long, to be stored
// under key.
func (r *PackedRecord) putValue(b, key []byte) {
	b[0], b[1] = packedVersion, 0
	copy(b[2:], r.Sum[:])
	binary.LittleEndian.PutUint32(b[18:], r.Len)
	binary.LittleEndian.PutUint64(b[22:], r.Object)
	binary.LittleEndian.PutUint64(b[30:], uint64(r.Offset))
	binary.LittleEndian.PutUint64(b[38:], r.Gen)
	binary.LittleEndian.PutUint32(b[46:], r.Epoch)
	binary.LittleEndian.PutUint64(b[50:], uint64(r.Expires))
	if r.HasParent {
		b[1] |= flagParent
		copy(b[58:], r.Parent[:r.HashLen])
	}
	end := len(b) - checksumBytes
	binary.LittleEndian.PutUint64(b[end:], checksum(key, b[:end]))
}

// decode reads a record from its key and value. It fails with ErrVersion or
// block.ErrCorrupt.
func (r *PackedRecord) decode(key, value []byte) error {
	k, hashLen, err := readBlockKey("packed record", kindPacked, key)
	if err != nil {
		return err
	}
	body, err := open("packed record", key, value, packedVersion)
	if err != nil {
		return err
	}
	*r = PackedRecord{Key: k, HashLen: hashLen}
	want := packedFixed - checksumBytes
	if len(body) > 1 && body[1]&flagParent != 0 {
		r.HasParent = true
		want += hashLen
	}
	if len(body) != want || body[1]&^flagParent != 0 {
		return fmt.Errorf("packed record %s: %w: value of %d bytes", r.Key, block.ErrCorrupt, len(value))
	}
	copy(r.Sum[:], body[2:])
	r.Len = binary.LittleEndian.Uint32(body[18:])
	r.Object = binary.LittleEndian.Uint64(body[22:])
	r.Offset = int64(binary.LittleEndian.Uint64(body[30:]))
	r.Gen = binary.LittleEndian.Uint64(body[38:])
	r.Epoch = binary.LittleEndian.Uint32(body[46:])
	r.Expires = int64(binary.LittleEndian.Uint64(body[50:]))
	copy(r.Parent[:], body[58:])
	if r.Offset < 0 || r.Len > block.MaxBlockBytes {
		return fmt.Errorf("packed record %s: %w: %d bytes at %d", r.Key, block.ErrCorrupt, r.Len, r.Offset)
	}
	return nil
}

// ObjectRecord is what the catalog knows of an object with blocks. It is there before
// the first record of a block in it, and until after the last.
type ObjectRecord struct {
	Number  uint64 // by which PackedRecords know it; never given to another one
	Bucket  uint16 // BucketRecord.Number
	NS      block.NamespaceID
	Digest  [32]byte   // of the namespace's descriptor: it may be dropped before the object is
	First   block.Hash // the first block in it, by which it is named
	HashLen int        // bytes of First that count: 8, 16, 20 or 32
	ID      [16]byte   // by which it is named, too
	Epoch   uint32     // of the namespace when it was packed
	Stamp   uint64     // when it was packed, by the clock of the bucket's stores
	Bytes   int64      // its length
	Members uint32     // blocks in it
	Live    uint32     // of these, those that have a PackedRecord
	// LiveBytes is what the payloads of those take.
	LiveBytes int64
}

// objectFixed is the length of its value without the hash: version, hash length, Bucket,
// NS, Digest, ID, Epoch, Stamp, Bytes, Members, Live, LiveBytes, checksum.
const objectFixed = 1 + 1 + 2 + 4 + 32 + 16 + 4 + 8 + 8 + 4 + 4 + 8 + checksumBytes

func objectKey(number uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{kindObject}, number)
}

func (o *ObjectRecord) encode() (key, value []byte) {
	key = objectKey(o.Number)
	le := binary.LittleEndian
	b := make([]byte, 0, objectFixed+block.HashBytes)
	b = append(b, objectVersion, uint8(o.HashLen))
	b = le.AppendUint16(b, o.Bucket)
	b = le.AppendUint32(b, uint32(o.NS))
	b = append(b, o.Digest[:]...)
	b = append(b, o.ID[:]...)
	b = le.AppendUint32(b, o.Epoch)
	b = le.AppendUint64(b, o.Stamp)
	b = le.AppendUint64(b, uint64(o.Bytes))
	b = le.AppendUint32(b, o.Members)
	b = le.AppendUint32(b, o.Live)
	b = le.AppendUint64(b, uint64(o.LiveBytes))
	b = append(b, o.First[:o.HashLen]...)
	return key, seal(key, b)
}

func (o *ObjectRecord) decode(key, value []byte) error {
	body, err := open("object record", key, value, objectVersion)
	if err != nil {
		return err
	}
	const head = objectFixed - checksumBytes
	if len(key) != 9 || key[0] != kindObject || len(body) < head ||
		!block.ValidHashLen(int(body[1])) || len(body) != head+int(body[1]) {
		return fmt.Errorf("object record %x: %w: value of %d bytes", key, block.ErrCorrupt, len(value))
	}
	le := binary.LittleEndian
	*o = ObjectRecord{
		Number: binary.BigEndian.Uint64(key[1:]), HashLen: int(body[1]), Bucket: le.Uint16(body[2:]),
		NS: block.NamespaceID(le.Uint32(body[4:])), Digest: [32]byte(body[8:]), ID: [16]byte(body[40:]),
		Epoch: le.Uint32(body[56:]), Stamp: le.Uint64(body[60:]), Bytes: int64(le.Uint64(body[68:])),
		Members: le.Uint32(body[76:]), Live: le.Uint32(body[80:]), LiveBytes: int64(le.Uint64(body[84:])),
	}
	copy(o.First[:], body[head:])
	if o.Live > o.Members || o.LiveBytes < 0 || o.LiveBytes > o.Bytes {
		return fmt.Errorf("object record %d: %w: %d of %d blocks with %d of %d bytes", o.Number, block.ErrCorrupt, o.Live, o.Members, o.LiveBytes, o.Bytes)
	}
	return nil
}

// BucketRecord tells of a bucket, or the part of it below a prefix, that the catalog's
// objects lie in.
type BucketRecord struct {
	Number  uint16
	URL     string // without secrets; where it was last seen
	Cluster string // whose prefix it is: the number stands for the two together
}

func bucketKey(number uint16) []byte {
	return binary.BigEndian.AppendUint16([]byte{kindBucket}, number)
}

func (r *BucketRecord) encode() (key, value []byte) {
	key = bucketKey(r.Number)
	b := binary.LittleEndian.AppendUint16([]byte{bucketVersion}, uint16(len(r.Cluster)))
	b = append(b, r.Cluster...)
	return key, seal(key, append(b, r.URL...))
}

func (r *BucketRecord) decode(key, value []byte) error {
	body, err := open("bucket record", key, value, bucketVersion)
	if err != nil {
		return err
	}
	if len(key) != 3 || key[0] != kindBucket || len(body) < 3 || len(body)-3 < int(binary.LittleEndian.Uint16(body[1:])) {
		return fmt.Errorf("bucket record %x: %w: value of %d bytes", key, block.ErrCorrupt, len(value))
	}
	url := 3 + int(binary.LittleEndian.Uint16(body[1:]))
	*r = BucketRecord{Number: binary.BigEndian.Uint16(key[1:]), Cluster: string(body[3:url]), URL: string(body[url:])}
	return nil
}

// PutPacked adds or replaces the record of a block in an object. It panics when a length
// of hash is not one that namespaces have.
func (b *Batch) PutPacked(r *PackedRecord) {
	checkHashLen(r.HashLen)
	op := b.b.SetDeferred(blockKeyPrefix+r.HashLen, r.valueLen())
	putBlockKey(op.Key, kindPacked, &r.Key, r.HashLen)
	r.putValue(op.Value, op.Key)
	b.finish(op)
}

// DropPacked removes the record of a block in an object, whether it is there or not.
func (b *Batch) DropPacked(k block.Key, hashLen int) {
	checkHashLen(hashLen)
	op := b.b.DeleteDeferred(blockKeyPrefix + hashLen)
	putBlockKey(op.Key, kindPacked, &k, hashLen)
	b.finish(op)
}

// PutObject adds or replaces the record of an object. It panics when the length of its
// hash is not one that namespaces have.
func (b *Batch) PutObject(o *ObjectRecord) {
	checkHashLen(o.HashLen)
	b.set(o.encode())
}

// DropObject removes the record of an object, whether it is there or not.
func (b *Batch) DropObject(number uint64) {
	b.drop(objectKey(number))
}

// GetPacked reads the record of one block in an object.
func (c *Catalog) GetPacked(k block.Key, hashLen int) (r PackedRecord, ok bool, err error) {
	checkHashLen(hashLen)
	var buf [blockKeyPrefix + block.HashBytes]byte
	key := buf[:blockKeyPrefix+hashLen]
	putBlockKey(key, kindPacked, &k, hashLen)
	ok, err = c.read("read packed record", key, r.decode)
	return r, ok, err
}

// GetObject reads the record of an object.
func (c *Catalog) GetObject(number uint64) (o ObjectRecord, ok bool, err error) {
	ok, err = c.read("read object record", objectKey(number), o.decode)
	return o, ok, err
}

// read finds and decodes one value.
func (c *Catalog) read(what string, key []byte, decode func(key, value []byte) error) (bool, error) {
	if err := c.enter(); err != nil {
		return false, err
	}
	defer c.leave()
	value, closer, err := c.now().db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, pebbleErr(what, err)
	}
	err = decode(key, value)
	if e := closer.Close(); err == nil && e != nil {
		err = pebbleErr(what, e)
	}
	return err == nil, err
}

// ScanPacked is ScanFrom for the records of a namespace's blocks in objects.
func (c *Catalog) ScanPacked(ns block.NamespaceID, after []byte, fn func(*PackedRecord) error) error {
	from, to := spaceRange(kindPacked, ns)
	if len(after) > 0 {
		from = append(append(from, after...), 0)
	}
	var r PackedRecord
	return c.walk("scan packed records", from, to, func(key, value []byte) error {
		if err := r.decode(key, value); err != nil {
			return err
		}
		return fn(&r)
	})
}

// ScanObjects calls fn for each object as of now, in the order of their numbers, from a
// given one on, until fn fails. The record is valid until fn returns. fn must not call
// the catalog: see Scan.
func (c *Catalog) ScanObjects(from uint64, fn func(*ObjectRecord) error) error {
	var o ObjectRecord
	return c.walk("scan object records", objectKey(from), []byte{kindObject + 1}, func(key, value []byte) error {
		if err := o.decode(key, value); err != nil {
			return err
		}
		return fn(&o)
	})
}

// Buckets lists the buckets in the order of their numbers.
func (c *Catalog) Buckets() (all []BucketRecord, err error) {
	err = c.walk("list buckets", []byte{kindBucket}, []byte{kindBucket + 1}, func(key, value []byte) error {
		var r BucketRecord
		err := r.decode(key, value)
		all = append(all, r)
		return err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// maxCluster is the longest name of a cluster that a bucket's record holds.
const maxCluster = 1<<16 - 1

// PutBucket adds or replaces a bucket, synced. The manifest does not have it: what lies
// in a bucket says so itself. It fails with block.ErrInvalid when the cluster's name is
// too long.
func (c *Catalog) PutBucket(r BucketRecord) error {
	if len(r.Cluster) > maxCluster {
		return fmt.Errorf("put bucket %s: %w: cluster name of %d bytes, at most %d", r.URL, block.ErrInvalid, len(r.Cluster), maxCluster)
	}
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	key, value := r.encode()
	if err := c.now().put(key, value); err != nil {
		return fmt.Errorf("put bucket %s: %w", r.URL, err)
	}
	return nil
}
