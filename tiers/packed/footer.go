package packed

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// MaxBytes is the longest packed object, its footer included.
	MaxBytes = 32 << 20
	// MaxMembers is the most blocks in one object.
	MaxMembers = 4096
	// HeaderBytes precede each payload: the block's slot header, as on a slab of
	// version 2 whose salt is the object's ID, with the member's place in the object.
	HeaderBytes = 256
	// TrailerBytes end every object, in any version: see FooterBytes.
	TrailerBytes = 32
	// TailBytes is what to read of an object's end first: it has the footer of any
	// object whose blocks have 64 KiB or more.
	TailBytes = 64 << 10
)

// ID is that of one object that was written, and of no other: who wrote it, and a number
// that it gave to no other object; see NewID. In a batch of tombstones it is random.
type ID [16]byte

// Writer is who writes objects: random, drawn for each catalog and bucket. By it a store
// knows from a listing which objects its catalog should know.
type Writer [8]byte

// NewID is the ID of the object to which its writer gave a number.
func NewID(w Writer, number uint64) (id ID) {
	copy(id[:], w[:])
	binary.BigEndian.PutUint64(id[len(w):], number)
	return id
}

// Writer is who wrote the object.
func (id ID) Writer() Writer { return Writer(id[:8]) }

// Number is what its writer knows the object by.
func (id ID) Number() uint64 { return binary.BigEndian.Uint64(id[8:]) }

// Member is a block in a packed object.
type Member struct {
	Hash      block.Hash
	Parent    block.Hash
	HasParent bool
	Offset    int64  // of its slot header in the object
	Len       uint32 // payload bytes, which follow the header
	Gen       uint64 // as in its slot header
	Expires   int64  // Unix seconds; 0: never
	Sum       block.Sum
}

// end is where what follows the member begins.
func (m *Member) end() int64 { return m.Offset + HeaderBytes + int64(m.Len) }

// Footer says what is in a packed object. Blocks of one namespace share an object,
// and lie in it without gaps, parents before their children as a rule; the footer
// follows. The zero value is an empty object.
type Footer struct {
	ID      ID
	Store   [16]byte // identity of the store that wrote it
	Digest  [32]byte // of the namespace's descriptor
	HashLen uint8    // bytes of hashes that count
	Epoch   uint32   // of the namespace in that store
	Stamp   uint64   // when it was packed: later than each member was put; see Clock
	Members []Member
}

// An object, numbers little-endian:
//
//	members, one behind the other: slot header(256) payload
//	head     magic(8) hash length(1) 0(3) members(4) id(16) store(16) digest(32) epoch(4) 0(4) stamp(8)
//	entries  offset(8) gen(8) expires(8) length(4) flags(1) 0(3) sum(16) hash parent,
//	         hashes with as many bytes as count, the parent zero where there is none
//	trailer  footer length(4) version(2) 0(2) checksum(8) magic(8) checksum(8)
//
// The length is that of head, entries and trailer. The first checksum is the xxhash64
// of head and entries, the second that of the trailer before it. The trailer is the
// same in every version, so that an unknown one is told from a damaged one.
const (
	footerMagic   = "KVTPACK\n"
	footerVersion = 1
	headBytes     = 96
	entryFixed    = 48

	entryHasParent = 1
)

func (f *Footer) entryBytes() int64 { return entryFixed + 2*int64(f.HashLen) }

func (f *Footer) footerBytes() int64 {
	return headBytes + int64(len(f.Members))*f.entryBytes() + TrailerBytes
}

// payloadEnd is where the footer begins.
func (f *Footer) payloadEnd() int64 {
	if len(f.Members) == 0 {
		return 0
	}
	return f.Members[len(f.Members)-1].end()
}

// PayloadBytes is what the payloads take in an object of so many bytes and members.
func PayloadBytes(size int64, members uint32, hashLen int) int64 {
	entry := (&Footer{HashLen: uint8(hashLen)}).entryBytes()
	return size - headBytes - TrailerBytes - int64(members)*(HeaderBytes+entry)
}

// Bytes is the length of the object.
func (f *Footer) Bytes() int64 { return f.payloadEnd() + f.footerBytes() }

// Add gives a block a place behind the others, which it sets in m and in the footer.
// It reports false, and changes nothing, when the object would become longer than
// MaxBytes or have more than MaxMembers. HashLen is to be set before.
func (f *Footer) Add(m *Member) bool {
	at := f.payloadEnd()
	if len(f.Members) == MaxMembers || at+HeaderBytes+int64(m.Len)+f.footerBytes()+f.entryBytes() > MaxBytes {
		return false
	}
	m.Offset = at
	f.Members = append(f.Members, *m)
	return true
}

// Append appends the footer to b.
func (f *Footer) Append(b []byte) []byte {
	le := binary.LittleEndian
	from := len(b)
	b = append(b, footerMagic...)
	b = append(b, f.HashLen, 0, 0, 0)
	b = le.AppendUint32(b, uint32(len(f.Members)))
	b = append(b, f.ID[:]...)
	b = append(b, f.Store[:]...)
	b = append(b, f.Digest[:]...)
	b = le.AppendUint32(b, f.Epoch)
	b = append(b, 0, 0, 0, 0)
	b = le.AppendUint64(b, f.Stamp)
	for i := range f.Members {
		m := &f.Members[i]
		b = le.AppendUint64(b, uint64(m.Offset))
		b = le.AppendUint64(b, m.Gen)
		b = le.AppendUint64(b, uint64(m.Expires))
		b = le.AppendUint32(b, m.Len)
		if m.HasParent {
			b = append(b, entryHasParent, 0, 0, 0)
		} else {
			b = append(b, 0, 0, 0, 0)
		}
		b = append(b, m.Sum[:]...)
		b = append(b, m.Hash[:f.HashLen]...)
		b = append(b, m.Parent[:f.HashLen]...)
	}
	sum := xxhash.Sum64(b[from:])
	trailer := len(b)
	b = le.AppendUint32(b, uint32(f.footerBytes()))
	b = le.AppendUint16(b, footerVersion)
	b = append(b, 0, 0)
	b = le.AppendUint64(b, sum)
	b = append(b, footerMagic...)
	return le.AppendUint64(b, xxhash.Sum64(b[trailer:]))
}

// FooterBytes reads from the end of an object of size bytes how long its footer is;
// tail is its last TrailerBytes or more. It fails with index.ErrVersion when the object
// is of a version that came later, which must be left as it is, and with
// block.ErrCorrupt when it is no packed object or damaged.
func FooterBytes(tail []byte, size int64) (int64, error) {
	if len(tail) < TrailerBytes {
		return 0, fmt.Errorf("%w: packed object of %d bytes", block.ErrCorrupt, size)
	}
	b := tail[len(tail)-TrailerBytes:]
	le := binary.LittleEndian
	if string(b[16:24]) != footerMagic {
		return 0, fmt.Errorf("%w: packed object: magic %q at its end", block.ErrCorrupt, b[16:24])
	}
	if got, want := xxhash.Sum64(b[:24]), le.Uint64(b[24:]); got != want {
		return 0, fmt.Errorf("%w: packed object: trailer has checksum %016x, want %016x", block.ErrCorrupt, got, want)
	}
	if v := le.Uint16(b[4:]); v != footerVersion {
		return 0, fmt.Errorf("packed object: %w %d, this program knows %d", index.ErrVersion, v, footerVersion)
	}
	n := int64(le.Uint32(b))
	if b[6]|b[7] != 0 || n < headBytes+TrailerBytes || n > size {
		return 0, fmt.Errorf("%w: packed object of %d bytes: footer of %d", block.ErrCorrupt, size, n)
	}
	return n, nil
}

// DecodeFooter reads the footer of an object of size bytes, of which b is the end, as
// long as FooterBytes says or longer. It accepts only what Append writes. Errors as
// those of FooterBytes.
func DecodeFooter(b []byte, size int64) (*Footer, error) {
	n, err := FooterBytes(b, size)
	if err != nil {
		return nil, err
	}
	bad := func(format string, args ...any) (*Footer, error) {
		return nil, fmt.Errorf("%w: packed object: %s", block.ErrCorrupt, fmt.Sprintf(format, args...))
	}
	if int64(len(b)) < n {
		return bad("%d bytes of a footer of %d", len(b), n)
	}
	le := binary.LittleEndian
	b = b[int64(len(b))-n:]
	want := le.Uint64(b[n-TrailerBytes+8:])
	b = b[:n-TrailerBytes]
	if got := xxhash.Sum64(b); got != want {
		return bad("footer has checksum %016x, want %016x", got, want)
	}
	count := int64(le.Uint32(b[12:]))
	f := &Footer{
		HashLen: b[8],
		ID:      ID(b[16:32]), Store: [16]byte(b[32:48]), Digest: [32]byte(b[48:80]),
		Epoch: le.Uint32(b[80:]), Stamp: le.Uint64(b[88:]),
	}
	switch {
	case string(b[:8]) != footerMagic:
		return bad("footer begins with %q", b[:8])
	case !block.ValidHashLen(int(f.HashLen)):
		return bad("hash length %d", f.HashLen)
	case count < 1 || count > MaxMembers || n != headBytes+count*f.entryBytes()+TrailerBytes:
		return bad("%d members in a footer of %d bytes", count, n)
	case b[9]|b[10]|b[11] != 0 || le.Uint32(b[84:]) != 0:
		return bad("footer: unused bytes are not zero")
	}
	f.Members = make([]Member, count)
	seen := make(map[block.Hash]struct{}, count)
	b = b[headBytes:]
	at := int64(0)
	for i := range f.Members {
		m := &f.Members[i]
		e := b[int64(i)*f.entryBytes():]
		*m = Member{
			Offset: int64(le.Uint64(e)), Gen: le.Uint64(e[8:]), Expires: int64(le.Uint64(e[16:])),
			Len: le.Uint32(e[24:]), HasParent: e[28]&entryHasParent != 0, Sum: block.Sum(e[32:48]),
		}
		copy(m.Hash[:], e[entryFixed:][:f.HashLen])
		copy(m.Parent[:], e[entryFixed+int64(f.HashLen):][:f.HashLen])
		_, twice := seen[m.Hash]
		seen[m.Hash] = struct{}{}
		switch {
		case m.Offset != at:
			return bad("member %d is at %d, want %d", i, m.Offset, at)
		case m.Len < 1 || m.Len > block.MaxBlockBytes:
			return bad("member %d has %d bytes", i, m.Len)
		case e[28]&^entryHasParent != 0 || e[29]|e[30]|e[31] != 0:
			return bad("member %d has flags %x", i, e[28:32])
		case !m.HasParent && m.Parent != block.Hash{}:
			return bad("member %d has a parent without its flag", i)
		case twice:
			return bad("member %d, %s, is there twice", i, m.Hash.Hex(int(f.HashLen)))
		}
		at = m.end()
	}
	if size != at+n || size > MaxBytes {
		return bad("members of %d bytes and a footer of %d in %d bytes", at, n, size)
	}
	return f, nil
}
