package block

import (
	"encoding/hex"
	"fmt"
)

// HashBytes is the room that a Hash has; a namespace fixes how many of the
// bytes count.
const HashBytes = 32

// Hash is an engine's sequence hash: it names a block together with its whole
// prefix. Shorter hashes fill the first bytes and leave the rest zero. No value
// is special, the all-zero hash included.
type Hash [HashBytes]byte

// ValidHashLen reports whether n bytes is a hash length that a namespace may
// have: 8, 16, 20 or 32.
func ValidHashLen(n int) bool { return n == 8 || n == 16 || n == 20 || n == 32 }

// HashFromBytes returns the hash whose first len(b) bytes are b. It fails with
// ErrInvalid unless ValidHashLen(len(b)).
func HashFromBytes(b []byte) (Hash, error) {
	var h Hash
	if !ValidHashLen(len(b)) {
		return h, fmt.Errorf("%w: hash: length %d bytes, want 8, 16, 20 or 32", ErrInvalid, len(b))
	}
	copy(h[:], b)
	return h, nil
}

// ParseHash reads a hash written in hex and returns it with its length in
// bytes. It fails with ErrInvalid on anything but 16, 32, 40 or 64 hex digits.
func ParseHash(s string) (Hash, int, error) {
	var h Hash
	b, err := hex.DecodeString(s)
	if err != nil {
		return h, 0, fmt.Errorf("%w: hash %q: not hex", ErrInvalid, s)
	}
	if !ValidHashLen(len(b)) {
		return h, 0, fmt.Errorf("%w: hash %q: length %d bytes, want 8, 16, 20 or 32", ErrInvalid, s, len(b))
	}
	copy(h[:], b)
	return h, len(b), nil
}

// Hex writes the first n bytes of the hash in hex.
func (h Hash) Hex(n int) string { return hex.EncodeToString(h[:n]) }

// String writes all 32 bytes in hex.
func (h Hash) String() string { return h.Hex(HashBytes) }

// Key names one block in the store: the handle of its namespace and its hash.
// It is pointer-free and comparable, so it can be a map key.
type Key struct {
	NS   NamespaceID
	Hash Hash
}

// String writes the key as namespace handle and full hash.
func (k Key) String() string { return fmt.Sprintf("%d/%s", k.NS, k.Hash) }

// Sum is the xxh3-128 of a payload, the high eight bytes first (the canonical
// big-endian form of the xxHash specification).
type Sum [16]byte

// String writes the sum in hex.
func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// Handle is a dense number by which the resident table and the policies know a
// block while it is resident. Zero is no block.
type Handle uint32
