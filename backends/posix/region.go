package posix

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// pageBytes is the page size of the page cache, and so the smallest unit that
// direct and buffered I/O on one file can share without meeting.
const pageBytes = 4096

// memory is the Region of DRAM.
type memory struct {
	addr, n uint64
	reg     atomic.Pointer[registered] // nil when the kernel does not know it, or not yet
	stop    atomic.Bool                // it is about to be deregistered
	known   chan struct{}              // closed when it is settled whether the kernel knows it
}

const (
	// registerAtOnce is up to which size memory is made known to the kernel before
	// Register returns. Of more, pages that are not there yet would take long.
	registerAtOnce = 8 << 20
	// populateStep is how many pages are made present at a time: while the kernel
	// does that, and while it pins a buffer, nothing else can be mapped.
	populateStep = 16 << 20
)

// fileKey is a file's identity. One file has one set of descriptors and one
// rule of exclusion, by however many names it is registered.
type fileKey struct {
	dev, ino uint64
	blk      bool
}

// file is the Region of FILE and BLK.
type file struct {
	key      fileKey
	path     string // the one it was first registered by
	dev      *device
	direct   int    // descriptor with O_DIRECT, or -1
	buffered int    // descriptor without
	align    int64  // of offset and length for direct, a multiple of pageBytes
	memAlign uint64 // of the address for direct
	refs     int    // guarded by Backend.mu

	// Writes in flight, guarded by the device's lock: see device.admit.
	directWrites, bufferedWrites int
}

// Register makes memory, a file or a block device usable.
func (b *Backend) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("posix register %s %v: %w", t, d, err)
	}
	if err := b.begin(); err != nil {
		return nil, err
	}
	defer b.inFlight.Done()
	var r xfer.Region
	var err error
	switch t {
	case xfer.DRAM:
		r, err = b.registerMemory(d)
	case xfer.FILE, xfer.BLK:
		r, err = b.registerFile(t, d)
	default:
		err = fmt.Errorf("%w: memory type %s", xfer.ErrInvalid, t)
	}
	if err != nil {
		return nil, fmt.Errorf("posix register %s %v: %w", t, d, err)
	}
	return r, nil
}

func (b *Backend) registerMemory(d xfer.Desc) (*memory, error) {
	if d.Addr == 0 || d.Len == 0 || d.End()-d.Addr != d.Len {
		return nil, fmt.Errorf("%w: no such memory", xfer.ErrInvalid)
	}
	m := &memory{addr: d.Addr, n: d.Len, known: make(chan struct{})}
	b.count.unregistered.Add(int64(m.n))
	if _, ok := b.engine.(*uring); !ok || m.n <= registerAtOnce {
		b.introduce(m)
		return m, nil
	}
	// It can be used from now on, with more CPU per operation for a while.
	b.background.Go(func() {
		b.populate(m)
		b.introduce(m)
	})
	return m, nil
}

// populate makes the pages of m present, since pinning those that are not would
// hold up everything else that maps memory. Where the kernel cannot (before Linux
// 5.14), pinning does it.
func (b *Backend) populate(m *memory) {
	from, end := (m.addr+pageBytes-1)/pageBytes*pageBytes, m.addr+m.n
	for from+pageBytes <= end && !m.stop.Load() && !b.closing.Load() {
		n := min(populateStep, (end-from)/pageBytes*pageBytes)
		if unix.Madvise(arena.View(from, int(n)), unix.MADV_POPULATE_WRITE) != nil {
			return
		}
		from += n
	}
}

// introduce makes m known to the kernel, if it takes it.
func (b *Backend) introduce(m *memory) {
	defer close(m.known)
	if m.stop.Load() || b.closing.Load() {
		return
	}
	reg, err := b.engine.register(m.addr, m.n)
	if err != nil {
		// It works all the same, only with more CPU per operation.
		b.log.Warn("posix: memory is not registered with io_uring", "bytes", m.n, "err", err)
	}
	if reg != nil {
		b.count.unregistered.Add(-int64(m.n))
		b.count.registered.Add(int64(m.n))
		m.reg.Store(reg)
	}
}

func (b *Backend) registerFile(t xfer.MemType, d xfer.Desc) (*file, error) {
	if d.Meta == "" {
		return nil, fmt.Errorf("%w: Meta is empty, want a path", xfer.ErrInvalid)
	}
	f, devID, err := openFile(t, d.Meta)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if have := b.mu.files[f.key]; have != nil {
		have.refs++
		return have, f.close()
	}
	dev := b.mu.devices[devID]
	if dev == nil {
		if dev, err = newDevice(b.opt.Depth, b.opt.DepthBytes); err != nil {
			return nil, errors.Join(err, f.close())
		}
		b.mu.devices[devID] = dev
	}
	f.dev, f.refs = dev, 1
	b.mu.files[f.key] = f
	if f.direct < 0 {
		b.log.Warn("posix: no direct I/O on this file system, bytes pass the page cache", "file", f.path)
	}
	return f, nil
}

// openFile opens path both ways and learns what it is. The number says on which
// device it is; files of one filesystem share a queue.
func openFile(t xfer.MemType, path string) (*file, uint64, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: open: %w", xfer.ErrUnavailable, err)
	}
	f := &file{path: path, direct: -1, buffered: fd, align: pageBytes, memAlign: 512}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, 0, errors.Join(fmt.Errorf("%w: fstat: %w", xfer.ErrUnavailable, err), f.close())
	}
	dev := st.Dev
	switch {
	case t == xfer.FILE && st.Mode&unix.S_IFMT == unix.S_IFREG:
		f.key = fileKey{dev: st.Dev, ino: st.Ino}
	case t == xfer.BLK && st.Mode&unix.S_IFMT == unix.S_IFBLK:
		f.key = fileKey{dev: st.Rdev, blk: true}
		dev = st.Rdev
	case t == xfer.FILE:
		return nil, 0, errors.Join(fmt.Errorf("%w: not a regular file", xfer.ErrInvalid), f.close())
	default:
		return nil, 0, errors.Join(fmt.Errorf("%w: not a block device", xfer.ErrInvalid), f.close())
	}
	f.openDirect()
	return f, dev, nil
}

// openDirect gets the descriptor with O_DIRECT, where the filesystem has such a
// thing. It goes by the open descriptor, since the path may name another file by
// now.
func (f *file) openDirect() {
	var st unix.Statx_t
	if err := unix.Statx(f.buffered, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 || st.Dio_mem_align == 0 || st.Dio_offset_align > maxPieceBytes/4 {
			return // this file cannot be read directly: it is compressed, say
		}
		// Less than a page would do for the disk, but see pageBytes.
		f.align = max(pageBytes, int64(st.Dio_offset_align))
		f.memAlign = uint64(st.Dio_mem_align)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", f.buffered), unix.O_RDWR|unix.O_CLOEXEC|unix.O_DIRECT, 0)
	if err == nil {
		f.direct = fd
	}
}

func (f *file) close() error {
	var errs []error
	for _, fd := range []int{f.buffered, f.direct} {
		if fd < 0 {
			continue
		}
		if err := unix.Close(fd); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", f.path, err))
		}
	}
	return errors.Join(errs...)
}

// Deregister undoes one Register.
func (b *Backend) Deregister(r xfer.Region) error {
	if err := b.begin(); err != nil {
		return err
	}
	defer b.inFlight.Done()
	switch r := r.(type) {
	case *memory:
		r.stop.Store(true)
		<-r.known
		reg := r.reg.Load()
		if reg == nil {
			b.count.unregistered.Add(-int64(r.n))
			return nil
		}
		b.count.registered.Add(-int64(r.n))
		if err := b.engine.deregister(reg); err != nil {
			return fmt.Errorf("posix deregister %d bytes of memory: %w", r.n, err)
		}
		return nil
	case *file:
		b.mu.Lock()
		r.refs--
		last := r.refs == 0
		if last {
			delete(b.mu.files, r.key)
		}
		b.mu.Unlock()
		if !last {
			return nil
		}
		if err := r.close(); err != nil {
			return fmt.Errorf("posix deregister: %w", err)
		}
		return nil
	}
	return fmt.Errorf("posix deregister: %w: a region of type %T is not ours", xfer.ErrInvalid, r)
}

// Query says whether the file or block device at a path exists, and its size.
// Something of the other kind at that path does not count.
func (b *Backend) Query(ctx context.Context, t xfer.MemType, descs []xfer.Desc) ([]xfer.QueryResult, error) {
	if t != xfer.FILE && t != xfer.BLK {
		return nil, fmt.Errorf("posix query: %w: memory type %s", xfer.ErrInvalid, t)
	}
	out := make([]xfer.QueryResult, len(descs))
	for i, d := range descs {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("posix query: %w", err)
		}
		if d.Meta == "" {
			return nil, fmt.Errorf("posix query descriptor %d: %w: Meta is empty, want a path", i, xfer.ErrInvalid)
		}
		var err error
		if out[i], err = stat(t, d.Meta); err != nil {
			return nil, fmt.Errorf("posix query %s %s: %w: %w", t, d.Meta, xfer.ErrUnavailable, err)
		}
	}
	return out, nil
}

func stat(t xfer.MemType, path string) (xfer.QueryResult, error) {
	var none xfer.QueryResult
	var st unix.Stat_t
	switch err := unix.Stat(path, &st); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return none, nil
	case err != nil:
		return none, fmt.Errorf("stat: %w", err)
	}
	switch kind := st.Mode & unix.S_IFMT; {
	case t == xfer.FILE && kind == unix.S_IFREG:
		return xfer.QueryResult{Exists: true, Bytes: uint64(st.Size)}, nil
	case t == xfer.BLK && kind == unix.S_IFBLK:
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return none, fmt.Errorf("open: %w", err)
		}
		defer unix.Close(fd)
		n, err := unix.Seek(fd, 0, unix.SEEK_END)
		if err != nil {
			return none, fmt.Errorf("seek to its end: %w", err)
		}
		return xfer.QueryResult{Exists: true, Bytes: uint64(n)}, nil
	}
	return none, nil
}
