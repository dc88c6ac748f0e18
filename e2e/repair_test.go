package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// TestNoneComesBack: of blocks that were deleted, cleared or have expired none comes
// back, when the daemon stopped in order or was killed and the catalog is made anew
// from the slab; all others do.
func TestNoneComesBack(t *testing.T) {
	withoutRace(t)
	const n = 100
	for _, end := range []string{"stop", "kill"} {
		for _, lost := range []string{"all", ".log", "MANIFEST-*"} {
			t.Run(end+"/"+lost, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				data := filepath.Join(dir, "data")
				args := []string{"--data", data, "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab") + "=128MiB"}
				d := serve(t, args...)
				c := dial(t, d)
				ns, other := open(t, c, "kept", stopBytes), open(t, c, "cleared", stopBytes)
				put(t, c, ns, 0, 2*n, stopBytes, block.G3)
				put(t, c, other, 0, n, stopBytes, block.G3)
				var items []api.PutItem
				for _, i := range numbers(2*n, n) {
					items = append(items, api.PutItem{Hash: hashOf(i), Data: payload(i, stopBytes)})
				}
				if _, err := c.Put(timeout(t), ns, items, api.PutOptions{Durable: block.G3, TTL: 2 * time.Second}); err != nil {
					t.Fatal(err)
				}
				expired := time.Now().Add(4 * time.Second)
				var hashes []block.Hash
				for _, i := range numbers(n, n) {
					hashes = append(hashes, hashOf(i))
				}
				if k, err := c.Delete(timeout(t), ns, hashes); err != nil || k != n {
					t.Fatalf("delete: %d, %v", k, err)
				}
				if k, err := c.Clear(timeout(t), other); err != nil || k != n {
					t.Fatalf("clear: %d, %v", k, err)
				}
				put(t, c, other, n, n, stopBytes, block.G3)
				if end == "stop" {
					d.stop(0)
				} else {
					d.kill()
				}

				catalog := filepath.Join(data, "catalog")
				if lost == "all" {
					if err := os.RemoveAll(catalog); err != nil {
						t.Fatal(err)
					}
				} else {
					names, err := filepath.Glob(filepath.Join(catalog, "*"+lost))
					if err != nil || len(names) == 0 {
						t.Fatal(names, err)
					}
					for _, name := range names {
						if err := os.Remove(name); err != nil {
							t.Fatal(err)
						}
					}
				}
				// A catalog that is not whole is none to serve with.
				if r := command(t, nil, onLoopback(args...)...); r.code != 1 {
					t.Fatalf("serve without a repair: exit code %d, %s", r.code, r.stderr)
				}
				time.Sleep(time.Until(expired))
				must(t, "repair", "--data", data)

				d = serve(t, args...)
				c = dial(t, d)
				ns, other = open(t, c, "kept", stopBytes), open(t, c, "cleared", stopBytes)
				for _, w := range []struct {
					ns        block.Namespace
					what      string
					first     int
					mustThere bool
				}{
					{ns, "kept", 0, true},
					{ns, "deleted", n, false},
					{ns, "expired", 2 * n, false},
					{other, "cleared", 0, false},
					{other, "put after the clearing", n, true},
				} {
					missed := get(timeout(t), t, c, w.ns, numbers(w.first, n), sameSize)
					if w.mustThere && len(missed) != 0 || !w.mustThere && len(missed) != n {
						t.Errorf("%s: %d of %d are there", w.what, n-len(missed), n)
					}
				}
				d.stop(0)
				if k := verify(t, data); k != 2*n {
					t.Errorf("%d blocks are committed, want %d", k, 2*n)
				}
			})
		}
	}
}

// TestDeletedAfterCrash: a daemon dies when a block is written and not yet recorded.
// When the block is deleted in the next one, a repair does not raise it, also when
// that daemon dies before the delete is answered. One that is not deleted it may.
func TestDeletedAfterCrash(t *testing.T) {
	withoutRace(t)
	for name, second := range map[string]string{"answered": "", "not answered": "KVTIER_CRASH=tombstones:2"} { // the first passage is the start's
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			data := filepath.Join(dir, "data")
			args := onLoopback("--data", data, "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=128MiB")
			run := func(env string) *daemon {
				cmd := exec.Command(checked, args...)
				if env != "" {
					cmd.Env = []string{env}
				}
				return mustReady(startCommand(t, cmd))
			}
			d := run("KVTIER_CRASH=g3-written")
			c := dial(t, d)
			ns := open(t, c, "kept", stopBytes)
			items := []api.PutItem{{Hash: hashOf(1), Data: payload(1, stopBytes)}}
			if _, err := c.Put(timeout(t), ns, items, api.PutOptions{Durable: block.G3}); err == nil {
				t.Fatal("a put was answered by a daemon that died")
			}
			d.wait()

			d = run(second)
			c = dial(t, d)
			ns = open(t, c, "kept", stopBytes)
			n, err := c.Delete(timeout(t), ns, []block.Hash{hashOf(1)})
			if answered := err == nil; answered != (second == "") || n != 0 {
				t.Fatalf("delete: %d, %v", n, err)
			}
			if second == "" {
				d.kill()
			} else {
				d.wait()
			}
			if err := os.RemoveAll(filepath.Join(data, "catalog")); err != nil {
				t.Fatal(err)
			}
			if out := must(t, "repair", "--data", data); !strings.Contains(out, "new catalog of 0 blocks") || !strings.Contains(out, " 1 stale") {
				t.Errorf("repair: %s", out)
			}
		})
	}
}
