package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// faultDeadline is the deadline of calls during a fault. They end by then; what
// is added is for a machine that does other things.
const (
	faultDeadline = 3 * time.Second
	faultSlack    = 2 * time.Second
)

// tryPut puts blocks of n bytes in one stream during a fault, and returns those
// that were stored and how the first other one ended. That must be by the
// deadline, for want of room or of a device.
func tryPut(t *testing.T, c *api.Client, ns block.Namespace, blocks []int, n int, tier block.TierID) (stored []int, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), faultDeadline)
	defer cancel()
	var items []api.PutItem
	for _, i := range blocks {
		items = append(items, api.PutItem{Hash: hashOf(i), Data: payload(i, n)})
	}
	begun := time.Now()
	res, _ := c.Put(ctx, ns, items, api.PutOptions{Durable: tier}) // its error is in the results too
	if took := time.Since(begun); took > faultDeadline+faultSlack {
		t.Errorf("put to %v took %v, its deadline was %v", tier, took, faultDeadline)
	}
	for k, one := range res {
		switch {
		case one.Err == nil:
			stored = append(stored, blocks[k])
		case !errors.Is(one.Err, block.ErrNoSpace) && !errors.Is(one.Err, block.ErrUnavailable):
			t.Errorf("put block %d to %v: %v, want no space or unavailable", blocks[k], tier, one.Err)
		case err == nil:
			err = one.Err
		}
	}
	return stored, err
}

// dramGoesOn puts and gets blocks in DRAM, first and the ones behind it.
func dramGoesOn(t *testing.T, c *api.Client, ns block.Namespace, first int) {
	t.Helper()
	if _, err := tryPut(t, c, ns, numbers(first, 20), stopBytes, block.G2); err != nil {
		t.Errorf("put to DRAM during the fault: %v", err)
	}
	if missed := get(timeout(t), t, c, ns, numbers(first, 20), sameSize); len(missed) != 0 {
		t.Errorf("during the fault %d of 20 blocks in DRAM are missed: %v", len(missed), missed)
	}
}

// TestDiskFull: the file system of the data directory is full for a while. DRAM
// goes on, durable puts are refused, and when there is room again all is well
// without a restart. What was answered is there after a kill.
func TestDiskFull(t *testing.T) {
	withoutRace(t)
	const bytes = 64 << 20
	for _, tt := range []struct {
		name string
		left int64 // for kvtier itself to fill, up to what it keeps free
		// drops: deletes need room too, and find none.
		drops bool
	}{
		{"by another file", 0, true},
		{"by kvtier", bytes/4 + 256<<10, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// Without extents there is no room ahead of the catalog's log.
			disk := ext4(t, bytes, noExtents, "defaults")
			data := filepath.Join(disk, "data")
			args := []string{"--data", data, "--dram", "64MiB", "--nvme", filepath.Join(t.TempDir(), "slab") + "=512MiB"}
			d := serve(t, args...)
			c := dial(t, d)
			ns := open(t, c, "full", stopBytes)
			put(t, c, ns, 0, 50, stopBytes, block.G3)
			put(t, c, ns, 100_000, manySmall, smallBytes, block.G3)

			other := filepath.Join(disk, "other")
			fill(t, other, tt.left)
			small := newSmall(10_000)
			until(t, "a durable put is refused", func() bool { return !small.put(t, c, ns, 500) })
			var deleted []int
			if tt.drops {
				deleted = deleteUntilFull(t, d, c, ns, numbers(100_000, manySmall))
			}
			dramGoesOn(t, c, ns, 100)
			if missed := get(timeout(t), t, c, ns, numbers(0, 50), sameSize); len(missed) != 0 {
				t.Errorf("while the disk is full, blocks are missed: %v", missed)
			}

			if err := os.Remove(other); err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			until(t, "durable puts again", func() bool { return small.put(t, c, ns, 1) })
			took := time.Since(begun)
			catalogState(t, d, block.Healthy)
			small.put(t, c, ns, 200)
			d.kill()

			d = serve(t, args...)
			c = dial(t, d)
			ns = open(t, c, "full", stopBytes)
			if missed := get(timeout(t), t, c, ns, numbers(0, 50), sameSize); len(missed) != 0 {
				t.Errorf("after the restart blocks are missed: %v", missed)
			}
			if missed := get(timeout(t), t, c, ns, small.acked, smallSize); len(missed) != 0 {
				t.Errorf("after the restart %d of %d blocks that were answered as durable are missed: %v", len(missed), len(small.acked), missed)
			}
			if missed := get(timeout(t), t, c, ns, deleted, smallSize); len(missed) != len(deleted) {
				t.Errorf("after the restart %d of %d blocks that were answered as deleted are back", len(deleted)-len(missed), len(deleted))
			}
			t.Attr("did", fmt.Sprintf("%d durable puts and %d deletes answered around the full disk, durable puts again after %v",
				len(small.acked), len(deleted), took.Round(time.Millisecond)))
			d.stop(0)
			verify(t, data)
		})
	}
}

const (
	smallBytes = 100
	// manySmall blocks have more records than there is room for in the log of the
	// catalog, which grows by 1 MiB.
	manySmall = 20_000
)

func smallSize(int) int { return smallBytes }

// small is a row of small blocks, of whose room the records are a good part.
type small struct {
	next  int
	acked []int
}

func newSmall(first int) *small { return &small{next: first} }

// put puts the next n blocks, durable, and says whether all were stored.
func (s *small) put(t *testing.T, c *api.Client, ns block.Namespace, n int) bool {
	t.Helper()
	stored, err := tryPut(t, c, ns, numbers(s.next, n), smallBytes, block.G3)
	s.next += n
	s.acked = append(s.acked, stored...)
	return err == nil
}

// deleteUntilFull deletes blocks, some in each call, until the catalog says that it can
// record no more, and returns those that were answered as deleted.
func deleteUntilFull(t *testing.T, d *daemon, c *api.Client, ns block.Namespace, blocks []int) (deleted []int) {
	t.Helper()
	for some := range slices.Chunk(blocks, 50) {
		var hashes []block.Hash
		for _, i := range some {
			hashes = append(hashes, hashOf(i))
		}
		ctx, cancel := context.WithTimeout(t.Context(), faultDeadline)
		_, err := c.Delete(ctx, ns, hashes)
		cancel()
		switch {
		case err == nil:
			deleted = append(deleted, some...)
		case errors.Is(err, block.ErrNoSpace) || errors.Is(err, block.ErrUnavailable):
			catalogState(t, d, block.Degraded)
			return deleted
		default:
			t.Fatalf("delete: %v, want no space or unavailable", err)
		}
	}
	t.Errorf("%d deletes went well on a full file system", len(deleted))
	return deleted
}

// catalogState waits until kvtier stat says that the catalog is in a state, with
// a reason if that is not healthy.
func catalogState(t *testing.T, d *daemon, want string) {
	t.Helper()
	var s struct {
		Catalog struct{ State, Reason string }
	}
	until(t, "catalog "+want, func() bool {
		decode(t, must(t, "stat", "--server", d.addr, "--json"), &s)
		return s.Catalog.State == want
	})
	if want != block.Healthy && s.Catalog.Reason == "" {
		t.Errorf("the catalog is %s without a reason", want)
	}
}
