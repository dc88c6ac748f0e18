package index

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/kvtier/kvtier/index/block"
)

// TestLogIsExtended looks at the log on disk: it is longer than what is in it, by
// zeros, and what is in it is found when the catalog is opened again.
func TestLogIsExtended(t *testing.T) {
	dir := t.TempDir()
	c, err := OpenCatalog(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := c.NewBatch()
	rec := Record{Key: block.Key{NS: 1, Hash: block.Hash{1, 2, 3}}, HashLen: 16, Len: 100}
	b.Put(&rec)
	if err := c.Commit(b, true); err != nil {
		t.Fatal(err)
	}
	logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("logs %v, %v", logs, err)
	}
	data, err := os.ReadFile(logs[len(logs)-1])
	if err != nil {
		t.Fatal(err)
	}
	if len(data) == 0 || len(data)%walAhead != 0 {
		t.Errorf("the log has %d bytes, want a multiple of %d", len(data), walAhead)
	}
	for _, x := range data[len(data)-walAhead/2:] {
		if x != 0 {
			t.Fatal("the log does not end with zeros")
		}
	}
	// A copy is what a crash would leave.
	crash := t.TempDir()
	if err := os.CopyFS(crash, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c, err = OpenCatalog(crash, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, ok, err := c.Get(rec.Key, rec.HashLen); err != nil || !ok || got != rec {
		t.Errorf("after a crash: %+v, %v, %v", got, ok, err)
	}
}

// TestLogThatCouldNotBeExtended: for want of room the log is not extended for a while,
// and what fits without is committed. When it can be extended again, the zeros come
// behind all that.
func TestLogThatCouldNotBeExtended(t *testing.T) {
	disk := newFullDisk()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	disk.fill(0, ofKind(isLog, errorfs.OpFileWriteAt))
	acked := make(map[block.Key]Record)
	const each = 20 * 60 // about the bytes of a commit
	for i := range uint64(3 * walAhead / each) {
		if i == 2*walAhead/each {
			disk.free()
		}
		b := c.NewBatch()
		for k := range uint64(20) {
			rec := recordOf(1, i*20+k)
			b.Put(rec)
			acked[rec.Key] = *rec
		}
		if err := c.Commit(b, true); err != nil {
			t.Fatal(err)
		}
	}
	if disk.after.Load() >= 0 {
		t.Fatal("the log was never to be extended")
	}
	has(t, openCatalog(t, "cat", &CatalogOptions{FS: disk.mem.CrashClone(vfs.CrashCloneCfg{})}), acked)
}
