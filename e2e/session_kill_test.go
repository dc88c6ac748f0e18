package e2e

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSessionClientsEnd: clients of sessions are killed, or stopped and killed, at
// random moments. What they held is free soon, and nobody sees wrong bytes.
func TestSessionClientsEnd(t *testing.T) {
	t.Parallel()
	rounds := 27
	switch {
	case soak:
		rounds = 200
	case raceEnabled, testing.Short():
		rounds = 6
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	x := newCrowd(t, "64MiB", 0)
	var slowest time.Duration
	var leases, places int64 // most that a client that ended held
	for round := range rounds {
		way := sessionWays[round%len(sessionWays)]
		name := fmt.Sprintf("%s-%d", way, round)
		p := startWorker(t, x.d, way, name, x.ns, r.Uint64())
		time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
		working(t, p, name)
		if round == rounds-1 { // whatever chance has brought so far
			until(t, "a worker has held leases and places", func() bool {
				working(t, p, name)
				l, g := x.held()
				leases, places = max(leases, l), max(places, g)
				return leases > 0 && places > 0
			})
		}
		if how := r.IntN(4); how < 2 {
			signal(t, p, unix.SIGSTOP)
			time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
			l, g := x.held()
			leases, places = max(leases, l), max(places, g)
			if how == 0 {
				signal(t, p, unix.SIGCONT)
				time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
				working(t, p, name)
			}
		}
		p.kill()
		slowest = max(slowest, x.freed(startWatch()))
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	x.end()
	t.Attr("did", fmt.Sprintf("%d clients ended, up to %d leases and %d places were held, all free within %v; %s",
		rounds, leases, places, slowest.Round(time.Millisecond), x.sum()))
}

// stopped starts a worker and stops it at a random moment, with holding set at one at
// which it holds a place.
func (x *crowd) stopped(way, name string, r *rand.Rand, holding bool) *process {
	x.t.Helper()
	x.gate.Lock()
	_, before := x.held()
	x.gate.Unlock()
	p := startWorker(x.t, x.d, way, name, x.ns, r.Uint64())
	time.Sleep(time.Duration(r.IntN(100)) * time.Millisecond)
	x.gate.Lock()
	defer x.gate.Unlock()
	until(x.t, "a worker holds a place", func() bool {
		working(x.t, p, name)
		signal(x.t, p, unix.SIGSTOP)
		until(x.t, "the worker is stopped", p.isStopped)
		if _, now := x.held(); now > before || !holding {
			return true
		}
		signal(x.t, p, unix.SIGCONT)
		return false
	})
	return p
}

func signal(t *testing.T, p *process, s unix.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// orphanedGrants are places that a process could still write whose session has ended.
var orphanedGrants = regexp.MustCompile(`(?m)^kvtier_session_orphaned_grants (\d+)$`)

// TestSessionClientsWakeLate: clients of sessions are stopped at random moments, also
// while they copy into and out of the store's memory, until their sessions have been
// given up and what they had been granted is the store's again. Then they go on.
func TestSessionClientsWakeLate(t *testing.T) {
	t.Parallel()
	times := 1
	if soak {
		times = 5
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	x := newCrowd(t, "128MiB", 10*time.Millisecond)
	var kept int64 // places in memory that stopped processes could write
	for n := range times {
		type client struct {
			*process
			name string
		}
		var clients []client
		for k, way := range []string{"tcp", "unix", "shared", "shared", "shared", "tcp", "unix", "shared"} {
			name := fmt.Sprintf("%s-%d-%d", way, n, k)
			clients = append(clients, client{x.stopped(way, name, r, way == "shared"), name})
		}
		until(t, "the sessions of stopped clients have ended", func() bool {
			for _, c := range clients {
				if !c.isStopped() {
					t.Fatalf("%s goes on, and nobody has told it to", c.name)
				}
				if sessionsEnded(x.d, c.name) == 0 {
					return false
				}
			}
			return true
		})
		w := startWatch()
		x.gate.Lock()
		looks := 0
		var places int64
		until(t, "the leases of stopped clients, and their places where they cannot write themselves, are free", func() bool {
			looks++
			var leases int64
			leases, places = x.held()
			return leases == 0 && places == number(t, x.d, "/metrics", orphanedGrants)
		})
		took := w.took()
		if looks > 1 {
			x.soon("what a stopped client held is free", took)
		}
		kept += places
		x.gate.Unlock()
		for _, c := range clients {
			signal(t, c.process, unix.SIGCONT)
		}
		until(t, "the clients have new sessions", func() bool {
			for _, c := range clients {
				working(t, c.process, c.name)
				if sessionsBegun(x.d, c.name) < 2 {
					return false
				}
			}
			return true
		})
		for _, c := range clients {
			time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
			working(t, c.process, c.name)
			c.kill()
		}
		x.freed(startWatch())
	}
	if kept == 0 {
		t.Error("no place was kept from others while a stopped process could write it")
	}
	x.end()
	t.Attr("did", fmt.Sprintf("%d times; %d places were kept while a stopped process could write them; %s", times, kept, x.sum()))
}
