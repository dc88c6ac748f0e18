package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// This file chooses what serve was not told: the data directory, the size of
// the DRAM tier and the slab of the NVMe tier.

const (
	autoDRAMShare = 4        // the DRAM tier gets one part in so many of the free memory
	minAutoDRAM   = 64 << 20 // below that serve asks for --dram
	minDRAM       = 32 << 20 // two extents that hold the largest block
	maxAutoDRAM   = 64 << 30
	dramUnit      = 2 << 20 // a huge page

	autoSlabShare = 10 // the slab gets one part in so many of the free space
	minAutoSlab   = 1 << 30
	maxAutoSlab   = 64 << 30
	slabUnit      = 64 << 20 // an extent
)

// defaultDataDir is where the data lies without --data: in the user's XDG data
// directory, or in /var/lib for a process that has no home. getenv is os.Getenv.
func defaultDataDir(getenv func(string) string) string {
	if d := getenv("XDG_DATA_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "kvtier")
	}
	if h := getenv("HOME"); filepath.IsAbs(h) {
		return filepath.Join(h, ".local", "share", "kvtier")
	}
	return "/var/lib/kvtier"
}

// dataDir is the absolute path of the data directory that a flag names, or else of
// the default one.
func dataDir(flag string) (string, error) {
	if flag == "" {
		flag = defaultDataDir(os.Getenv)
	}
	return filepath.Abs(flag)
}

// freeMemory is how much memory this process could still take: what the kernel
// calls available, or the limit of a cgroup around it when that is less. root is
// the file system, os.DirFS("/"). what names the bound that counted.
func freeMemory(root fs.FS) (n int64, what string, err error) {
	return memory(root, "MemAvailable", "available memory")
}

// totalMemory is the most memory that this process could ever take: the
// machine's, or the limit of a cgroup around it when that is less. root and what
// are as in freeMemory.
func totalMemory(root fs.FS) (n int64, what string, err error) {
	return memory(root, "MemTotal", "the machine's memory")
}

// memory is a field of /proc/meminfo, called name, or the cgroup's limit when
// that is less.
func memory(root fs.FS, field, name string) (n int64, what string, err error) {
	if n, err = meminfo(root, field); err != nil {
		return 0, "", err
	}
	what = name
	if limit, ok := cgroupLimit(root); ok && limit < n {
		n, what = limit, "the cgroup's memory limit"
	}
	return n, what, nil
}

// meminfo reads a field of /proc/meminfo.
func meminfo(root fs.FS, field string) (int64, error) {
	data, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("find memory: %w", err)
	}
	sc := bufio.NewScanner(bytes.NewReader(data))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) >= 2 && f[0] == field+":" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil || kib < 0 || kib > math.MaxInt64>>10 {
				return 0, fmt.Errorf("find memory: /proc/meminfo: %s %q", field, f[1])
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("find memory: /proc/meminfo has no %s", field)
}

// cgroupLimit is the least memory limit of the cgroups that this process is in,
// of version 2 (memory.max and memory.high) or 1 (memory.limit_in_bytes).
func cgroupLimit(root fs.FS) (int64, bool) {
	data, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return 0, false // no cgroups
	}
	least := int64(math.MaxInt64)
	sc := bufio.NewScanner(bytes.NewReader(data))
	for sc.Scan() {
		// hierarchy-ID:controllers:path
		f := strings.SplitN(sc.Text(), ":", 3)
		if len(f) != 3 {
			continue
		}
		switch {
		case f[0] == "0" && f[1] == "":
			least = min(least, limitUpwards(root, "sys/fs/cgroup", f[2], "memory.max", "memory.high"))
		case hasController(f[1], "memory"):
			least = min(least, limitUpwards(root, "sys/fs/cgroup/memory", f[2], "memory.limit_in_bytes"))
		}
	}
	// Version 1 writes "no limit" as the largest multiple of a page.
	return least, least < math.MaxInt64-1<<20
}

func hasController(list, name string) bool {
	for c := range strings.SplitSeq(list, ",") {
		if c == name {
			return true
		}
	}
	return false
}

// limitUpwards is the least value that the files of a cgroup and of those
// around it have. In a container the path may be that of the host: then only
// the mount's own top is there, and it is the container's.
func limitUpwards(root fs.FS, mount, cgroup string, files ...string) int64 {
	least := int64(math.MaxInt64)
	for dir := path.Clean("/" + cgroup); ; dir = path.Dir(dir) {
		for _, name := range files {
			data, err := fs.ReadFile(root, path.Join(mount, dir, name))
			if err != nil {
				continue
			}
			if n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64); err == nil && n > 0 {
				least = min(least, n)
			}
		}
		if dir == "/" {
			return least
		}
	}
}

// autoDRAM is the size of the DRAM tier when free bytes of memory are to be had.
func autoDRAM(free int64) (int64, error) {
	n := free / autoDRAMShare / dramUnit * dramUnit
	if n < minAutoDRAM {
		return 0, fmt.Errorf("choose --dram: %s of memory is too little to choose from; give --dram SIZE", formatSizeShort(free))
	}
	return min(n, maxAutoDRAM), nil
}

// autoSlab is the size of a new slab on a file system with free bytes of space,
// or 0 when it has no room for one.
func autoSlab(free int64) int64 {
	if free < 2*minAutoSlab {
		return 0 // the smallest slab would take more than half of what is left
	}
	n := free / autoSlabShare / slabUnit * slabUnit
	return min(max(n, minAutoSlab), maxAutoSlab)
}

// freeSpace is the space that an unprivileged user may take on the file system
// of dir, or of the nearest directory above that exists.
func freeSpace(dir string) (int64, error) {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			return int64(st.Bavail) * st.Bsize, nil
		}
		up := filepath.Dir(dir)
		if !errors.Is(err, fs.ErrNotExist) || up == dir {
			return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
		}
		dir = up
	}
}
