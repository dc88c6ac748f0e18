package block

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"
)

// MaxBlockBytes is the largest payload of a block.
const MaxBlockBytes = 8 << 20

// NamespaceID is the handle of a namespace in one store. It is never given to
// another namespace again, and is not known outside that store's catalog.
type NamespaceID uint32

// Descriptor says what the blocks of a namespace are. Its digest is the
// identity of the namespace: a known name opened with another digest is refused.
type Descriptor struct {
	Name           string // unique in the store: 1 to 255 printable characters without '/'
	Model          string
	Revision       string
	DType          string
	Layout         string
	TokensPerBlock uint32
	BlockBytes     int64 // exact payload length; 0 when MaxBlockBytes is given
	MaxBlockBytes  int64 // largest payload length; 0 when BlockBytes is given
	HashAlgorithm  string
	HashSeed       string
	RankLayout     string
	KVGroup        string
	Tenant         string
}

// Field is one part of a descriptor by the name that the API gives it.
type Field struct{ Name, Value string }

// Fields lists all fields in the order of the struct, numbers as decimal text.
func (d Descriptor) Fields() []Field {
	return []Field{
		{"name", d.Name},
		{"model", d.Model},
		{"revision", d.Revision},
		{"dtype", d.DType},
		{"layout", d.Layout},
		{"tokens_per_block", fmt.Sprint(d.TokensPerBlock)},
		{"block_bytes", fmt.Sprint(d.BlockBytes)},
		{"max_block_bytes", fmt.Sprint(d.MaxBlockBytes)},
		{"hash_algorithm", d.HashAlgorithm},
		{"hash_seed", d.HashSeed},
		{"rank_layout", d.RankLayout},
		{"kv_group", d.KVGroup},
		{"tenant", d.Tenant},
	}
}

// Set is the inverse of Fields for one of them. It fails with ErrInvalid for a name
// that no field has, and for a text that is no number where one is wanted.
func (d *Descriptor) Set(f Field) error {
	var n uint64
	var err error
	switch f.Name {
	case "name":
		d.Name = f.Value
	case "model":
		d.Model = f.Value
	case "revision":
		d.Revision = f.Value
	case "dtype":
		d.DType = f.Value
	case "layout":
		d.Layout = f.Value
	case "tokens_per_block":
		n, err = f.number(32)
		d.TokensPerBlock = uint32(n)
	case "block_bytes":
		n, err = f.number(63)
		d.BlockBytes = int64(n)
	case "max_block_bytes":
		n, err = f.number(63)
		d.MaxBlockBytes = int64(n)
	case "hash_algorithm":
		d.HashAlgorithm = f.Value
	case "hash_seed":
		d.HashSeed = f.Value
	case "rank_layout":
		d.RankLayout = f.Value
	case "kv_group":
		d.KVGroup = f.Value
	case "tenant":
		d.Tenant = f.Value
	default:
		return fmt.Errorf("%w: descriptor: %q is no field of one", ErrInvalid, f.Name)
	}
	return err
}

func (f *Field) number(bits int) (uint64, error) {
	n, err := strconv.ParseUint(f.Value, 10, bits)
	if err != nil {
		return 0, fmt.Errorf("%w: descriptor: %s: %q, want a number from 0 to %d", ErrInvalid, f.Name, f.Value, uint64(1)<<bits-1)
	}
	return n, nil
}

// Validate fails with ErrInvalid, naming the field and its value.
func (d Descriptor) Validate() error {
	if d.Name == "" || len(d.Name) > 255 {
		return fmt.Errorf("%w: namespace name %q: length %d, want 1 to 255", ErrInvalid, d.Name, len(d.Name))
	}
	for _, r := range d.Name {
		if r < 0x21 || r == '/' || r == 0x7f {
			return fmt.Errorf("%w: namespace name %q: character %q is not allowed", ErrInvalid, d.Name, r)
		}
	}
	for _, f := range d.Fields() {
		if !utf8.ValidString(f.Value) {
			return fmt.Errorf("%w: namespace %q: %s %q is not UTF-8", ErrInvalid, d.Name, f.Name, f.Value)
		}
		if len(f.Value) > 1024 {
			return fmt.Errorf("%w: namespace %q: %s is %d bytes long, at most 1024", ErrInvalid, d.Name, f.Name, len(f.Value))
		}
	}
	switch {
	case d.BlockBytes != 0 && d.MaxBlockBytes != 0:
		return fmt.Errorf("%w: namespace %q: block_bytes %d and max_block_bytes %d exclude each other", ErrInvalid, d.Name, d.BlockBytes, d.MaxBlockBytes)
	case d.MaxBlockBytes != 0:
		return checkBlockBytes(d.Name, "max_block_bytes", d.MaxBlockBytes)
	}
	return checkBlockBytes(d.Name, "block_bytes", d.BlockBytes)
}

func checkBlockBytes(name, field string, n int64) error {
	if n < 1 || n > MaxBlockBytes {
		return fmt.Errorf("%w: namespace %q: %s %d, want 1 to %d", ErrInvalid, name, field, n, MaxBlockBytes)
	}
	return nil
}

// Digest is the SHA-256 of a canonical encoding: version byte 1, then each
// field in the order of the struct as a 32-bit little-endian length and its
// text. Slot headers and object names carry it.
func (d Descriptor) Digest() [32]byte {
	buf := []byte{1}
	for _, f := range d.Fields() {
		buf = binary.LittleEndian.AppendUint32(buf, uint32(len(f.Value)))
		buf = append(buf, f.Value...)
	}
	return sha256.Sum256(buf)
}

// Tag is the start of the digest, by which a handle of another store's namespace is
// recognised.
func (d Descriptor) Tag() uint64 {
	sum := d.Digest()
	return binary.LittleEndian.Uint64(sum[:8])
}

// Differs returns the first field in which want is not d, or nil.
func (d Descriptor) Differs(want Descriptor) *Mismatch {
	a, b := d.Fields(), want.Fields()
	for i := range a {
		if a[i] != b[i] {
			return &Mismatch{Name: d.Name, Field: a[i].Name, Have: a[i].Value, Want: b[i].Value}
		}
	}
	return nil
}

// CheckLen fails with ErrInvalid when a payload of n bytes cannot be a block of
// the namespace, naming what was expected.
func (d Descriptor) CheckLen(n int64) error {
	switch {
	case d.BlockBytes != 0 && n != d.BlockBytes:
		return fmt.Errorf("%w: payload of %d bytes: namespace %q has blocks of exactly %d", ErrInvalid, n, d.Name, d.BlockBytes)
	case d.BlockBytes == 0 && (n < 1 || n > d.MaxBlockBytes):
		return fmt.Errorf("%w: payload of %d bytes: namespace %q has blocks of 1 to %d", ErrInvalid, n, d.Name, d.MaxBlockBytes)
	}
	return nil
}

// Namespace is an opened namespace.
type Namespace struct {
	ID      NamespaceID
	Desc    Descriptor
	HashLen int           // bytes of a hash that count; 0 until the first put fixes it
	Epoch   uint32        // raised by Clear; slots of an older epoch are dead
	TTL     time.Duration // default time to live of its blocks; 0 is without end
	Created time.Time
}

// CheckHashLen fails with ErrInvalid when a hash of n bytes cannot be one of
// the namespace's.
func (n Namespace) CheckHashLen(bytes int) error {
	if !ValidHashLen(bytes) {
		return fmt.Errorf("%w: hash: length %d bytes, want 8, 16, 20 or 32", ErrInvalid, bytes)
	}
	if n.HashLen != 0 && bytes != n.HashLen {
		return fmt.Errorf("%w: hash: length %d bytes: namespace %q has hashes of %d", ErrInvalid, bytes, n.Desc.Name, n.HashLen)
	}
	return nil
}
