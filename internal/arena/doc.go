// Package arena maps block memory outside the Go heap: anonymous, or backed by
// memfds that can be handed to another process. It is for memory that devices,
// the kernel or peers read and write in place, so it is 2 MiB aligned, on huge
// pages where the host gives them (worth two to three times on copies and
// direct I/O), populated ahead and locked as far as allowed. What a host does
// not give is a warning and a smaller number in Obtained, not a refusal.
//
// It needs Linux. Transparent huge pages for anonymous arenas need
// /sys/kernel/mm/transparent_hugepage/enabled to be madvise or always. A memfd
// arena takes reserved huge pages (vm.nr_hugepages) when enough are free, else
// asks for transparent ones, which hosts may refuse for shared memory.
package arena
