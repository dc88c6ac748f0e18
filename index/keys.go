package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index/block"
)

// ErrVersion: something on disk was written in a format that this program does
// not know. It is left as it is.
var ErrVersion = errors.New("unknown format version")

// Keys of the catalog begin with a byte that says what they lead to. Numbers in
// them are big-endian, so that keys sort as the numbers do.
//
//	m                      meta
//	c                      ScrubRecord
//	n namespace(4)         namespace
//	d digest(32)           namespace that was dropped, by the digest of its descriptor
//	s number(2)            SlabRecord
//	t                      there are Tombstones
//	b namespace(4) hash    Record; the hash with as many bytes as count
//	k number(2)            BucketRecord
//	o number(8)            ObjectRecord
//	p namespace(4) hash    PackedRecord
//	w number(2)            ObjectSweepRecord, by the number of its bucket
//	g number(2) namespace(4) hash    OwedRecord, by the number of its bucket
//
// Values begin with a version byte and end with a checksum: the xxhash64 of what
// precedes it in the value, xor that of the key, so that a value does not pass
// under another key. Numbers in them are little-endian.
const (
	kindMeta        = 'm'
	kindScrub       = 'c'
	kindSpace       = 'n'
	kindDropped     = 'd'
	kindSlab        = 's'
	kindTombs       = 't'
	kindBlock       = 'b'
	kindBucket      = 'k'
	kindObject      = 'o'
	kindPacked      = 'p'
	kindObjectSweep = 'w'
	kindOwed        = 'g'

	blockKeyPrefix = 1 + 4
	checksumBytes  = 8
)

// Versions of the values. catalogVersion covers the keys, which values there are,
// and the flags in them. Version 1 of the catalog knew neither ScrubRecord, nor
// Record.Pinned, nor Clean, which its meta record, of version 1 too, does not
// have; version 2 had no buckets, objects and blocks in them; version 3 neither
// SlabRecord.Unswept nor 't'; version 4 neither ObjectSweepRecord nor OwedRecord. All
// are read, and become version 5 when they are opened for writing.
const (
	catalogVersion     = 5
	metaVersion        = 2
	scrubVersion       = 1
	spaceVersion       = 1
	slabVersion        = 1
	tombsVersion       = 1
	recordVersion      = 1
	bucketVersion      = 1
	objectVersion      = 1
	packedVersion      = 1
	objectSweepVersion = 1
	owedVersion        = 1
)

// Record is what the catalog knows of one block on a durable medium.
type Record struct {
	Key       block.Key
	HashLen   int // bytes of the hashes that count: 8, 16, 20 or 32
	Parent    block.Hash
	HasParent bool
	Sum       block.Sum
	Len       uint32 // payload bytes
	Slab      uint16 // SlabRecord.Number
	Offset    int64  // of the slot on the slab: a multiple of 512
	Slot      uint32 // bytes of the slot, a multiple of 512, which may be more than the block needs
	Gen       uint64 // of the slot, as in its header
	Epoch     uint32 // of the namespace when the block was put
	Expires   int64  // Unix seconds; 0: never
	Pinned    bool   // never evicted
}

// recordFixed is the length of a record's value without a parent:
// version, flags, Sum, Len, Slab, Offset, Gen, Epoch, Expires, Slot, checksum.
const recordFixed = 1 + 1 + 16 + 4 + 2 + 8 + 8 + 4 + 8 + 4 + checksumBytes

const (
	flagParent = 1
	flagPinned = 2
)

func (r *Record) valueLen() int {
	if r.HasParent {
		return recordFixed + r.HashLen
	}
	return recordFixed
}

// putBlockKey writes a key into b, which is blockKeyPrefix+hashLen bytes long.
func putBlockKey(b []byte, kind byte, k *block.Key, hashLen int) {
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(k.NS))
	copy(b[blockKeyPrefix:], k.Hash[:hashLen])
}

// readBlockKey reads what putBlockKey wrote. what names the record in errors.
func readBlockKey(what string, kind byte, key []byte) (k block.Key, hashLen int, err error) {
	hashLen = len(key) - blockKeyPrefix
	if !block.ValidHashLen(hashLen) || key[0] != kind {
		return k, 0, fmt.Errorf("%s %x: %w: key of %d bytes", what, key, block.ErrCorrupt, len(key))
	}
	k.NS = block.NamespaceID(binary.BigEndian.Uint32(key[1:]))
	copy(k.Hash[:], key[blockKeyPrefix:])
	return k, hashLen, nil
}

func appendBlockKey(b []byte, k *block.Key, hashLen int) []byte {
	b = append(b, kindBlock)
	b = binary.BigEndian.AppendUint32(b, uint32(k.NS))
	return append(b, k.Hash[:hashLen]...)
}

// putValue writes the record's value into b, which is valueLen bytes long, to be
// stored under key.
func (r *Record) putValue(b, key []byte) {
	b[0], b[1] = recordVersion, 0
	copy(b[2:], r.Sum[:])
	binary.LittleEndian.PutUint32(b[18:], r.Len)
	binary.LittleEndian.PutUint16(b[22:], r.Slab)
	binary.LittleEndian.PutUint64(b[24:], uint64(r.Offset))
	binary.LittleEndian.PutUint64(b[32:], r.Gen)
	binary.LittleEndian.PutUint32(b[40:], r.Epoch)
	binary.LittleEndian.PutUint64(b[44:], uint64(r.Expires))
	binary.LittleEndian.PutUint32(b[52:], r.Slot)
	if r.HasParent {
		b[1] |= flagParent
		copy(b[56:], r.Parent[:r.HashLen])
	}
	if r.Pinned {
		b[1] |= flagPinned
	}
	end := len(b) - checksumBytes
	binary.LittleEndian.PutUint64(b[end:], checksum(key, b[:end]))
}

// Encode gives the key and the value under which Pebble has the record, for a
// benchmark that compares the two.
func (r *Record) Encode() (key, value []byte) {
	key = appendBlockKey(nil, &r.Key, r.HashLen)
	value = make([]byte, r.valueLen())
	r.putValue(value, key)
	return key, value
}

// decode reads a record from its key and value. It fails with ErrVersion or
// block.ErrCorrupt.
func (r *Record) decode(key, value []byte) error {
	k, hashLen, err := readBlockKey("block record", kindBlock, key)
	if err != nil {
		return err
	}
	body, err := open("block record", key, value, recordVersion)
	if err != nil {
		return err
	}
	*r = Record{Key: k, HashLen: hashLen}
	want := recordFixed - checksumBytes
	if len(body) > 1 && body[1]&flagParent != 0 {
		r.HasParent = true
		want += hashLen
	}
	if len(body) != want || body[1]&^(flagParent|flagPinned) != 0 {
		return fmt.Errorf("block record %s: %w: value of %d bytes", r.Key, block.ErrCorrupt, len(value))
	}
	copy(r.Sum[:], body[2:])
	r.Len = binary.LittleEndian.Uint32(body[18:])
	r.Slab = binary.LittleEndian.Uint16(body[22:])
	r.Offset = int64(binary.LittleEndian.Uint64(body[24:]))
	r.Gen = binary.LittleEndian.Uint64(body[32:])
	r.Epoch = binary.LittleEndian.Uint32(body[40:])
	r.Expires = int64(binary.LittleEndian.Uint64(body[44:]))
	r.Slot = binary.LittleEndian.Uint32(body[52:])
	r.Pinned = body[1]&flagPinned != 0
	copy(r.Parent[:], body[56:])
	// block.PlaceAt takes no other offsets.
	if r.Offset < 0 || r.Offset%512 != 0 || r.Offset>>57 != 0 {
		return fmt.Errorf("block record %s: %w: offset %d", r.Key, block.ErrCorrupt, r.Offset)
	}
	if r.Len > block.MaxBlockBytes {
		return fmt.Errorf("block record %s: %w: length %d", r.Key, block.ErrCorrupt, r.Len)
	}
	return nil
}

// SlabRecord tells of a slab that the catalog's records point into.
type SlabRecord struct {
	Number      uint16
	ID          [16]byte // as in the slab's own header
	Path        string   // where it was last seen
	Bytes       int64
	ExtentBytes int64
	Device      bool // a block device, not a regular file
	Retired     bool // no longer in use; its number is not given again
	Unswept     bool // it may have headers of dead blocks although the store has ended in order
}

const (
	flagDevice  = 1
	flagRetired = 2
	flagUnswept = 4
)

func slabKey(number uint16) []byte { return binary.BigEndian.AppendUint16([]byte{kindSlab}, number) }

func (s *SlabRecord) encode() (key, value []byte) {
	key = slabKey(s.Number)
	b := []byte{slabVersion, 0}
	if s.Device {
		b[1] |= flagDevice
	}
	if s.Retired {
		b[1] |= flagRetired
	}
	if s.Unswept {
		b[1] |= flagUnswept
	}
	b = append(b, s.ID[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Bytes))
	b = binary.LittleEndian.AppendUint64(b, uint64(s.ExtentBytes))
	b = append(b, s.Path...)
	return key, seal(key, b)
}

func (s *SlabRecord) decode(key, value []byte) error {
	body, err := open("slab record", key, value, slabVersion)
	if err != nil {
		return err
	}
	if len(key) != 3 || key[0] != kindSlab || len(body) < 34 || body[1] > flagDevice|flagRetired|flagUnswept {
		return fmt.Errorf("slab record %x: %w: value of %d bytes", key, block.ErrCorrupt, len(value))
	}
	*s = SlabRecord{
		Number:      binary.BigEndian.Uint16(key[1:]),
		ID:          [16]byte(body[2:]),
		Bytes:       int64(binary.LittleEndian.Uint64(body[18:])),
		ExtentBytes: int64(binary.LittleEndian.Uint64(body[26:])),
		Path:        string(body[34:]),
		Device:      body[1]&flagDevice != 0,
		Retired:     body[1]&flagRetired != 0,
		Unswept:     body[1]&flagUnswept != 0,
	}
	return nil
}

// tombsKey leads to a record that says no more than that it is there.
var tombsKey = []byte{kindTombs}

func encodeTombsRecord() []byte { return seal(tombsKey, []byte{tombsVersion}) }

func decodeTombsRecord(key, value []byte) error {
	body, err := open("record of tombstones", key, value, tombsVersion)
	if err == nil && (len(key) != 1 || len(body) != 1) {
		err = fmt.Errorf("record of tombstones: %w: value of %d bytes", block.ErrCorrupt, len(value))
	}
	return err
}

func spaceKey(id block.NamespaceID) []byte {
	return binary.BigEndian.AppendUint32([]byte{kindSpace}, uint32(id))
}

func droppedKey(digest [32]byte) []byte { return append([]byte{kindDropped}, digest[:]...) }

// spaceTexts are the texts of a descriptor in the order in which they are
// stored.
func spaceTexts(d *block.Descriptor) [10]*string {
	return [...]*string{
		&d.Name, &d.Model, &d.Revision, &d.DType, &d.Layout,
		&d.HashAlgorithm, &d.HashSeed, &d.RankLayout, &d.KVGroup, &d.Tenant,
	}
}

// encodeSpace writes a namespace, or one that was dropped, for a key.
func encodeSpace(key []byte, n *block.Namespace) []byte {
	b := []byte{spaceVersion, uint8(n.HashLen)}
	b = binary.LittleEndian.AppendUint32(b, uint32(n.ID))
	b = binary.LittleEndian.AppendUint32(b, n.Epoch)
	b = binary.LittleEndian.AppendUint64(b, uint64(n.TTL))
	b = binary.LittleEndian.AppendUint64(b, uint64(n.Created.Unix()))
	b = binary.LittleEndian.AppendUint32(b, uint32(n.Created.Nanosecond()))
	b = binary.LittleEndian.AppendUint32(b, n.Desc.TokensPerBlock)
	b = binary.LittleEndian.AppendUint64(b, uint64(n.Desc.BlockBytes))
	b = binary.LittleEndian.AppendUint64(b, uint64(n.Desc.MaxBlockBytes))
	for _, s := range spaceTexts(&n.Desc) {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(*s)))
		b = append(b, *s...)
	}
	return seal(key, b)
}

const spaceFixed = 1 + 1 + 4 + 4 + 8 + 8 + 4 + 4 + 8 + 8

func decodeSpace(key, value []byte) (block.Namespace, error) {
	var n block.Namespace
	body, err := open("namespace record", key, value, spaceVersion)
	if err != nil {
		return n, err
	}
	bad := fmt.Errorf("namespace record %x: %w: value of %d bytes", key, block.ErrCorrupt, len(value))
	if len(body) < spaceFixed {
		return n, bad
	}
	nanos := binary.LittleEndian.Uint32(body[26:])
	n = block.Namespace{
		ID:      block.NamespaceID(binary.LittleEndian.Uint32(body[2:])),
		HashLen: int(body[1]),
		Epoch:   binary.LittleEndian.Uint32(body[6:]),
		TTL:     time.Duration(binary.LittleEndian.Uint64(body[10:])),
		Created: time.Unix(int64(binary.LittleEndian.Uint64(body[18:])), int64(nanos)).UTC(),
		Desc: block.Descriptor{
			TokensPerBlock: binary.LittleEndian.Uint32(body[30:]),
			BlockBytes:     int64(binary.LittleEndian.Uint64(body[34:])),
			MaxBlockBytes:  int64(binary.LittleEndian.Uint64(body[42:])),
		},
	}
	if n.HashLen != 0 && !block.ValidHashLen(n.HashLen) || nanos >= 1e9 {
		return n, bad
	}
	body = body[spaceFixed:]
	for _, s := range spaceTexts(&n.Desc) {
		if len(body) < 4 {
			return n, bad
		}
		size := uint64(binary.LittleEndian.Uint32(body))
		if size > uint64(len(body)-4) {
			return n, bad
		}
		*s, body = string(body[4:4+size]), body[4+size:]
	}
	if len(body) != 0 {
		return n, bad
	}
	// The key says again what the value says.
	want := spaceKey(n.ID)
	if len(key) > 0 && key[0] == kindDropped {
		want = droppedKey(n.Desc.Digest())
	}
	if string(key) != string(want) {
		return n, bad
	}
	return n, nil
}

// meta is what the catalog knows of itself.
type meta struct {
	Catalog   uint32 // catalogVersion of the program that made it
	Boot      uint32 // raised each time the catalog is opened for writing
	NextSpace block.NamespaceID
	Store     [16]byte // identity of the store, drawn when it was made
	Clean     bool     // the last opening for writing has ended in order
}

var metaKey = []byte{kindMeta}

const flagClean = 1

// encode writes a meta record of version 1 for a catalog of version 1.
func (m *meta) encode() []byte {
	b := []byte{metaVersion}
	if m.Catalog == 1 {
		b[0] = 1
	}
	b = binary.LittleEndian.AppendUint32(b, m.Catalog)
	b = binary.LittleEndian.AppendUint32(b, m.Boot)
	b = binary.LittleEndian.AppendUint32(b, uint32(m.NextSpace))
	b = append(b, m.Store[:]...)
	switch {
	case b[0] == 1:
	case m.Clean:
		b = append(b, flagClean)
	default:
		b = append(b, 0)
	}
	return seal(metaKey, b)
}

func (m *meta) decode(value []byte) error {
	version, size := byte(metaVersion), 30
	if len(value) > 0 && value[0] == 1 {
		version, size = 1, 29
	}
	body, err := open("meta record", metaKey, value, version)
	if err != nil {
		return err
	}
	if len(body) != size {
		return fmt.Errorf("meta record: %w: value of %d bytes", block.ErrCorrupt, len(value))
	}
	m.Catalog = binary.LittleEndian.Uint32(body[1:])
	m.Boot = binary.LittleEndian.Uint32(body[5:])
	m.NextSpace = block.NamespaceID(binary.LittleEndian.Uint32(body[9:]))
	m.Store = [16]byte(body[13:])
	m.Clean = false
	if version > 1 {
		if body[29] > flagClean {
			return fmt.Errorf("meta record: %w: flags %#x", block.ErrCorrupt, body[29])
		}
		m.Clean = body[29] == flagClean
	}
	if m.Catalog == 0 || m.Catalog > catalogVersion || (m.Catalog == 1) != (version == 1) {
		return fmt.Errorf("catalog: %w: %d, this program knows up to %d", ErrVersion, m.Catalog, catalogVersion)
	}
	return nil
}

func checksum(key, body []byte) uint64 { return xxhash.Sum64(body) ^ xxhash.Sum64(key) }

func seal(key, body []byte) []byte {
	return binary.LittleEndian.AppendUint64(body, checksum(key, body))
}

// open checks version and checksum of a value and returns what lies before the
// checksum, the version byte included. The version is looked at first, since
// another one may have another checksum.
func open(what string, key, value []byte, version byte) ([]byte, error) {
	if len(value) == 0 {
		return nil, fmt.Errorf("%s %x: %w: empty value", what, key, block.ErrCorrupt)
	}
	if value[0] != version {
		return nil, fmt.Errorf("%s %x: %w: %d, this program knows %d", what, key, ErrVersion, value[0], version)
	}
	end := len(value) - checksumBytes
	if end < 1 || binary.LittleEndian.Uint64(value[end:]) != checksum(key, value[:end]) {
		return nil, fmt.Errorf("%s %x: %w: checksum does not match", what, key, block.ErrCorrupt)
	}
	return value[:end], nil
}
