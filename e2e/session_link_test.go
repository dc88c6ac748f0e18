package e2e

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// The directions of a link.
const (
	toServer = iota
	toClient
	directions
)

// linkFaults are what a link can do at a byte.
var linkFaults = []string{
	"cut",     // both connections are closed, over TCP with a reset
	"half",    // the receiver hears that this direction has ended
	"stall",   // nothing passes until the link is mended
	"delay",   // nothing passes for some time
	"trickle", // a little at a time passes until the link is mended
}

const (
	linkDelay = 50 * time.Millisecond
	// A trickle brings less than a frame until any deadline of these tests.
	trickleBytes = 512
	trickleEvery = 2 * time.Millisecond
)

// link passes connections on to a server, and does harm to one of them.
type link struct {
	t   *testing.T
	lis net.Listener
	to  [2]string // network and address

	work sync.WaitGroup
	mu   struct {
		sync.Mutex
		conns  map[net.Conn]struct{} // nil: closed
		fault  string                // "": none
		dir    int
		left   int64 // bytes that pass before it
		passed [directions]int64
		mended chan struct{}
	}
}

// newLink listens at an address until the test ends.
func newLink(t *testing.T, network, at, to string) *link {
	t.Helper()
	var lc net.ListenConfig
	lis, err := lc.Listen(t.Context(), network, at)
	if err != nil {
		t.Fatal(err)
	}
	l := &link{t: t, lis: lis, to: [2]string{network, to}}
	l.mu.conns = map[net.Conn]struct{}{}
	l.mu.mended = make(chan struct{})
	close(l.mu.mended)
	l.work.Go(l.accept)
	t.Cleanup(l.close)
	return l
}

func (l *link) close() {
	l.mend()
	_ = l.lis.Close() // accept ends
	l.mu.Lock()
	for c := range l.mu.conns {
		_ = c.Close() // its pumps end
	}
	l.mu.conns = nil
	l.mu.Unlock()
	l.work.Wait()
}

func (l *link) accept() {
	for {
		near, err := l.lis.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				l.t.Error(err)
			}
			return
		}
		far, err := net.DialTimeout(l.to[0], l.to[1], patience)
		if err != nil {
			_ = near.Close() // as nobody answers
			continue
		}
		l.mu.Lock()
		if l.mu.conns == nil {
			_, _ = near.Close(), far.Close() // the test is over
		} else {
			l.mu.conns[near], l.mu.conns[far] = struct{}{}, struct{}{}
			var both sync.WaitGroup
			both.Go(func() { l.pump(near, far, toServer) })
			both.Go(func() { l.pump(far, near, toClient) })
			l.work.Go(func() {
				both.Wait()
				l.cut(near, far)
				l.mu.Lock()
				defer l.mu.Unlock()
				delete(l.mu.conns, near)
				delete(l.mu.conns, far)
			})
		}
		l.mu.Unlock()
	}
}

// spoil makes the link do harm to whatever passes in a direction after some bytes.
func (l *link) spoil(fault string, dir int, after int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.fault, l.mu.dir, l.mu.left, l.mu.mended = fault, dir, after, make(chan struct{})
	l.mu.passed = [directions]int64{}
}

// mend ends the harm, and says whether there was any, and the bytes that have passed
// in each direction since spoil.
func (l *link) mend() (done bool, passed [directions]int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.mu.mended:
	default:
		close(l.mu.mended)
	}
	done = l.mu.left < 0
	l.mu.fault, l.mu.left = "", 0
	return done, l.mu.passed
}

// take says how many of n bytes pass, and what happens to the connection behind
// them.
func (l *link) take(dir, n int) (pass int, fault string, mended chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	pass = n
	if l.mu.fault != "" && l.mu.dir == dir && l.mu.left >= 0 {
		if int64(n) > l.mu.left {
			pass, fault = int(l.mu.left), l.mu.fault
			l.mu.left = -1 // once
		} else {
			l.mu.left -= int64(n)
		}
	}
	l.mu.passed[dir] += int64(pass)
	return pass, fault, l.mu.mended
}

// pump passes on what comes in one direction.
func (l *link) pump(from, to net.Conn, dir int) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		pass, fault, mended := l.take(dir, n)
		if _, werr := to.Write(buf[:pass]); werr != nil {
			l.cut(from, to)
			return
		}
		rest := buf[pass:n]
		switch fault {
		case "cut":
			l.cut(from, to)
			return
		case "half":
			end(to)
			return // and whoever sends waits
		case "stall":
			<-mended
		case "delay":
			time.Sleep(linkDelay)
		case "trickle":
			if rest = l.trickle(from, to, rest, mended); rest == nil {
				l.cut(from, to)
				return
			}
		}
		if _, werr := to.Write(rest); werr != nil {
			l.cut(from, to)
			return
		}
		if errors.Is(err, io.EOF) {
			end(to)
			return
		}
		if err != nil {
			l.cut(from, to)
			return
		}
	}
}

// trickle passes on little at a time until the link is mended, and returns what is
// left of what it has read; nil when the connection has ended.
func (l *link) trickle(from, to net.Conn, rest []byte, mended chan struct{}) []byte {
	tick := time.NewTicker(trickleEvery)
	defer tick.Stop()
	for {
		select {
		case <-mended:
			return rest
		case <-tick.C:
		}
		if len(rest) == 0 {
			rest = make([]byte, trickleBytes)
			n, err := from.Read(rest)
			if err != nil {
				return nil
			}
			rest = rest[:n]
		}
		n, err := to.Write(rest[:min(len(rest), trickleBytes)])
		if err != nil {
			return nil
		}
		rest = rest[n:]
	}
}

// end tells the receiver that no more comes.
func end(to net.Conn) {
	_ = to.(interface{ CloseWrite() error }).CloseWrite() // it fails where the connection has ended
}

// cut closes both ends, TCP with a reset.
func (l *link) cut(ends ...net.Conn) {
	for _, c := range ends {
		if tc, ok := c.(*net.TCPConn); ok {
			_ = tc.SetLinger(0) // it fails where the connection has ended
		}
		_ = c.Close() // as above
	}
}
