package tiers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// disk is a block device that is neither a partition nor made of others.
type disk struct {
	name   string // in /sys/block, and of its node in /dev
	number uint64 // of the node
}

// disksUnder finds the disks on which a block device lies, of which number is the
// device number: the whole device of a partition, and the members of a device mapping
// or an array, through all layers. sys is where sysfs is mounted. A file system that
// has no block device of its own, as an overlay or one of several devices, is an error.
func disksUnder(sys string, number uint64) ([]disk, error) {
	at := strconv.Itoa(int(unix.Major(number))) + ":" + strconv.Itoa(int(unix.Minor(number)))
	top, err := filepath.EvalSymlinks(filepath.Join(sys, "dev", "block", at))
	if err != nil {
		return nil, fmt.Errorf("block device %s: %w", at, err)
	}
	var disks []disk
	seen := map[string]bool{} // two members may be partitions of one disk
	for next := []string{top}; len(next) > 0; {
		dir := next[0]
		next = next[1:]
		if _, err := os.Lstat(filepath.Join(dir, "partition")); err == nil {
			dir = filepath.Dir(dir)
		}
		if seen[dir] {
			continue
		}
		seen[dir] = true
		members, err := os.ReadDir(filepath.Join(dir, "slaves"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, m := range members {
			to, err := filepath.EvalSymlinks(filepath.Join(dir, "slaves", m.Name()))
			if err != nil {
				return nil, err
			}
			next = append(next, to)
		}
		if len(members) > 0 {
			continue
		}
		number, err := deviceNumber(dir)
		if err != nil {
			return nil, err
		}
		disks = append(disks, disk{name: filepath.Base(dir), number: number})
	}
	return disks, nil
}

// deviceNumber reads the device number of a block device from its directory in sysfs.
func deviceNumber(dir string) (uint64, error) {
	path := filepath.Join(dir, "dev")
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	major, minor, _ := strings.Cut(strings.TrimSpace(string(b)), ":")
	ma, err := strconv.ParseUint(major, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	mi, err := strconv.ParseUint(minor, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return unix.Mkdev(uint32(ma), uint32(mi)), nil
}
