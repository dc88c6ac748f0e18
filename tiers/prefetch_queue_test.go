package tiers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// prefetchItems makes items of 10 bytes, a letter a block; '.' is one that needs
// no work.
func prefetchItems(blocks string) []prefetchItem {
	var items []prefetchItem
	for i, c := range blocks {
		if c != '.' {
			items = append(items, prefetchItem{key: block.Key{Hash: block.Hash{byte(c)}}, bytes: 10, index: i})
		}
	}
	return items
}

func mustAdd(t *testing.T, q *prefetchQueue, id, blocks string) *prefetchRequest {
	t.Helper()
	return mustAddWith(t, q, block.PrefetchOptions{ID: id}, blocks)
}

func mustAddWith(t *testing.T, q *prefetchQueue, o block.PrefetchOptions, blocks string) *prefetchRequest {
	t.Helper()
	r, err := q.add(t.Context(), o, len(blocks), prefetchItems(blocks))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// takeAll empties the queue and says in which order.
func takeAll(t *testing.T, q *prefetchQueue) string {
	t.Helper()
	var order strings.Builder
	for {
		it, ok, err := q.take()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return order.String()
		}
		order.WriteByte(it.key.Hash[0])
		q.done(it, block.Hit, block.G2)
	}
}

// outcomes says how each block of a request ended: its tier, or '-' with the
// reason, or '?' while that is open.
func outcomes(r *prefetchRequest) string {
	var s []string
	for i := range r.result {
		switch p, done, _ := r.outcome(i); {
		case !done:
			s = append(s, "?")
		case p.Reason == block.Hit:
			s = append(s, p.Tier.String())
		default:
			s = append(s, "-"+p.Reason.String())
		}
	}
	return strings.Join(s, " ")
}

func TestPrefetchOrder(t *testing.T) {
	for _, c := range []struct {
		name     string
		requests []string
		want     string
	}{
		{"root first", []string{"abcd"}, "abcd"},
		{"in turns", []string{"abcdef", "xy", "1"}, "ax1bycdef"},
		{"gaps", []string{".a..b"}, "ab"},
		{"a block twice in a request", []string{"abab"}, "ab"},
		{"a block in two requests", []string{"ab", "bc"}, "abbc"},
		{"nothing to do", []string{"...", ""}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := newPrefetchQueue(100, 1000)
			defer q.close()
			for _, blocks := range c.requests {
				mustAdd(t, q, "", blocks)
			}
			if got := takeAll(t, q); got != c.want {
				t.Errorf("order %s, want %s", got, c.want)
			}
			if n, bytes := q.pending(); n != 0 || bytes != 0 {
				t.Errorf("%d blocks of %d bytes are pending", n, bytes)
			}
		})
	}
}

func TestPrefetchBounds(t *testing.T) {
	for _, c := range []struct {
		name     string
		items    int
		bytes    int64
		blocks   string
		want     string
		outcomes string
		dropped  int64
	}{
		{"all fit", 3, 30, "abc", "abc", "g2 g2 g2", 0},
		{"too many", 2, 1000, "abcd", "ab", "g2 g2 -no_room -no_room", 2},
		{"too large", 100, 29, "abc", "ab", "g2 g2 -no_room", 1},
		{"one alone may be larger", 100, 5, "ab", "a", "g2 -no_room", 1},
		{"the same block again needs no room", 2, 1000, "abacb", "ab", "g2 g2 g2 -no_room g2", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := newPrefetchQueue(c.items, c.bytes)
			defer q.close()
			r := mustAdd(t, q, "r", c.blocks)
			if got := takeAll(t, q); got != c.want {
				t.Errorf("took %s, want %s", got, c.want)
			}
			if got := outcomes(r); got != c.outcomes {
				t.Errorf("outcomes %s, want %s", got, c.outcomes)
			}
			n := int64(len(c.want))
			if got, want := q.stats(), (block.PrefetchStats{Queued: n, Done: n, Dropped: c.dropped}); got != want {
				t.Errorf("counters %+v, want %+v", got, want)
			}
		})
	}
	// Behind one that does not fit, a smaller one is of no use.
	small := newPrefetchQueue(100, 25)
	defer small.close()
	items := prefetchItems("abc")
	items[1].bytes = 20
	r, err := small.add(t.Context(), block.PrefetchOptions{}, 3, items)
	if err != nil {
		t.Fatal(err)
	}
	if got := outcomes(r); got != "? -no_room -no_room" {
		t.Errorf("with a large block in the middle: %s", got)
	}
	// What is being worked on counts until it is done.
	q := newPrefetchQueue(2, 1000)
	defer q.close()
	mustAdd(t, q, "", "ab")
	it, _, _ := q.take()
	if got := outcomes(mustAdd(t, q, "", "c")); got != "-no_room" {
		t.Errorf("while two are pending: %s", got)
	}
	q.done(it, block.Hit, block.G2)
	if got := outcomes(mustAdd(t, q, "", "c")); got != "?" {
		t.Errorf("with room for one: %s", got)
	}
}

// TestPrefetchPriority: a higher priority goes first, and takes what room it needs from
// the lowest, from the ends of its requests; what others have begun with stays.
func TestPrefetchPriority(t *testing.T) {
	for _, c := range []struct {
		name     string
		items    int
		bytes    int64
		begun    int // blocks that a worker has taken before the last request comes
		requests []string
		want     string // order of the rest
		outcomes string // of all requests, as they are when the last has come
		stats    block.PrefetchStats
	}{
		{"higher first", 100, 1000, 0, []string{"0ab", "2xy", "1no", "2z"}, "xzynoab", "? ?|? ?|? ?|?", block.PrefetchStats{Queued: 7}},
		{"the end of the lowest goes", 4, 1000, 0, []string{"1ab", "0no", "2x"}, "xabn", "? ?|? -no_room|?", block.PrefetchStats{Queued: 5, Displaced: 1}},
		{"then the next one", 4, 1000, 0, []string{"1ab", "0no", "2xyz"}, "xyza", "? -no_room|-no_room -no_room|? ? ?", block.PrefetchStats{Queued: 7, Displaced: 3}},
		{"one request loses all before another loses anything", 4, 1000, 0, []string{"0ab", "0no", "2xy"}, "xyab", "? ?|-no_room -no_room|? ?", block.PrefetchStats{Queued: 6, Displaced: 2}},
		{"not that of an equal", 2, 1000, 0, []string{"1ab", "1x"}, "ab", "? ?|-no_room", block.PrefetchStats{Queued: 2, Dropped: 1}},
		{"nor that of a higher one", 2, 1000, 0, []string{"2ab", "1x"}, "ab", "? ?|-no_room", block.PrefetchStats{Queued: 2, Dropped: 1}},
		{"bytes as well", 100, 40, 0, []string{"0ab", "0no", "2xyz"}, "xyza", "? -no_room|-no_room -no_room|? ? ?", block.PrefetchStats{Queued: 7, Displaced: 3}},
		{"what is begun stays", 2, 1000, 1, []string{"0ab", "2xy"}, "x", "? -no_room|? -no_room", block.PrefetchStats{Queued: 3, Dropped: 1, Displaced: 1}},
		{"nothing goes in vain", 3, 30, 2, []string{"0abc", "2X"}, "c", "? ? ?|-no_room", block.PrefetchStats{Queued: 3, Dropped: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := newPrefetchQueue(c.items, c.bytes)
			defer q.close()
			var rs []*prefetchRequest
			var begun []prefetchItem
			for i, text := range c.requests {
				if i == len(c.requests)-1 {
					for range c.begun {
						it, _, _ := q.take()
						begun = append(begun, it)
					}
				}
				items := prefetchItems(text[1:])
				if text[1:] == "X" {
					items[0].bytes = 20 // more than one takes the place of
				}
				r, err := q.add(t.Context(), block.PrefetchOptions{Priority: text[0] - '0'}, len(items), items)
				if err != nil {
					t.Fatal(err)
				}
				rs = append(rs, r)
			}
			var got []string
			for _, r := range rs {
				got = append(got, outcomes(r))
			}
			if got := strings.Join(got, "|"); got != c.outcomes {
				t.Errorf("outcomes %s, want %s", got, c.outcomes)
			}
			if got := q.stats(); got != c.stats {
				t.Errorf("counters %+v, want %+v", got, c.stats)
			}
			if got := takeAll(t, q); got != c.want {
				t.Errorf("order %s, want %s", got, c.want)
			}
			for _, it := range begun {
				q.done(it, block.Hit, block.G2)
			}
			if n, bytes := q.pending(); n != 0 || bytes != 0 {
				t.Errorf("%d blocks of %d bytes are pending", n, bytes)
			}
		})
	}
}

// TestPrefetchStale: what nobody has begun with when it is of no use any more leaves the
// queue, and who waits is told; what is being brought up goes on.
func TestPrefetchStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newPrefetchQueue(100, 1000)
		defer q.close()
		r := mustAddWith(t, q, block.PrefetchOptions{Within: time.Second}, "abca")
		mustAdd(t, q, "", "xy")
		a, _, _ := q.take()
		time.Sleep(time.Second - 1)
		synctest.Wait()
		if got := outcomes(r); got != "? ? ? ?" {
			t.Errorf("before the time: %s", got)
		}
		if p, err := r.wait(t.Context(), 1); err != nil || p.Reason != block.MissDeadline {
			t.Errorf("who waited got %+v, %v", p, err)
		}
		if a.context().Err() != nil {
			t.Error("what was begun is cancelled")
		}
		q.done(a, block.Hit, block.G2)
		if got := outcomes(r); got != "g2 -deadline -deadline g2" {
			t.Errorf("outcomes %s", got)
		}
		if got := takeAll(t, q); got != "xy" {
			t.Errorf("left in the queue: %s", got)
		}
		// The time of one that has ended does nothing.
		mustAddWith(t, q, block.PrefetchOptions{Within: time.Second}, "de").end(false)
		time.Sleep(2 * time.Second)
		if got, want := q.stats(), (block.PrefetchStats{Queued: 7, Done: 3, Stale: 2, Cancelled: 2}); got != want {
			t.Errorf("counters %+v, want %+v", got, want)
		}
		// So is what is left when the time of the caller is up.
		mustAdd(t, q, "", "fg").end(true)
		if got := q.stats().Stale; got != 4 {
			t.Errorf("%d are stale, want 4", got)
		}
	})
}

func TestPrefetchCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newPrefetchQueue(100, 1000)
		defer q.close()
		r := mustAdd(t, q, "r", ".abc")
		r.know(0, block.Hit, block.G2)
		mustAdd(t, q, "other", "xy")
		if _, err := q.add(t.Context(), block.PrefetchOptions{ID: "r"}, 1, nil); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), `"r"`) {
			t.Errorf("the same id again: %v", err)
		}
		a, _, _ := q.take()
		ended := make(chan error, 1)
		go func() {
			for i := range 4 {
				if _, err := r.wait(t.Context(), i); err != nil {
					ended <- fmt.Errorf("block %d: %w", i, err)
					return
				}
			}
			ended <- nil
		}()
		synctest.Wait()
		if a.context().Err() != nil {
			t.Error("cancelled before its time")
		}
		if err := q.cancel("r"); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "block 1") {
			t.Errorf("who waited got %v", err)
		}
		if a.context().Err() == nil {
			t.Error("the work was not cancelled")
		}
		q.done(a, block.MissDeadline, block.NoTier)
		if err := q.cancel("r"); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("cancelled twice: %v", err)
		}
		if got := takeAll(t, q); got != "xy" {
			t.Errorf("left in the queue: %s", got)
		}
		if got, want := q.stats(), (block.PrefetchStats{Queued: 5, Done: 2, Cancelled: 3}); got != want {
			t.Errorf("counters %+v, want %+v", got, want)
		}
		r.end(false)
		mustAdd(t, q, "r", "a") // the id is free again
	})
}

func TestPrefetchWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newPrefetchQueue(100, 1000)
		r := mustAdd(t, q, "r", "abca")
		got := make(chan string, 4)
		go func() {
			for i := range 4 {
				p, err := r.wait(t.Context(), i)
				got <- fmt.Sprint(p.Index, p.Reason, p.Tier, err)
			}
		}()
		worker := make(chan prefetchItem, 3)
		go func() {
			for {
				it, err := q.next(t.Context())
				if err != nil {
					close(worker)
					return
				}
				worker <- it
			}
		}()
		a, b, c := <-worker, <-worker, <-worker
		q.done(c, block.MissNoRoom, block.NoTier)
		q.done(b, block.MissAbsent, block.NoTier)
		synctest.Wait()
		if len(got) != 0 {
			t.Errorf("%s came before the first", <-got)
		}
		q.done(a, block.Hit, block.G2)
		for _, want := range []string{"0 hit g2 <nil>", "1 absent none <nil>", "2 no_room none <nil>", "3 hit g2 <nil>"} {
			if s := <-got; s != want {
				t.Errorf("progress %q, want %q", s, want)
			}
		}
		r.end(false)
		open := mustAdd(t, q, "", "z")
		<-worker
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := open.wait(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Errorf("wait with an ended context: %v", err)
		}
		if _, err := q.next(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("next with an ended context: %v", err)
		}
		q.close()
		q.close()
		<-worker
		if _, err := q.next(t.Context()); !errors.Is(err, block.ErrClosed) {
			t.Errorf("next after close: %v", err)
		}
		if _, err := q.add(t.Context(), block.PrefetchOptions{}, 0, nil); !errors.Is(err, block.ErrClosed) {
			t.Errorf("add after close: %v", err)
		}
		if _, err := open.wait(t.Context(), 0); !errors.Is(err, context.Canceled) {
			t.Errorf("wait after close: %v", err)
		}
	})
}

// TestPrefetchWorkers: one request feeds all workers that wait, and close frees
// them all.
func TestPrefetchWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newPrefetchQueue(100, 1000)
		took, ended := make(chan prefetchItem, 4), make(chan error, 4)
		for range 4 {
			go func() {
				it, err := q.next(t.Context())
				if err != nil {
					ended <- err
					return
				}
				took <- it
			}()
		}
		synctest.Wait()
		mustAdd(t, q, "", "ab")
		synctest.Wait()
		if len(took) != 2 {
			t.Errorf("%d workers took one of two blocks", len(took))
		}
		q.close()
		for range 2 {
			if err := <-ended; !errors.Is(err, block.ErrClosed) {
				t.Errorf("a worker ended with %v", err)
			}
		}
	})
}

// TestPrefetchConcurrent: every block that was taken is counted once, whatever
// ends its request, and all workers leave.
func TestPrefetchConcurrent(t *testing.T) {
	q := newPrefetchQueue(50, 400)
	var workers, clients sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for {
				it, err := q.next(t.Context())
				if err != nil {
					if !errors.Is(err, block.ErrClosed) {
						t.Error(err)
					}
					return
				}
				q.done(it, block.Hit, block.G2)
			}
		})
	}
	for c := range 4 {
		clients.Go(func() {
			id := fmt.Sprint(c)
			for i := range 500 {
				r, err := q.add(t.Context(), block.PrefetchOptions{ID: id, Priority: uint8(c), Within: time.Duration(i%5) * 10 * time.Microsecond}, 10, prefetchItems("abcdefghij"))
				if err != nil {
					t.Error(err)
					return
				}
				switch i % 3 {
				case 0:
					if err := q.cancel(id); err != nil {
						t.Error(err)
					}
				default:
					for i := range 10 {
						if _, err := r.wait(t.Context(), i); err != nil {
							t.Error(err)
						}
					}
				}
				r.end(i%2 == 0)
			}
		})
	}
	clients.Wait()
	q.close()
	workers.Wait()
	if n, bytes := q.pending(); n != 0 || bytes != 0 || len(q.mu.live) != 0 {
		t.Errorf("pending: %d blocks, %d bytes, %d requests", n, bytes, len(q.mu.live))
	}
	for p, l := range q.mu.levels {
		if l.items != 0 || l.bytes != 0 || len(l.turns) != 0 {
			t.Errorf("priority %d: %+v", p, l)
		}
	}
	if st := q.stats(); st.Queued != st.Done+st.Displaced+st.Stale+st.Cancelled {
		t.Errorf("counters %+v", st)
	}
}

// pending is what is queued or being worked on.
func (q *prefetchQueue) pending() (items int, bytes int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.mu.items, q.mu.bytes
}
