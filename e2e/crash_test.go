package e2e

import (
	"errors"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

const largestJournaled = 96 << 10

// journaledBytes is the length of block i in the crash tests: of several slot
// classes, on both sides of where headers change.
func journaledBytes(i int) int {
	return []int{1, 511, 4096, 16 << 10, 64<<10 - 1, 64 << 10, largestJournaled}[i%7]
}

// journal is what a client knows of its blocks from the answers it got.
type journal struct {
	mu struct {
		sync.Mutex
		next    int          // block that nobody has put yet
		durable []int        // answered as durable and not deleted
		unsure  map[int]bool // put or deleted, and not answered
		absent  map[int]bool // answered as deleted, or as refused for want of room
		deletes int          // answered
	}
}

func newJournal() *journal {
	j := &journal{}
	j.mu.unsure, j.mu.absent = map[int]bool{}, map[int]bool{}
	return j
}

// take hands out n new blocks. Until they are answered they may be there or not.
func (j *journal) take(n int) []int {
	j.mu.Lock()
	defer j.mu.Unlock()
	blocks := numbers(j.mu.next, n)
	j.mu.next += n
	for _, i := range blocks {
		j.mu.unsure[i] = true
	}
	return blocks
}

// stored notes a block that was answered as durable.
func (j *journal) stored(i int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.mu.unsure, i)
	j.mu.durable = append(j.mu.durable, i)
}

// takeDurable hands out a durable block that is to be deleted.
func (j *journal) takeDurable(r *rand.Rand) (i int, ok bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.mu.durable) < 100 {
		return 0, false
	}
	at := r.IntN(len(j.mu.durable))
	i = j.mu.durable[at]
	j.mu.durable = slices.Delete(j.mu.durable, at, at+1)
	j.mu.unsure[i] = true
	return i, true
}

// gone notes a block that was answered as not there.
func (j *journal) gone(i int, deleted bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.mu.unsure, i)
	j.mu.absent[i] = true
	if deleted {
		j.mu.deletes++
	}
}

func (j *journal) counts() (durable, deletes int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.mu.durable), j.mu.deletes
}

// putAll puts new blocks until the daemon is gone.
func (j *journal) putAll(t *testing.T, c *api.Client, ns block.Namespace, r *rand.Rand) {
	for {
		blocks := j.take(1 + r.IntN(8))
		var items []api.PutItem
		for _, i := range blocks {
			items = append(items, api.PutItem{Hash: hashOf(i), Data: payload(i, journaledBytes(i))})
		}
		res, err := c.Put(timeout(t), ns, items, api.PutOptions{Durable: block.G3})
		for k, one := range res {
			switch {
			case one.Err == nil:
				j.stored(blocks[k])
			case errors.Is(one.Err, block.ErrNoSpace):
				j.gone(blocks[k], false) // an engine goes on without it
			case err == nil:
				t.Errorf("put block %d: %v", blocks[k], one.Err)
			}
		}
		if err != nil {
			if !errors.Is(err, block.ErrDisconnected) {
				t.Errorf("put: %v", err)
			}
			return
		}
	}
}

// deleteSome deletes durable blocks until the daemon is gone.
func (j *journal) deleteSome(t *testing.T, c *api.Client, ns block.Namespace, r *rand.Rand) {
	for {
		i, ok := j.takeDurable(r)
		if !ok {
			if _, err := c.Ping(timeout(t)); err != nil {
				return
			}
			time.Sleep(time.Millisecond) // so that the puts get ahead
			continue
		}
		n, err := c.Delete(timeout(t), ns, []block.Hash{hashOf(i)})
		switch {
		case err == nil && n != 1:
			t.Errorf("delete of durable block %d: deleted %d", i, n)
		case err == nil:
			j.gone(i, true)
		case !errors.Is(err, block.ErrDisconnected):
			t.Errorf("delete: %v", err)
			return
		default:
			return
		}
	}
}

// judge compares a daemon with the journal: what was answered as durable is
// there with the right bytes, what was answered as deleted is not, and of the
// rest there are the right bytes or none. What is there after all is durable
// from now on.
func (j *journal) judge(t *testing.T, c *api.Client, ns block.Namespace) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for i, reason := range get(timeout(t), t, c, ns, j.mu.durable, journaledBytes) {
		t.Errorf("block %d (%d bytes) was answered as durable and is a miss: %v", i, journaledBytes(i), reason)
	}
	var absent, unsure []int
	for i := range j.mu.absent {
		absent = append(absent, i)
	}
	for i := range j.mu.unsure {
		unsure = append(unsure, i)
	}
	missed := get(timeout(t), t, c, ns, absent, journaledBytes)
	for _, i := range absent {
		if reason, ok := missed[i]; !ok || reason != block.MissAbsent {
			t.Errorf("block %d was answered as deleted or refused and is there (%v)", i, reason)
		}
	}
	missed = get(timeout(t), t, c, ns, unsure, journaledBytes)
	for _, i := range unsure {
		delete(j.mu.unsure, i)
		if _, ok := missed[i]; ok {
			j.mu.absent[i] = true
		} else {
			j.mu.durable = append(j.mu.durable, i)
		}
	}
}

// TestKillDurable kills a daemon again and again amid durable puts and deletes.
// The slab is large enough that nothing is evicted, so the client's journal says
// exactly what must be there.
func TestKillDurable(t *testing.T) {
	rounds := 4
	if soak {
		rounds = 100
	}
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	slab := "1GiB"
	if soak {
		slab = "16GiB"
	}
	args := []string{"--data", data, "--dram", "256MiB", "--nvme", filepath.Join(dir, "slab") + "=" + slab}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	j := newJournal()
	for round := range rounds {
		d := serve(t, args...)
		c := dial(t, d)
		ns := open(t, c, "journal", largestJournaled)
		j.judge(t, c, ns)
		before, beforeDeletes := j.counts()

		var clients sync.WaitGroup
		for range 4 {
			own := rand.New(rand.NewPCG(random.Uint64(), 0))
			clients.Go(func() { j.putAll(t, c, ns, own) })
		}
		own := rand.New(rand.NewPCG(random.Uint64(), 0))
		clients.Go(func() { j.deleteSome(t, c, ns, own) })
		answers := 100 + random.IntN(300)
		until(t, "durable puts", func() bool {
			durable, deletes := j.counts()
			return durable >= before+answers && deletes > beforeDeletes
		})
		d.kill()
		clients.Wait()
		if t.Failed() {
			t.Fatalf("round %d:\n%s", round, d.stderr)
		}
	}
	if n := verify(t, data); n == 0 {
		t.Error("nothing is committed")
	}
	d := serve(t, args...)
	c := dial(t, d)
	ns := open(t, c, "journal", largestJournaled)
	j.judge(t, c, ns)
	durable, deletes := j.counts()
	t.Logf("%d blocks durable, %d deletes", durable, deletes)
	d.stop(0)
	if n := verify(t, data); n != int64(durable) {
		t.Errorf("%d blocks are committed, the journal has %d", n, durable)
	}
}
