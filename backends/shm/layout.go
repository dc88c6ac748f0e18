package shm

import (
	"sync/atomic"
	"unsafe"
)

// gate is a page of words that an owner of memory and one initiator share. The
// first word belongs to the connection, each other to one region.
type gate []uint32

const (
	gateBytes = 2 << 20
	gateWords = gateBytes / 4

	shut    uint32 = 1 << 31 // nobody enters any more
	entered uint32 = shut - 1
)

// gateOf is the gate in shared memory. Words of mapped memory are aligned, and the
// garbage collector does not know them; both sides touch them by atomic operations.
func gateOf(b []byte) gate {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// enter is the initiator's, before it touches a region's memory. One addition
// both raises the count and sees whether the gate was shut before: the
// owner either sees the count or is seen.
func (g gate) enter(word uint32) bool {
	if atomic.AddUint32(&g[word], 1)&shut == 0 {
		return true
	}
	g.leave(word)
	return false
}

// leave follows an enter that was let in.
func (g gate) leave(word uint32) { atomic.AddUint32(&g[word], ^uint32(0)) }

// shut is the owner's: from now on nobody enters.
func (g gate) shut(word uint32) { atomic.OrUint32(&g[word], shut) }

// isShut says whether the owner shut it.
func (g gate) isShut(word uint32) bool { return atomic.LoadUint32(&g[word])&shut != 0 }

// quiet says whether nobody is inside.
func (g gate) quiet(word uint32) bool { return atomic.LoadUint32(&g[word])&entered == 0 }
