package frame

import (
	"context"
	"sync"
	"time"
)

// control is what the connection itself has to send. Whoever finds that something is
// due notes it here and goes on; a goroutine sends it, which may wait for the peer.
// There is room for one answer: a peer that sends Pings without reading gets the last
// one answered.
type control struct {
	mu struct {
		sync.Mutex
		ping, pong bool
		pongID     uint64
	}
	poke chan struct{} // of one
}

func (k *control) wake() {
	select {
	case k.poke <- struct{}{}:
	default: // it will look at everything
	}
}

func (c *Conn) pong(id uint64) {
	c.control.mu.Lock()
	c.control.mu.pong, c.control.mu.pongID = true, id
	c.control.mu.Unlock()
	c.control.wake()
}

func (c *Conn) ping() {
	c.control.mu.Lock()
	c.control.mu.ping = true
	c.control.mu.Unlock()
	c.control.wake()
}

// answer sends what is due until the connection ends.
func (c *Conn) answer() {
	for {
		select {
		case <-c.done:
			return
		case <-c.control.poke:
		}
		k := &c.control.mu
		k.Lock()
		ping, pong, id := k.ping, k.pong, k.pongID
		k.ping, k.pong = false, false
		k.Unlock()
		// Both fail only with the connection.
		if pong {
			_ = c.Send(context.Background(), Frame{Header: Header{Type: Pong, ID: id}})
		}
		if ping {
			_ = c.Send(context.Background(), Frame{Header: Header{Type: Ping}})
		}
	}
}

// watch keeps the promises of Options until the connection ends. It never waits for
// the peer.
func (c *Conn) watch() {
	v := vigil{o: &c.o}
	t := time.NewTicker(c.o.tick())
	defer t.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-t.C:
		}
		now := sample{
			reads: c.in.reads.Load(), reading: c.in.waiting.Load(),
			writes: c.out.writes.Load(), writing: c.out.waiting.Load(),
		}
		if now.writing {
			now.queued = c.queued()
		}
		ping, err := v.tick(now)
		if err != nil {
			c.fail(err)
		}
		if ping {
			c.ping()
		}
	}
}

func (o *Options) tick() time.Duration {
	return max(min(o.PingAfter, o.DeadAfter, o.StallAfter)/4, time.Millisecond)
}

// vigil decides what follows from how long things have not happened. It counts ticks
// instead of asking a clock, so that a process that was stopped does not take its own
// absence for the peer's.
type vigil struct {
	o    *Options
	last sample
	// How long nothing came, nothing went, a send took no byte, no Ping was sent.
	silent, idle, stalled, unpinged time.Duration
}

// sample is what is seen of a connection at a tick.
type sample struct {
	reads, writes    int64 // that moved something, up to now
	reading, writing bool  // somebody waits for the peer
	queued           int   // bytes written that the peer has not taken yet, while writing
}

func (v *vigil) tick(now sample) (ping bool, err error) {
	step := v.o.tick()
	v.silent, v.idle, v.stalled, v.unpinged = v.silent+step, v.idle+step, v.stalled+step, v.unpinged+step
	wrote := now.writes != v.last.writes
	if wrote {
		v.idle = 0
	}
	// A handler that is busy is no silence of the peer's.
	if !now.reading || now.reads != v.last.reads {
		v.silent = 0
	}
	switch {
	case !now.writing:
		v.stalled = 0
	case wrote || v.last.writing && now.queued < v.last.queued:
		v.stalled, v.silent = 0, 0 // who takes bytes is alive
	}
	v.last = now
	switch {
	case v.stalled >= v.o.StallAfter:
		return false, ErrStalled
	case v.silent >= v.o.DeadAfter:
		return false, ErrSilent
	case max(v.silent, v.idle) >= v.o.PingAfter && v.unpinged >= v.o.PingAfter:
		v.unpinged = 0
		return true, nil
	}
	return false, nil
}
