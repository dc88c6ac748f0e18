package session

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// maxTexts is how many failures of one put are explained.
const maxTexts = 64

// grant answers CodeGrant.
func (s *session) grant(id uint64, p []byte) error {
	var m GrantMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	switch _, err := s.namespace(m.NS, m.Tag, access.Write); {
	case err != nil:
		return s.fail(id, err)
	case m.Size == 0 || m.Size > block.MaxBlockBytes:
		return s.fail(id, invalid("size: %d bytes, want 1 to %d", m.Size, block.MaxBlockBytes))
	case m.Count == 0:
		return s.fail(id, invalid("count: 0, want at least 1"))
	}
	c, err := s.open(id, m.Deadline)
	return s.spawn(id, c, err, func(c *call) error {
		told, err := s.grantPlaces(c.ctx, m.NS, int64(m.Size), int(min(m.Count, uint32(s.keys))), nil)
		if err != nil {
			return err
		}
		c.end()
		g := GrantedMessage{TTLMS: millis(s.srv.o.GrantTTL), Places: told}
		return s.send(s.ctx, id, CodeGranted, g.Append(nil))
	})
}

// grantPlaces asks the store for places, as many as the session may have, and
// appends them to told.
func (s *session) grantPlaces(ctx context.Context, ns block.NamespaceID, size int64, count int, told []GrantedPlace) ([]GrantedPlace, error) {
	n := s.places.reserve(size, count)
	if n == 0 {
		return told, ErrBusy
	}
	grants, err := s.srv.store.Grant(ctx, ns, size, n)
	return s.places.add(ns, size, n, grants, told), err
}

// put answers CodePut: at once, unless it is to be durable.
func (s *session) put(id uint64, p []byte) error {
	m := &s.in.put
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	_, beyond, err := s.keyed(&m.Keys, m.Flags, FlagRegrant|FlagParents, access.Write)
	if err != nil {
		return s.fail(id, err)
	}
	if m.TTLMS > maxTTLMS {
		return s.fail(id, invalid("ttl_ms: %d, want 0 to %d", m.TTLMS, maxTTLMS))
	}
	switch m.Durable {
	case block.NoTier, block.G2:
		w := &s.puts
		w.prepare(s, m, beyond)
		w.commit(s, s.ctx)
		return s.reply(id, CodePutDone, &w.done)
	case block.G3:
	default:
		return s.fail(id, invalid("durable: %v, want g2 or g3", m.Durable))
	}
	c, err := s.open(id, m.Deadline)
	if errors.Is(err, ErrBusy) {
		return s.reply(id, CodePutDone, s.busyPut(m.Len(), beyond))
	}
	if err != nil {
		return s.spawn(id, c, err, nil)
	}
	w := new(putWork)
	w.prepare(s, m, beyond) // here, so that data behind the message finds its places closed
	c.stores(w.bytes())
	return s.spawn(id, c, nil, func(c *call) error {
		w.commit(s, c.ctx)
		c.end()
		return s.send(s.ctx, id, CodePutDone, w.done.Append(nil))
	})
}

// busyPut answers a put that is not begun: its grants stay as they are. So many of its
// keys were told to be busy already.
func (s *session) busyPut(n, beyond int) *PutDoneMessage {
	s.srv.stats.busy.Add(int64(n))
	m := &PutDoneMessage{Results: make([]PutResult, n+beyond)}
	for i := range m.Results {
		m.Results[i].Status = StatusBusy
	}
	return m
}

// putWork is what one put needs, to be used again.
type putWork struct {
	ns      block.NamespaceID
	regrant bool
	puts    []block.GrantPut
	at      []int    // of each put, its place in the message
	unseen  []unseen // of puts
	bad     []uint64 // grants to give back
	sizes   []int64  // of the places that are used up
	done    PutDoneMessage
	texts   int
}

// unseen is what a client wrote to the store's memory itself.
type unseen struct {
	put   int // in putWork.puts
	bytes []byte
	sum   block.Sum
}

// prepare closes the places of a put and checks what came into them as data. Of its keys
// so many are beyond those to serve: their places stay as they are.
func (w *putWork) prepare(s *session, m *PutMessage, beyond int) {
	n, hl := m.Len(), int(m.HashLen)
	*w = putWork{
		ns: m.NS, regrant: m.Flags&FlagRegrant != 0, puts: w.puts[:0], at: w.at[:0], unseen: w.unseen[:0], bad: w.bad[:0], sizes: w.sizes[:0],
		done: PutDoneMessage{Results: sized(w.done.Results, n+beyond), Grants: GrantedMessage{Places: w.done.Grants.Places[:0]}},
	}
	durable := block.G2
	if m.Durable == block.G3 {
		durable = block.G3
	}
	for i := n; i < n+beyond; i++ {
		w.done.Results[i] = PutResult{Status: StatusBusy}
	}
	for i := range n {
		it := &m.Items[i]
		w.done.Results[i] = PutResult{}
		size, own, err := s.places.take(m.NS, it)
		if size != 0 {
			w.sizes = append(w.sizes, size)
		}
		if err != nil {
			w.fail(i, err)
			if size != 0 {
				w.bad = append(w.bad, it.Grant)
			}
			continue
		}
		g := block.GrantPut{Grant: it.Grant, Key: block.Key{NS: m.NS}, Hlen: hl, Len: int64(it.Len), Sum: it.Sum}
		copy(g.Key.Hash[:], m.Hashes[i*hl:(i+1)*hl])
		g.Durable, g.TTL, g.Session = durable, time.Duration(m.TTLMS)*time.Millisecond, s.id
		if it.HasParent {
			g.HasParent = true
			copy(g.Parent[:], m.Parents[i*hl:(i+1)*hl])
		}
		if own != nil {
			w.unseen = append(w.unseen, unseen{put: len(w.puts), bytes: own})
		}
		w.puts, w.at = append(w.puts, g), append(w.at, i)
	}
	w.abort(s)
}

// bytes is how much is put.
func (w *putWork) bytes() (n int64) {
	for i := range w.puts {
		n += w.puts[i].Len
	}
	return n
}

// abort gives back the grants of what has failed.
func (w *putWork) abort(s *session) {
	if len(w.bad) > 0 {
		s.srv.store.AbortGrants(w.bad)
		w.bad = w.bad[:0]
	}
}

// inspect computes the checksums of what the client wrote itself, and takes out what has
// another one than it says. The client can still change the bytes, as all can who have
// the memory: then whoever reads the block finds out, but not what it was put as.
func (w *putWork) inspect(s *session) {
	if len(w.unseen) == 0 {
		return
	}
	var bytes int64
	for i := range w.unseen {
		bytes += int64(len(w.unseen[i].bytes))
	}
	if n := movers(len(w.unseen), bytes); n > 1 {
		hashAll(w.unseen, n)
	} else {
		for i := range w.unseen {
			w.unseen[i].sum = sumOf(w.unseen[i].bytes)
		}
	}
	for i := range w.unseen {
		u := &w.unseen[i]
		p := &w.puts[u.put]
		if err := s.compare(p.Len, u.sum, p.Sum); err != nil {
			w.fail(w.at[u.put], err)
			w.bad = append(w.bad, p.Grant)
		}
		u.bytes = nil // the store's, to be given to others
	}
	if len(w.bad) == 0 {
		return
	}
	kept := 0
	for j := range w.puts {
		if w.done.Results[w.at[j]].Status == StatusOK {
			w.puts[kept], w.at[kept] = w.puts[j], w.at[j]
			kept++
		}
	}
	w.puts, w.at = w.puts[:kept], w.at[:kept]
	w.abort(s)
}

// hashAll computes checksums with n goroutines, this one among them.
func hashAll(all []unseen, n int) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < len(all); i = int(next.Add(1)) - 1 {
			all[i].sum = sumOf(all[i].bytes)
		}
	}
	var others sync.WaitGroup
	for range n - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
}

func (w *putWork) fail(i int, err error) {
	r := &w.done.Results[i]
	r.Status = StatusOf(err)
	if w.texts++; w.texts <= maxTexts {
		r.Text = err.Error()
	}
}

// commit makes blocks of what is there, and takes new places for those used up. It
// does not wait for room: whoever gets none asks for it, and then waits.
func (w *putWork) commit(s *session, ctx context.Context) {
	w.inspect(s)
	if len(w.puts) > 0 {
		for j, r := range s.srv.store.PutGranted(ctx, w.puts) {
			if r.Err != nil {
				w.fail(w.at[j], r.Err)
				continue
			}
			w.done.Results[w.at[j]].Put = r.Status
		}
	}
	if !w.regrant {
		return
	}
	g := &w.done.Grants
	for rest := w.sizes; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n] == rest[0] {
			n++
		}
		g.Places, _ = s.grantPlaces(s.srv.noWait, w.ns, rest[0], n, g.Places) // without places the client asks for some
		rest = rest[n:]
	}
	g.TTLMS = millis(s.srv.o.GrantTTL)
}
