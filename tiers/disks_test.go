package tiers

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeSys is a tree as the kernel's sysfs has it.
type fakeSys struct {
	t    *testing.T
	root string
	dirs map[string]string // of block devices, by name
}

// add makes a block device: a partition when it is below another, made of members if any.
func (s *fakeSys) add(name, below string, major, minor uint32, members ...string) {
	s.t.Helper()
	dir := filepath.Join(s.root, "devices", "pci0000:00", "block", name)
	if below != "" {
		dir = filepath.Join(s.dirs[below], name)
	}
	s.dirs[name] = dir
	s.do(os.MkdirAll(dir, 0o700))
	number := fmt.Sprintf("%d:%d", major, minor)
	s.do(os.WriteFile(filepath.Join(dir, "dev"), []byte(number+"\n"), 0o600))
	if below != "" {
		s.do(os.WriteFile(filepath.Join(dir, "partition"), []byte("1\n"), 0o600))
	} else {
		s.do(os.Mkdir(filepath.Join(dir, "slaves"), 0o700))
	}
	for _, m := range members {
		s.link(s.dirs[m], filepath.Join(dir, "slaves", m))
	}
	s.link(dir, filepath.Join(s.root, "dev", "block", number))
}

func (s *fakeSys) link(to, at string) {
	s.t.Helper()
	rel, err := filepath.Rel(filepath.Dir(at), to)
	s.do(err)
	s.do(os.Symlink(rel, at))
}

func (s *fakeSys) do(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func TestDisksUnder(t *testing.T) {
	s := &fakeSys{t: t, root: t.TempDir(), dirs: map[string]string{}}
	s.do(os.MkdirAll(filepath.Join(s.root, "dev", "block"), 0o700))
	s.add("nvme0n1", "", 259, 0)
	s.add("nvme0n1p1", "nvme0n1", 259, 1)
	s.add("nvme0n1p2", "nvme0n1", 259, 2)
	s.add("nvme1n1", "", 259, 3)
	s.add("nvme1n1p1", "nvme1n1", 259, 300)
	s.add("sda", "", 8, 0)
	s.add("md0", "", 9, 0, "nvme0n1p1", "nvme1n1p1")
	s.add("md0p1", "md0", 259, 9)
	s.add("dm-0", "", 253, 0, "md0p1", "sda")
	s.add("dm-1", "", 253, 1, "dm-0")
	s.add("dm-2", "", 253, 2, "nvme0n1p1", "nvme0n1p2")

	nvme0, nvme1, sda := disk{"nvme0n1", unix.Mkdev(259, 0)}, disk{"nvme1n1", unix.Mkdev(259, 3)}, disk{"sda", unix.Mkdev(8, 0)}
	for _, c := range []struct {
		major, minor uint32
		want         []disk
	}{
		{259, 0, []disk{nvme0}},
		{259, 2, []disk{nvme0}},
		{259, 300, []disk{nvme1}},
		{8, 0, []disk{sda}},
		{9, 0, []disk{nvme0, nvme1}},
		{253, 1, []disk{sda, nvme0, nvme1}},
		{253, 2, []disk{nvme0}},
	} {
		got, err := disksUnder(s.root, unix.Mkdev(c.major, c.minor))
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%d:%d: %v, error %v, want %v", c.major, c.minor, got, err, c.want)
		}
	}

	// What has no block device of its own has no disks, nor has one that has gone away.
	if got, err := disksUnder(s.root, unix.Mkdev(0, 45)); err == nil {
		t.Errorf("an anonymous device: %v", got)
	}
	s.do(os.RemoveAll(s.dirs["nvme1n1"]))
	if got, err := disksUnder(s.root, unix.Mkdev(9, 0)); err == nil {
		t.Errorf("a member that is gone: %v", got)
	}
	for _, text := range []string{"", "259", "259:", "a:b", "259:-1", "4294967296:0"} {
		s.do(os.WriteFile(filepath.Join(s.dirs["sda"], "dev"), []byte(text), 0o600))
		if got, err := disksUnder(s.root, unix.Mkdev(8, 0)); err == nil {
			t.Errorf("number %q: %v", text, got)
		}
	}
}
