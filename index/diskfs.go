package index

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// diskFS lies between walFS and the disk. Pebble goes on after some errors as
// if another try could not do harm, and without end after others; here is where
// both end. In each mode what is on disk is what a crash would have left.
//
// While Pebble is being opened it tries without end to flush what it read from
// the log. So the first error makes the disk frozen, and what failed is told to
// the one who opens: see opened.
//
// Frozen, it takes everything, keeps new files in memory and changes nothing on
// disk, so that Pebble can end what it has under way, and be closed, whatever
// the disk does. A table that was begun before cannot be read again, so writing
// on fails, and Pebble makes a new one.
//
// Once Pebble has said that it cannot go on, which is when it does not know what
// its MANIFEST has, the disk refuses all changes: later ones would build on a
// MANIFEST that may not be the one that is read at the next opening. Errors of
// the MANIFEST itself are kept from Pebble, which would never write it again, and
// those of syncing its directory, on which it panics when it makes a log.
type diskFS struct {
	vfs.FS
	fatal func(error) // takes the errors that are kept from Pebble, and calls refuse
	mem   *vfs.MemFS  // files made while frozen
	mode  atomic.Int32
	why   atomic.Pointer[error] // set before the mode is frozen or refusing
}

const (
	diskOpening int32 = iota
	diskOpen
	diskFrozen
	diskRefusing
)

var errFrozen = errors.New("the catalog's files are given up")

func newDiskFS(disk vfs.FS, fatal func(error)) *diskFS {
	return &diskFS{FS: disk, fatal: fatal, mem: vfs.NewMem()}
}

// opened ends the opening. An error is one that Pebble was not told of.
func (d *diskFS) opened() error {
	if d.mode.CompareAndSwap(diskOpening, diskOpen) {
		return nil
	}
	return *d.why.Load()
}

func (d *diskFS) freeze(err error) {
	d.why.CompareAndSwap(nil, &err)
	d.mode.Store(diskFrozen)
}

func (d *diskFS) refuse(err error) {
	d.why.CompareAndSwap(nil, &err)
	if !d.mode.CompareAndSwap(diskOpening, diskFrozen) {
		d.mode.CompareAndSwap(diskOpen, diskRefusing)
	}
}

// swallow reports whether Pebble must not see an error of the disk. Which files
// are there and which are not is an answer, not an error.
func (d *diskFS) swallow(err error) bool {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) {
		return false
	}
	d.why.CompareAndSwap(nil, &err)
	d.mode.CompareAndSwap(diskOpening, diskFrozen)
	return d.mode.Load() == diskFrozen
}

// change runs something that changes the disk.
func (d *diskFS) change(fn func() error) error {
	switch d.mode.Load() {
	case diskFrozen:
		return nil
	case diskRefusing:
		return *d.why.Load()
	}
	if err := fn(); err != nil && !d.swallow(err) {
		return err
	}
	return nil
}

func (d *diskFS) create(name string, fn func() (vfs.File, error)) (vfs.File, error) {
	var f vfs.File
	if err := d.change(func() (err error) { f, err = fn(); return err }); err != nil {
		return nil, err
	}
	if f != nil {
		return &diskFile{
			File: f, fs: d,
			table: strings.HasSuffix(name, ".sst"),
			vital: strings.HasPrefix(d.PathBase(name), "MANIFEST-"),
		}, nil
	}
	if err := d.mem.MkdirAll(d.mem.PathDir(name), 0o755); err != nil {
		return nil, err
	}
	return d.mem.Create(name, vfs.WriteCategoryUnspecified)
}

// Create is part of vfs.FS.
func (d *diskFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.create(name, func() (vfs.File, error) { return d.FS.Create(name, c) })
}

// ReuseForWrite is part of vfs.FS.
func (d *diskFS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.create(newname, func() (vfs.File, error) { return d.FS.ReuseForWrite(oldname, newname, c) })
}

// Open is part of vfs.FS.
func (d *diskFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if d.mode.Load() == diskFrozen {
		if f, err := d.mem.Open(name, opts...); err == nil {
			return f, nil
		}
	}
	return d.FS.Open(name, opts...)
}

// OpenDir is part of vfs.FS.
func (d *diskFS) OpenDir(name string) (vfs.File, error) {
	f, err := d.FS.OpenDir(name)
	if err != nil {
		return nil, err
	}
	return &diskFile{File: f, fs: d, vital: true}, nil
}

// Stat is part of vfs.FS.
func (d *diskFS) Stat(name string) (vfs.FileInfo, error) {
	if d.mode.Load() == diskFrozen {
		if i, err := d.mem.Stat(name); err == nil {
			return i, nil
		}
	}
	return d.FS.Stat(name)
}

// Link is part of vfs.FS.
func (d *diskFS) Link(oldname, newname string) error {
	return d.change(func() error { return d.FS.Link(oldname, newname) })
}

// Remove is part of vfs.FS.
func (d *diskFS) Remove(name string) error {
	return d.change(func() error { return d.FS.Remove(name) })
}

// RemoveAll is part of vfs.FS.
func (d *diskFS) RemoveAll(name string) error {
	return d.change(func() error { return d.FS.RemoveAll(name) })
}

// Rename is part of vfs.FS.
func (d *diskFS) Rename(oldname, newname string) error {
	return d.change(func() error { return d.FS.Rename(oldname, newname) })
}

// MkdirAll is part of vfs.FS.
func (d *diskFS) MkdirAll(dir string, perm os.FileMode) error {
	return d.change(func() error { return d.FS.MkdirAll(dir, perm) })
}

// Unwrap is part of vfs.FS.
func (d *diskFS) Unwrap() vfs.FS { return d.FS }

// diskFile is a file or directory on the disk.
type diskFile struct {
	vfs.File
	fs    *diskFS
	table bool
	vital bool // the MANIFEST or a directory
}

func (f *diskFile) change(fn func() error) error {
	switch {
	case f.vital && f.fs.mode.Load() == diskRefusing:
		return nil
	case f.table && f.fs.mode.Load() == diskFrozen:
		return errFrozen
	}
	err := f.fs.change(fn)
	switch {
	case f.vital && err != nil:
		f.fs.fatal(err)
		return nil
	case f.table && err == nil && f.fs.mode.Load() == diskFrozen:
		return errFrozen // perhaps it was not written
	}
	return err
}

// Write is part of vfs.File.
func (f *diskFile) Write(p []byte) (int, error) {
	n := len(p)
	err := f.change(func() (err error) { n, err = f.File.Write(p); return err })
	if err == nil {
		n = len(p)
	}
	return n, err
}

// WriteAt is part of vfs.File.
func (f *diskFile) WriteAt(p []byte, at int64) (int, error) {
	n := len(p)
	err := f.change(func() (err error) { n, err = f.File.WriteAt(p, at); return err })
	if err == nil {
		n = len(p)
	}
	return n, err
}

// Preallocate is part of vfs.File. Some file systems cannot, and nobody minds.
func (f *diskFile) Preallocate(offset, length int64) error {
	if m := f.fs.mode.Load(); m == diskFrozen || m == diskRefusing {
		return nil
	}
	return f.File.Preallocate(offset, length)
}

// Sync is part of vfs.File.
func (f *diskFile) Sync() error { return f.change(f.File.Sync) }

// SyncData is part of vfs.File.
func (f *diskFile) SyncData() error { return f.change(f.File.SyncData) }

// SyncTo is part of vfs.File.
func (f *diskFile) SyncTo(n int64) (bool, error) {
	var full bool
	err := f.change(func() (err error) { full, err = f.File.SyncTo(n); return err })
	return full, err
}

// Close is part of vfs.File.
func (f *diskFile) Close() error {
	if err := f.File.Close(); err != nil && !f.fs.swallow(err) {
		return err
	}
	return nil
}
