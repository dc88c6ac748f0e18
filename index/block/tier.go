package block

import (
	"fmt"
	"strings"
)

// TierID names a kind of medium, nearest first.
type TierID uint8

// The tiers. NoTier is the zero value and names none.
const (
	NoTier TierID = iota
	G1            // GPU HBM
	G2            // pinned host DRAM, volatile
	G3            // NVMe, durable
	G4            // object storage, durable
)

// String gives the name that flags, logs and metrics use: g1 to g4.
func (t TierID) String() string {
	switch t {
	case NoTier:
		return "none"
	case G1, G2, G3, G4:
		return "g" + string('0'+byte(t))
	}
	return fmt.Sprintf("tier(%d)", uint8(t))
}

// ParseTier reads g1 to g4. It fails with ErrInvalid, naming the value.
func ParseTier(s string) (TierID, error) {
	switch strings.ToLower(s) {
	case "g1":
		return G1, nil
	case "g2":
		return G2, nil
	case "g3":
		return G3, nil
	case "g4":
		return G4, nil
	}
	return NoTier, fmt.Errorf("%w: tier %q: want g1, g2, g3 or g4", ErrInvalid, s)
}

// placeUnit is the granularity of offsets in a Place: the smallest logical
// block that a device reads or writes.
const placeUnit = 512

// Place says where in a tier a slot begins: the number of the device in that
// tier and an offset on it in bytes, a multiple of 512, below 2^57. It is one
// word, comparable, and its zero value is device 0, offset 0.
type Place uint64

// PlaceAt makes a Place. It panics when the offset is not a multiple of 512 or
// out of range, since only our own allocators make offsets.
func PlaceAt(device uint8, offset int64) Place {
	if offset < 0 || offset%placeUnit != 0 || offset>>57 != 0 {
		panic(fmt.Sprintf("block: place offset %d", offset))
	}
	return Place(uint64(device)<<56 | uint64(offset/placeUnit))
}

// Device is the number of the device in its tier.
func (p Place) Device() uint8 { return uint8(p >> 56) }

// Offset is where the slot begins on the device, in bytes.
func (p Place) Offset() int64 { return int64(p&(1<<56-1)) * placeUnit }

// String writes device and offset.
func (p Place) String() string { return fmt.Sprintf("%d+%d", p.Device(), p.Offset()) }
