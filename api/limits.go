package api

import (
	"fmt"
	"math"
	"time"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// Limits of one message.
const (
	// MaxMatchKeys is how many keys a match or a prefetch may name.
	MaxMatchKeys = 65536
	// MaxKeys is how many keys any other call may name.
	MaxKeys = 4096
	// MaxDataBytes is how much payload one message of a put may carry.
	MaxDataBytes = 1 << 20

	// maxMessageBytes bounds what the server reads into memory for one message:
	// the largest match is 2 MiB, a reserve of 4096 hashes with parents less.
	maxMessageBytes = 4 << 20

	// maxStreams bounds the calls of one connection that are under way at once;
	// more wait in the client.
	maxStreams = 1024
	// maxReplyBytes bounds what the client accepts; a list of all namespaces is
	// the largest.
	maxReplyBytes = 64 << 20
	// maxRequestID bounds the id that a client gives a prefetch.
	maxRequestID = 255
	// defaultListLimit is the page of a listing that names no limit.
	defaultListLimit = 1000
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", block.ErrInvalid, fmt.Sprintf(format, args...))
}

// checkHashes returns how many hashes are packed in hashes.
func checkHashes(hashLen uint32, hashes []byte, most int) (int, error) {
	switch {
	case hashLen > block.HashBytes || !block.ValidHashLen(int(hashLen)):
		return 0, invalid("hash_len: %d bytes, want 8, 16, 20 or 32", hashLen)
	case len(hashes) == 0:
		return 0, invalid("hashes: 0 bytes, want at least one hash")
	case len(hashes)%int(hashLen) != 0:
		return 0, invalid("hashes: %d bytes are not a multiple of hash_len %d", len(hashes), hashLen)
	}
	n := len(hashes) / int(hashLen)
	if n > most {
		return 0, invalid("hashes: %d keys, at most %d in one call", n, most)
	}
	return n, nil
}

// checkCount bounds the length of a list of a request.
func checkCount(field string, n int) error {
	switch {
	case n == 0:
		return invalid("%s: empty, want at least one", field)
	case n > MaxKeys:
		return invalid("%s: %d of them, at most %d in one call", field, n, MaxKeys)
	}
	return nil
}

// hashField reads one hash.
func hashField(field string, b []byte) (block.Hash, error) {
	h, err := block.HashFromBytes(b)
	if err != nil {
		return h, invalid("%s: length %d bytes, want 8, 16, 20 or 32", field, len(b))
	}
	return h, nil
}

// parentField reads the hash of a parent, which may be absent and is otherwise
// as long as the block's own.
func parentField(b []byte, hashLen int) (h block.Hash, has bool, err error) {
	if len(b) == 0 {
		return h, false, nil
	}
	if len(b) != hashLen {
		return h, false, invalid("parent: length %d bytes, want %d as the block's hash", len(b), hashLen)
	}
	copy(h[:], b)
	return h, true, nil
}

// checkLength bounds the announced payload of a block.
func checkLength(n uint32) error {
	if n == 0 || n > block.MaxBlockBytes {
		return invalid("length: payload of %d bytes, want 1 to %d", n, block.MaxBlockBytes)
	}
	return nil
}

// classField reads a hint to the policy.
func classField(c uint32) (uint8, error) {
	if c > math.MaxUint8 {
		return 0, invalid("class: %d, want 0 to %d", c, math.MaxUint8)
	}
	return uint8(c), nil
}

// durationField reads milliseconds.
func durationField(field string, ms int64) (time.Duration, error) {
	if ms < 0 || ms > int64(math.MaxInt64/time.Millisecond) {
		return 0, invalid("%s: %d milliseconds, want 0 to %d", field, ms, int64(math.MaxInt64/time.Millisecond))
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// durableField reads how durable a put is to be.
func durableField(t pb.Tier) (block.TierID, error) {
	switch t {
	case pb.Tier_TIER_NONE, pb.Tier_TIER_G2:
		return block.G2, nil
	case pb.Tier_TIER_G3:
		return block.G3, nil
	}
	return block.NoTier, invalid("durable: %v, want TIER_G2 or TIER_G3", t)
}

// millis rounds a duration up to milliseconds: a short one does not become none.
func millis(d time.Duration) int64 {
	ms := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		ms++
	}
	return ms
}
