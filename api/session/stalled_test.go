package session_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/xfer/frame"
)

// TestStalled shows that a client that takes nothing loses its session, and that
// what it held comes back, while others are served.
func TestStalled(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Frame: frame.Options{StallAfter: 500 * time.Millisecond}})
	c := r.client()
	p := pattern(4<<20, 1)
	c.store(r.keys("a"), p)
	small := pattern(100, 2) // fits into any buffer: who gets it cannot stall
	c.store(r.keys("b"), small)
	if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a"), LeaseMS: 60000}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
		t.Fatal(err)
	}
	c.places(r.ns, 100, 3)
	for range 16 { // more than any buffer holds
		c.send(session.CodeGet, &session.GetMessage{Keys: r.keys("a")})
	}
	other := r.client()
	if got, _, err := other.blocks(&session.GetMessage{Keys: r.keys("b")}); err != nil || !bytes.Equal(got[0], small) {
		t.Errorf("another client: error %v", err)
	}
	r.await("the session's end", func() bool { return r.server.Stats().Sessions == 1 })
	if st := r.store.Stats(); st.Leases != 0 || st.Reservations != 0 {
		t.Errorf("%d leases and %d grants are left", st.Leases, st.Reservations)
	}
}

// TestStalledMemory shows that clients that take nothing cost the server a bounded amount
// of memory each, whatever they ask for.
func TestStalledMemory(t *testing.T) {
	const (
		clients = 48
		most    = 1 << 20 // for each: what one message may have
	)
	r := newRig(t, nil, nil)
	c := r.client()
	c.store(r.keys("a"), pattern(4<<20, 1))
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	// Gets of more than any buffer holds, and matches whose answers are long, so many that
	// the answers alone would be gigabytes.
	const rounds = 400
	many := r.ns
	many.Hashes = bytes.Repeat(r.keys("a").Hashes, 8000)
	get, match := session.GetMessage{Keys: r.keys("a")}, session.MatchMessage{Keys: many, Flags: session.FlagAll}
	requests := [][]byte{
		packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeGet)}, get.Append(nil)),
		packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeMatch)}, match.Append(nil)),
	}
	before := heap()
	var written atomic.Int64
	var writers sync.WaitGroup
	var conns []*client
	for i := range clients {
		s := dial(t, "unix", r.unix)
		if i%2 == 0 {
			s = dial(t, "tcp", r.tcp)
		}
		if err := s.hello(session.HelloMessage{}); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, s)
		writers.Go(func() {
			for id := range uint64(rounds) {
				for k, b := range requests {
					var head [frame.HeaderBytes]byte
					copy(head[:], b)
					binary.LittleEndian.PutUint64(head[8:], 1+2*id+uint64(k))
					v := net.Buffers{head[:], b[frame.HeaderBytes:]}
					n, err := v.WriteTo(s.c)
					written.Add(n)
					if err != nil {
						return // it was closed, in the end
					}
				}
			}
			t.Error("the server reads on, though nobody takes its answers")
		})
	}
	var last int64
	same := 0
	r.await("nobody gets anything on any more", func() bool {
		time.Sleep(20 * time.Millisecond)
		now := written.Load()
		if now != last || now == 0 {
			same = 0
		}
		last = now
		same++
		return same > 10
	})
	grown := heap() - before
	t.Logf("%d clients have written %d KiB each, the heap has grown by %d KiB for each", clients, last>>10/clients, grown>>10/clients)
	if grown > clients*most {
		t.Errorf("the heap has grown by %d bytes for %d clients that take nothing, want at most %d each", grown, clients, most)
	}
	if n := r.server.Stats().Sessions; n != clients+1 {
		t.Errorf("%d sessions, want %d", n, clients+1)
	}
	if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || len(got[0]) != 4<<20 {
		t.Errorf("another client: error %v", err)
	}
	for _, s := range conns {
		_ = s.c.Close()
	}
	writers.Wait()
	_ = c.c.Close()
	r.quiet()
}
