package session_test

import (
	"bytes"
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/xfer/frame"
)

// TestFlat shows that sessions that come and go, in order and not, leave neither
// goroutines nor descriptors nor mapped memory.
func TestFlat(t *testing.T) {
	rounds := 1000
	switch {
	case os.Getenv("KVTIER_SOAK") != "":
		rounds = 10_000
	case raceEnabled, testing.Short():
		rounds = 100
	}
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, nil)
	first := r.client()
	first.store(r.keys("a"), pattern(1000, 1))
	_ = first.c.Close()
	file, _ := unsealed(t, 1<<20)
	files := func() int {
		t.Helper()
		l, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(l)
	}
	mapped := func() int {
		t.Helper()
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return bytes.Count(b, []byte("memfd:"))
	}
	regions := func() *client {
		c := dial(t, "unix", r.unix)
		if err := c.withRegions([]int{int(file.Fd())}, session.HelloRegion{Length: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		return c
	}
	round := func(i int) {
		var c *client
		switch i % 7 {
		case 0: // with a call under way
			c = r.client()
			c.places(r.ns, 1000, 1)
			c.recv(c.send(session.CodeWatch, &session.WatchMessage{}))
		case 1: // in the middle of a frame
			c = r.client()
			c.write(packed(frame.Header{Type: frame.Data, Token: c.places(r.ns, 1000, 1)[0].Grant}, make([]byte, 1000))[:500])
			_ = c.c.(*net.TCPConn).SetLinger(0)
		case 2: // over the other socket, with memory
			c = dial(t, "unix", r.unix)
			_ = unix.Munmap(c.share())
		case 3: // without a hello
			c = dial(t, "tcp", r.tcp)
			c.write([]byte("x"))
		case 4: // with a region
			c = regions()
		case 5: // while the server writes to it
			c = regions()
			c.send(session.CodeRegionGet, &session.RegionGetMessage{Keys: r.keys("a"), Segments: segments([]session.Segment{segment(0, 1000, 0)})})
		case 6: // with answers that nobody has read
			c = r.client()
			c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a"), LeaseMS: 60000})
			c.send(session.CodeGet, &session.GetMessage{Keys: r.keys("a")})
		}
		_ = c.c.Close()
	}
	for i := range 14 {
		round(i)
	}
	r.quiet()
	fds, maps, routines := files(), mapped(), runtime.NumGoroutine()
	for i := range rounds {
		round(i)
	}
	r.quiet()
	r.await("as few goroutines as before", func() bool { return runtime.NumGoroutine() <= routines })
	r.await("as few descriptors as before", func() bool { return files() <= fds })
	r.await("as little mapped as before", func() bool { return mapped() <= maps })
	if st := r.server.Stats(); st.Regions != 0 || st.RegionBytes != 0 || st.Orphans != 0 || st.Grants != 0 {
		t.Errorf("left: %+v", st)
	}
}
