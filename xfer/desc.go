package xfer

import "fmt"

// MemType is a kind of memory. The values are NIXL's (nixl_types.h).
type MemType uint8

// The memory types, and what Addr, Dev and Meta of a Desc mean in each.
const (
	DRAM MemType = 0 // virtual address in this process; Dev 0; Meta empty
	VRAM MemType = 1 // device pointer; Dev is the GPU's index
	BLK  MemType = 2 // byte offset on a block device; Dev is the caller's number for it; Meta its path
	OBJ  MemType = 3 // byte offset in an object; Dev is the caller's number for it; Meta its key
	FILE MemType = 4 // byte offset in a file; Dev is the caller's number for it; Meta its path
)

// memTypes is the number of memory types.
const memTypes = 5

var memNames = [memTypes]string{"DRAM", "VRAM", "BLK", "OBJ", "FILE"}

// String gives the name of the type.
func (m MemType) String() string {
	if int(m) < len(memNames) {
		return memNames[m]
	}
	return fmt.Sprintf("MemType(%d)", uint8(m))
}

// Unbounded reports whether a registration of length 0 in this type covers
// every offset (BLK, OBJ and FILE), as in NIXL since 1.3.
func (m MemType) Unbounded() bool { return m == BLK || m == OBJ || m == FILE }

// Op is the direction of a transfer, seen from the local side. The values are
// NIXL's.
type Op uint8

// The operations.
const (
	Read  Op = 0 // remote to local
	Write Op = 1 // local to remote
)

// String gives the name of the operation.
func (o Op) String() string {
	switch o {
	case Read:
		return "read"
	case Write:
		return "write"
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// Desc describes one piece of memory: Len bytes from Addr on device Dev. It is
// a plain comparable value and carries no ownership. In a registration Meta
// says what the backend needs to reach the memory (a path, a key); in a
// transfer Meta is empty, since the registration has it.
type Desc struct {
	Addr uint64
	Len  uint64
	Dev  uint64
	Meta string
}

// End is the first address behind the piece, saturating at the largest value.
func (d Desc) End() uint64 {
	if d.Addr+d.Len < d.Addr {
		return ^uint64(0)
	}
	return d.Addr + d.Len
}

// String writes the descriptor as dev:[addr,+len) and its meta.
func (d Desc) String() string {
	s := fmt.Sprintf("%d:[%#x,+%d)", d.Dev, d.Addr, d.Len)
	if d.Meta != "" {
		s += " " + d.Meta
	}
	return s
}

// CheckDRAM says what keeps d from being a piece of this process's memory, for the
// backends that serve only that: ErrInvalid. Nobody can see whether it is mapped.
func CheckDRAM(t MemType, d Desc) error {
	switch {
	case t != DRAM:
		return fmt.Errorf("%w: memory type %s, want DRAM", ErrInvalid, t)
	case d.Addr == 0:
		return fmt.Errorf("%w: address is 0", ErrInvalid)
	case d.Dev != 0:
		return fmt.Errorf("%w: device %d, want 0 for DRAM", ErrInvalid, d.Dev)
	}
	return nil
}

// DescList is a list of descriptors of one memory type.
type DescList struct {
	Type  MemType
	Descs []Desc
}

// Bytes is the sum of the lengths.
func (l DescList) Bytes() uint64 {
	var n uint64
	for _, d := range l.Descs {
		n += d.Len
	}
	return n
}
