package xfertest

import (
	"bufio"
	"encoding/gob"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// refServed is a connection that a peer made.
type refServed struct {
	conn net.Conn
	cut  chan struct{} // closed when it is to end
	once sync.Once
	done chan struct{}
}

func (s *refServed) end() {
	s.once.Do(func() { close(s.cut); _ = s.conn.Close() })
}

func (b *reference) accept() {
	for {
		conn, err := b.ln.Accept()
		if err != nil {
			return // closed, or cut by a test: peers find nobody here
		}
		b.wg.Go(func() { b.serve(conn) })
	}
}

func (b *reference) serve(conn net.Conn) {
	s := &refServed{conn: conn, cut: make(chan struct{}), done: make(chan struct{})}
	defer close(s.done)
	defer s.end()
	stop := make(chan struct{})
	defer close(stop)
	b.wg.Go(func() { // so that Close ends connections that have not said hello
		select {
		case <-b.closed:
			s.end()
		case <-stop:
		}
	})
	r, w := bufio.NewReader(conn), bufio.NewWriterSize(conn, refStep)
	enc, dec := gob.NewEncoder(w), gob.NewDecoder(r)
	var hello refHello
	if dec.Decode(&hello) != nil {
		return
	}
	me := refConnID{hello.From, hello.ID}
	b.mu.Lock()
	self := b.mu.self
	var left []*refServed
	for _, id := range hello.Fence {
		if old := b.mu.served[refConnID{hello.From, id}]; old != nil {
			left = append(left, old)
		}
	}
	b.mu.served[me] = s
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.mu.served, me)
		b.mu.Unlock()
	}()
	for _, old := range left {
		old.end()
		<-old.done
	}
	if enc.Encode(refWelcome{self}) != nil || w.Flush() != nil {
		return
	}
	if hello.To != self && b.fault != "believes anyone" {
		return
	}
	for {
		var call refCall
		if dec.Decode(&call) != nil {
			return
		}
		var answer refAnswer
		switch {
		case call.Notify:
			for range 1 + b.times("delivers twice") {
				select {
				case b.notes <- xfer.Notification{Peer: hello.From, Msg: call.Msg}:
				case <-s.cut:
					return
				}
			}
		default:
			regions := b.find(call.Pieces)
			answer.Refused = make([]bool, len(regions))
			for i, r := range regions {
				answer.Refused[i] = r == nil
			}
			if enc.Encode(answer) != nil || w.Flush() != nil {
				return
			}
			if b.move(call, regions, answer.Refused, r, w, s) != nil {
				return
			}
		}
		if enc.Encode(answer) != nil || w.Flush() != nil {
			return
		}
	}
}

func (b *reference) times(fault string) int {
	if b.fault == fault {
		return 1
	}
	return 0
}

// find gives the regions of pieces, nil where a piece is refused.
func (b *reference) find(pieces []refPiece) []*refRegion {
	b.mu.Lock()
	defer b.mu.Unlock()
	regions := make([]*refRegion, len(pieces))
	for i, p := range pieces {
		r := b.mu.regions[p.Token]
		if r == nil {
			continue
		}
		inside := p.Addr >= r.desc.Addr && p.Len <= r.desc.Len && p.Addr-r.desc.Addr <= r.desc.Len-p.Len
		if inside || b.fault == "ignores bounds" {
			regions[i] = r
		}
	}
	return regions
}

// move serves the bytes of a call; what was deregistered meanwhile is refused.
func (b *reference) move(call refCall, regions []*refRegion, refused []bool, r io.Reader, w io.Writer, s *refServed) error {
	buf := make([]byte, refStep)
	var late []func()
	for i, p := range call.Pieces {
		region := regions[i]
		if region == nil {
			continue
		}
		for at := uint64(0); at < p.Len; at += refStep {
			step := buf[:min(refStep, p.Len-at)]
			if call.Op == xfer.Write {
				if b.fault == "acknowledges early" {
					step = make([]byte, len(step))
				}
				if _, err := io.ReadFull(r, step); err != nil {
					if b.fault == "lands late" {
						b.later(pause+30*time.Millisecond, func() { region.land(p.Addr+at, step) })
					}
					return err
				}
			}
			if b.fault == "lands after Deregister" {
				time.Sleep(2 * time.Millisecond) // so that there is something under way at any time
			}
			touch := func() {
				region.mu.RLock()
				defer region.mu.RUnlock()
				view := arena.View(p.Addr+at, len(step))
				switch {
				case region.gone:
					refused[i] = true
				case call.Op == xfer.Write:
					copy(view, step)
				default:
					copy(step, view)
				}
			}
			select {
			case <-s.cut:
				return net.ErrClosed
			default:
			}
			if b.fault == "acknowledges early" && call.Op == xfer.Write {
				late = append(late, touch)
				continue
			}
			touch()
			if call.Op == xfer.Read {
				if _, err := w.Write(step); err != nil {
					return err
				}
			}
		}
	}
	for _, touch := range late {
		b.later(time.Millisecond, touch)
	}
	return nil
}

// later is for faults.
func (b *reference) later(d time.Duration, do func()) {
	b.wg.Go(func() { time.Sleep(d); do() })
}

func (r *refRegion) land(addr uint64, step []byte) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if !r.gone {
		copy(arena.View(addr, len(step)), step)
	}
}
