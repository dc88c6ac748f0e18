package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// tryGet reads blocks of stopBytes during a fault, and returns why each was
// missed.
func tryGet(t *testing.T, c *api.Client, ns block.Namespace, blocks []int) map[int]block.MissReason {
	t.Helper()
	begun := time.Now()
	missed := get(timeout(t), t, c, ns, blocks, sameSize)
	if took := time.Since(begun); took > faultDeadline+faultSlack {
		t.Errorf("get of %d blocks took %v", len(blocks), took)
	}
	return missed
}

// shrink lets a loop device end after n bytes, 0 for all of its file: what lies
// behind that cannot be read or written, and is there again afterwards.
func shrink(t *testing.T, dev string, n uint64) {
	t.Helper()
	f, err := os.Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err == nil {
		info.Sizelimit = n
		err = unix.IoctlLoopSetStatus64(int(f.Fd()), info)
	}
	if err != nil {
		t.Fatalf("resize %s: %v", dev, err)
	}
}

// deviceState waits until a tier's only device is in a state, with a reason if
// that is not healthy.
func deviceState(t *testing.T, c *api.Client, id block.TierID, want string, prod func()) {
	t.Helper()
	var d block.DeviceStats
	until(t, fmt.Sprintf("%v %s", id, want), func() bool {
		prod()
		d = tierStats(t, c, id).Devices[0]
		return d.State == want
	})
	if want != block.Healthy && (d.Reason == "" || d.Errors == 0) {
		t.Errorf("%v is %s, reason %q, %d errors", id, want, d.Reason, d.Errors)
	}
}

// TestDeviceGone: the device of the slab fails every call for a while. G3 is
// down with a reason, DRAM goes on, and when the device is back so is G3,
// without a restart, with all that it had.
func TestDeviceGone(t *testing.T) {
	dev := loopDevice(t, t.TempDir(), 192<<20)
	data := filepath.Join(t.TempDir(), "data")
	args := []string{"--data", data, "--dram", "64MiB", "--nvme", dev + "=192MiB"}
	d := serve(t, args...)
	c := dial(t, d)
	ns := open(t, c, "gone", stopBytes)
	put(t, c, ns, 0, 100, stopBytes, block.G3)
	d.stop(0)
	d = serve(t, args...) // with nothing in DRAM
	c = dial(t, d)
	ns = open(t, c, "gone", stopBytes)

	shrink(t, dev, 1<<20)
	missed := tryGet(t, c, ns, numbers(0, 20))
	if len(missed) == 0 {
		t.Error("all blocks are read without a device")
	}
	for i, reason := range missed {
		if reason != block.MissUnavailable {
			t.Errorf("block %d: miss: %v, want %v", i, reason, block.MissUnavailable)
		}
	}
	var acked []int
	next := 1000
	more := func() {
		stored, _ := tryPut(t, c, ns, numbers(next, 1), stopBytes, block.G3)
		acked = append(acked, stored...)
		next++
	}
	more()
	deviceState(t, c, block.G3, block.Down, more)
	if len(acked) != 0 {
		t.Errorf("%d durable puts were answered without a device", len(acked))
	}
	dramGoesOn(t, c, ns, 500)
	deviceState(t, c, block.G2, block.Healthy, func() {})

	shrink(t, dev, 0)
	begun := time.Now()
	deviceState(t, c, block.G3, block.Healthy, func() {})
	until(t, "durable puts again", func() bool { more(); return len(acked) > 0 })
	t.Attr("did", fmt.Sprintf("g3 back %v after its device", time.Since(begun).Round(time.Millisecond)))
	if missed := get(timeout(t), t, c, ns, numbers(0, 100), sameSize); len(missed) != 0 {
		t.Errorf("%d of 100 blocks are gone with the fault: %v", len(missed), missed)
	}
	d.kill()
	d = serve(t, args...)
	c = dial(t, d)
	ns = open(t, c, "gone", stopBytes)
	if missed := get(timeout(t), t, c, ns, append(numbers(0, 100), acked...), sameSize); len(missed) != 0 {
		t.Errorf("after the restart %d blocks are gone: %v", len(missed), missed)
	}
	d.stop(0)
	verify(t, data)
}

// TestReadOnly: the kernel takes the file system of slab and catalog for broken
// and makes it read-only. The daemon serves what it has; the next one, on the
// file system mounted anew, has all that was answered.
func TestReadOnly(t *testing.T) {
	withoutRace(t)
	dev := loopDevice(t, t.TempDir(), 384<<20)
	if _, err := tool("mkfs.ext4", "-q", "-m", "0", dev); err != nil {
		servers.Missing(t, "root", err)
	}
	disk := mount(t, dev)
	data := filepath.Join(disk, "data")
	args := []string{"--data", data, "--dram", "64MiB", "--nvme", filepath.Join(disk, "slab") + "=128MiB"}
	d := serve(t, args...)
	c := dial(t, d)
	ns := open(t, c, "ro", stopBytes)
	put(t, c, ns, 0, 100, stopBytes, block.G3)
	d.stop(0)
	d = serve(t, args...)
	c = dial(t, d)
	ns = open(t, c, "ro", stopBytes)

	// A plain remount is refused while files are open for writing.
	if _, err := tool("mount", "-o", "remount,abort", disk); err != nil {
		servers.Missing(t, "root", err)
	}
	acked := 0
	for i := range 3 {
		stored, _ := tryPut(t, c, ns, numbers(1000+i, 1), stopBytes, block.G3)
		acked += len(stored)
	}
	if acked != 0 {
		t.Errorf("%d durable puts were answered on a read-only file system", acked)
	}
	dramGoesOn(t, c, ns, 500)
	for i, reason := range tryGet(t, c, ns, numbers(0, 100)) {
		// A device that fails every write may be out of use for reads too.
		if reason != block.MissUnavailable {
			t.Errorf("block %d: miss: %v, want the bytes or %v", i, reason, block.MissUnavailable)
		}
	}
	// What is in DRAM only cannot be kept, and the stop says so.
	if code := stopCode(d); code != 1 && code != 3 {
		t.Errorf("the stop's exit code is %d, want 1 or 3:\n%s", code, d.stderr)
	}
	if _, err := tool("umount", disk); err != nil {
		t.Fatal(err)
	}
	if _, err := tool("mount", dev, disk); err != nil {
		t.Fatal(err)
	}
	d = serve(t, args...)
	c = dial(t, d)
	ns = open(t, c, "ro", stopBytes)
	if missed := get(timeout(t), t, c, ns, numbers(0, 100), sameSize); len(missed) != 0 {
		t.Errorf("after the restart %d of 100 blocks are gone: %v", len(missed), missed)
	}
	d.stop(0)
	verify(t, data)
}

// stopCode sends SIGTERM and returns the exit code.
func stopCode(d *daemon) int {
	if err := d.cmd.Process.Signal(unix.SIGTERM); err != nil {
		d.t.Error(err)
	}
	return d.wait()
}

// TestSlabCutBelow: the slab's file is cut while a daemon uses it. What is behind
// the cut is a counted miss, and never a signal; the next daemon refuses it.
func TestSlabCutBelow(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	data, slab := filepath.Join(dir, "data"), filepath.Join(dir, "slab")
	args := []string{"--data", data, "--dram", "64MiB", "--nvme", slab + "=128MiB"}
	d := serve(t, args...)
	c := dial(t, d)
	ns := open(t, c, "cut", stopBytes)
	const blocks = 400
	put(t, c, ns, 0, blocks, stopBytes, block.G3)
	d.stop(0)
	d = serve(t, args...)
	c = dial(t, d)
	ns = open(t, c, "cut", stopBytes)
	if err := os.Truncate(slab, 10<<20); err != nil {
		t.Fatal(err)
	}
	missed := tryGet(t, c, ns, numbers(0, blocks))
	if len(missed) == 0 || len(missed) == blocks {
		t.Errorf("%d of %d blocks are missed, want some", len(missed), blocks)
	}
	reasons := map[block.MissReason]int64{}
	for _, why := range missed {
		reasons[why]++
	}
	s, err := c.Stats(timeout(t))
	if err != nil {
		t.Fatal(err)
	}
	for why, n := range reasons {
		if why == block.MissAbsent || s.Misses[why.String()] < n {
			t.Errorf("%d blocks were missed: %v; %d such are counted", n, why, s.Misses[why.String()])
		}
	}
	dramGoesOn(t, c, ns, 1000)
	d.kill()

	before, err := os.Stat(slab) // longer than it was cut to, when something was written behind the cut
	if err != nil {
		t.Fatal(err)
	}
	r := command(t, nil, onLoopback(args...)...)
	if r.code != 1 || !strings.Contains(r.stderr, slab) {
		t.Errorf("a slab that was cut: exit code %d, %q, want 1 and its name", r.code, r.stderr)
	}
	if after, err := os.Stat(slab); err != nil || after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("the slab that was refused was changed: %v, %v", after, err)
	}
}
