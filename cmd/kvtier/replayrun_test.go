package main

import (
	"context"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy/trace"
)

// requestLines are n requests, each for the blocks of those before it in its
// group of ten and one more.
func requestLines(n int) []string {
	lines := make([]string, n)
	for i := range lines {
		ids := make([]string, i%10+1)
		for j := range ids {
			ids[j] = fmt.Sprint(i/10*10 + j)
		}
		lines[i] = requestLine(strings.Join(ids, ","))
	}
	return lines
}

// Several clients do each request once, and one report and one journal have all.
func TestReplayClients(t *testing.T) {
	const n = 200
	addr, _ := startServer(t, memstore.New(nil), nil)
	trace, path := writeTrace(t, requestLines(n)...), filepath.Join(t.TempDir(), "journal")
	rep, _ := runReplay(t, addr, trace, 0, "--clients", "8", "--journal", path)
	if rep.Requests != n || rep.BlockRefs != n/10*55 || rep.Clients != 8 || rep.WrongBytes != 0 || rep.Errors != 0 {
		t.Errorf("replay: %+v", rep)
	}
	if rep.BytesPut != n*100 || rep.Hits+rep.Puts-rep.Missed != rep.BlockRefs || rep.Puts-rep.Existed != n || rep.BytesGot != 100*(rep.Gets-rep.Missed) {
		t.Errorf("blocks: %+v", rep)
	}
	// Match and request once each; as many gets and puts as there was need for.
	if l := rep.Latency; l.Match.Count != n || l.Request.Count != n || l.Get.Count > n || l.Put.Count > n || l.Get.Count*l.Put.Count == 0 {
		t.Errorf("latencies: %+v", l)
	}
	acked, err := readJournal(path)
	if err != nil || len(acked) != n {
		t.Errorf("the journal has %d blocks, %v; want %d", len(acked), err, n)
	}
	for _, clients := range []string{"1", "7"} {
		ck := runCheck(t, addr, trace, 0, "--clients", clients, "--journal", path)
		if ck.Listed != n || ck.Present != n || ck.BytesGot != n*100 || *ck.Acknowledged != n || *ck.AcknowledgedGone != 0 {
			t.Errorf("check by %s clients: %+v", clients, ck)
		}
	}
}

// A check that fails in one client fails as a whole.
func TestReplayCheckClientsFail(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	addr, srv := startServer(t, s, nil)
	trace := writeTrace(t, requestLines(50)...)
	runReplay(t, addr, trace, 0)
	s.get = func(ctx context.Context) error {
		go func() { _ = srv.Drain(cancelled()) }()
		<-ctx.Done()
		return ctx.Err()
	}
	if ck := runCheck(t, addr, trace, 1, "--clients", "4"); ck.Present != 0 || ck.Errors != 1 || ck.Error == "" {
		t.Errorf("check: %+v", ck)
	}
}

// A daemon that goes away ends all clients, with one error.
func TestReplayClientsServerGoes(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	var calls atomic.Int64
	var srv atomic.Pointer[api.Server]
	var dying *atomic.Bool
	s.match = func(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
		if n := calls.Add(1); n > 20 {
			if n == 24 { // all clients wait
				dying.Store(true)
				go func() { _ = srv.Load().Drain(cancelled()) }()
			}
			<-ctx.Done()
			return ctx.Err()
		}
		return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
	}
	addr, started := startServer(t, s, nil)
	srv.Store(started)
	dying = dyingStats(t, s)
	rep, stderr := runReplay(t, addr, writeTrace(t, requestLines(100)...), 1, "--clients", "4")
	if rep.Requests != 24 || rep.Error == "" || rep.Evictions != nil {
		t.Errorf("replay: %+v", rep)
	}
	if strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "ended after 24 requests") {
		t.Errorf("stderr %q, want one line", stderr)
	}
}

// A trace that breaks off lets the requests before that end.
func TestReplayClientsBrokenTrace(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	rep, stderr := runReplay(t, addr, writeTrace(t, append(requestLines(30), "oops")...), 1, "--clients", "5")
	if rep.Requests != 30 || rep.Errors != 0 || rep.BytesPut != 3000 || !strings.Contains(stderr, "line 31") {
		t.Errorf("replay: %+v, %s", rep, stderr)
	}
}

// A request that stalls holds up only its client: with --rate the others begin
// whether or not it has ended, and its time is in the report.
func TestReplayRate(t *testing.T) {
	const n, stall = 12, 50 * time.Millisecond
	s := &hookedStore{Store: memstore.New(nil)}
	var calls atomic.Int64
	others := make(chan struct{})
	s.match = func(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
		switch calls.Add(1) {
		case 1:
			select {
			case <-others:
				time.Sleep(stall)
			case <-ctx.Done():
				return ctx.Err()
			}
		case n:
			close(others)
		}
		return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
	}
	addr, _ := startServer(t, s, nil)
	rep, _ := runReplay(t, addr, writeTrace(t, requestLines(n)...), 0, "--rate", "1000", "--clients", "2")
	if rep.Requests != n || rep.Rate != 1000 || rep.Clients != 2 || rep.Seconds < 0.011 {
		t.Errorf("replay: %+v", rep)
	}
	least := float64(stall / time.Millisecond)
	if l := rep.Latency; l.Match.Max < least || l.Request.Max < l.Match.Max || l.Request.P999 < least {
		t.Errorf("latencies: %+v", l)
	}
}

// The lateness of requests that no client was free for is in the times.
func TestReplayRateLate(t *testing.T) {
	const n, each = 5, 20 * time.Millisecond
	s := &hookedStore{Store: memstore.New(nil)}
	s.match = func(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
		time.Sleep(each)
		return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
	}
	addr, _ := startServer(t, s, nil)
	trace := writeTrace(t, requestLines(n)...)
	// The last is due after 4 ms and begins after 80 ms.
	const lag, longest = 76, 96
	for _, args := range [][]string{{"--rate", "1000", "--clients", "1"}, {"--speed", "1000"}} {
		rep, _ := runReplay(t, addr, trace, 0, args...)
		if rep.Late < n-1 || rep.LagSeconds < lag/1e3 || rep.Latency.Match.Max < longest || rep.Latency.Request.Max < longest {
			t.Errorf("%v: %+v", args, rep)
		}
	}
	// Without moments nothing is late.
	rep, _ := runReplay(t, addr, trace, 0)
	if rep.Late != 0 || rep.LagSeconds != 0 || rep.Latency.Match.P50 < float64(each/time.Millisecond) {
		t.Errorf("replay: %+v", rep)
	}
}

func TestReplayClientsDefault(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	trace := writeTrace(t, requestLine("0"))
	for _, tc := range []struct {
		args []string
		want int
	}{{nil, 1}, {[]string{"--rate", "0"}, 1}, {[]string{"--rate", "0.5"}, rateClients}, {[]string{"--rate", "10", "--clients", "3"}, 3}} {
		if rep, _ := runReplay(t, addr, trace, 0, tc.args...); rep.Clients != tc.want {
			t.Errorf("%v: %d clients, want %d", tc.args, rep.Clients, tc.want)
		}
	}
}

// A rate or speed near zero makes moments that are far away, not past ones.
func TestReplayFarMoments(t *testing.T) {
	for _, run := range []*replayRun{{rate: 1e-300}, {speed: 1e-300}} {
		at := time.Duration(0)
		run.next = func() (*trace.Request, error) { at += time.Second; return &trace.Request{Time: at}, nil }
		run.start = time.Now()
		for i := range 3 {
			if _, due, ok := run.deal(); !ok || (i > 0) != (due.Sub(run.start) > 365*24*time.Hour) || due.Before(run.start) {
				t.Errorf("rate %v, speed %v: request %d is due after %v", run.rate, run.speed, i, due.Sub(run.start))
			}
		}
	}
}

// Puts that are broken off are no errors, and the journal does not have them.
func TestReplayAbandon(t *testing.T) {
	trace := writeTrace(t, requestLines(60)...)
	replayed := func(args ...string) (replayReport, int) {
		addr, _ := startServer(t, memstore.New(nil), nil)
		path := filepath.Join(t.TempDir(), "journal")
		rep, _ := runReplay(t, addr, trace, 0, append(args, "--journal", path)...)
		acked, err := readJournal(path)
		if err != nil {
			t.Fatal(err)
		}
		return rep, len(acked)
	}
	if rep, acked := replayed("--abandon", "1"); rep.Abandoned != rep.Puts || rep.Puts < 60 || rep.BytesPut != 0 || acked != 0 {
		t.Errorf("all broken off: %+v, %d in the journal", rep, acked)
	}
	rep, acked := replayed("--abandon", "0.3", "--seed", "7")
	if rep.Abandoned == 0 || acked == 0 || rep.Puts != rep.Abandoned+int64(acked) {
		t.Errorf("some broken off: %+v, %d in the journal", rep, acked)
	}
}

// Counters of a daemon that was started anew meanwhile say nothing.
func TestReplayEvictionsUnknown(t *testing.T) {
	count := func(g2, g3 int64) block.Stats {
		return block.Stats{Tiers: []block.TierStats{{Tier: block.G2, Evictions: g2}, {Tier: block.G3, Evictions: g3}}}
	}
	other := count(10, 10)
	other.Incarnation = 1
	for _, after := range []block.Stats{count(10, 4), count(4, 40), {}, other} {
		rep := newReplayReport()
		if rep.countEvictions(count(5, 5), after); rep.Evictions != nil || rep.EvictionsByTier != nil {
			t.Errorf("%+v: %d, %v", after, *rep.Evictions, rep.EvictionsByTier)
		}
		var text strings.Builder
		if err := rep.print(&text); err != nil || !strings.Contains(text.String(), "unknown") {
			t.Errorf("%v in\n%s", err, &text)
		}
	}
}

// What is added up is every counter.
func TestReplayReportAdd(t *testing.T) {
	set := func() *replayReport {
		rep := newReplayReport()
		v := reflect.ValueOf(rep).Elem()
		for i := range v.NumField() {
			if f := v.Field(i); f.Kind() == reflect.Int64 {
				f.SetInt(int64(i + 1))
			}
		}
		rep.HitsByTier["g2"], rep.MissReasons["absent"] = 3, 4
		return rep
	}
	sum, one := set(), set()
	one.HitsByTier["g3"], one.LagSeconds = 5, 2
	sum.add(one)
	for i := range reflect.TypeFor[replayReport]().NumField() {
		field := reflect.TypeFor[replayReport]().Field(i)
		if field.Type.Kind() != reflect.Int64 || field.Name == "BlockBytes" {
			continue
		}
		if got := reflect.ValueOf(sum).Elem().Field(i).Int(); got != 2*int64(i+1) {
			t.Errorf("%s: %d and %d are %d", field.Name, i+1, i+1, got)
		}
	}
	if sum.HitsByTier["g2"] != 6 || sum.HitsByTier["g3"] != 5 || sum.MissReasons["absent"] != 8 || sum.LagSeconds != 2 {
		t.Errorf("sum: %+v", sum)
	}
}
