package e2e

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

const stopBytes = 64 << 10

func sameSize(int) int { return stopBytes }

// TestStopKeeps: a clean stop brings down what is only in DRAM.
func TestStopKeeps(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	d := serve(t, "--data", data, "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=256MiB")
	c := dial(t, d)
	ns := open(t, c, "stop", stopBytes)
	put(t, c, ns, 0, 300, stopBytes, block.G2)
	if n := tierStats(t, c, block.G3).Blocks; n != 0 {
		t.Fatalf("%d blocks are in g3 before the stop; this test needs them in g2 only", n)
	}
	d.stop(0)
	if n := verify(t, data); n != 300 {
		t.Errorf("%d blocks are committed after the stop, want 300", n)
	}

	// The data directory knows its slabs.
	d = serve(t, "--data", data, "--dram", "64MiB")
	c = dial(t, d)
	ns = open(t, c, "stop", stopBytes)
	if missed := get(timeout(t), t, c, ns, numbers(0, 300), sameSize); len(missed) != 0 {
		t.Errorf("%d of 300 blocks are gone after a clean stop", len(missed))
	}
	d.stop(0)
}

// left reads what the message of a stop that lost blocks says.
var left = regexp.MustCompile(`stopped, but (\d+) blocks that were only in DRAM are gone, (\d+) were brought down`)

// TestStopLoses: a clean stop that cannot keep every block says how many are
// gone and exits with 3. What it brought down is there.
func TestStopLoses(t *testing.T) {
	withoutRace(t)
	for _, tt := range []struct {
		name  string
		slab  string
		extra []string
		why   string
	}{
		{"no room", "80MiB", nil, "no room"},
		{"no time", "1GiB", []string{"--drain-timeout", "0s"}, "--drain-timeout 0s was over"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			data := filepath.Join(dir, "data")
			d := serve(t, append([]string{"--data", data, "--dram", "256MiB", "--nvme", filepath.Join(dir, "slab") + "=" + tt.slab}, tt.extra...)...)
			c := dial(t, d)
			ns := open(t, c, "stop", stopBytes)
			const blocks = 2400 // 150 MiB
			put(t, c, ns, 0, blocks, stopBytes, block.G2)
			d.stop(3)
			m := left.FindStringSubmatch(d.stderr.String())
			if m == nil || !strings.Contains(d.stderr.String(), tt.why) {
				t.Fatalf("the daemon did not say what is gone and why (%s):\n%s", tt.why, d.stderr)
			}

			// What it brought down is committed. It may be above the watermark, so
			// that the next daemon evicts some of it at once.
			if kept := verify(t, data); m[2] != itoa(int(kept)) || m[1] != itoa(blocks-int(kept)) {
				t.Errorf("%q, but %d of %d blocks are committed", m[0], kept, blocks)
			}
			d = serve(t, "--data", data, "--dram", "256MiB")
			c = dial(t, d)
			ns = open(t, c, "stop", stopBytes)
			if missed := get(timeout(t), t, c, ns, numbers(0, blocks), sameSize); tt.slab == "80MiB" && len(missed) == blocks {
				t.Error("nothing is left of what it brought down")
			}
			d.stop(0)
		})
	}
}

// TestStopWithoutNVMe: nothing can be kept, and nothing was promised.
func TestStopWithoutNVMe(t *testing.T) {
	withoutRace(t)
	d := serve(t, "--data", filepath.Join(t.TempDir(), "data"), "--dram", "64MiB", "--nvme", "none")
	c := dial(t, d)
	ns := open(t, c, "stop", stopBytes)
	put(t, c, ns, 0, 10, stopBytes, block.G2)
	r := command(t, strings.NewReader(strings.Repeat("x", stopBytes)), "put", "--server", d.addr, "--namespace", "durable", "--max-block-bytes", "64KiB", "--durable", "g3", "0011223344556677", "-")
	if r.code != 1 || !strings.Contains(r.stderr, "g3") {
		t.Errorf("a durable put without an NVMe tier: exit code %d, %q, want 1 and a reason that names g3", r.code, r.stderr)
	}
	d.stop(0)
}
