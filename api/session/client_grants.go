package session

import (
	"context"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// idleGrant is how long a place waits for a put, and how long after a put another
// one of the size is expected.
const idleGrant = time.Second

// grant is a place in the store that this session may write to.
type grant struct {
	id    uint64
	ns    block.NamespaceID
	size  int
	mem   []byte // nil: the bytes are sent
	until time.Time
	since time.Time // it is idle
}

// grants are the places that the session has, and how many more it may ask for.
type grants struct {
	most      int
	mostBytes int64

	mu struct {
		sync.Mutex
		idle    []grant
		count   int   // asked for, idle and used
		bytes   int64 // of those
		revoked map[uint64]struct{}
		last    struct { // put
			ns   block.NamespaceID
			size int
			at   time.Time
		}
		watched bool          // housekeeping looks for idle ones
		waits   int           // callers that wait for room
		freed   chan struct{} // closed when there may be room
	}
}

func (g *grants) init(most int, mostBytes int64) {
	g.most, g.mostBytes = most, mostBytes
	g.mu.revoked = make(map[uint64]struct{})
	g.mu.freed = make(chan struct{})
}

// fits reports whether a place of size bytes is one for a payload of n.
func fits(size, n int) bool { return size >= n && size <= n+n/4+4096 }

// take finds an idle place for n bytes.
func (g *grants) take(ns block.NamespaceID, n int, now time.Time) (grant, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := len(g.mu.idle) - 1; i >= 0; i-- {
		if one := g.mu.idle[i]; one.ns == ns && fits(one.size, n) && now.Before(one.until) {
			g.remove(i)
			return one, true
		}
	}
	return grant{}, false
}

// remove takes an idle place out. It needs the lock.
func (g *grants) remove(i int) {
	last := len(g.mu.idle) - 1
	g.mu.idle[i] = g.mu.idle[last]
	g.mu.idle[last] = grant{}
	g.mu.idle = g.mu.idle[:last]
}

// add keeps places that came or were not used. It reports whether housekeeping must
// be told.
func (g *grants) add(now time.Time, places ...grant) (tell bool) {
	if len(places) == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range places {
		p.since = now
		g.mu.idle = append(g.mu.idle, p)
	}
	g.free()
	tell = !g.mu.watched
	g.mu.watched = true
	return tell
}

// counted changes how many places there are.
func (g *grants) counted(n int, bytes int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.count += n
	g.mu.bytes += bytes
	if n < 0 {
		g.free()
	}
	if g.mu.count == 0 {
		clear(g.mu.revoked)
	}
}

// free wakes those who wait for room. It needs the lock.
func (g *grants) free() {
	if g.mu.waits > 0 {
		close(g.mu.freed)
		g.mu.freed, g.mu.waits = make(chan struct{}), 0
	}
}

// room counts up to want places of size bytes as asked for, and returns how many. Idle
// ones of other kinds are given back for it. While all are in use it waits, or returns
// 0, as it does when the session has ended.
func (g *grants) room(ctx context.Context, ended <-chan struct{}, size, want int, wait bool, l *later) (int, error) {
	for {
		g.mu.Lock()
		n := g.spare(size, want)
		for n < want && len(g.mu.idle) > 0 {
			one := g.mu.idle[0]
			g.remove(0)
			g.mu.count--
			g.mu.bytes -= int64(one.size)
			l.grant(one.id)
			n = g.spare(size, want)
		}
		if n == 0 && g.mu.count == 0 {
			n = 1 // more than the session may have: let the server say so
		}
		if n > 0 {
			g.mu.count += n
			g.mu.bytes += int64(n) * int64(size)
			g.mu.Unlock()
			return n, nil
		}
		if !wait {
			g.mu.Unlock()
			return 0, nil
		}
		freed := g.mu.freed
		g.mu.waits++
		g.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-ended:
			return 0, nil
		}
	}
}

// spare is how many of want more places the limits allow. It needs the lock.
func (g *grants) spare(size, want int) int {
	n := min(want, g.most-g.mu.count)
	return max(0, min(n, int((g.mostBytes-g.mu.bytes)/int64(size))))
}

// expected notes a put and reports whether one like it was just before.
func (g *grants) expected(ns block.NamespaceID, size int, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := &g.mu.last
	like := l.ns == ns && fits(max(l.size, size), min(l.size, size)) && now.Sub(l.at) < idleGrant
	l.ns, l.size, l.at = ns, size, now
	return like
}

// expire gives back what has been idle for long, and says when to look again.
func (g *grants) expire(now time.Time, l *later) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := len(g.mu.idle) - 1; i >= 0; i-- {
		one := g.mu.idle[i]
		if now.Before(one.until) && now.Sub(one.since) < idleGrant {
			continue
		}
		g.remove(i)
		g.mu.count--
		g.mu.bytes -= int64(one.size)
		l.grant(one.id)
	}
	g.free()
	if len(g.mu.idle) == 0 {
		g.mu.watched = false
		return time.Hour
	}
	return idleGrant / 2
}

// drop takes out all idle places, and returns their ids.
func (g *grants) drop() (ids []uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, one := range g.mu.idle {
		ids = append(ids, one.id)
		g.mu.count--
		g.mu.bytes -= int64(one.size)
	}
	g.mu.idle = nil
	g.free()
	return ids
}

// revoke takes a place out that the server has taken back. It reports whether
// nothing writes to it any more; if something does, wasRevoked will tell.
func (g *grants) revoke(id uint64) (quiet bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.mu.idle {
		if g.mu.idle[i].id == id {
			g.mu.count--
			g.mu.bytes -= int64(g.mu.idle[i].size)
			g.remove(i)
			g.free()
			return true
		}
	}
	if g.mu.count > 0 {
		g.mu.revoked[id] = struct{}{}
		return false
	}
	return true
}

// wasRevoked reports whether a place was revoked while it was used, once.
func (g *grants) wasRevoked(id uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, ok := g.mu.revoked[id]
	delete(g.mu.revoked, id)
	return ok
}

// revoked takes the server's word that grants cannot be committed any more. Where
// this side writes the memory, the server waits to hear that it does not.
func (r *reader) revoked(p []byte) error {
	c := (*Client)(r)
	var m RevokeMessage
	if err := m.Decode(p); err != nil {
		return err
	}
	for _, id := range m.Grants {
		if c.grants.revoke(id) && c.passed() {
			c.later.grant(id)
		}
	}
	return nil
}

// giveBack releases places that came for nobody.
func (c *Client) giveBack(places []GrantedPlace) {
	for _, p := range places {
		c.later.grant(p.Grant)
	}
}

// keepGrants keeps idle places for the next put.
func (c *Client) keepGrants(places ...grant) {
	if c.grants.add(time.Now(), places...) {
		select {
		case c.later.wake <- struct{}{}:
		default:
		}
	}
}

// newGrants appends places that the server granted, which were counted already.
func (c *Client) newGrants(to []grant, ns block.NamespaceID, m *GrantedMessage) ([]grant, error) {
	ttl := time.Duration(m.TTLMS) * time.Millisecond
	until := time.Now().Add(ttl - min(ttl/8, time.Second))
	for _, p := range m.Places {
		g := grant{id: p.Grant, ns: ns, size: int(p.Size), until: until}
		if p.Size == 0 || p.Size > block.MaxBlockBytes {
			return to, c.giveUp("server granted a place of %d bytes", p.Size)
		}
		if p.Chunk != NoChunk {
			at, ok := c.at(p.Chunk, p.Offset, g.size, true)
			if !ok {
				return to, c.giveUp("server granted %d bytes at %d of chunk %d", p.Size, p.Offset, p.Chunk)
			}
			c.letGo(at) // while something is granted there the chunk stays
			g.mem = at.mem
		}
		to = append(to, g)
	}
	return to, nil
}
