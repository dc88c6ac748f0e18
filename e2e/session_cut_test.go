package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

const (
	// cutDeadline is that of the calls over a link that does harm.
	cutDeadline = 200 * time.Millisecond
	cutBytes    = 1 << 20
	cutFixed    = 4 // blocks that are there from the beginning
)

// cutClient is what a test of bad links needs of a client.
type cutClient interface {
	// get reads block i into memory of its own and compares it: there says whether it
	// has come. What it leaves in memory is looked at by quiet.
	get(ctx context.Context, i int) (there bool, err error)
	put(ctx context.Context, i int) error
	match(ctx context.Context) error
	// quiet says what has written into memory of calls that were over.
	quiet() error
	// way is how it moves blocks now.
	way() string
	close()
}

// cutTest is a daemon behind a link.
type cutTest struct {
	t    *testing.T
	d    *daemon
	link *link
	c    cutClient
	next int // block to put
	puts []int
	did  struct{ right, late, lost, hits int }
	most time.Duration // beyond a deadline
}

// TestSessionLinks: a link to the daemon cuts, ends half, holds and delays what it
// passes, at random bytes. Each call ends by its deadline with a right answer or a
// right error, its memory is left alone then, and the next call does well.
func TestSessionLinks(t *testing.T) {
	t.Parallel()
	for _, way := range []string{"tcp", "unix"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			socket := filepath.Join(dir, "s")
			dram := "256MiB" // for all that is put
			if soak {
				dram = "2GiB"
			}
			d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", dram, "--nvme", "none", "--socket", socket, "--shared-memory", "off")
			x := &cutTest{t: t, d: d, next: cutFixed}
			c := dial(t, d)
			ns := open(t, c, "cut", cutBytes)
			put(t, c, ns, 0, cutFixed, cutBytes, block.G2)
			if way == "tcp" {
				x.link = newLink(t, "tcp", "127.0.0.1:0", sessionAddr(t, d, "tcp"))
				x.c = &cutSession{address: x.link.lis.Addr().String(), ns: session.Namespace{ID: ns.ID, HashLen: hashBytes}}
			} else {
				// The client looks for the daemon's socket where the link is.
				if err := os.Rename(socket, socket+"2"); err != nil {
					t.Fatal(err)
				}
				x.link = newLink(t, "unix", socket, socket+"2")
				x.c = &cutAPI{c: dial(t, d), ns: ns}
			}
			x.run()
			d.stop(0)
		})
	}
}

func (x *cutTest) run() {
	rounds := 60
	switch {
	case soak:
		rounds = 600
	case raceEnabled, testing.Short():
		rounds = 20
	}
	seed := uint64(time.Now().UnixNano())
	x.t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	defer func() { x.c.close() }()
	// How much passes when all is well.
	x.link.spoil("", 0, 0)
	x.calls()
	_, whole := x.link.mend()
	for round := range rounds {
		fault, dir := linkFaults[round%len(linkFaults)], r.IntN(directions)
		after := r.Int64N(whole[dir] + whole[dir]/16)
		what := fmt.Sprintf("round %d: %s after %d bytes in direction %d", round, fault, after, dir)
		x.link.spoil(fault, dir, after)
		x.judge(what)
		if done, _ := x.link.mend(); done {
			x.did.hits++
		}
		x.after(what)
		if x.t.Failed() {
			x.t.Fatalf("%s:\n%s", what, x.d.stderr)
		}
	}
	x.kept()
	if x.did.right == 0 || x.did.late == 0 || x.did.lost == 0 || x.did.hits < rounds/2 {
		x.t.Errorf("the rounds did not do what they are for: %+v", x.did)
	}
	x.t.Attr("did", fmt.Sprintf("%d rounds, %+v; at most %v after a deadline", rounds, x.did, x.most.Round(time.Microsecond)))
}

// kept reads what was answered as stored.
func (x *cutTest) kept() {
	x.t.Helper()
	for _, i := range x.puts {
		if there, err := x.c.get(timeout(x.t), i); err != nil || !there {
			x.t.Errorf("block %d was answered as stored: there %v, error %v", i, there, err)
		}
	}
}

// judge makes calls, none of which may be late.
func (x *cutTest) judge(what string) {
	x.t.Helper()
	allowed := grace
	if raceEnabled {
		allowed *= 4 // its code is as much slower
	}
	late := x.calls()
	x.most = max(x.most, late)
	if late > allowed {
		x.t.Errorf("%s: calls end %v after their deadline", what, late)
	}
}

// calls makes calls at once, and returns how long after its deadline the last one
// ended.
func (x *cutTest) calls() (latest time.Duration) {
	x.t.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	do := func(what string, call func(ctx context.Context) error) {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(x.t.Context(), cutDeadline)
			defer cancel()
			end := make(chan error, 1)
			go func() { end <- call(ctx) }()
			late, err := await(ctx, end)
			mu.Lock()
			defer mu.Unlock()
			latest = max(latest, late)
			switch {
			case err == nil:
				x.did.right++
			case errors.Is(err, context.DeadlineExceeded):
				x.did.late++
			case errors.Is(err, block.ErrDisconnected):
				x.did.lost++
			default:
				x.t.Errorf("%s: %v", what, err)
			}
		})
	}
	for i := range 2 {
		do("get", func(ctx context.Context) error {
			there, err := x.c.get(ctx, i)
			if err == nil && !there {
				err = errors.New("a miss")
			}
			return err
		})
	}
	i := x.next
	x.next++
	do("put", func(ctx context.Context) error {
		err := x.c.put(ctx, i)
		if err == nil {
			mu.Lock()
			defer mu.Unlock()
			x.puts = append(x.puts, i)
		}
		return err
	})
	do("match", x.c.match)
	wg.Wait()
	return latest
}

// after makes the calls that follow when the link is well again.
func (x *cutTest) after(what string) {
	x.t.Helper()
	there, err := x.c.get(timeout(x.t), cutFixed-1)
	if errors.Is(err, block.ErrDisconnected) { // it was the one that found out
		there, err = x.c.get(timeout(x.t), cutFixed-1)
	}
	if err != nil || !there {
		x.t.Errorf("%s: the next get: there %v, error %v", what, there, err)
	}
	if _, err := x.c.get(timeout(x.t), x.next-1); err != nil { // it may be there or not
		x.t.Errorf("%s: the get of what was put meanwhile: %v", what, err)
	}
	until(x.t, "blocks move by a session again", func() bool {
		if x.c.way() != api.WayGRPC {
			return true
		}
		_, err := x.c.get(timeout(x.t), 0)
		if err != nil {
			x.t.Error(err)
		}
		return false
	})
	if err := x.c.quiet(); err != nil {
		x.t.Errorf("%s: %v", what, err)
	}
}

// cutAPI is a client that finds its sessions itself.
type cutAPI struct {
	c  *api.Client
	ns block.Namespace
}

func (c *cutAPI) get(ctx context.Context, i int) (there bool, err error) {
	err = c.c.Get(ctx, c.ns, []block.Wanted{{Hash: hashOf(i)}}, block.GetOptions{}, func(_ int, p block.Payload) error {
		there, err = cutCheck(i, p.Reason, p.Bytes)
		return err
	})
	return there, err
}

// cutCheck is what an answer for a block means.
func cutCheck(i int, reason block.MissReason, b []byte) (there bool, err error) {
	switch {
	case reason == block.MissAbsent:
		return false, nil
	case reason == block.MissDeadline:
		return false, context.DeadlineExceeded
	case reason != block.Hit:
		return false, fmt.Errorf("block %d: %v", i, reason)
	case !bytes.Equal(b, payload(i, cutBytes)):
		return true, fmt.Errorf("block %d: %d wrong bytes", i, len(b))
	}
	return true, nil
}

func (c *cutAPI) put(ctx context.Context, i int) error {
	data := payload(i, cutBytes)
	defer clear(data) // nobody needs it any more
	res, err := c.c.Put(ctx, c.ns, []api.PutItem{{Hash: hashOf(i), Data: data}}, api.PutOptions{})
	if err != nil {
		return err
	}
	return res[0].Err
}

func (c *cutAPI) match(ctx context.Context) error {
	m, err := c.c.Match(ctx, c.ns, []block.Hash{hashOf(0), hashOf(1)}, block.MatchOptions{})
	if err == nil && m.Prefix != 2 {
		err = fmt.Errorf("match: a prefix of %d, want 2", m.Prefix)
	}
	return err
}

func (c *cutAPI) way() string { return c.c.SessionInfo().Way }

func (*cutAPI) quiet() error { return nil } // its memory is its own

func (*cutAPI) close() {} // with the test

// cutSession is a session, and another one when that has ended.
type cutSession struct {
	address string
	ns      session.Namespace

	mu sync.Mutex
	c  *session.Client
	// Memory of calls that are over, filled with a pattern.
	over [][]byte
}

// session is the session; a call that finds none opens it.
func (c *cutSession) session(ctx context.Context) (*session.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c != nil && c.c.Err() == nil {
		return c.c, nil
	}
	if c.c != nil {
		_ = c.c.Close() // it had ended
		c.c = nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err // another call has tried
	}
	s, err := session.Dial(ctx, "tcp", c.address, nil)
	if err == nil {
		c.c = s
	}
	return s, err
}

// done fills memory of a call that is over.
func (c *cutSession) done(b []byte) {
	for i := range b {
		b[i] = cutPattern
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = append(c.over, b)
}

const cutPattern = 0xa5

func (c *cutSession) quiet() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	over := c.over
	c.over = nil
	for _, b := range over {
		if n := len(b) - bytes.Count(b, []byte{cutPattern}); n > 0 {
			return fmt.Errorf("%d bytes were written into the memory of a call that was over", n)
		}
	}
	return nil
}

func (c *cutSession) get(ctx context.Context, i int) (bool, error) {
	s, err := c.session(ctx)
	if err != nil {
		return false, err
	}
	into := make([]byte, cutBytes)
	res, err := s.Get(ctx, c.ns, []session.GetItem{{Hash: hashOf(i), Into: into}}, block.GetOptions{})
	var there bool
	if err == nil {
		if err = res[0].Err; err == nil {
			there, err = cutCheck(i, res[0].Reason, into[:res[0].Len])
		}
	}
	c.done(into)
	return there, err
}

func (c *cutSession) put(ctx context.Context, i int) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	data := payload(i, cutBytes)
	defer c.done(data)
	res, err := s.Put(ctx, c.ns, []session.PutBlock{{Hash: hashOf(i), Bytes: data}}, session.PutOptions{})
	if err != nil {
		return err
	}
	return res[0].Err
}

func (c *cutSession) match(ctx context.Context) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	h0, h1 := hashOf(0), hashOf(1)
	var m block.MatchResult
	err = s.Match(ctx, c.ns, append(h0[:hashBytes:hashBytes], h1[:hashBytes]...), block.MatchOptions{}, &m)
	if err == nil && m.Prefix != 2 {
		err = fmt.Errorf("match: a prefix of %d, want 2", m.Prefix)
	}
	return err
}

func (c *cutSession) way() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil || c.c.Err() != nil {
		return ""
	}
	return api.WayTCP
}

func (c *cutSession) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c != nil {
		_ = c.c.Close() // it may have ended
	}
}
