package tiers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
)

// What slabs and data directories need of files, beyond package os.

// lock takes the lock that keeps a second process out, for as long as f is open.
func lock(f *os.File) error {
	err := retryEINTR(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("%w: in use by another process", block.ErrUnavailable)
	case err != nil:
		return fmt.Errorf("%w: flock: %w", block.ErrUnavailable, err)
	}
	return nil
}

// preallocate gives a file all its blocks, so that no write meets a full file
// system later. Where the file system cannot, it writes zeros.
func preallocate(ctx context.Context, f *os.File, bytes int64, log *slog.Logger) error {
	const step = 1 << 30 // an allocation cannot be interrupted
	for off := int64(0); off < bytes; off += step {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := retryEINTR(func() error { return unix.Fallocate(int(f.Fd()), 0, off, min(step, bytes-off)) })
		switch {
		case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS):
			log.Warn("slab: no preallocation on this file system, so zeros are written first", "file", f.Name(), "bytes", bytes)
			return writeZeros(ctx, f, bytes)
		case err != nil:
			return fmt.Errorf("fallocate: %w", err)
		}
	}
	return nil
}

func writeZeros(ctx context.Context, f *os.File, bytes int64) error {
	zeros := make([]byte, 1<<20)
	for off := int64(0); off < bytes; off += int64(len(zeros)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), bytes-off)], off); err != nil {
			return fmt.Errorf("write zeros: %w", err)
		}
	}
	return nil
}

// syncDir makes a new name in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("%w: sync directory %s: %w", block.ErrUnavailable, dir, err)
	}
	return nil
}

// statfs is how large the file system at path is, and how many bytes it has left
// for us.
func statfs(path string) (size, free int64, err error) {
	var st unix.Statfs_t
	if err := retryEINTR(func() error { return unix.Statfs(path, &st) }); err != nil {
		return 0, 0, fmt.Errorf("%w: statfs %s: %w", block.ErrUnavailable, path, err)
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil
}

func fdatasync(f *os.File) error {
	return retryEINTR(func() error { return unix.Fdatasync(int(f.Fd())) })
}

// retryEINTR repeats a system call that a signal interrupted.
func retryEINTR(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// replaceFile puts a file with this content in the place of another: after a crash one of
// the two is there, and if it syncs, this one once it has returned.
func replaceFile(path string, data []byte, sync bool) error {
	temp := path + ".tmp"
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && sync {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = os.Remove(temp) // takes room that may be what was short
		return err
	}
	if !sync {
		return nil
	}
	return syncDir(filepath.Dir(path))
}
