package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// proxy stands between two nodes and spoils connections.
type proxy struct {
	l    net.Listener
	to   string
	done sync.WaitGroup
	mu   struct {
		sync.Mutex
		closed bool
		rule   rule
		pairs  map[net.Conn]net.Conn
	}
}

// rule is what happens to each connection after so many bytes in either direction.
type rule struct {
	after int64
	how   string
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l, to: to}
	p.mu.pairs = map[net.Conn]net.Conn{}
	p.done.Go(p.accept)
	t.Cleanup(func() {
		l.Close()
		p.mu.Lock()
		p.mu.closed = true
		p.mu.Unlock()
		p.cut()
		p.done.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		d, err := net.Dial("tcp", p.to)
		if err != nil {
			c.Close()
			continue
		}
		p.mu.Lock()
		r := p.mu.rule
		p.mu.pairs[c] = d
		if p.mu.closed {
			c.Close()
			d.Close()
		}
		p.mu.Unlock()
		over := make(chan struct{}, 2)
		p.done.Go(func() { p.copy(d, c, r); over <- struct{}{} })
		p.done.Go(func() { p.copy(c, d, r); over <- struct{}{} })
		p.done.Go(func() {
			<-over
			<-over
			c.Close()
			d.Close()
			p.mu.Lock()
			delete(p.mu.pairs, c)
			p.mu.Unlock()
		})
	}
}

// copy passes one direction on, until the rule says otherwise.
func (p *proxy) copy(to, from net.Conn, r rule) {
	if r.how == "" {
		_, _ = io.Copy(to, from)
		_ = to.(*net.TCPConn).CloseWrite()
		return
	}
	_, err := io.CopyN(to, from, r.after)
	if err != nil {
		_ = to.(*net.TCPConn).CloseWrite()
		return
	}
	switch r.how {
	case "cut":
		to.Close()
		from.Close()
	case "half-close": // the other direction goes on
		_ = to.(*net.TCPConn).CloseWrite()
	case "stall": // nothing is taken any more, until the test cuts
	case "delay":
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				time.Sleep(2 * time.Millisecond) // this is the delay
				_, _ = to.Write(buf[:n])
			}
			if err != nil {
				_ = to.(*net.TCPConn).CloseWrite()
				return
			}
		}
	}
	if r.how == "half-close" || r.how == "stall" {
		// The connection stays as it is until its other end has had enough.
		_ = from.SetReadDeadline(time.Time{})
		p.wait(from)
	}
}

// wait returns when a connection is cut.
func (p *proxy) wait(c net.Conn) {
	for {
		p.mu.Lock()
		known := p.mu.pairs[c] != nil
		for _, d := range p.mu.pairs {
			known = known || d == c
		}
		closed := p.mu.closed
		p.mu.Unlock()
		if !known || closed {
			return
		}
		time.Sleep(time.Millisecond) // until somebody cuts
	}
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c, d := range p.mu.pairs {
		c.Close()
		d.Close()
		delete(p.mu.pairs, c)
	}
}

func (p *proxy) set(r rule) {
	p.mu.Lock()
	p.mu.rule = r
	p.mu.Unlock()
}

// TestSpoiledConnections: whatever becomes of the connections, a transfer ends by its
// deadline and a moment, with the right bytes or an error, and nothing arrives after it.
func TestSpoiledConnections(t *testing.T) {
	const (
		size  = 8 << 20
		limit = 300 * time.Millisecond // of each transfer
		most  = 100 * time.Millisecond // that it may take longer
		// tries is how often a transfer may be late: a machine that is busy is late now
		// and then, a transfer that waits for more than its deadline every time.
		tries = 20
	)
	rounds := 4 // one of them in the hellos and the first frames
	if os.Getenv("KVTIER_SOAK") != "" {
		rounds = 12
	}
	server := newNode(t, "server", size, Options{})
	info, err := server.ConnInfo()
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := parseConnInfo(info)
	if err != nil {
		t.Fatal(err)
	}
	via := newProxy(t, addrs[0])
	client := newNode(t, "client", size, Options{Conns: 2, BackoffMin: time.Nanosecond, BackoffMax: time.Nanosecond})
	if err := client.LoadConnInfo(server.id, appendConnInfo(nil, []string{via.l.Addr().String()})); err != nil {
		t.Fatal(err)
	}
	remote := client.loads(t, server)
	rnd := rand.New(rand.NewPCG(5, 6))
	var worst time.Duration
	for _, how := range []string{"cut", "half-close", "stall", "delay"} {
		for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
			t.Run(fmt.Sprintf("%s %s", how, op), func(t *testing.T) {
				failed := 0
				var r rule
				for i, try := 0, 1; i < rounds; {
					if try == 1 {
						r = rule{after: rnd.Int64N(size), how: how}
						if i%4 == 0 {
							r.after = rnd.Int64N(300) // in the hellos and the first frames
						}
					}
					via.set(r)
					client.Disconnect(server.id)
					fill(client.bytes(), rnd.Uint64())
					fill(server.bytes(), rnd.Uint64())
					to, from := server, client
					if op == xfer.Read {
						to, from = client, server
					}
					ctx, cancel := context.WithTimeout(t.Context(), limit)
					began := time.Now()
					err := client.move(ctx, t, op, remote, server, 0, size)
					late := time.Since(began) - limit
					cancel()
					switch {
					case err == nil:
						if !bytes.Equal(to.bytes(), from.bytes()) {
							t.Fatalf("%+v: success with wrong bytes", r)
						}
					case !errors.Is(err, xfer.ErrDisconnected) && !errors.Is(err, xfer.ErrCanceled):
						t.Errorf("%+v: %v", r, err)
					default:
						failed++
					}
					// The connections that carried the old bytes are replaced or go on: either
					// way what is written now stays.
					via.set(rule{})
					if how == "stall" || how == "half-close" {
						via.cut()
					}
					fill(client.bytes(), rnd.Uint64())
					waitFor(t, func() bool {
						return client.move(t.Context(), t, xfer.Write, remote, server, 0, size) == nil
					})
					if !bytes.Equal(server.bytes(), client.bytes()) {
						t.Fatalf("%+v: old bytes came after new ones", r)
					}
					if late > most {
						t.Logf("%+v: %v after its deadline", r, late)
						if try++; try > tries {
							t.Fatalf("%+v: %d times more than %v after its deadline", r, tries, most)
						}
						continue
					}
					worst = max(worst, late)
					i, try = i+1, 1
				}
				if failed == 0 && how != "delay" {
					t.Error("the proxy spoiled nothing")
				}
				t.Logf("%d of %d failed", failed, rounds)
			})
		}
	}
	t.Logf("the latest end was %v after its deadline; %+v", worst, client.Stats())
}
