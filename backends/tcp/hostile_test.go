package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// raw is a peer that writes what it wants.
type raw struct {
	t testing.TB
	net.Conn
}

func dialRaw(t testing.TB, n *node) raw {
	t.Helper()
	c, err := net.Dial("tcp", n.mu.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return raw{t, c}
}

// greeted is a raw peer that has said a proper hello.
func greeted(t testing.TB, n *node) raw {
	t.Helper()
	r := dialRaw(t, n)
	h := hello{min: 1, max: 1, from: xfer.PeerID{Name: "raw", Incarnation: random()}, to: n.id, line: random()}
	if err := frame.SendHello(r, h.append(nil), nil); err != nil {
		t.Fatal(err)
	}
	if a := r.answer(); a.status != helloOK || a.identity != n.id || a.calls == 0 {
		t.Fatalf("answer to the hello: %+v", a)
	}
	return r
}

func (r raw) answer() answer {
	r.t.Helper()
	payload, _, err := frame.RecvHello(r)
	if err != nil {
		r.t.Fatal(err)
	}
	a, err := parseAnswer(payload)
	if err != nil {
		r.t.Fatal(err)
	}
	return a
}

func (r raw) send(h frame.Header, payload []byte) {
	h.Length = uint32(len(payload))
	r.write(append(h.Append(nil), payload...))
}

func (r raw) write(b []byte) {
	_, _ = r.Write(b) // the peer may have had enough
}

// next is the next frame that is not of the keep-alive.
func (r raw) next() (frame.Header, []byte, error) {
	for {
		head := make([]byte, frame.HeaderBytes)
		if _, err := io.ReadFull(r, head); err != nil {
			return frame.Header{}, nil, err
		}
		h, err := frame.ParseHeader(head)
		if err != nil {
			return h, nil, err
		}
		p := make([]byte, h.Length)
		if _, err := io.ReadFull(r, p); err != nil {
			return h, nil, err
		}
		if h.Type != frame.Ping && h.Type != frame.Pong {
			return h, p, nil
		}
	}
}

// done waits for the answer to a call.
func (r raw) done(call uint32) (frame.Header, []byte) {
	r.t.Helper()
	h, p, err := r.next()
	if err != nil {
		r.t.Fatalf("answer to call %d: %v", call, err)
	}
	if id, _ := splitID(h.ID); h.Type != frame.Done || id != call {
		r.t.Fatalf("%+v, want the answer to call %d", h, call)
	}
	return h, p
}

// closed waits until the peer has closed the connection; it may say Bye.
func (r raw) closed() {
	r.t.Helper()
	for {
		h, p, err := r.next()
		var timeout net.Error
		switch {
		case errors.As(err, &timeout) && timeout.Timeout():
			r.t.Fatal("the connection stays open")
		case err != nil:
			return
		case h.Type != frame.Bye:
			r.t.Fatalf("%+v %q, want the end", h, p)
		}
	}
}

// TestBadInput: whatever a peer sends, it reaches no memory but what it may, gets the
// right answer or loses its connection, and the others are unharmed.
func TestBadInput(t *testing.T) {
	const size = 1 << 20
	server := newNode(t, "server", size, Options{})
	hasty := newNode(t, "hasty", size, Options{HelloTimeout: 20 * time.Millisecond}) // nobody is to be in time for it
	good := newNode(t, "good", size, Options{})
	remote := good.meets(t, server)
	token := server.region.(*region).token
	fill(server.bytes(), 1)
	fill(good.bytes(), 2)
	if err := good.Connect(t.Context(), server.id); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, dial func() raw, hello func() raw)
	}{
		{"no frame", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			r.write([]byte("GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"))
			r.closed()
		}},
		{"silence", func(t *testing.T, _, _ func() raw) { dialRaw(t, hasty).closed() }},
		{"half a hello", func(t *testing.T, _, _ func() raw) {
			r := dialRaw(t, hasty)
			r.write(append((&frame.Header{Type: frame.Hello, Length: 60}).Append(nil), magic...))
			r.closed()
		}},
		{"data before the hello", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			r.send(frame.Header{Type: frame.Data, Token: token}, make([]byte, 100))
			r.closed()
		}},
		{"wrong magic", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			h := hello{min: 1, max: 1, to: server.id}
			r.send(frame.Header{Type: frame.Hello}, append([]byte("KVTS"), h.append(nil)[4:]...))
			r.closed()
		}},
		{"too new", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			h := hello{min: 7, max: 9, to: server.id}
			r.send(frame.Header{Type: frame.Hello}, h.append(nil))
			if a := r.answer(); a.status != helloVersion || a.version != maxVersion {
				t.Errorf("%+v", a)
			}
			r.closed()
		}},
		{"newer, but not only", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			h := hello{min: 1, max: 9, from: xfer.PeerID{Name: "new", Incarnation: 1}, to: server.id}
			r.send(frame.Header{Type: frame.Hello}, append(h.append(nil), "and more"...))
			if a := r.answer(); a.status != helloOK || a.version != maxVersion {
				t.Errorf("%+v", a)
			}
			r.Close()
		}},
		{"another incarnation", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			h := hello{min: 1, max: 1, to: xfer.PeerID{Name: "server", Incarnation: 1}}
			r.send(frame.Header{Type: frame.Hello}, h.append(nil))
			if a := r.answer(); a.status != helloStranger || a.identity != server.id {
				t.Errorf("%+v", a)
			}
			r.closed()
		}},
		{"nobody", func(t *testing.T, dial, _ func() raw) {
			r := dial()
			h := hello{min: 1, max: 1, from: xfer.PeerID{Name: "raw"}, to: server.id}
			r.send(frame.Header{Type: frame.Hello}, h.append(nil))
			r.closed()
		}},
		{"unknown type", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.send(frame.Header{Type: 200, ID: 1, Token: token}, make([]byte, 1000))
			r.send(frame.Header{Type: frame.Flush, ID: callID(1, 0)}, nil)
			if h, _ := r.done(1); h.Status != statusOK {
				t.Errorf("%+v", h)
			}
		}},
		{"refused writes", func(t *testing.T, _, hello func() raw) {
			r := hello()
			for i, h := range []frame.Header{
				{Token: token + 1},                            // not registered
				{Token: 0},                                    //
				{Token: token, Offset: size},                  // behind the end
				{Token: token, Offset: size - 99},             // over the end
				{Token: token, Offset: ^uint64(0)},            // around
				{Token: token, Offset: ^uint64(0) - 100 + 1},  //
				{Token: token, Offset: 1<<63 + server.addr()}, //
			} {
				h.Type, h.ID = frame.Data, callID(1, uint32(2*i))
				r.send(h, make([]byte, 100))
			}
			r.send(frame.Header{Type: frame.Flush, ID: callID(1, 0)}, nil)
			h, p := r.done(1)
			if spans, err := parseSpans(p); h.Status != statusRefused || err != nil || len(spans) != 7 || spans[6] != (span{12, 1}) {
				t.Errorf("%+v: %v, %v", h, spans, err)
			}
			r.send(frame.Header{Type: frame.Flush, ID: callID(1, 0)}, nil)
			if h, _ := r.done(1); h.Status != statusOK {
				t.Errorf("refusals are told twice: %+v", h)
			}
		}},
		{"refused scatter", func(t *testing.T, _, hello func() raw) {
			r := hello()
			p := binary.LittleEndian.AppendUint32(nil, 3)
			p = entry{token, size - 3, 4}.append(p)
			p = entry{token + 1, 0, 4}.append(p)
			p = entry{token, ^uint64(0), 4}.append(p)
			r.send(frame.Header{Type: typeScatter, ID: callID(1, 5)}, append(p, make([]byte, 12)...))
			r.send(frame.Header{Type: frame.Flush, ID: callID(1, 0)}, nil)
			h, p := r.done(1)
			if spans, err := parseSpans(p); h.Status != statusRefused || err != nil || fmt.Sprint(spans) != "[{5 3}]" {
				t.Errorf("%+v: %v, %v", h, spans, err)
			}
		}},
		{"refused reads", func(t *testing.T, _, hello func() raw) {
			r := hello()
			p := entry{token, size - 3, 4}.append(nil)
			p = entry{token, size - 3, 5000}.append(p)
			p = entry{token + 1, 0, 4}.append(p)
			p = entry{token, ^uint64(0), 8000}.append(p)
			r.send(frame.Header{Type: frame.Read, ID: callID(1, 0)}, p)
			h, p := r.done(1)
			if spans, err := parseSpans(p); h.Status != statusRefused || err != nil || fmt.Sprint(spans) != "[{0 4}]" {
				t.Errorf("%+v: %v, %v", h, spans, err)
			}
		}},
		{"refusals without end", func(t *testing.T, _, hello func() raw) {
			r := hello()
			var b []byte
			for i := range uint32(3 * maxSpans) {
				h := frame.Header{Type: frame.Data, ID: callID(1, 2*i), Length: 1}
				b = append(h.Append(b), 0)
			}
			r.write(b)
			r.send(frame.Header{Type: frame.Flush, ID: callID(1, 0)}, nil)
			h, p := r.done(1)
			if spans, err := parseSpans(p); h.Status != statusRefused || err != nil || len(spans) != 1 || spans[0].first != 0 {
				t.Errorf("%+v: %v, %v", h, spans, err)
			}
			for i := range uint32(2 * maxRefusing) {
				h := frame.Header{Type: frame.Data, ID: callID(i+2, 0), Length: 1}
				r.write(append(h.Append(nil), 0))
			}
			r.closed()
		}},
		{"oversize data", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.write((&frame.Header{Type: frame.Data, Token: token, Length: frame.MaxData + 1}).Append(nil))
			r.closed()
		}},
		{"oversize message", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.write((&frame.Header{Type: frame.Read, Length: frame.MaxMessage + 1}).Append(nil))
			r.closed()
		}},
		{"oversize notification", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.send(frame.Header{Type: frame.Note}, make([]byte, xfer.MaxNotification+1))
			r.closed()
		}},
		{"read of nothing", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.send(frame.Header{Type: frame.Read}, nil)
			r.closed()
		}},
		{"read of too many", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.send(frame.Header{Type: frame.Read}, bytes.Repeat(entry{token, 0, 1}.append(nil), maxEntries+1))
			r.closed()
		}},
		{"scatter that lies", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.send(frame.Header{Type: typeScatter}, append(entry{token, 0, 100}.append([]byte{1, 0, 0, 0}), make([]byte, 99)...))
			r.closed()
		}},
		{"a server's frame", func(t *testing.T, _, hello func() raw) {
			r := hello()
			r.send(frame.Header{Type: frame.Done, ID: callID(1, 0)}, nil)
			r.closed()
		}},
		{"torn frame of data", func(t *testing.T, _, hello func() raw) {
			r := hello()
			h := frame.Header{Type: frame.Data, Token: token + 1, Length: 1000}
			r.write(append(h.Append(nil), make([]byte, 500)...))
			r.Close()
		}},
		{"calls without end", func(t *testing.T, _, hello func() raw) {
			r := hello()
			p := entry{token, 0, 256 << 10}.append(nil)
			go func() { // it takes nothing
				for i := range uint32(100_000) {
					h := frame.Header{Type: frame.Read, ID: callID(i+1, 0), Length: uint32(len(p))}
					if _, err := r.Write(append(h.Append(nil), p...)); err != nil {
						return
					}
				}
			}()
			waitFor(t, func() bool { return server.Stats().Accepted == 4 })
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := bytes.Clone(server.bytes())
			tt.do(t, func() raw { return dialRaw(t, server) }, func() raw { return greeted(t, server) })
			if !bytes.Equal(server.bytes(), want) {
				t.Error("memory has changed")
			}
			for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
				if err := good.move(t.Context(), t, op, remote, server, 0, size); err != nil {
					t.Errorf("another peer's %s: %v", op, err)
				}
			}
			if s := good.Stats(); s.Connects != 4 {
				t.Errorf("another peer lost its connections: %+v", s)
			}
			if !bytes.Equal(server.bytes(), good.bytes()) {
				t.Error("another peer's bytes are wrong")
			}
		})
	}
}

func (n *node) addr() uint64 { return n.mem.Desc.Addr }

func waitFor(t testing.TB, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !cond(); time.Sleep(time.Millisecond) { // between two looks
		if time.Now().After(deadline) {
			t.Fatal("it does not come about")
		}
	}
}

// TestFlood: connections that say nothing are bounded, and keep nobody out.
func TestFlood(t *testing.T) {
	server := newNode(t, "server", 1<<20, Options{HelloTimeout: time.Minute})
	for range 3 * helloBacklog {
		dialRaw(t, server)
	}
	// When so many were closed all have been taken in.
	waitFor(t, func() bool { return server.Stats().Strangers == 2*helloBacklog })
	client := newNode(t, "client", 1<<20, Options{})
	remote := client.meets(t, server)
	if err := client.move(t.Context(), t, xfer.Write, remote, server, 0, 1<<20); err != nil {
		t.Error(err)
	}
	server.Backend.mu.Lock()
	defer server.Backend.mu.Unlock()
	if n := len(server.Backend.mu.strangers.list); n > helloBacklog {
		t.Errorf("%d connections are open of which nobody knows whose they are, at most %d", n, helloBacklog)
	}
}

func TestInboundLimit(t *testing.T) {
	server := newNode(t, "server", 1<<20, Options{Inbound: 6})
	first := newNode(t, "first", 1<<20, Options{})
	r := first.meets(t, server)
	if err := first.move(t.Context(), t, xfer.Write, r, server, 0, 1<<20); err != nil {
		t.Fatal(err)
	}
	second := newNode(t, "second", 1<<20, Options{BackoffMin: time.Nanosecond, BackoffMax: time.Nanosecond})
	r2 := second.meets(t, server)
	if err := second.move(t.Context(), t, xfer.Write, r2, server, 0, 1<<20); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("beyond the limit: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return second.move(t.Context(), t, xfer.Write, r2, server, 0, 1<<20) == nil })
}

// TestPeerDoesNotRead: who asks and does not take the answers loses its connection.
func TestPeerDoesNotRead(t *testing.T) {
	const size = 64 << 20
	o := Options{}
	o.Frame.StallAfter = 100 * time.Millisecond
	server := newNode(t, "server", size, o)
	r := greeted(t, server)
	r.send(frame.Header{Type: frame.Read, ID: callID(1, 0)}, entry{server.region.(*region).token, 0, size}.append(nil))
	// It was accepted before its hello was answered.
	waitFor(t, func() bool { return server.Stats().Accepted == 0 })
}

// TestDeregisterEvicts: a peer that stops in the middle of a frame does not hold
// Deregister up, and its bytes land no more.
func TestDeregisterEvicts(t *testing.T) {
	const size = 64 << 20
	server := newNode(t, "server", size, Options{})
	token := server.region.(*region).token
	writer, reader := greeted(t, server), greeted(t, server)
	h := frame.Header{Type: frame.Data, Token: token, Length: 1000}
	writer.write(append(h.Append(nil), bytes.Repeat([]byte{1}, 500)...))
	reader.send(frame.Header{Type: frame.Read, ID: callID(1, 0)}, entry{token, 0, size}.append(nil))
	users := func() int {
		g := server.region.(*region)
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.mu.users)
	}
	waitFor(t, func() bool { return users() == 2 && server.bytes()[499] == 1 })
	if err := server.Deregister(server.region); err != nil {
		t.Fatal(err)
	}
	if n := users(); n != 0 {
		t.Errorf("%d connections use the memory", n)
	}
	want := bytes.Clone(server.bytes()[:1000])
	_, _ = writer.Write(bytes.Repeat([]byte{2}, 500)) // the connection is closed, or will be
	writer.closed()
	if !bytes.Equal(server.bytes()[:1000], want) {
		t.Error("bytes landed after Deregister")
	}
}

// TestSuccessor: a connection is answered only when the one before it is quiet.
func TestSuccessor(t *testing.T) {
	server := newNode(t, "server", 1<<20, Options{})
	from := xfer.PeerID{Name: "raw", Incarnation: 7}
	say := func() raw {
		r := dialRaw(t, server)
		h := hello{min: 1, max: 1, from: from, to: server.id, line: 99}
		if err := frame.SendHello(r, h.append(nil), nil); err != nil {
			t.Fatal(err)
		}
		if a := r.answer(); a.status != helloOK {
			t.Fatalf("%+v", a)
		}
		return r
	}
	old := say()
	h := frame.Header{Type: frame.Data, Token: server.region.(*region).token, Length: 1000}
	old.write(append(h.Append(nil), bytes.Repeat([]byte{1}, 500)...))
	waitFor(t, func() bool { return server.bytes()[499] == 1 })
	say()
	g := server.region.(*region)
	g.mu.Lock()
	users := len(g.mu.users)
	g.mu.Unlock()
	if users != 0 {
		t.Error("the old connection still lands when the new one is answered")
	}
	old.closed()
}

// fake is a listener that says hello as a peer would, and then what the test wants.
func fakePeer(t *testing.T, id xfer.PeerID, then func(r raw)) []byte {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	ended := make(chan struct{})
	t.Cleanup(func() { l.Close(); close(ended); served.Wait() })
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			served.Go(func() {
				defer c.Close()
				if _, _, err := frame.RecvHello(c); err != nil {
					return
				}
				a := answer{version: 1, calls: 8, identity: id}
				if err := frame.SendHello(c, a.append(nil), nil); err != nil {
					return
				}
				then(raw{t, c})
				<-ended
			})
		}
	})
	return appendConnInfo(nil, []string{l.Addr().String()})
}

// TestBadServer: whatever a peer answers, only the memory of the call is reached, and
// a read succeeds only with all its bytes.
func TestBadServer(t *testing.T) {
	const size = 1 << 20
	data := func(r raw, call, piece uint32, off uint64, n int) {
		r.send(frame.Header{Type: frame.Data, ID: callID(call, piece), Offset: off}, bytes.Repeat([]byte{0xee}, n))
	}
	done := func(r raw, call uint32, status uint16, p []byte) {
		r.send(frame.Header{Type: frame.Done, ID: callID(call, 0), Status: status}, p)
	}
	for _, tt := range []struct {
		name string
		then func(r raw, call uint32)
		want error
	}{
		{"nothing, and done", func(r raw, c uint32) { done(r, c, statusOK, nil) }, xfer.ErrShort},
		{"too little", func(r raw, c uint32) { data(r, c, 0, 0, 99_999); done(r, c, statusOK, nil) }, xfer.ErrShort},
		{"too much", func(r raw, c uint32) { data(r, c, 0, 0, 100_001); done(r, c, statusOK, nil) }, xfer.ErrShort},
		{"beyond the end", func(r raw, c uint32) {
			data(r, c, 0, 0, 99_999)
			data(r, c, 0, 99_999, 2)
			done(r, c, statusOK, nil)
		}, xfer.ErrShort},
		{"twice", func(r raw, c uint32) {
			data(r, c, 0, 0, 50_000)
			data(r, c, 0, 0, 50_000)
			done(r, c, statusOK, nil)
		}, xfer.ErrShort},
		{"far away", func(r raw, c uint32) { data(r, c, 0, 1<<63, 100_000); done(r, c, statusOK, nil) }, xfer.ErrShort},
		{"another piece", func(r raw, c uint32) { data(r, c, 1, 0, 100_000); done(r, c, statusOK, nil) }, xfer.ErrShort},
		{"another call", func(r raw, c uint32) { data(r, c+1, 0, 0, 100_000); done(r, c, statusOK, nil) }, xfer.ErrShort},
		{"gather too much", func(r raw, c uint32) {
			r.send(frame.Header{Type: typeGather, ID: callID(c, 0)}, make([]byte, 200_000))
			done(r, c, statusOK, nil)
		}, nil},
		{"gather too little", func(r raw, c uint32) {
			r.send(frame.Header{Type: typeGather, ID: callID(c, 0)}, make([]byte, 99_999))
			done(r, c, statusOK, nil)
		}, xfer.ErrShort},
		{"busy", func(r raw, c uint32) { done(r, c, statusBusy, nil) }, xfer.ErrUnavailable},
		{"refused", func(r raw, c uint32) { done(r, c, statusRefused, (&spans{all: true}).append(nil)) }, xfer.ErrInvalid},
		{"refused, not said what", func(r raw, c uint32) { done(r, c, statusRefused, nil) }, xfer.ErrDisconnected},
		{"an answer too many", func(r raw, c uint32) { done(r, c+1, statusOK, nil) }, xfer.ErrDisconnected},
		{"a caller's frame", func(r raw, c uint32) { r.send(frame.Header{Type: frame.Flush, ID: callID(c, 0)}, nil) }, xfer.ErrDisconnected},
		{"no frame", func(r raw, _ uint32) { r.write(bytes.Repeat([]byte{0}, 100)) }, xfer.ErrDisconnected},
		{"torn", func(r raw, c uint32) {
			h := frame.Header{Type: frame.Data, ID: callID(c, 0), Length: 100_000}
			r.write(append(h.Append(nil), make([]byte, 50_000)...))
			r.Close()
		}, xfer.ErrDisconnected},
		{"after the end", func(r raw, c uint32) {
			data(r, c, 0, 0, 100_000)
			done(r, c, statusOK, nil)
			data(r, c, 0, 0, 100_000)
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := newNode(t, "a", size, Options{Conns: 1})
			id := xfer.PeerID{Name: "fake", Incarnation: 3}
			info := fakePeer(t, id, func(r raw) {
				if h, _, err := r.next(); err == nil {
					c, _ := splitID(h.ID)
					tt.then(r, c)
				}
			})
			if err := a.LoadConnInfo(id, info); err != nil {
				t.Fatal(err)
			}
			far := &node{id: id, mem: xfertest.Memory{Desc: xfer.Desc{Addr: 4096, Len: size}}}
			remote, err := a.LoadRegion(id, xfer.DRAM, far.mem.Desc, regionInfo{1, 4096, size}.append(nil))
			if err != nil {
				t.Fatal(err)
			}
			fill(a.bytes(), 1)
			want := bytes.Clone(a.bytes())
			err = a.move(t.Context(), t, xfer.Read, remote, far, 100_000, 100_000)
			if !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Errorf("%v, want %v", err, tt.want)
			}
			copy(want[100_000:200_000], a.bytes()[100_000:])
			if !bytes.Equal(a.bytes(), want) {
				t.Error("memory outside of the read has changed")
			}
		})
	}
}

// TestStalledServer: a peer that says hello and nothing else does not keep a transfer
// longer than its context, for which it is given up where that is needed.
func TestStalledServer(t *testing.T) {
	const size = 64 << 20
	for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
		t.Run(op.String(), func(t *testing.T) {
			a := newNode(t, "a", size, Options{})
			id := xfer.PeerID{Name: "fake", Incarnation: 3}
			if err := a.LoadConnInfo(id, fakePeer(t, id, func(raw) {})); err != nil {
				t.Fatal(err)
			}
			far := &node{id: id, mem: xfertest.Memory{Desc: xfer.Desc{Addr: 4096, Len: size}}}
			remote, err := a.LoadRegion(id, xfer.DRAM, far.mem.Desc, regionInfo{1, 4096, size}.append(nil))
			if err != nil {
				t.Fatal(err)
			}
			if err := a.Connect(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			began := time.Now()
			if err := a.move(ctx, t, op, remote, far, 0, size); !errors.Is(err, xfer.ErrCanceled) {
				t.Errorf("%v, want ErrCanceled", err)
			}
			t.Logf("it took %v", time.Since(began))
			if time.Since(began) > 10*time.Second {
				t.Error("it waited for the peer")
			}
			if open := a.Stats().Dialed; op == xfer.Read && open != 4 {
				t.Errorf("%d connections after a read that nobody answered, want all 4", open)
			}
		})
	}
}

func TestParse(t *testing.T) {
	if _, err := parseConnInfo(appendConnInfo(nil, []string{"nowhere"})); !errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), `"nowhere"`) {
		t.Errorf("address: %v", err)
	}
	if _, err := parseConnInfo([]byte{9, 1}); !errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), "version 9") {
		t.Errorf("version: %v", err)
	}
	if _, err := parseRegionInfo(append(regionInfo{1, 2, 3}.append(nil), 0)); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("too long: %v", err)
	}
	a := newNode(t, "a", 1<<20, Options{})
	id := xfer.PeerID{Name: "p", Incarnation: 1}
	if err := a.LoadConnInfo(id, appendConnInfo(nil, []string{"127.0.0.1:1"})); err != nil {
		t.Fatal(err)
	}
	for _, d := range []xfer.Desc{{Addr: 99, Len: 1}, {Addr: 100, Len: 101}, {Addr: 200, Len: 1}, {Addr: ^uint64(0), Len: 1}, {Addr: 101, Len: ^uint64(0)}, {Addr: 100, Len: 1, Dev: 1}} {
		if _, err := a.LoadRegion(id, xfer.DRAM, d, regionInfo{1, 100, 100}.append(nil)); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("%s: %v", d, err)
		}
	}
}
