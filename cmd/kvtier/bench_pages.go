package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// hugePagesFile is where Linux keeps how many huge pages are set aside.
const hugePagesFile = "/proc/sys/vm/nr_hugepages"

// reservePages has the kernel set aside huge pages for so many bytes of memory that
// processes share, until the returned function gives them back. Where that cannot be
// it says so: then everything that is measured is on small pages, the limit as well.
func (b *bench) reservePages(bytes int64) (reserved bool, giveBack func() error) {
	none := func() error { return nil }
	before, err := readCount(hugePagesFile)
	if err != nil {
		b.note("note: no huge pages for shared memory: %v", err)
		return false, none
	}
	free, err := freeHugePages(os.DirFS("/"))
	if err != nil {
		b.note("note: no huge pages for shared memory: %v", err)
		return false, none
	}
	want := (bytes + hugePage - 1) / hugePage
	if free >= want {
		return true, none
	}
	if err := os.WriteFile(hugePagesFile, []byte(strconv.FormatInt(before+want-free, 10)), 0); err != nil {
		b.note("note: no huge pages for shared memory, so all is measured on small ones: %v", err)
		return false, none
	}
	// The kernel may have set aside fewer. Only these go back: somebody else may have added
	// some meanwhile.
	after, err := readCount(hugePagesFile)
	if err != nil {
		after = before + want - free
	}
	giveBack = func() error {
		now, err := readCount(hugePagesFile)
		if err == nil {
			err = os.WriteFile(hugePagesFile, []byte(strconv.FormatInt(max(0, now-(after-before)), 10)), 0)
		}
		if err != nil {
			return fmt.Errorf("give huge pages back: %w", err)
		}
		return nil
	}
	if free, err = freeHugePages(os.DirFS("/")); err != nil || free < want {
		b.note("note: only %d of %d huge pages could be set aside for shared memory, so all is measured on small ones", free, want)
		return false, giveBack
	}
	return true, giveBack
}

// hugePage is the size of a huge page.
const hugePage = 2 << 20

func readCount(path string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// freeHugePages is how many reserved huge pages nobody uses. root is the file
// system, os.DirFS("/").
func freeHugePages(root fs.FS) (int64, error) {
	data, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, err
	}
	return numberAfter(string(data), "HugePages_Free:")
}

// cpuTime is the processor time that a process has used, all threads together.
func cpuTime(pid int) (time.Duration, error) {
	// The clock of another process's CPU time, as clock_getcpuclockid(3) makes it.
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// cpuOf runs fn and returns the processor time that this process and another one
// used meanwhile.
func cpuOf(ctx context.Context, pid int, fn func(ctx context.Context) error) (time.Duration, error) {
	var sum time.Duration
	for i, sign := range []time.Duration{-1, 1} {
		for _, p := range []int{os.Getpid(), pid} {
			t, err := cpuTime(p)
			if err != nil {
				return 0, err
			}
			sum += sign * t
		}
		if i == 0 {
			if err := fn(ctx); err != nil {
				return 0, err
			}
		}
	}
	return sum, nil
}
