package session_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// meeting lets go of those who wait when there are n of them.
type meeting struct {
	mu   sync.Mutex
	n    int
	full chan struct{}
}

func (m *meeting) wait(t *testing.T) {
	m.mu.Lock()
	if m.n--; m.n == 0 {
		close(m.full)
	}
	m.mu.Unlock()
	select {
	case <-m.full:
	case <-time.After(patience):
		t.Error("the parts of a get do not run beside each other")
	}
}

// TestRegionGetInParts gets so many bytes that several goroutines share them: each block
// has its own outcome, in whatever part it is, and nobody copies when the call is over.
func TestRegionGetInParts(t *testing.T) {
	const n, count, parts = 1 << 20, 16, 4
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(parts))
	st := memstore.New(&memstore.Options{Capacity: 64 << 20})
	h := &hooked{Store: st}
	r := serve(t, st, h, nil)
	src, _, smem := r.attach(n * count)
	want := bytesOf(1, n*count)
	copy(smem, want)
	items, blocks := rows(0, count, n)
	const absent, spoiled = 6, 13
	for _, part := range [][]session.RegionBlock{blocks[:absent], blocks[absent+1:]} {
		part[0].HasParent = false
		res, err := src.RegionPut(t.Context(), r.handle(), part, session.PutOptions{})
		for i := range res {
			err = errors.Join(err, res[i].Err)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// inParts makes every get wait for the others of its call, and hand out use's bytes.
	inParts := func(of int, hand func(w block.Wanted, p *block.Payload)) {
		m := &meeting{n: of, full: make(chan struct{})}
		h.hook(func() {
			h.get = func(_ context.Context, want []block.Wanted, o block.GetOptions, use func(int, block.Payload) error) error {
				if !o.Verify {
					m.wait(t)
				}
				return st.Get(context.Background(), r.ns.NS, 8, want, o, func(i int, p block.Payload) error {
					if !o.Verify {
						hand(want[i], &p)
					}
					return use(i, p)
				})
			}
		})
	}

	t.Run("outcomes", func(t *testing.T) {
		c, _, mem := r.attach(n * count)
		inParts(parts, func(w block.Wanted, p *block.Payload) {
			if w.Hash == hashOf(spoiled) {
				p.Bytes = bytesOf(77, n)
			}
		})
		res, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i, got := range res {
			reason, row := block.Hit, want[i*n:][:n]
			if i == absent {
				reason, row = block.MissAbsent, make([]byte, n)
			}
			if got.Err != nil || got.Reason != reason || !bytes.Equal(mem[i*n:][:n], row) {
				t.Errorf("block %d: %v, error %v, want %v and its bytes", i, got.Reason, got.Err, reason)
			}
		}
	})

	t.Run("truncated", func(t *testing.T) {
		c, f, mem := r.attach(n * count)
		if err := f.Truncate(n * count / 2); err != nil {
			t.Fatal(err)
		}
		faults := r.server.Stats().RegionFaults
		inParts(parts, func(block.Wanted, *block.Payload) {})
		res, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i, got := range res {
			switch {
			case i == absent:
			case i >= count/2 && !errors.Is(got.Err, block.ErrInvalid):
				t.Errorf("block %d, behind the end of its region: %v, error %v", i, got.Reason, got.Err)
			case i < count/2 && (got.Err != nil || got.Reason != block.Hit || !bytes.Equal(mem[i*n:][:n], want[i*n:][:n])):
				t.Errorf("block %d: %v, error %v", i, got.Reason, got.Err)
			}
		}
		if got := r.server.Stats().RegionFaults - faults; got != 1 {
			t.Errorf("the region is told of %d times, want once", got)
		}
	})

	t.Run("cancelled", func(t *testing.T) {
		c, _, mem := r.attach(n * count)
		reached, goOn := make(chan struct{}, count), make(chan struct{})
		inParts(parts, func(block.Wanted, *block.Payload) {
			select {
			case <-goOn:
			default:
				reached <- struct{}{}
				<-goOn
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := c.RegionGet(ctx, r.handle(), items, block.GetOptions{})
			done <- err
		}()
		for range parts {
			<-reached
		}
		cancel()
		r.await("the cancel", func() bool { return r.server.Stats().Calls[session.CodeCancel] == 1 })
		var m block.MatchResult
		if err := c.Match(t.Context(), r.handle(), packedFrom(0, 1), block.MatchOptions{}, &m); err != nil { // behind it
			t.Error(err)
		}
		select {
		case err := <-done:
			t.Fatalf("it returned while the server may copy: %v", err)
		default:
		}
		close(goOn)
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want canceled", err)
		}
		quiet(t, mem)
		if !bytes.Equal(mem, make([]byte, n*count)) {
			t.Error("bytes of a call that had ended")
		}
	})

	t.Run("failed", func(t *testing.T) {
		c, _, _ := r.attach(n * count)
		m := &meeting{n: parts, full: make(chan struct{})}
		h.hook(func() {
			h.get = func(_ context.Context, want []block.Wanted, o block.GetOptions, use func(int, block.Payload) error) error {
				m.wait(t)
				if want[0].Hash == items[0].Hash {
					return st.Get(context.Background(), r.ns.NS, 8, want, o, use)
				}
				return block.ErrUnavailable
			}
		})
		if _, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{}); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("error %v, want that of the parts that failed", err)
		}
	})
}

// TestRegionGetSmall shows that few bytes are got in one part: in the store's order.
func TestRegionGetSmall(t *testing.T) {
	st := memstore.New(nil)
	h := &hooked{Store: st}
	r := serve(t, st, h, nil)
	const n, count = 1 << 10, 16
	c, _, mem := r.attach(n * count)
	copy(mem, bytesOf(1, n*count))
	items, blocks := rows(0, count, n)
	if _, err := c.RegionPut(t.Context(), r.handle(), blocks, session.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	gets := 0
	h.hook(func() {
		h.get = func(_ context.Context, want []block.Wanted, o block.GetOptions, use func(int, block.Payload) error) error {
			gets++
			return st.Get(context.Background(), r.ns.NS, 8, want, o, use)
		}
	})
	clear(mem)
	res, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{})
	if err != nil || gets != 1 || !bytes.Equal(mem, bytesOf(1, n*count)) {
		t.Errorf("%+v in %d gets, error %v", res, gets, err)
	}
}
