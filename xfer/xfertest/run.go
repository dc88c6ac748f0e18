// Package xfertest is the conformance suite and benchmark of transfer
// backends: Run checks every sentence of the contract in xfer/backend.go, on a
// bare backend where the contract is with the agent, and through an agent
// where it is with its users. A backend's own test says how to make one and, for
// each memory type other than DRAM, how to make memory that the suite can look at
// by itself. RunRemote does the same for the roles Remote and Notifier, with two
// agents, in one process and in two.
//
// For tests of what uses backends, Faulty and Injector wrap one to make it fail on
// purpose, by a rule that stays or one that changes, and Volatile to make it lose
// what was not flushed.
package xfertest

import (
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/xfer"
)

// Harness tells the suite about a backend.
type Harness struct {
	// New makes a fresh backend, which the suite closes. It skips the test when
	// what the backend needs is missing.
	New func(t testing.TB) xfer.Backend

	// Memory makes memory of each type that the backend's Caps name; DRAM is
	// there already. It skips the test when that cannot be had here.
	Memory map[xfer.MemType]func(t testing.TB, size int64) Memory

	// Absent describes something of an unbounded type that does not exist and
	// that registering does not create, if there is such a thing.
	Absent map[xfer.MemType]func(t testing.TB) xfer.Desc

	// MaxBytes bounds the memory that a test moves at once (32 MiB when 0).
	MaxBytes int64

	// Dear says that each piece costs a request of a service: tests that move thousands
	// of pieces move hundreds.
	Dear bool
}

// few is a number of pieces or rounds, or a tenth of it where they are dear.
func (h Harness) few(n int) int {
	if h.Dear {
		return (n + 9) / 10
	}
	return n
}

func (h Harness) maxBytes() int64 {
	if h.MaxBytes > 0 {
		return h.MaxBytes
	}
	return 32 << 20
}

func (h Harness) memory(t testing.TB, typ xfer.MemType, size int64) Memory {
	t.Helper()
	if f := h.Memory[typ]; f != nil {
		return f(t, size)
	}
	if typ == xfer.DRAM {
		return DRAM(t, size)
	}
	t.Fatalf("the backend serves %s, but the harness has no such memory", typ)
	return Memory{}
}

// pairs asks a backend which pairs it serves.
func (h Harness) pairs(t testing.TB) []xfer.Pair {
	t.Helper()
	b := h.New(t)
	pairs := b.Caps().Pairs
	if err := b.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return pairs
}

var ops = []xfer.Op{xfer.Write, xfer.Read}

// Run checks a backend against its contract.
func Run(t *testing.T, h Harness) {
	leaks := goleak.IgnoreCurrent()
	t.Run("identity", func(t *testing.T) { testIdentity(t, h) })
	t.Run("leaves nothing", func(t *testing.T) { testLeavesNothing(t, h) })
	for _, pair := range h.pairs(t) {
		t.Run(pair.Local.String()+"-"+pair.Remote.String(), func(t *testing.T) {
			for _, c := range []struct {
				name string
				test func(*testing.T, Harness, xfer.Pair)
			}{
				{"lengths and offsets", testLengths},
				{"scatter lists", testScatter},
				{"large", testLarge},
				{"regions", testRegions},
				{"done", testDone},
				{"concurrent requests", testConcurrent},
				{"concurrent neighbours", testNeighbours},
				{"repost", testRepost},
				{"prepared lists", testPreparedLists},
				{"cancel before", testCancelBefore},
				{"cancel during", testCancelDuring},
				{"cancel a request", testCancelRequest},
				{"cancel after", testCancelAfter},
				{"deadline", testDeadline},
				{"each", testEach},
				{"misuse", testMisuse},
				{"close in flight", testCloseInFlight},
				{"register often", testRegisterOften},
				{"short", testShort},
				{"absent", testAbsent},
				{"query", testQuery},
				{"estimate", testEstimate},
			} {
				t.Run(c.name, func(t *testing.T) { c.test(t, h, pair) })
			}
		})
	}
	// A goroutine that outlives its backend's Close is a leak.
	if err := goleak.Find(leaks); err != nil {
		t.Error(err)
	}
}

// testIdentity: Name and Caps are constant and consistent, Close is safe
// twice.
func testIdentity(t *testing.T, h Harness) {
	b := h.New(t)
	agent, err := xfer.NewAgent("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.AddBackend(b); err != nil {
		t.Fatalf("an agent does not adopt the backend: %v", err)
	}
	info := agent.Backends()[0]
	other := h.New(t)
	if b.Name() != info.Name || other.Name() != info.Name {
		t.Errorf("Name is not constant: %q, %q, %q", info.Name, b.Name(), other.Name())
	}
	if info.Caps.Align&(info.Caps.Align-1) != 0 {
		t.Errorf("Caps.Align %d is no power of two", info.Caps.Align)
	}
	if info.Caps.Engine == "" {
		t.Error("Caps.Engine is empty")
	}
	if err := agent.Close(); err != nil {
		t.Errorf("close agent: %v", err)
	}
	for range 2 { // both are closed a second time here
		for _, b := range []xfer.Backend{b, other} {
			if err := b.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
	}
}

// testLeavesNothing: goroutines, file descriptors and mappings are gone when
// Close returns.
func testLeavesNothing(t *testing.T, h Harness) {
	pair := h.pairs(t)[0] // the first use also opens what the runtime keeps
	live := func(t *testing.T) {
		g := newRig(t, h, pair, 64<<10)
		g.move(t.Context(), xfer.Write, stripes(16, 4096)...)
		g.move(t.Context(), xfer.Read, stripes(64, 1000)...)
	}
	t.Run("first", live)
	leaks := goleak.IgnoreCurrent()
	fds, maps := openFiles(t), mappedFiles(t)
	t.Run("second", live)
	if err := goleak.Find(leaks); err != nil {
		t.Error(err)
	}
	if got := openFiles(t); len(got) > len(fds) {
		t.Errorf("open files before: %q\nand after: %q", fds, got)
	}
	if got := mappedFiles(t); len(got) > len(maps) {
		t.Errorf("mapped files before: %q\nand after: %q", maps, got)
	}
}

// openFiles lists what the process's descriptors refer to.
func openFiles(t testing.TB) []string {
	t.Helper()
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var open []string
	for _, e := range entries {
		// The descriptor of the directory itself is closed by now.
		if target, err := os.Readlink(dir + "/" + e.Name()); err == nil {
			open = append(open, target)
		}
	}
	return open
}

// mappedFiles lists mappings that are not plain memory, such as rings.
func mappedFiles(t testing.TB) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	var mapped []string
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 5 && !strings.HasPrefix(f[5], "[") {
			mapped = append(mapped, strings.Join(f[5:], " "))
		}
	}
	return mapped
}
