package arena

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Replace gives a chunk of a memfd arena another memory file, at the same addresses and
// full of zeros, so that whoever was passed the old one sees nothing of what comes. What
// was in the chunk is gone: its pages are freed, whoever still maps them. Nobody may use
// the chunk meanwhile, and what was registered of it with a device or the kernel is no
// longer that memory. On error the old file stays, and the chunk is full of zeros.
func (a *Arena) Replace(chunk int) error {
	old, b := a.Fd(chunk), a.chunks[chunk]
	if old < 0 {
		return fmt.Errorf("replace chunk %d: the arena is anonymous", chunk)
	}
	n := int64(len(b))
	// First, since there may be no room for both.
	if err := unix.Fallocate(old, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, n); err != nil {
		return fmt.Errorf("replace chunk %d: free its pages: %w", chunk, err)
	}
	fd, err := a.remap(old, b)
	if err != nil {
		return fmt.Errorf("replace chunk %d: %w", chunk, err)
	}
	a.file.Lock()
	a.fds[chunk] = fd
	a.file.Unlock()
	if err := unix.Close(old); err != nil {
		return fmt.Errorf("replace chunk %d: close the old file: %w", chunk, err)
	}
	if a.opt.Lock {
		_ = unix.Mlock(b) // as far as allowed, which New has told of
	}
	if a.opt.NoPopulate {
		return nil
	}
	if err := populatePiece(b, !a.opt.NoHugePages); err != nil {
		a.log.Warn("arena", "chunk", chunk, "warning", "populate: "+err.Error()) // its first users do
	}
	return nil
}

// remap maps a new memory file over b, on reserved huge pages if old is and there are
// enough.
func (a *Arena) remap(old int, b []byte) (fd int, err error) {
	n := int64(len(b))
	var st unix.Statfs_t
	if unix.Fstatfs(old, &st) == nil && st.Type == unix.HUGETLBFS_MAGIC {
		if fd, err = a.mapOver(b, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB); err == nil {
			return fd, nil
		}
		a.log.Warn("arena", "bytes", n, "warning", "reserved huge pages are gone: "+err.Error())
	}
	if fd, err = a.mapOver(b, 0); err != nil {
		return -1, err
	}
	advice := unix.MADV_HUGEPAGE
	if a.opt.NoHugePages {
		advice = unix.MADV_NOHUGEPAGE
	}
	_ = unix.Madvise(b, advice) // EINVAL: a kernel without transparent huge pages
	return fd, nil
}

// mapOver puts a new memory file in the place of what is mapped there. On error nothing
// has changed.
func (a *Arena) mapOver(b []byte, flags int) (fd int, err error) {
	if fd, err = makeMemfd(a.opt.Name, int64(len(b)), flags); err != nil {
		return -1, err
	}
	// Mapped elsewhere first: what would fail, reserving huge pages for one, fails before
	// the old mapping is gone.
	trial, err := unix.Mmap(fd, 0, len(b), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd) // the other error says more
		return -1, fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(trial)
	at := unsafe.Pointer(unsafe.SliceData(b))
	if _, err := unix.MmapPtr(fd, 0, at, uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.Close(fd) // the other error says more
		return -1, fmt.Errorf("mmap: %w", err)
	}
	return fd, nil
}
