package arena

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Obtained is what the host gave of what was asked for.
type Obtained struct {
	Bytes       int64    // mapped
	PageBytes   int64    // page size that the whole arena has at least
	HugeBytes   int64    // on huge pages
	LockedBytes int64    // locked in memory
	Populated   bool     // every page was made present
	Warnings    []string // what was not given, and why
}

// Obtained reports what the host gave. The page sizes are those found when
// populating ended, since walking the page tables of a large arena is slow; an
// arena that was never populated is measured by each call.
func (a *Arena) Obtained() Obtained {
	select {
	case <-a.populated:
		a.mu.Lock()
		measured := a.mu.measured
		a.mu.Unlock()
		if !measured {
			if got, err := a.measure(); err == nil {
				return got
			}
		}
	default:
	}
	return a.snapshot()
}

func (a *Arena) snapshot() Obtained {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.mu.obtained
	o.Warnings = slices.Clone(o.Warnings)
	return o
}

func (a *Arena) warn(s string) {
	a.log.Warn("arena", "bytes", a.size, "warning", s)
	a.mu.Lock()
	a.mu.obtained.Warnings = append(a.mu.obtained.Warnings, s)
	a.mu.Unlock()
}

// measure reads page sizes from the kernel.
func (a *Arena) measure() (Obtained, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return Obtained{}, fmt.Errorf("measure page size: %w", err)
	}
	defer f.Close()
	huge, page, err := scanSmaps(f, a.chunks)
	if err != nil {
		return Obtained{}, fmt.Errorf("measure page size: %w", err)
	}
	if huge >= a.size {
		page = HugeBytes
	}
	a.mu.Lock()
	a.mu.measured = a.mu.obtained.Populated
	a.mu.obtained.HugeBytes = huge
	a.mu.obtained.PageBytes = page
	a.mu.Unlock()
	return a.snapshot(), nil
}

// scanSmaps sums what of the chunks lies on huge pages and finds the smallest
// kernel page size among them. The format is proc_pid_smaps(5): a line
// "start-end perms ..." per mapping, followed by "Name: value kB" lines.
func scanSmaps(r io.Reader, chunks [][]byte) (huge, page int64, err error) {
	const (
		anonHuge  = "AnonHugePages:"
		shmemHuge = "ShmemPmdMapped:"
		pageSize  = "KernelPageSize:"
		hugetlb   = "Private_Hugetlb:"
		hugetlbSh = "Shared_Hugetlb:"
	)
	inside := false
	s := bufio.NewScanner(r)
	for s.Scan() {
		name, rest, _ := strings.Cut(s.Text(), " ")
		if from, to, ok := strings.Cut(name, "-"); ok && !strings.HasSuffix(name, ":") {
			a, errA := strconv.ParseUint(from, 16, 64)
			b, errB := strconv.ParseUint(to, 16, 64)
			if errA != nil || errB != nil {
				return 0, 0, fmt.Errorf("mapping %q: not a range of addresses", name)
			}
			inside = slices.ContainsFunc(chunks, func(c []byte) bool {
				return a >= Addr(c) && b <= Addr(c)+uint64(len(c))
			})
			continue
		}
		if !inside {
			continue
		}
		switch name {
		case anonHuge, shmemHuge, pageSize, hugetlb, hugetlbSh:
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, 0, fmt.Errorf("field %s %q: not a number of kB", name, rest)
			}
			if name != pageSize {
				huge += kib << 10
			} else if page == 0 || kib<<10 < page {
				page = kib << 10
			}
		}
	}
	return huge, page, s.Err()
}

// whyNoHuge quotes the settings that decide over huge pages.
func whyNoHuge(memfd bool) string {
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return err.Error()
		}
		return strings.TrimSpace(string(b))
	}
	const thp = "/sys/kernel/mm/transparent_hugepage/"
	if memfd {
		return "shmem_enabled is " + read(thp+"shmem_enabled") + ", free huge pages " +
			read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	}
	return "transparent_hugepage is " + read(thp+"enabled")
}
