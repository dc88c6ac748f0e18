package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

func TestFreeMemory(t *testing.T) {
	const gib = 1 << 30
	const meminfo = "MemTotal:       33554432 kB\nMemFree:         1000 kB\nMemAvailable:   16777216 kB\n" // 16 GiB
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  int64
		what  string
	}{
		{"no cgroups", nil, 16 * gib, "available memory"},
		{"v2 without a limit", map[string]string{
			"proc/self/cgroup":            "0::/a\n",
			"sys/fs/cgroup/a/memory.max":  "max\n",
			"sys/fs/cgroup/a/memory.high": "max\n",
		}, 16 * gib, "available memory"},
		{"v2", map[string]string{
			"proc/self/cgroup":             "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "4294967296\n",
		}, 4 * gib, "the cgroup's memory limit"},
		{"v2 limit above", map[string]string{
			"proc/self/cgroup":             "0::/a/b\n",
			"sys/fs/cgroup/a/memory.max":   "2147483648\n",
			"sys/fs/cgroup/a/b/memory.max": "max\n",
		}, 2 * gib, "the cgroup's memory limit"},
		{"v2 high", map[string]string{
			"proc/self/cgroup":            "0::/a\n",
			"sys/fs/cgroup/a/memory.max":  "4294967296\n",
			"sys/fs/cgroup/a/memory.high": "3221225472\n",
		}, 3 * gib, "the cgroup's memory limit"},
		{"v2 limit that is above what is available", map[string]string{
			"proc/self/cgroup":           "0::/a\n",
			"sys/fs/cgroup/a/memory.max": "17179869185\n",
		}, 16 * gib, "available memory"},
		{"v2 in a container: the path is the host's", map[string]string{
			"proc/self/cgroup":         "0::/kubepods/pod1\n",
			"sys/fs/cgroup/memory.max": "1073741824\n",
		}, gib, "the cgroup's memory limit"},
		{"v1", map[string]string{
			"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5368709120\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":   "9223372036854771712\n",
		}, 5 * gib, "the cgroup's memory limit"},
		{"v1 without a limit", map[string]string{
			"proc/self/cgroup":                           "4:memory:/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
		}, 16 * gib, "available memory"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}}
			for name, data := range tc.files {
				root[name] = &fstest.MapFile{Data: []byte(data)}
			}
			got, what, err := freeMemory(root)
			if err != nil || got != tc.want || what != tc.what {
				t.Errorf("got %d, %q, %v, want %d, %q", got, what, err, tc.want, tc.what)
			}
		})
	}
}

func TestTotalMemory(t *testing.T) {
	root := fstest.MapFS{"proc/meminfo": {Data: []byte("MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n")}}
	if n, what, err := totalMemory(root); err != nil || n != 32<<30 || what != "the machine's memory" {
		t.Errorf("got %d, %q, %v", n, what, err)
	}
	root["proc/self/cgroup"] = &fstest.MapFile{Data: []byte("0::/a\n")}
	root["sys/fs/cgroup/a/memory.max"] = &fstest.MapFile{Data: []byte("4294967296\n")}
	if n, what, err := totalMemory(root); err != nil || n != 4<<30 || what != "the cgroup's memory limit" {
		t.Errorf("in a cgroup: got %d, %q, %v", n, what, err)
	}
}

func TestFreeMemoryRefuses(t *testing.T) {
	for _, root := range []fs.FS{
		fstest.MapFS{},
		fstest.MapFS{"proc/meminfo": {Data: []byte("MemTotal: 1 kB\n")}},
		fstest.MapFS{"proc/meminfo": {Data: []byte("MemAvailable: lots kB\n")}},
	} {
		if n, _, err := freeMemory(root); err == nil {
			t.Errorf("%v: got %d, want an error", root, n)
		}
	}
}

// This host's own files can be read.
func TestFreeMemoryHere(t *testing.T) {
	n, _, err := freeMemory(os.DirFS("/"))
	if err != nil || n <= 0 {
		t.Errorf("got %d, %v", n, err)
	}
}

func TestAutoDRAM(t *testing.T) {
	for _, tc := range []struct{ free, want int64 }{
		{256 << 20, 64 << 20},
		{16 << 30, 4 << 30},
		{16<<30 + 9<<20, 4<<30 + 2<<20},
		{1 << 40, 64 << 30},
	} {
		if got, err := autoDRAM(tc.free); err != nil || got != tc.want {
			t.Errorf("autoDRAM(%d) = %d, %v, want %d", tc.free, got, err, tc.want)
		}
	}
	if n, err := autoDRAM(255 << 20); err == nil || !strings.Contains(err.Error(), "--dram") {
		t.Errorf("autoDRAM(255 MiB) = %d, %v, want an error that names --dram", n, err)
	}
}

func TestAutoSlab(t *testing.T) {
	for _, tc := range []struct{ free, want int64 }{
		{0, 0},
		{2<<30 - 1, 0},
		{2 << 30, 1 << 30},
		{20 << 30, 2 << 30},
		{20<<30 + 630<<20, 2 << 30},
		{10 << 40, 64 << 30},
	} {
		if got := autoSlab(tc.free); got != tc.want {
			t.Errorf("autoSlab(%d) = %d, want %d", tc.free, got, tc.want)
		}
	}
}

func TestFreeSpace(t *testing.T) {
	dir := t.TempDir()
	here, err := freeSpace(dir)
	if err != nil || here <= 0 {
		t.Fatalf("%s: %d, %v", dir, here, err)
	}
	if n, err := freeSpace(filepath.Join(dir, "not", "yet")); err != nil || n <= 0 {
		t.Errorf("a directory that does not exist: %d, %v", n, err)
	}
	file := filepath.Join(dir, "file")
	write(t, file, "")
	if n, err := freeSpace(filepath.Join(file, "sub")); err == nil {
		t.Errorf("below a file: %d, want an error", n)
	}
}

func TestDefaultDataDir(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"XDG_DATA_HOME": "/x", "HOME": "/h"}, "/x/kvtier"},
		{map[string]string{"XDG_DATA_HOME": "rel", "HOME": "/h"}, "/h/.local/share/kvtier"},
		{map[string]string{"HOME": "/h"}, "/h/.local/share/kvtier"},
		{nil, "/var/lib/kvtier"},
	} {
		if got := defaultDataDir(func(k string) string { return tc.env[k] }); got != tc.want {
			t.Errorf("%v: got %s, want %s", tc.env, got, tc.want)
		}
	}
}
