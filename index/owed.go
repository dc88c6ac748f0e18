package index

import (
	"encoding/binary"
	"fmt"

	"github.com/kvtier/kvtier/index/block"
)

// OwedRecord tells of a block that was deleted and whose tombstone may not be in a bucket
// yet: an object there may hold the block, and whoever imports it would raise it.
type OwedRecord struct {
	Bucket  uint16 // BucketRecord.Number
	Key     block.Key
	HashLen int      // bytes of the hash that count: 8, 16, 20 or 32
	Digest  [32]byte // of the namespace's descriptor: it may be dropped before the tombstone is there
	Stamp   uint64   // of the tombstone: what was packed later is another block
}

const (
	owedPrefix = 1 + 2 + 4
	// owedBytes is the length of its value: version, Digest, Stamp, checksum.
	owedBytes = 1 + 32 + 8 + checksumBytes
)

func owedKey(bucket uint16, k block.Key, hashLen int) []byte {
	b := binary.BigEndian.AppendUint16([]byte{kindOwed}, bucket)
	b = binary.BigEndian.AppendUint32(b, uint32(k.NS))
	return append(b, k.Hash[:hashLen]...)
}

func (r *OwedRecord) encode() (key, value []byte) {
	key = owedKey(r.Bucket, r.Key, r.HashLen)
	b := append(make([]byte, 0, owedBytes), owedVersion)
	b = append(b, r.Digest[:]...)
	return key, seal(key, binary.LittleEndian.AppendUint64(b, r.Stamp))
}

func (r *OwedRecord) decode(key, value []byte) error {
	body, err := open("owed record", key, value, owedVersion)
	if err != nil {
		return err
	}
	hashLen := len(key) - owedPrefix
	if len(value) != owedBytes || key[0] != kindOwed || !block.ValidHashLen(hashLen) {
		return fmt.Errorf("owed record %x: %w: value of %d bytes", key, block.ErrCorrupt, len(value))
	}
	*r = OwedRecord{
		Bucket: binary.BigEndian.Uint16(key[1:]), HashLen: hashLen, Digest: [32]byte(body[1:]), Stamp: binary.LittleEndian.Uint64(body[33:]),
	}
	r.Key.NS = block.NamespaceID(binary.BigEndian.Uint32(key[3:]))
	copy(r.Key.Hash[:], key[owedPrefix:])
	return nil
}

// PutOwed adds or replaces the record of a tombstone that a bucket is owed. It panics when
// the length of its hash is not one that namespaces have.
func (b *Batch) PutOwed(r *OwedRecord) {
	checkHashLen(r.HashLen)
	b.set(r.encode())
}

// DropOwed removes such a record, whether it is there or not.
func (b *Batch) DropOwed(r *OwedRecord) {
	checkHashLen(r.HashLen)
	b.drop(owedKey(r.Bucket, r.Key, r.HashLen))
}

// GetOwed reads the record of the tombstone that a bucket is owed of a block.
func (c *Catalog) GetOwed(bucket uint16, k block.Key, hashLen int) (r OwedRecord, ok bool, err error) {
	checkHashLen(hashLen)
	ok, err = c.read("read owed record", owedKey(bucket, k, hashLen), r.decode)
	return r, ok, err
}

// ScanOwed calls fn for each tombstone that a bucket is owed as of now, until fn fails. The
// record is valid until fn returns. fn must not call the catalog: see Scan.
func (c *Catalog) ScanOwed(bucket uint16, fn func(*OwedRecord) error) error {
	from := binary.BigEndian.AppendUint16([]byte{kindOwed}, bucket)
	to := []byte{kindOwed + 1}
	if bucket < 1<<16-1 {
		to = binary.BigEndian.AppendUint16([]byte{kindOwed}, bucket+1)
	}
	var r OwedRecord
	return c.walk("scan owed records", from, to, func(key, value []byte) error {
		if err := r.decode(key, value); err != nil {
			return err
		}
		return fn(&r)
	})
}
