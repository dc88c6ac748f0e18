package e2e

import (
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// objectPoints are passed when blocks go into an object; see crashPoints.
var objectPoints = []point{{"object-intent", 3}, {"object-written", 3}, {"object-committed", 3}}

// TestObjectCrashPoints has daemons die when an object was announced in the catalog, when it
// is in the bucket, and when its blocks are recorded. The next one serves all that was
// acknowledged as durable, also what had gone into the bucket before; each block that it
// lists can be read, so it believes in no object that is not there, and its uploads go on.
func TestObjectCrashPoints(t *testing.T) {
	withoutRace(t)
	_, url := bucketOf(t)
	const size, most = 1 << 20, 400
	length := func(int) int { return size }
	for _, at := range objectPoints {
		t.Run(at.name, func(t *testing.T) {
			dir := t.TempDir()
			args := onLoopback("--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=64MiB",
				"--object", url, "--cluster", "west")
			cmd := exec.Command(checked, args...)
			cmd.Env = []string{"KVTIER_CRASH=" + at.name + ":3"}
			d := mustReady(startCommand(t, cmd))
			c := dial(t, d)
			ns := open(t, c, at.name, size)
			var acked []int
			for i := range most {
				res, err := c.Put(timeout(t), ns, []api.PutItem{{Hash: hashOf(i), Data: payload(i, size)}}, api.PutOptions{Durable: block.G3})
				if err != nil {
					break
				}
				if res[0].Err == nil {
					acked = append(acked, i)
				}
			}
			if len(acked) == most {
				t.Fatal("it does not die")
			}
			d.wait()
			if s, _ := d.cmd.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() || s.Signal() != syscall.SIGKILL {
				t.Fatalf("it ended with %v:\n%s", d.cmd.ProcessState, d.stderr)
			}

			d = mustReady(startCommand(t, exec.Command(checked, args...)))
			c = dial(t, d)
			ns = open(t, c, at.name, size)
			far := tierStats(t, c, block.G4).Blocks
			if missed := get(timeout(t), t, c, ns, acked, length); len(missed) > 0 {
				t.Errorf("of %d blocks that were acknowledged some are missed: %v", len(acked), missed)
			}
			put(t, c, ns, most, 64, size, block.G3)
			until(t, "more goes into the bucket", func() bool { return tierStats(t, c, block.G4).Blocks > far })
			wantListed(t, c, ns, most+64, size)
			d.stop(0)

			d = mustReady(startCommand(t, exec.Command(checked, args...)))
			c = dial(t, d)
			if missed := get(timeout(t), t, c, ns, append(acked, numbers(most, 64)...), length); len(missed) > 0 {
				t.Errorf("after another start some are missed: %v", missed)
			}
			t.Logf("%d blocks were acknowledged before it died, %d were in the bucket", len(acked), far)
			if far == 0 {
				t.Error("nothing was in the bucket when it died")
			}
		})
	}
}

// wantListed wants each block that is listed to be one of the first n, and readable.
func wantListed(t *testing.T, c *api.Client, ns block.Namespace, n, size int) {
	t.Helper()
	names := make(map[block.Hash]int, n)
	for i := range n {
		names[hashOf(i)] = i
	}
	var listed []int
	for cursor := ""; ; {
		entries, next, err := c.List(timeout(t), ns, cursor, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			i, ok := names[e.Hash]
			if !ok {
				t.Fatalf("block %s is listed, and nobody put it", e.Hash)
			}
			listed = append(listed, i)
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	if missed := get(timeout(t), t, c, ns, listed, func(int) int { return size }); len(missed) > 0 {
		t.Errorf("of %d blocks that are listed some are missed: %v", len(listed), missed)
	}
}
