package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/internal/arena"
)

// hugePagesFile is where Linux keeps how many huge pages are set aside.
const hugePagesFile = "/proc/sys/vm/nr_hugepages"

// reservePages has the kernel set aside huge pages for so many bytes of memory that
// processes share, until the returned function gives them back. Where that cannot be
// it says so: then everything that is measured is on the pages that shared memory has
// without, the limit as well. huge says whether these are huge ones.
func (b *bench) reservePages(bytes int64) (huge bool, giveBack func() error) {
	none := func() error { return nil }
	before, err := readCount(hugePagesFile)
	if err != nil {
		return b.unreserved(err), none
	}
	free, err := freeHugePages(os.DirFS("/"))
	if err != nil {
		return b.unreserved(err), none
	}
	want := (bytes + hugePage - 1) / hugePage
	if free >= want {
		return true, none
	}
	if err := os.WriteFile(hugePagesFile, []byte(strconv.FormatInt(before+want-free, 10)), 0); err != nil {
		return b.unreserved(err), none
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
		// Else the daemon would take those that there are, and the limit would not.
		err = errors.Join(fmt.Errorf("only %d of %d could be set aside", free, want), err, giveBack())
		return b.unreserved(err), none
	}
	return true, giveBack
}

// unreserved tells that no huge pages are set aside, and why, and on which pages
// shared memory is then.
func (b *bench) unreserved(why error) (huge bool) {
	kind := "small"
	trial, err := arena.New(arena.HugeBytes, &arena.Options{Memfd: true, Reserved: arena.ReservedNever})
	if err == nil {
		if huge = trial.Obtained().PageBytes >= arena.HugeBytes; huge {
			kind = "huge"
		}
		err = trial.Close()
	}
	b.note("note: no huge pages are set aside for shared memory, so all is measured on the pages that it has without, %s ones: %v", kind, errors.Join(why, err))
	return huge
}

// checkPages tells when a daemon's memory is on other pages than the limit's.
func (b *bench) checkPages(ctx context.Context, admin *api.Client, limit *arena.Arena) error {
	var got int64
	for range settleTries { // until it is populated
		st, err := admin.Stats(ctx)
		if err != nil {
			return err
		}
		if got = st.Tiers[0].Devices[0].PageBytes; got > 0 {
			break
		}
		select {
		case <-time.After(settleEvery):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if want := limit.Obtained().PageBytes; got != want {
		b.note("note: the daemon's memory is on pages of %s, the limit's on pages of %s: the ratios are off", formatSizeShort(got), formatSizeShort(want))
	}
	return nil
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
