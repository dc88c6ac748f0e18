package session

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// A put from regions has so many places, and bytes of them, at once: few enough for
// the store to find room, enough for durable blocks to be written beside each other.
const (
	regionPlaces     = 16
	regionPlaceBytes = 16 << 20
)

// regionPut answers CodeRegionPut.
func (s *session) regionPut(id uint64, p []byte) error {
	w := regionPuts.Get().(*regionPutWork)
	w.s, w.id = s, id
	c, err := w.begin(p)
	switch {
	case errors.Is(err, ErrBusy):
		err = s.reply(id, CodePutDone, s.busyPut(len(w.lens), len(w.done.Results)-len(w.lens)))
	case err == nil || errors.Is(err, errTwice):
		return s.spawn(id, c, err, w.run)
	default:
		err = s.fail(id, err)
	}
	regionPuts.Put(w)
	return err
}

// regionPutWork is what one put from regions needs, to be used again.
type regionPutWork struct {
	s      *session
	id     uint64
	m      RegionPutMessage
	segs   [][]Segment
	lens   []int64          // of each key of the message
	keys   []block.GrantPut // of those to put, without their places and checksums
	at     []int            // of each, its place in the message
	filled []filled         // of those whose places are being filled
	open   []int            // of those whose places are filled
	puts   []block.GrantPut // of those
	done   PutDoneMessage
	texts  int
	out    []byte
}

var regionPuts = sync.Pool{New: func() any { return new(regionPutWork) }}

// begin reads a request and opens its call. The bytes of p are not needed behind it.
func (w *regionPutWork) begin(p []byte) (*call, error) {
	s, m := w.s, &w.m
	if err := m.Decode(p); err != nil {
		return nil, err
	}
	_, beyond, err := s.keyed(&m.Keys, m.Flags, FlagParents, access.Write)
	if err != nil {
		return nil, err
	}
	if m.TTLMS > maxTTLMS {
		return nil, invalid("ttl_ms: %d, want 0 to %d", m.TTLMS, maxTTLMS)
	}
	o := block.PutOptions{Durable: m.Durable, TTL: time.Duration(m.TTLMS) * time.Millisecond, Session: s.id}
	switch m.Durable {
	case block.G2, block.G3:
	case block.NoTier:
		o.Durable = block.G2
	default:
		return nil, invalid("durable: %v, want g2 or g3", m.Durable)
	}
	n, hl := m.Len(), int(m.HashLen)
	w.segs, w.lens, w.done.Results = m.split(w.segs[:0]), sized(w.lens, n), sized(w.done.Results, n+beyond)
	w.keys, w.at, w.texts = w.keys[:0], w.at[:0], 0
	for i := n; i < n+beyond; i++ {
		w.done.Results[i] = PutResult{Status: StatusBusy}
	}
	for i := range n {
		w.done.Results[i] = PutResult{}
		bytes, err := s.regions.check(w.segs[i], false)
		if err == nil && (bytes == 0 || bytes > block.MaxBlockBytes) {
			err = invalid("segments of %d bytes, want 1 to %d", bytes, block.MaxBlockBytes)
		}
		if w.lens[i] = bytes; err != nil {
			w.lens[i] = 0
			w.fail(i, err)
		}
	}
	c, err := s.open(w.id, m.Deadline)
	if err != nil {
		return nil, err
	}
	admitted := c.admit(w.lens, s.bytes)
	for i := range n {
		r := &w.done.Results[i]
		switch {
		case i >= admitted:
			s.srv.stats.busy.Add(1)
			*r = PutResult{Status: StatusBusy}
		case r.Status == StatusOK:
			g := block.GrantPut{Key: block.Key{NS: m.NS}, Hlen: hl, Len: w.lens[i], PutOptions: o}
			copy(g.Key.Hash[:], m.Hashes[i*hl:(i+1)*hl])
			if m.HasParent[i] {
				g.HasParent = true
				copy(g.Parent[:], m.Parents[i*hl:(i+1)*hl])
			}
			w.keys, w.at = append(w.keys, g), append(w.at, i)
		}
	}
	return c, nil
}

func (w *regionPutWork) fail(i int, err error) {
	r := &w.done.Results[i]
	r.Status = StatusOf(err)
	if w.texts++; w.texts <= maxTexts {
		r.Text = err.Error()
	}
}

// run serves the call on a goroutine of its own. What is put stays put when the call
// ends before its time: each key has its own outcome.
func (w *regionPutWork) run(c *call) error {
	defer regionPuts.Put(w)
	for next := 0; next < len(w.keys); {
		if err := c.ctx.Err(); err != nil {
			w.fail(w.at[next], fmt.Errorf("put: %w", context.Cause(c.ctx)))
			next++
			continue
		}
		next = w.fillSome(c.ctx, next)
		if len(w.puts) == 0 {
			continue
		}
		for j, r := range w.s.srv.store.PutGranted(c.ctx, w.puts) {
			if i := w.open[j]; r.Err != nil {
				w.fail(i, r.Err)
			} else {
				w.done.Results[i].Put = r.Status
			}
		}
	}
	c.end()
	w.out = w.done.Append(w.out[:0])
	return w.s.send(w.s.ctx, w.id, CodePutDone, w.out)
}

// fillSome brings blocks into places, from next on, as many as have room at once, and
// returns the next. It waits for room for the first one only.
func (w *regionPutWork) fillSome(ctx context.Context, next int) int {
	w.open, w.puts = w.open[:0], w.puts[:0]
	var bytes int64
	for tried := 0; next < len(w.keys) && tried < regionPlaces && bytes < regionPlaceBytes; {
		size, n := w.keys[next].Len, 1
		for next+n < len(w.keys) && w.keys[next+n].Len == size && tried+n < regionPlaces && bytes+int64(n)*size < regionPlaceBytes {
			n++
		}
		room := ctx
		if tried > 0 {
			room = w.s.srv.noWait
		}
		places, err := w.s.srv.store.Grant(room, w.m.NS, size, n)
		if err != nil {
			if tried == 0 {
				w.fail(w.at[next], err)
				next++
			}
			return next
		}
		for j, f := range w.fillAll(ctx, next, places) {
			if i := w.at[next+j]; f.err != nil {
				w.fail(i, f.err)
				w.s.srv.store.AbortGrants([]uint64{places[j].ID})
			} else {
				p := w.keys[next+j]
				p.Grant, p.Sum = places[j].ID, f.sum
				w.open, w.puts = append(w.open, i), append(w.puts, p)
			}
		}
		next, tried, bytes = next+len(places), tried+len(places), bytes+int64(len(places))*size
	}
	return next
}

// fillAll brings blocks into their places, from key k on, and says how each ended. Many
// bytes are copied by several goroutines: one core does not copy and hash as fast as
// memory could.
func (w *regionPutWork) fillAll(ctx context.Context, k int, places []block.Grant) []filled {
	w.filled = sized(w.filled, len(places))
	var next atomic.Int64
	work := func() {
		for j := int(next.Add(1)) - 1; j < len(places); j = int(next.Add(1)) - 1 {
			w.filled[j].sum, w.filled[j].err = w.fill(ctx, w.segs[w.at[k+j]], places[j].Mem)
		}
	}
	var others sync.WaitGroup
	for range movers(len(places), int64(len(places)*len(places[0].Mem))) - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
	return w.filled
}

// filled is how the copying of one block ended.
type filled struct {
	sum block.Sum
	err error
}

// fill copies one block into its place and hashes it there, a step at a time, while
// that is in the cache: not where it comes from, since the client may change that.
func (w *regionPutWork) fill(ctx context.Context, segs []Segment, mem []byte) (block.Sum, error) {
	from := segmented{rs: &w.s.regions, segs: segs}
	var sum summer
	defer sum.drop()
	for at := 0; at < len(mem); {
		part := mem[at:min(at+regionStep, len(mem))]
		if err := from.move(part, false); err != nil {
			return block.Sum{}, err
		}
		if ctx.Err() != nil {
			return block.Sum{}, fmt.Errorf("put: %w", context.Cause(ctx))
		}
		if at += len(part); len(mem) > regionStep {
			sum.add(mem[:at])
		}
	}
	w.s.srv.stats.regionIn.Add(int64(len(mem)))
	if len(mem) > regionStep {
		return sum.sum(), nil
	}
	return sumOf(mem), nil
}
