package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/servers"
)

// tool runs a program of the system as root.
func tool(args ...string) (string, error) {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return "", errors.Join(err, errors.New(strings.Join(args, " ")+": "+string(out)))
	}
	return strings.TrimSpace(string(out)), nil
}

// mount mounts at a new directory, and unmounts when the test ends, whatever
// uses it then.
func mount(t *testing.T, args ...string) (dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "mounts need it")
	}
	dir = t.TempDir()
	if _, err := tool(append(append([]string{"mount"}, args...), dir)...); err != nil {
		servers.Missing(t, "root", err)
	}
	t.Cleanup(func() {
		err := unix.Unmount(dir, 0)
		if errors.Is(err, syscall.EBUSY) {
			err = unix.Unmount(dir, unix.MNT_DETACH)
			t.Errorf("%s was in use when the test ended", dir)
		}
		if err != nil && !errors.Is(err, syscall.EINVAL) { // EINVAL: not mounted any more
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// loopDevice makes a block device of a new file of n bytes in dir.
func loopDevice(t *testing.T, dir string, n int64) (dev string) {
	t.Helper()
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "loop devices need it")
	}
	file := filepath.Join(dir, "disk")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, n); err != nil {
		t.Fatal(err)
	}
	dev, err := tool("losetup", "--find", "--show", file)
	if err != nil {
		servers.Missing(t, "loop", err)
	}
	t.Cleanup(func() {
		if _, err := tool("losetup", "--detach", dev); err != nil {
			t.Error(err)
		}
	})
	return dev
}

// ext4 mounts a new file system of n bytes, of which nothing is kept for root.
// features are as for mkfs.ext4 -O, options as for mount -o.
func ext4(t *testing.T, n int64, features, options string) (dir string) {
	t.Helper()
	dev := loopDevice(t, t.TempDir(), n)
	if _, err := tool("mkfs.ext4", "-q", "-m", "0", "-O", features, dev); err != nil {
		servers.Missing(t, "root", err)
	}
	return mount(t, "-o", options, dev)
}

// fill takes the room of a file system but for what is left.
func fill(t *testing.T, path string, left int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	piece := make([]byte, 1<<20)
	for {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil {
			t.Fatal(err)
		}
		room := int64(st.Bavail)*st.Bsize - left
		if room <= 0 && left > 0 {
			break
		}
		if _, err := f.Write(piece[:min(int64(len(piece)), max(room, 4096))]); err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			break
		}
	}
	// What is written later may not need the room before this is there.
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}
