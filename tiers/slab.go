package tiers

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
)

// ErrNoSlab: the path is absent, or what is there is empty or holds nothing but
// zeros: CreateSlab may make a slab there.
var ErrNoSlab = errors.New("no slab")

// errBlank is the ErrNoSlab of something that is there and has a length.
var errBlank = fmt.Errorf("%w: it holds nothing but zeros", ErrNoSlab)

// errForeign: there is something, and it is no slab.
var errForeign = errors.New("something that is no slab")

// errNoSuperblock: the magic is not there.
var errNoSuperblock = errors.New("no superblock")

// SlabID is the identity of a slab: random, made with it, and on the medium, so
// that devices can be reordered, moved and replaced.
type SlabID [16]byte

// String writes the identity in hex.
func (id SlabID) String() string { return hex.EncodeToString(id[:]) }

// SlabOptions go with making and opening a slab.
type SlabOptions struct {
	ExtentBytes int64        // of a new slab; 64 MiB if 0
	Store       [16]byte     // identity of the store, recorded in a new slab
	NoSync      bool         // Flush does nothing: for measuring what it costs
	Logger      *slog.Logger // nil: no logging
}

// Slab is one preallocated regular file or one block device that holds all of a
// device's payload. It makes, checks, locks and flushes it; reading and writing
// slots is the transfer core's business, by path.
type Slab struct {
	path   string
	f      *os.File // keeps the lock
	super  superblock
	device bool
	noSync bool
	hurt   int64         // where a superblock is damaged that has a whole twin, -1 for nowhere
	sync   func() error  // makes what was written durable
	failed atomic.Uint64 // flushes that failed
	mu     struct {
		sync.Mutex // held while the slab is flushed
		closed     bool
	}
}

// OpenSlab opens and locks an existing slab. Errors: ErrNoSlab; ErrVersion (it
// is left as it is); block.ErrInvalid when something else is there or the file
// is shorter than the slab; block.ErrCorrupt when both superblocks are damaged;
// block.ErrUnavailable when it is in use by another process.
func OpenSlab(path string, o SlabOptions) (*Slab, error) {
	f, device, err := openLocked(path)
	if err != nil {
		return nil, fmt.Errorf("open slab %s: %w", path, err)
	}
	super, hurt, err := readSuper(f, device)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open slab %s: %w", path, err)
	}
	s := newSlab(path, f, device, super, o)
	s.hurt = hurt
	return s, nil
}

// CreateSlab makes a slab of bytes and opens it. A regular file is preallocated
// under the name path.creating and renamed when it is whole, so a crash leaves
// none or all of it. A block device, or a file that is preallocated already, must
// have that many bytes; bytes 0 takes all of it. What is no slab is never
// overwritten, unless it holds nothing but zeros. Errors:
// block.ErrNoSpace naming wanted and free bytes; block.ErrInvalid when something
// is there or a size is out of range; block.ErrUnavailable when another process
// uses it; ctx's error.
func CreateSlab(ctx context.Context, path string, bytes int64, o SlabOptions) (*Slab, error) {
	if o.ExtentBytes == 0 {
		o.ExtentBytes = 64 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	super := superblock{store: o.Store, bytes: bytes, extent: o.ExtentBytes, dataAt: slabDataAt, version: superVersion}
	rand.Read(super.id[:]) // never fails
	rand.Read(super.salt[:])
	st, err := os.Stat(path)
	device := err == nil && st.Mode()&fs.ModeDevice != 0
	var f *os.File
	switch {
	case device || err == nil && st.Size() > 0:
		f, err = createInPlace(ctx, path, &super, o.Logger)
	case err == nil && !st.Mode().IsRegular():
		err = fmt.Errorf("%w: is neither a regular file nor a block device", block.ErrInvalid)
	case err == nil || errors.Is(err, fs.ErrNotExist):
		f, err = createFile(ctx, path, &super, o.Logger)
	}
	if err != nil {
		return nil, fmt.Errorf("create slab %s: %w", path, err)
	}
	return newSlab(path, f, device, super, o), nil
}

func newSlab(path string, f *os.File, device bool, super superblock, o SlabOptions) *Slab {
	s := &Slab{path: path, f: f, super: super, device: device, noSync: o.NoSync, hurt: -1}
	s.sync = func() error { return fdatasync(f) }
	return s
}

// Path is the path by which the slab was opened.
func (s *Slab) Path() string { return s.path }

// ID is the identity of the slab.
func (s *Slab) ID() SlabID { return s.super.id }

// StoreID is the identity of the store that made the slab.
func (s *Slab) StoreID() [16]byte { return s.super.store }

// Bytes is the length of the slab, superblocks included.
func (s *Slab) Bytes() int64 { return s.super.bytes }

// ExtentBytes is the length of its extents.
func (s *Slab) ExtentBytes() int64 { return s.super.extent }

// DataOffset is where payload begins; offsets of slots count from there.
func (s *Slab) DataOffset() int64 { return s.super.dataAt }

// DataBytes is how much there is for slots, a multiple of 4096.
func (s *Slab) DataBytes() int64 {
	n := s.super.bytes - s.super.dataAt
	return n - n%largeHeaderBytes
}

// Seal is what the header of a slot at an offset is sealed with.
func (s *Slab) Seal(offset int64) Seal {
	return Seal{Version: s.super.version, Salt: s.super.salt, Offset: offset}
}

// IsDevice reports whether it is a block device, not a regular file.
func (s *Slab) IsDevice() bool { return s.device }

// FreeOnFS is how many bytes the file system under the slab has left for
// others, 0 for a block device.
func (s *Slab) FreeOnFS() (int64, error) {
	if s.device {
		return 0, nil
	}
	_, free, err := statfs(s.path)
	if err != nil {
		return 0, fmt.Errorf("slab %s: %w", s.path, err)
	}
	return free, nil
}

// Flush returns when what was written to the slab before the call is on the
// medium. One flush runs at a time. After one that failed, a later one may succeed,
// but says nothing of what was written before the one that failed: the kernel
// tells of lost writes once. After Close it fails with block.ErrClosed.
func (s *Slab) Flush() error {
	if s.noSync {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return fmt.Errorf("flush slab %s: %w", s.path, block.ErrClosed)
	}
	if err := s.sync(); err != nil {
		s.failed.Add(1)
		return fmt.Errorf("flush slab %s: %w", s.path, err)
	}
	return nil
}

// Failures is how many flushes have failed. What was written after it was asked
// is on the medium when a flush succeeds and the number is still the same. It
// waits for no flush.
func (s *Slab) Failures() uint64 { return s.failed.Load() }

// cutBefore reports whether the file ends before an offset of its data.
func (s *Slab) cutBefore(end int64) bool {
	st, err := s.f.Stat()
	return err == nil && st.Mode().IsRegular() && st.Size() < s.super.dataAt+end
}

// Close unlocks the slab, when a flush under way has ended. It does not flush. It
// is safe to call twice.
func (s *Slab) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	s.mu.closed = true
	return s.f.Close()
}

// openLocked opens a file or device for reading and writing and locks it
// against other processes.
func openLocked(path string) (f *os.File, device bool, err error) {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, false, fmt.Errorf("%w: %w", ErrNoSlab, err)
	case err != nil:
		return nil, false, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	flags := os.O_RDWR
	switch m := st.Mode(); {
	case m&fs.ModeDevice != 0 && m&fs.ModeCharDevice == 0:
		device = true
		flags |= os.O_EXCL // EBUSY when it is mounted or part of something
	case !m.IsRegular():
		return nil, false, fmt.Errorf("%w: is neither a regular file nor a block device", block.ErrInvalid)
	}
	f, err = os.OpenFile(path, flags, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, false, fmt.Errorf("%w: the device is mounted or in use by another process: %w", block.ErrUnavailable, err)
	case err != nil:
		return nil, false, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if err := lock(f); err != nil {
		f.Close()
		return nil, false, err
	}
	return f, device, nil
}

// readSuper reads the superblock, or its copy when the first is damaged, and
// checks the slab's length. hurt is where one of the two is damaged and the other
// is whole, -1 for nowhere: one of an unknown version is not damaged.
func readSuper(f *os.File, device bool) (_ superblock, hurt int64, _ error) {
	size, err := f.Seek(0, io.SeekEnd) // also right for block devices
	if err != nil {
		return superblock{}, -1, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if size == 0 {
		return superblock{}, -1, fmt.Errorf("%w: it is empty", ErrNoSlab)
	}
	hurt = -1
	super, err := readSuperAt(f, 0)
	twin, twinErr := readSuperAt(f, superTwinAt)
	switch {
	case errors.Is(err, ErrVersion):
	case err == nil && twinErr != nil && !errors.Is(twinErr, ErrVersion):
		hurt = superTwinAt
	case err != nil && twinErr == nil:
		super, err, hurt = twin, nil, 0
	case err != nil && (errors.Is(twinErr, ErrVersion) || errors.Is(err, errNoSuperblock) && !errors.Is(twinErr, errNoSuperblock)):
		err = twinErr
	}
	switch {
	case errors.Is(err, errNoSuperblock):
		return superblock{}, -1, notASlab(f, device, size)
	case err != nil:
		return superblock{}, -1, err
	case size < super.bytes:
		return superblock{}, -1, fmt.Errorf("%w: the slab is too short: it has %d bytes and should have %d", block.ErrInvalid, size, super.bytes)
	}
	return super, hurt, nil
}

// mend writes a damaged superblock anew from its twin, and says where it was; -1
// when both are whole.
func (s *Slab) mend() (at int64, err error) {
	if at = s.hurt; at < 0 {
		return at, nil
	}
	if _, err := s.f.WriteAt(s.super.encode(), at); err != nil {
		return at, fmt.Errorf("%w: write superblock: %w", block.ErrUnavailable, err)
	}
	if err := s.f.Sync(); err != nil {
		return at, fmt.Errorf("%w: sync superblock: %w", block.ErrUnavailable, err)
	}
	s.hurt = -1
	return at, nil
}

func readSuperAt(f *os.File, off int64) (superblock, error) {
	b := make([]byte, superBytes)
	if n, err := f.ReadAt(b, off); err != nil && !errors.Is(err, io.EOF) {
		return superblock{}, fmt.Errorf("%w: read superblock at %d: %w", block.ErrUnavailable, off, err)
	} else if n < superBytes {
		return superblock{}, errNoSuperblock
	}
	return decodeSuperblock(b)
}

// notASlab says what to do about something that has no superblock: it may be
// used when the room of the superblocks is zero, and so are samples of the rest.
func notASlab(f *os.File, device bool, size int64) error {
	const samples, sampleBytes = 64, 4096
	b := make([]byte, slabDataAt)
	blank := true
	for i := int64(0); i <= samples && blank; i++ {
		off := int64(0)
		if i > 0 {
			off, b = size/samples*i-sampleBytes, b[:sampleBytes]
		}
		n, err := f.ReadAt(b, max(off, 0))
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: read: %w", block.ErrUnavailable, err)
		}
		blank = allZero(b[:n])
	}
	switch {
	case blank:
		return errBlank
	case device:
		return fmt.Errorf("%w: the device has %w; to use it, wipe it first: blkdiscard -z DEVICE, or dd if=/dev/zero of=DEVICE bs=1M", block.ErrInvalid, errForeign)
	}
	return fmt.Errorf("%w: the file has %d bytes of %w; remove it to use this path", block.ErrInvalid, size, errForeign)
}

// createInPlace makes a slab of a block device, or of a regular file that
// somebody has preallocated.
func createInPlace(ctx context.Context, path string, super *superblock, log *slog.Logger) (*os.File, error) {
	f, device, err := openLocked(path)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*os.File, error) {
		f.Close()
		return nil, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", block.ErrUnavailable, err))
	}
	if super.bytes == 0 {
		super.bytes = size
	}
	if size < super.bytes {
		return fail(fmt.Errorf("%w: too short: it has %d bytes, %d are asked for", block.ErrInvalid, size, super.bytes))
	}
	if err := super.check(); err != nil {
		return fail(err)
	}
	switch _, _, err := readSuper(f, device); {
	case err == nil:
		return fail(fmt.Errorf("%w: it is a slab already", block.ErrInvalid))
	case !errors.Is(err, ErrNoSlab):
		return fail(err)
	}
	if !device { // it may have holes
		if err := preallocate(ctx, f, super.bytes, log); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return fail(fmt.Errorf("%w: wanted %d bytes: %w", block.ErrNoSpace, super.bytes, err))
		} else if err != nil {
			return fail(err)
		}
	}
	if err := writeSuper(f, super); err != nil {
		return fail(err)
	}
	return f, nil
}

// createFile preallocates a file, writes its superblocks, and gives it its name.
func createFile(ctx context.Context, path string, super *superblock, log *slog.Logger) (*os.File, error) {
	if err := super.check(); err != nil {
		return nil, err
	}
	// The rename below would put a file in the place of a symbolic link.
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	} else if _, lerr := os.Lstat(path); lerr == nil {
		return nil, fmt.Errorf("%w: %w", block.ErrInvalid, err)
	}
	dir := filepath.Dir(path)
	_, free, err := statfs(dir)
	if err != nil {
		return nil, err
	}
	temp := path + ".creating"
	f, err := openTemp(temp)
	if err != nil {
		return nil, err
	}
	// Whoever made a slab there since the caller looked did so under this lock.
	if st, err := os.Stat(path); err == nil && st.Size() > 0 {
		err = fmt.Errorf("%w: another process has just made it", block.ErrInvalid)
		return nil, errors.Join(err, os.Remove(temp), f.Close())
	}
	if err := fillAndName(ctx, f, temp, path, super, free, log); err != nil {
		return nil, errors.Join(err, os.Remove(temp), f.Close())
	}
	if err := syncDir(dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func fillAndName(ctx context.Context, f *os.File, temp, path string, super *superblock, free int64, log *slog.Logger) error {
	if free < super.bytes {
		return fmt.Errorf("%w: wanted %d bytes, the file system has %d free", block.ErrNoSpace, super.bytes, free)
	}
	if err := preallocate(ctx, f, super.bytes, log); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: wanted %d bytes, the file system had %d free: %w", block.ErrNoSpace, super.bytes, free, err)
	} else if err != nil {
		return err
	}
	if err := writeSuper(f, super); err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return nil
}

// openTemp opens the file that becomes the slab, locked and empty. One that a
// crash left behind is used again; its lock tells it from one being made.
func openTemp(temp string) (*os.File, error) {
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	fail := func(err error) (*os.File, error) {
		f.Close()
		return nil, err
	}
	if err := lock(f); err != nil {
		return fail(err)
	}
	// Its maker may have given it its name between our open and our lock.
	mine, err := f.Stat()
	if err != nil {
		return fail(fmt.Errorf("%w: %w", block.ErrUnavailable, err))
	}
	if now, err := os.Lstat(temp); err != nil || !os.SameFile(mine, now) {
		return fail(fmt.Errorf("%w: another process is making it", block.ErrUnavailable))
	}
	if err := f.Truncate(0); err != nil {
		return fail(fmt.Errorf("%w: %w", block.ErrUnavailable, err))
	}
	return f, nil
}

// writeSuper writes the superblock and its copy, through to the medium.
func writeSuper(f *os.File, super *superblock) error {
	b := super.encode()
	for _, off := range []int64{superTwinAt, 0} {
		if _, err := f.WriteAt(b, off); err != nil {
			return fmt.Errorf("%w: write superblock: %w", block.ErrUnavailable, err)
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("%w: sync superblock: %w", block.ErrUnavailable, err)
	}
	return nil
}
