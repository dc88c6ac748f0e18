package packed

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// Tombstones is a batch of what one store has deleted. It is in the bucket before the
// deletions are answered, and stays as long as an object may be there that it is about.
type Tombstones struct {
	ID      ID
	Store   [16]byte // identity of the store that deleted
	Deleted []Deleted
	Cleared []Cleared
}

// Deleted is a block that was: all that was packed up to Stamp.
type Deleted struct {
	Digest  [32]byte // of the namespace's descriptor
	HashLen uint8
	Hash    block.Hash
	Stamp   uint64
}

// Cleared is a namespace of which all blocks were deleted, or that was dropped: all that
// was packed up to Stamp, and by the same store in an older epoch.
type Cleared struct {
	Digest [32]byte
	Epoch  uint32 // since then
	Stamp  uint64
}

// A batch, numbers little-endian:
//
//	magic(8) version(2) 0(6) id(16) store(16) deleted(4) cleared(4)
//	for each block      stamp(8) digest(32) hash length(1) hash
//	for each namespace  stamp(8) digest(32) epoch(4)
//	checksum(8), the xxhash64 of all before it
//
// Magic, version and checksum are there in every version.
const (
	tombstonesMagic   = "KVTTOMB\n"
	tombstonesVersion = 1
	tombstonesFixed   = 8 + 8 + 16 + 16 + 4 + 4
	clearedBytes      = 8 + 32 + 4

	// MaxTombstones is the most deletions in one batch.
	MaxTombstones = 1 << 16
	// MaxTombstonesBytes is the longest object of a batch.
	MaxTombstonesBytes = tombstonesFixed + MaxTombstones*(8+32+1+block.HashBytes) + 8
)

// Append appends the object of the batch to b.
func (t *Tombstones) Append(b []byte) []byte {
	le := binary.LittleEndian
	from := len(b)
	b = append(b, tombstonesMagic...)
	b = le.AppendUint16(b, tombstonesVersion)
	b = append(b, 0, 0, 0, 0, 0, 0)
	b = append(b, t.ID[:]...)
	b = append(b, t.Store[:]...)
	b = le.AppendUint32(b, uint32(len(t.Deleted)))
	b = le.AppendUint32(b, uint32(len(t.Cleared)))
	for i := range t.Deleted {
		d := &t.Deleted[i]
		b = le.AppendUint64(b, d.Stamp)
		b = append(b, d.Digest[:]...)
		b = append(b, d.HashLen)
		b = append(b, d.Hash[:d.HashLen]...)
	}
	for i := range t.Cleared {
		c := &t.Cleared[i]
		b = le.AppendUint64(b, c.Stamp)
		b = append(b, c.Digest[:]...)
		b = le.AppendUint32(b, c.Epoch)
	}
	return le.AppendUint64(b, xxhash.Sum64(b[from:]))
}

// DecodeTombstones reads a whole object. It fails with index.ErrVersion when that is of
// a version that came later: an import that goes on without it might raise the dead. It
// fails with block.ErrCorrupt on anything else that Append does not write.
func DecodeTombstones(b []byte) (*Tombstones, error) {
	bad := func(format string, args ...any) (*Tombstones, error) {
		return nil, fmt.Errorf("%w: tombstones: %s", block.ErrCorrupt, fmt.Sprintf(format, args...))
	}
	le := binary.LittleEndian
	end := len(b) - 8
	switch {
	case end < 16:
		return bad("%d bytes", len(b))
	case string(b[:8]) != tombstonesMagic:
		return bad("magic %q", b[:8])
	}
	if got, want := xxhash.Sum64(b[:end]), le.Uint64(b[end:]); got != want {
		return bad("checksum %016x, want %016x", got, want)
	}
	if v := le.Uint16(b[8:]); v != tombstonesVersion {
		return nil, fmt.Errorf("tombstones: %w %d, this program knows %d", index.ErrVersion, v, tombstonesVersion)
	}
	b = b[:end]
	if len(b) < tombstonesFixed || !zero(b[10:16]) {
		return bad("head of %d bytes", len(b))
	}
	t := &Tombstones{ID: ID(b[16:32]), Store: [16]byte(b[32:48])}
	deleted, cleared := le.Uint32(b[48:]), le.Uint32(b[52:])
	if deleted > MaxTombstones || cleared > MaxTombstones-deleted {
		return bad("%d blocks and %d namespaces, at most %d", deleted, cleared, MaxTombstones)
	}
	b = b[tombstonesFixed:]
	for i := range deleted {
		if len(b) < 41 || !block.ValidHashLen(int(b[40])) || len(b) < 41+int(b[40]) {
			return bad("block %d of %d: %d bytes are left", i, deleted, len(b))
		}
		d := Deleted{Stamp: le.Uint64(b), Digest: [32]byte(b[8:40]), HashLen: b[40]}
		copy(d.Hash[:], b[41:41+d.HashLen])
		t.Deleted = append(t.Deleted, d)
		b = b[41+d.HashLen:]
	}
	if len(b) != int(cleared)*clearedBytes {
		return bad("%d bytes for %d namespaces", len(b), cleared)
	}
	for ; len(b) > 0; b = b[clearedBytes:] {
		t.Cleared = append(t.Cleared, Cleared{Stamp: le.Uint64(b), Digest: [32]byte(b[8:40]), Epoch: le.Uint32(b[40:])})
	}
	return t, nil
}

func zero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// Graves is what the tombstones of a prefix say together. The zero value is ready for
// use; it belongs to one goroutine at a time.
type Graves struct {
	blocks map[graveKey]uint64 // latest stamp
	spaces map[[32]byte]uint64 // latest stamp
	epochs map[epochKey]uint32 // highest epoch
}

type graveKey struct {
	digest [32]byte
	hash   block.Hash
}

type epochKey struct {
	digest [32]byte
	store  [16]byte
}

// Add takes in a batch, in any order, and more than once.
func (g *Graves) Add(t *Tombstones) {
	if g.blocks == nil {
		g.blocks, g.spaces, g.epochs = map[graveKey]uint64{}, map[[32]byte]uint64{}, map[epochKey]uint32{}
	}
	for i := range t.Deleted {
		d := &t.Deleted[i]
		k := graveKey{d.Digest, d.Hash}
		g.blocks[k] = max(g.blocks[k], d.Stamp)
	}
	for i := range t.Cleared {
		c := &t.Cleared[i]
		g.spaces[c.Digest] = max(g.spaces[c.Digest], c.Stamp)
		k := epochKey{c.Digest, t.Store}
		g.epochs[k] = max(g.epochs[k], c.Epoch)
	}
}

// Dead reports whether member i of an object was deleted after the object was packed,
// by itself or with its namespace.
func (g *Graves) Dead(f *Footer, i int) bool {
	if epoch, ok := g.epochs[epochKey{f.Digest, f.Store}]; ok && f.Epoch < epoch {
		return true
	}
	return g.Buried(f.Digest, f.Members[i].Hash, f.Stamp)
}

// Buried reports whether a block of a namespace was deleted after it was packed at stamp, by
// itself or with its namespace.
func (g *Graves) Buried(digest [32]byte, h block.Hash, stamp uint64) bool {
	if at, ok := g.spaces[digest]; ok && at >= stamp {
		return true
	}
	at, ok := g.blocks[graveKey{digest, h}]
	return ok && at >= stamp
}
