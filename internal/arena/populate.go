package arena

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pieceBytes is what one populating goroutine takes at a time: long enough to
// make the system calls cheap, short enough that Close is not kept waiting.
const pieceBytes = 32 << 20

// maxPopulators bounds the goroutines that populate one arena. The kernel clears
// pages at memory speed with fewer.
const maxPopulators = 8

// populate makes the arena's pages present and locked as o asks, then measures
// what was obtained. It returns nil when it was stopped by Close.
func (a *Arena) populate(o *Options) error {
	var pieces [][]byte
	for _, c := range a.chunks {
		for len(c) > 0 {
			n := min(len(c), pieceBytes)
			pieces = append(pieces, c[:n])
			c = c[n:]
		}
	}
	var (
		next    atomic.Int64
		locked  atomic.Int64
		noLock  atomic.Pointer[error]
		wg      sync.WaitGroup
		errOnce sync.Once
		failed  error
	)
	work := func() {
		for {
			i := int(next.Add(1)) - 1
			if i >= len(pieces) {
				return
			}
			select {
			case <-a.stop:
				return
			default:
			}
			if !o.NoPopulate {
				if err := populatePiece(pieces[i], o.Memfd && !o.NoHugePages); err != nil {
					errOnce.Do(func() { failed = err })
					next.Store(int64(len(pieces)))
					return
				}
			}
			if o.Lock && noLock.Load() == nil {
				if err := unix.Mlock(pieces[i]); err != nil {
					noLock.CompareAndSwap(nil, &err)
				} else {
					locked.Add(int64(len(pieces[i])))
				}
			}
		}
	}
	for range min(maxPopulators, runtime.GOMAXPROCS(0), len(pieces)) {
		wg.Go(work)
	}
	wg.Wait()

	stopped := false
	select {
	case <-a.stop:
		stopped = true
	default:
	}
	a.mu.Lock()
	a.mu.obtained.LockedBytes = locked.Load()
	a.mu.obtained.Populated = !o.NoPopulate && failed == nil && !stopped
	a.mu.Unlock()
	if failed != nil || stopped {
		return failed
	}
	if err := noLock.Load(); err != nil {
		a.warn(fmt.Sprintf("locked %d of %d bytes: mlock: %v (RLIMIT_MEMLOCK is %s)", locked.Load(), a.size, *err, memlockLimit()))
	}
	if o.NoPopulate {
		return nil
	}
	got, err := a.measure()
	if err != nil {
		a.warn(err.Error())
	} else if !o.NoHugePages && got.HugeBytes < a.size {
		a.warn(fmt.Sprintf("%d of %d bytes are on huge pages: %s", got.HugeBytes, a.size, whyNoHuge(o.Memfd)))
	}
	return nil
}

// populatePiece makes the pages of b present and writable without changing what
// is in them: somebody may already use the memory.
func populatePiece(b []byte, collapse bool) error {
	if collapse {
		// For shared memory an explicit request is honoured by some kernels even
		// where shmem_enabled is never; it makes the huge page from nothing.
		// Any failure leaves the pages to the call below.
		_ = unix.Madvise(b, unix.MADV_COLLAPSE)
	}
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	if !errors.Is(err, unix.EINVAL) {
		if err != nil {
			return fmt.Errorf("madvise MADV_POPULATE_WRITE: %w", err)
		}
		return nil
	}
	// Before Linux 5.14. An atomic addition of nothing touches the page and
	// loses no concurrent write.
	for i := 0; i < len(b); i += 4096 {
		atomic.AddUint32((*uint32)(unsafe.Pointer(&b[i])), 0)
	}
	return nil
}

func memlockLimit() string {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return err.Error()
	}
	if l.Cur == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return fmt.Sprintf("%d bytes", l.Cur)
}
