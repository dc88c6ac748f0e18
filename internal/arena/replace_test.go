package arena_test

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
)

// TestReplace: whoever has a chunk's old file sees nothing of the new one, not even
// where he holds on to it, and frees no memory by doing so; the other chunks stay.
func TestReplace(t *testing.T) {
	a, err := arena.New(2*arena.HugeBytes, &arena.Options{Memfd: true, ChunkBytes: arena.HugeBytes})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, c := range a.Chunks() {
		copy(c[4096:], "first")
	}
	addr := arena.Addr(a.Chunks()[1])
	old, err := unix.Dup(a.Fd(1))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(old)
	s, err := arena.MapFile(old, arena.HugeBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got := s.Bytes()[4096:4101]; string(got) != "first" {
		t.Fatalf("the file has %q", got)
	}
	if err := a.Replace(1); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(old, &st); err != nil || st.Blocks != 0 {
		t.Errorf("the old file has %d blocks, %v", st.Blocks, err)
	}
	c := a.Chunks()[1]
	if arena.Addr(c) != addr || len(c) != arena.HugeBytes || !bytes.Equal(c, make([]byte, len(c))) {
		t.Errorf("the new memory is %d bytes at %#x, or not clear", len(c), arena.Addr(c))
	}
	copy(c[8192:], "second")
	copy(s.Bytes()[12288:], "third")
	if got := s.Bytes()[8192:8198]; !bytes.Equal(got, make([]byte, 6)) {
		t.Errorf("the old file has %q of the new one", got)
	}
	if got := c[12288:12293]; !bytes.Equal(got, make([]byte, 5)) {
		t.Errorf("the new file has %q of the old one", got)
	}
	if got := a.Slice(4096, 5); string(got) != "first" {
		t.Errorf("the other chunk has %q", got)
	}
	n, err := arena.MapFile(a.Fd(1), arena.HugeBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if got := n.Bytes()[8192:8198]; string(got) != "second" {
		t.Errorf("the new file has %q", got)
	}
}

func TestReplaceAnonymous(t *testing.T) {
	a, err := arena.New(1, &arena.Options{NoPopulate: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.Replace(0); err == nil {
		t.Error("a chunk without a file was replaced")
	}
}
