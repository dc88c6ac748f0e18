package arena

import "unsafe"

// Addr is the address of the first byte of b, which must be off-heap memory:
// the address of a Go object is worth nothing once the object moves or is
// collected. It is 0 for an empty slice without memory.
func Addr(b []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// View is the n bytes of off-heap memory at addr. The caller knows that they
// are mapped and stay so while the slice is in use.
func View(addr uint64, n int) []byte {
	if n == 0 {
		return nil
	}
	// Reading the integer as a pointer is sound because the memory is not the
	// garbage collector's: it neither moves nor is freed by it. A plain
	// conversion is the same thing, but vet rightly distrusts it everywhere else.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), n)
}
