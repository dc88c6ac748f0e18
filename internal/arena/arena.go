package arena

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// HugeBytes is the size of a huge page and the alignment of every chunk.
const HugeBytes = 2 << 20

// MaxChunkBytes bounds a chunk, because the kernel registers at most 1 GiB as
// one I/O buffer.
const MaxChunkBytes = 1 << 30

// Options says how an arena is made. The zero value gives a populated,
// anonymous, unlocked arena on huge pages.
type Options struct {
	Memfd       bool         // back each chunk by a memfd, to be shared by descriptor
	Name        string       // name of the memfds in /proc; "kvtier" when empty
	NoHugePages bool         // stay on 4 KiB pages
	Reserved    Reserved     // with Memfd: whether it takes huge pages that are reserved (hugetlb)
	Lock        bool         // mlock, as far as RLIMIT_MEMLOCK allows
	NoPopulate  bool         // leave pages to their first touch
	Background  bool         // populate after New returned; see Populated
	ChunkBytes  int64        // size of each chunk but the last, a multiple of HugeBytes; MaxChunkBytes when 0
	Logger      *slog.Logger // where warnings go besides Obtained; nowhere when nil
}

// Reserved says what a memfd has to do with the huge pages that the host has set
// aside for whoever asks for them. They are huge for certain, while other memory
// has huge pages as the kernel's settings and its free memory have it.
type Reserved uint8

// What a memfd may do with reserved huge pages.
const (
	ReservedFirst Reserved = iota // each chunk takes them while there are enough for it
	ReservedOnly                  // New fails with unix.ENOMEM when there are not enough for all
	ReservedNever
)

// Arena is a piece of mapped memory in chunks. Its methods may be called from
// many goroutines; after Close nothing it handed out may be touched.
type Arena struct {
	size      int64
	chunkSize int64
	chunks    [][]byte
	fds       []int
	maps      []mapping // what Close unmaps
	log       *slog.Logger

	populated chan struct{}
	stop      chan struct{}
	closeOnce sync.Once
	closeErr  error

	mu struct {
		sync.Mutex
		measured bool
		obtained Obtained
	}
	opt  Options
	file sync.Mutex // guards fds
}

// mapping is a range of addresses that the arena owns. Around a chunk it has
// unusable guard pages, so that an overrun faults and the kernel does not merge
// the chunk with a neighbour.
type mapping struct {
	p unsafe.Pointer
	n uintptr
}

// New maps an arena of size bytes, rounded up to a whole number of huge pages.
// It returns when the memory is populated, unless o says otherwise. Errors: a
// size or option that cannot be accepted; the kernel's refusal to map or (in
// the foreground) to populate, with its errno.
func New(size int64, o *Options) (*Arena, error) {
	if o == nil {
		o = &Options{}
	}
	opt := *o
	if opt.ChunkBytes == 0 {
		opt.ChunkBytes = MaxChunkBytes
	}
	if size <= 0 || size > 1<<46 {
		return nil, fmt.Errorf("arena size %d: want 1 to %d bytes", size, int64(1)<<46)
	}
	if opt.ChunkBytes < HugeBytes || opt.ChunkBytes > MaxChunkBytes || opt.ChunkBytes%HugeBytes != 0 {
		return nil, fmt.Errorf("arena chunk size %d: want a multiple of %d up to %d", opt.ChunkBytes, HugeBytes, MaxChunkBytes)
	}
	if opt.Name == "" {
		opt.Name = "kvtier"
	}
	if opt.Logger == nil {
		opt.Logger = slog.New(slog.DiscardHandler)
	}
	a := &Arena{
		size:      (size + HugeBytes - 1) / HugeBytes * HugeBytes,
		chunkSize: opt.ChunkBytes,
		log:       opt.Logger,
		opt:       opt,
		populated: make(chan struct{}),
		stop:      make(chan struct{}),
	}
	a.mu.obtained.Bytes = a.size
	if err := a.mapChunks(&opt); err != nil {
		return nil, errors.Join(fmt.Errorf("map arena of %d bytes: %w", a.size, err), a.unmap())
	}
	if opt.NoPopulate && !opt.Lock {
		close(a.populated)
		return a, nil
	}
	if opt.Background {
		go func() {
			defer close(a.populated)
			if err := a.populate(&opt); err != nil {
				a.warn("populate: " + err.Error())
			}
		}()
		return a, nil
	}
	err := a.populate(&opt)
	close(a.populated)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("populate arena of %d bytes: %w", a.size, err), a.Close())
	}
	return a, nil
}

// Size is the number of usable bytes: what was asked for, rounded up to a whole
// number of huge pages.
func (a *Arena) Size() int64 { return a.size }

// Chunks are the arena's memory in order of offset, each of Options.ChunkBytes
// but the last, which may be shorter. The slices must not be changed.
func (a *Arena) Chunks() [][]byte { return a.chunks }

// Slice is the n bytes at offset off. It panics when they are not inside one
// chunk: an arena's user lays out its blocks so that none straddles two.
func (a *Arena) Slice(off, n int64) []byte {
	if off < 0 || n < 0 || off > a.size || n > a.size-off {
		panic(fmt.Sprintf("arena: slice [%d,+%d) outside of %d bytes", off, n, a.size))
	}
	if n == 0 {
		return nil
	}
	i, in := off/a.chunkSize, off%a.chunkSize
	if in+n > a.chunkSize {
		panic(fmt.Sprintf("arena: slice [%d,+%d) crosses a chunk of %d bytes", off, n, a.chunkSize))
	}
	return a.chunks[i][in : in+n : in+n]
}

// Fd is the memfd behind a chunk, sealed against any change of size, or -1 in
// an anonymous arena. The arena keeps owning it.
func (a *Arena) Fd(chunk int) int {
	a.file.Lock()
	defer a.file.Unlock()
	if a.fds == nil {
		return -1
	}
	return a.fds[chunk]
}

// Populated is closed when populating has ended, well or not: Obtained tells
// which. It is closed from the start when nothing is populated.
func (a *Arena) Populated() <-chan struct{} { return a.populated }

// Close waits for populating to stop and unmaps the memory. It is safe to call
// twice.
func (a *Arena) Close() error {
	a.closeOnce.Do(func() {
		close(a.stop)
		<-a.populated
		a.closeErr = a.unmap()
	})
	return a.closeErr
}

// mapChunks maps each chunk on its own.
func (a *Arena) mapChunks(o *Options) error {
	hugetlb := o.Memfd && !o.NoHugePages && o.Reserved != ReservedNever
	for off := int64(0); off < a.size; off += a.chunkSize {
		n := min(a.chunkSize, a.size-off)
		var b []byte
		var err error
		if hugetlb {
			// Fails when too few reserved huge pages are free. The chunks that got
			// theirs keep them.
			b, err = a.mapMemfd(o.Name, n, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB, a.mapHugetlb)
			if hugetlb = err == nil; err != nil && o.Reserved == ReservedOnly {
				return fmt.Errorf("chunk %d of %d bytes: %w", off/a.chunkSize, n, err)
			}
		}
		if !hugetlb {
			if o.Memfd {
				b, err = a.mapMemfd(o.Name, n, 0, a.mapAligned)
			} else {
				b, err = a.mapAligned(-1, n)
			}
			if err != nil {
				return fmt.Errorf("chunk %d of %d bytes: %w", off/a.chunkSize, n, err)
			}
			advice := unix.MADV_HUGEPAGE
			if o.NoHugePages {
				advice = unix.MADV_NOHUGEPAGE
			}
			// EINVAL: a kernel without transparent huge pages. Obtained tells.
			_ = unix.Madvise(b, advice)
		}
		a.chunks = append(a.chunks, b)
	}
	return nil
}

// mapMemfd maps n bytes of a new memfd by the given function and keeps its
// descriptor.
func (a *Arena) mapMemfd(name string, n int64, flags int, mapFd func(fd int, n int64) ([]byte, error)) ([]byte, error) {
	fd, err := makeMemfd(name, n, flags)
	if err != nil {
		return nil, err
	}
	b, err := mapFd(fd, n)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	a.fds = append(a.fds, fd)
	return b, nil
}

// makeMemfd makes a memfd of n bytes whose size nobody can change.
func makeMemfd(name string, n int64, flags int) (fd int, err error) {
	flags |= unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err = unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // MFD_NOEXEC_SEAL came with Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create %s: %w", name, err)
	}
	if err = unix.Ftruncate(fd, n); err != nil {
		err = fmt.Errorf("ftruncate memfd: %w", err)
	} else if err = unix.Fchmod(fd, 0o600); err != nil {
		// With more, another user who is passed it for reading could open it for writing.
		err = fmt.Errorf("fchmod memfd: %w", err)
	} else if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		// A peer that could shrink the file would kill this process by SIGBUS.
		err = fmt.Errorf("seal memfd: %w", err)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// mapHugetlb maps a memfd of reserved huge pages. The kernel aligns it, and
// sets the pages aside now: touching them later cannot fail.
func (a *Arena) mapHugetlb(fd int, n int64) ([]byte, error) {
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of huge pages: %w", err)
	}
	a.maps = append(a.maps, mapping{p, uintptr(n)})
	return unsafe.Slice((*byte)(p), n), nil
}

// mapAligned maps a memfd, or anonymous memory when fd is -1, at a multiple of
// HugeBytes inside a reserved range that has room for guards.
func (a *Arena) mapAligned(fd int, n int64) ([]byte, error) {
	m, at, err := reserve(n)
	if err != nil {
		return nil, err
	}
	a.maps = append(a.maps, m)
	flags := unix.MAP_SHARED | unix.MAP_FIXED
	if fd < 0 {
		flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_FIXED
	}
	if _, err = unix.MmapPtr(fd, 0, at, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, flags); err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	return unsafe.Slice((*byte)(at), n), nil
}

// reserve takes addresses for n bytes at a multiple of HugeBytes, so that huge pages
// of a file are huge pages here as well, with guards around them.
func reserve(n int64) (m mapping, at unsafe.Pointer, err error) {
	m.n = uintptr(n) + 2*HugeBytes
	m.p, err = unix.MmapPtr(-1, 0, nil, m.n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return m, nil, fmt.Errorf("reserve addresses: %w", err)
	}
	return m, unsafe.Add(m.p, HugeBytes-uintptr(m.p)%HugeBytes), nil
}

func (a *Arena) unmap() error {
	var errs []error
	for _, m := range a.maps {
		if err := unix.MunmapPtr(m.p, m.n); err != nil {
			errs = append(errs, fmt.Errorf("unmap arena: %w", err))
		}
	}
	for _, fd := range a.fds {
		if err := unix.Close(fd); err != nil {
			errs = append(errs, fmt.Errorf("close memfd: %w", err))
		}
	}
	return errors.Join(errs...)
}
