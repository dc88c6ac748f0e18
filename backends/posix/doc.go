// Package posix moves bytes between memory and files or block devices of this
// machine: DRAM to and from FILE and BLK. It is for local disks; a network
// filesystem works but is not what it is tuned for.
//
// A file or device is registered by its path in Desc.Meta and must exist; it is
// opened for reading and writing, with O_DIRECT where the filesystem accepts
// that, so bytes do not pass the page cache. What O_DIRECT cannot do is done
// for the caller: see the comment at mode. Addresses, offsets and lengths that
// are multiples of Caps.Align avoid any copy.
//
// Memory is used in place, by its address: it must not be Go heap. With the
// io_uring engine, registered memory is also registered with the kernel, as far
// as RLIMIT_MEMLOCK allows; Stats tells how much.
//
// A write that is done is visible to every reader of the file. It is NOT durable:
// that takes an fdatasync by the file's owner, who alone knows which writes
// belong together. Files are never created, extended by a read, or truncated;
// a write past the end of a file extends it.
//
// Two transfers at once that write bytes of the same disk block, be they
// disjoint, are safe: unaligned edges go through the page cache, and never while
// a direct write of the same file is in flight.
//
// It needs Linux; the io_uring engine needs 5.6 or later (5.19 for registered
// memory) and a kernel and a container that permit it. Which engine is used is
// found out by trying, when the backend is made.
package posix
