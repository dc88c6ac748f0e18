package index

import (
	"strings"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// walFS stands between Pebble and the file system for the sake of its
// write-ahead log. Pebble ends the process when the log cannot be written,
// rotated or made. A store has something better to do: to go on serving reads
// and to refuse writes.
//
// So the first error of a log is kept from Pebble and told to fail, which makes
// the catalog refuse and fail every commit, those under way too; from then on
// the logs take everything and write nothing, and no new one appears on disk.
// What is there is then what a crash at that moment would have left: every
// commit that was answered without an error, and a tail that replay cuts off.
//
// It refuses logs that have lost what was synced, see readLog, and slows Pebble down
// that makes a table again at once after it failed.
type walFS struct {
	vfs.FS
	fail   func(error)
	pause  func() // before a table is made
	failed atomic.Bool
	syncs  *syncStats
}

// syncStats counts what the log's syncs cost.
type syncStats struct {
	count, nanos, max atomic.Int64
}

func (s *syncStats) add(d time.Duration) {
	s.count.Add(1)
	s.nanos.Add(int64(d))
	for {
		m := s.max.Load()
		if int64(d) <= m || s.max.CompareAndSwap(m, int64(d)) {
			return
		}
	}
}

// Create is part of vfs.FS.
func (w *walFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if strings.HasSuffix(name, ".sst") {
		w.pause()
	}
	return w.log(name, func() (vfs.File, error) { return w.FS.Create(name, c) })
}

// Open is part of vfs.FS. A log is opened to be replayed, and checked before.
func (w *walFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if strings.HasSuffix(name, ".log") {
		log, err := readLog(w.FS, name)
		if err != nil {
			return nil, err
		}
		return vfs.NewMemFile(log), nil
	}
	return w.FS.Open(name, opts...)
}

// ReuseForWrite is part of vfs.FS.
func (w *walFS) ReuseForWrite(oldname, newname string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return w.log(newname, func() (vfs.File, error) { return w.FS.ReuseForWrite(oldname, newname, c) })
}

// Unwrap is part of vfs.FS.
func (w *walFS) Unwrap() vfs.FS { return w.FS }

func (w *walFS) log(name string, create func() (vfs.File, error)) (vfs.File, error) {
	if !strings.HasSuffix(name, ".log") {
		return create()
	}
	if !w.failed.Load() {
		f, err := create()
		if err == nil {
			return &walFile{File: f, fs: w}, nil
		}
		w.broke(err)
	}
	// A file that is nowhere, but is the right thing to have a name and a size.
	f := vfs.NewMemFile(nil)
	return &walFile{File: f, fs: w}, nil
}

func (w *walFS) broke(err error) {
	w.fail(err) // before anybody can be told of a success
	w.failed.Store(true)
}

// walFile is one write-ahead log. It is extended with zeros ahead of what is
// written: a sync of bytes inside the file has no new length to record, which
// on a journalling file system is most of its cost. Pebble takes zeros for the
// end of a log.
type walFile struct {
	vfs.File
	fs    *walFS
	at    int64 // where the next write goes
	ahead int64 // length of the file
}

// walAhead is how far a log is extended at a time.
const walAhead = 1 << 20

var walZeros [walAhead]byte

// extend makes the file longer, if need be, so that n more bytes fit. Failing is
// no loss: the write will tell. One that does without has then gone past ahead, and
// zeros must never lie on what was written.
func (f *walFile) extend(n int) {
	if f.at+int64(n) <= f.ahead {
		return
	}
	f.ahead = max(f.ahead, f.at)
	for f.ahead < f.at+int64(n) {
		if _, err := f.File.WriteAt(walZeros[:], f.ahead); err != nil {
			return
		}
		f.ahead += walAhead
	}
}

func (f *walFile) Write(p []byte) (int, error) {
	if !f.fs.failed.Load() {
		f.extend(len(p))
		f.at += int64(len(p))
		if _, err := f.File.Write(p); err != nil {
			f.fs.broke(err)
		}
	}
	return len(p), nil
}

// Sync is part of vfs.File.
func (f *walFile) Sync() error {
	f.sync(f.File.Sync)
	return nil
}

// SyncData is part of vfs.File.
func (f *walFile) SyncData() error {
	f.sync(f.File.SyncData)
	return nil
}

// SyncTo is part of vfs.File.
func (f *walFile) SyncTo(n int64) (bool, error) {
	var full bool
	f.sync(func() (err error) {
		full, err = f.File.SyncTo(n)
		return err
	})
	return full, nil
}

func (f *walFile) sync(fn func() error) {
	if f.fs.failed.Load() {
		return
	}
	start := time.Now()
	if err := fn(); err != nil {
		f.fs.broke(err)
		return
	}
	f.fs.syncs.add(time.Since(start))
}

// Stat is part of vfs.File.
func (f *walFile) Stat() (vfs.FileInfo, error) {
	i, err := f.File.Stat()
	if err != nil {
		f.fs.broke(err)
		return vfs.NewMemFile(nil).Stat()
	}
	return i, nil
}

// Close is part of vfs.File.
func (f *walFile) Close() error {
	if err := f.File.Close(); err != nil && !f.fs.failed.Load() {
		f.fs.broke(err)
	}
	return nil
}
