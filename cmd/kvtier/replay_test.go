package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
)

// hookedStore is a store some of whose calls a test replaces.
type hookedStore struct {
	*memstore.Store
	match   func(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error
	reserve func(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error)
	get     func(ctx context.Context) error
	stats   func() block.Stats
}

func (s *hookedStore) Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	if s.match == nil {
		return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
	}
	return s.match(ctx, ns, hashLen, hashes, o, res)
}

func (s *hookedStore) Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, fn func(int, block.Payload) error) error {
	if s.get == nil {
		return s.Store.Get(ctx, ns, hashLen, want, o, fn)
	}
	return s.get(ctx)
}

func (s *hookedStore) Reserve(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error) {
	if s.reserve == nil {
		return s.Store.Reserve(ctx, ns, hashLen, h, n, o)
	}
	return s.reserve(ctx, ns, hashLen, h, n, o)
}

func (s *hookedStore) Stats() block.Stats {
	if s.stats == nil {
		return s.Store.Stats()
	}
	return s.stats()
}

// runReplay replays in blocks of 100 bytes, which are no multiple of eight, and
// reads the report.
func runReplay(t *testing.T, addr, trace string, wantCode int, args ...string) (rep replayReport, stderr string) {
	t.Helper()
	r := kvtier(t, addr, "", append([]string{"replay", trace, "--block-bytes", "100", "--json", "--verify"}, args...)...)
	if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if r.code != wantCode || (r.code == 0) != (r.stderr == "") {
		t.Errorf("exit %d, stderr %q; want %d", r.code, r.stderr, wantCode)
	}
	return rep, r.stderr
}

func runCheck(t *testing.T, addr, trace string, wantCode int, args ...string) checkReport {
	t.Helper()
	var rep checkReport
	r := kvtier(t, addr, "", append([]string{"replay", trace, "--check-only", "--json"}, args...)...)
	if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if r.code != wantCode || (r.code == 0) != (r.stderr == "") {
		t.Errorf("exit %d, stderr %q; want %d", r.code, r.stderr, wantCode)
	}
	return rep
}

func TestReplay(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	trace := writeTrace(t, requestLine("0,1,2"), requestLine("0,1,3,4"), requestLine(""), requestLine("5,0"))

	rep, _ := runReplay(t, addr, trace, 0, "--durable", "g3")
	// 0 and 1 are found in the second request, 0 behind a gap in the last.
	if rep.Requests != 4 || rep.BlockRefs != 9 || rep.PrefixHits != 2 || rep.Hits != 3 {
		t.Errorf("replay: %+v", rep)
	}
	if rep.PrefixHitRate != 2./9 || rep.HitRate != 3./9 || rep.BytesPut != 600 || rep.BytesGot != 300 {
		t.Errorf("replay: %+v", rep)
	}
	if rep.WrongBytes != 0 || rep.Errors != 0 || rep.Refused != 0 || rep.Missed != 0 || rep.Existed != 0 || rep.Durable != "g3" {
		t.Errorf("replay: %+v", rep)
	}
	if want := map[string]int64{"g2": 3}; !maps.Equal(rep.HitsByTier, want) {
		t.Errorf("hits by tier %v, want %v", rep.HitsByTier, want)
	}

	// Everything is there now.
	if rep, _ = runReplay(t, addr, trace, 0, "--limit", "2"); rep.Requests != 2 || rep.PrefixHitRate != 1 || rep.HitRate != 1 || rep.BytesPut != 0 || rep.BytesGot != 700 {
		t.Errorf("second replay: %+v", rep)
	}

	ck := runCheck(t, addr, trace, 0)
	if ck.Listed != 6 || ck.Present != 6 || ck.TraceKeys != 6 || ck.Missed != 0 || ck.WrongBytes != 0 || ck.Foreign != 0 || ck.BytesGot != 600 {
		t.Errorf("check: %+v", ck)
	}
	if ck = runCheck(t, addr, trace, 0, "--limit", "1"); ck.Listed != 3 || ck.Present != 3 || ck.Foreign != 3 {
		t.Errorf("check --limit 1: %+v", ck)
	}

	// Parents are told: 3 comes behind 1, 5 is a root.
	r := kvtier(t, addr, "", "ls", "--namespace", "replay", "--json")
	for id, parent := range map[uint64]string{3: traceHash(1).Hex(16), 4: traceHash(3).Hex(16), 5: ""} {
		found := false
		for line := range strings.Lines(r.stdout) {
			var b listedBlock
			if err := json.Unmarshal([]byte(line), &b); err != nil {
				t.Fatal(err)
			}
			if b.Hash == traceHash(id).Hex(16) {
				found = true
				if b.Parent != parent {
					t.Errorf("block %d has parent %q, want %q", id, b.Parent, parent)
				}
			}
		}
		if !found {
			t.Errorf("block %d is not listed in %s", id, r.stdout)
		}
	}
}

// A journal has what was acknowledged, and a check tells what of that is gone.
func TestReplayJournal(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	s.reserve = func(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error) {
		if h == traceHash(4) {
			return block.Reserved{}, block.Existing{}, fmt.Errorf("reserve: %w", block.ErrUnavailable)
		}
		return s.Store.Reserve(ctx, ns, hashLen, h, n, o)
	}
	addr, _ := startServer(t, s, nil)
	trace := writeTrace(t, requestLine("0,1,2"), requestLine("0,3,4"), requestLine("0,3"))
	path := filepath.Join(t.TempDir(), "journal")
	runReplay(t, addr, trace, 1, "--journal", path)
	acked, err := readJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint64(5) {
		if _, ok := acked[traceHash(id)]; ok != (id != 4) {
			t.Errorf("block %d in the journal: %v", id, ok)
		}
	}
	if ck := runCheck(t, addr, trace, 0, "--journal", path); *ck.Acknowledged != 4 || *ck.AcknowledgedGone != 0 {
		t.Errorf("check: %d acknowledged, %d gone", *ck.Acknowledged, *ck.AcknowledgedGone)
	}
	kvtier(t, addr, "", "rm", "--namespace", "replay", traceHash(0).Hex(16), traceHash(3).Hex(16)).want(t, 0, "deleted 2 of 2\n", "")
	if ck := runCheck(t, addr, trace, 0, "--journal", path); *ck.Acknowledged != 4 || *ck.AcknowledgedGone != 2 || ck.Listed != 2 {
		t.Errorf("check: %d acknowledged, %d gone, %d listed", *ck.Acknowledged, *ck.AcknowledgedGone, ck.Listed)
	}

	write(t, path, traceHash(0).Hex(16)+"\n"+traceHash(1).Hex(16)[:20])
	if acked, err = readJournal(path); err != nil || len(acked) != 1 {
		t.Errorf("journal with a last line cut: %d blocks, %v", len(acked), err)
	}
	write(t, path, traceHash(0).Hex(16)+"\n0011223344556677\n")
	kvtier(t, addr, "", "replay", "--check-only", trace, "--journal", path).want(t, 1, "", "line 2")
	kvtier(t, addr, "", "replay", "--check-only", trace, "--journal", path+"-absent").want(t, 1, "", "journal-absent")
	kvtier(t, addr, "", "replay", trace, "--block-bytes", "100", "--journal", t.TempDir()).want(t, 1, "", "open journal")
}

// The names of the fixed fields, which scripts rely on.
func TestReplayNames(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	trace := writeTrace(t, requestLine("0,1"))
	for _, tc := range []struct {
		args  []string
		names string
	}{
		{[]string{"--block-bytes", "8"}, "requests block_refs prefix_hit_rate hit_rate bytes_put bytes_got wrong_bytes refused errors hits_by_tier evictions seconds latency"},
		{[]string{"--check-only"}, "listed present missed wrong_bytes"},
	} {
		r := kvtier(t, addr, "", append([]string{"replay", trace, "--json"}, tc.args...)...)
		var got map[string]any
		if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		for _, name := range strings.Fields(tc.names) {
			if v, ok := got[name]; !ok || v == nil {
				t.Errorf("%v: no %s in %s", tc.args, name, r.stdout)
			}
		}
		if latency, ok := got["latency"].(map[string]any); ok {
			for _, call := range []string{"match", "get", "put", "request"} {
				times, _ := latency[call].(map[string]any)
				for _, name := range []string{"count", "p50_ms", "p99_ms", "p999_ms", "max_ms"} {
					if _, ok := times[name].(float64); !ok {
						t.Errorf("%v: no latency.%s.%s in %s", tc.args, call, name, r.stdout)
					}
				}
			}
		}
	}
	for _, args := range [][]string{{"--block-bytes", "8"}, {"--check-only"}} {
		if r := kvtier(t, addr, "", append([]string{"replay", trace}, args...)...); r.code != 0 || !strings.Contains(r.stdout, "wrong bytes") {
			t.Errorf("table: %+v", r)
		}
	}
}

func TestReplayFindsWrongBytes(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	trace := writeTrace(t, requestLine("0,1"), requestLine("0,1"))
	// Block 1 holds the bytes of block 2.
	var p [100]byte
	fillPattern(p[:], traceHash(2))
	kvtier(t, addr, string(p[:]), "put", "--namespace", "replay", "--block-bytes", "100", traceHash(1).Hex(16), "-").
		want(t, 0, "stored "+traceHash(1).Hex(16)+", 100 bytes, g2\n", "")
	rep, stderr := runReplay(t, addr, trace, 1)
	if rep.Requests != 2 || rep.WrongBytes < 150 || rep.Errors != 0 || !strings.Contains(stderr, "wrong bytes") {
		t.Errorf("replay: %+v, %s", rep, stderr)
	}
	if ck := runCheck(t, addr, trace, 1); ck.Listed != 2 || ck.Present != 1 || ck.WrongBytes < 75 || ck.Missed != 0 {
		t.Errorf("check: %+v", ck)
	}
}

func TestReplayConflict(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	// A lookup that finds nothing, as when blocks come in behind it.
	s.match = func(_ context.Context, _ block.NamespaceID, hashLen int, hashes []byte, _ block.MatchOptions, res *block.MatchResult) error {
		res.Blocks = append(res.Blocks, make([]block.Found, len(hashes)/hashLen)...)
		return nil
	}
	addr, _ := startServer(t, s, nil)
	trace := writeTrace(t, requestLine("0,1"), requestLine("0,1,2"))
	var p [100]byte
	fillPattern(p[:], traceHash(7))
	kvtier(t, addr, string(p[:]), "put", "--namespace", "replay", "--block-bytes", "100", traceHash(1).Hex(16), "-").
		want(t, 0, "stored "+traceHash(1).Hex(16)+", 100 bytes, g2\n", "")
	rep, stderr := runReplay(t, addr, trace, 1)
	if rep.Requests != 2 || rep.Conflicts != 2 || rep.Errors != 2 || rep.Existed != 1 || rep.BytesPut != 200 || rep.WrongBytes != 0 {
		t.Errorf("replay: %+v", rep)
	}
	if !strings.Contains(stderr, "conflict") || !strings.Contains(stderr, traceHash(1).Hex(16)) {
		t.Errorf("stderr %q does not name the conflict", stderr)
	}
}

// Blocks that go between the match and the get are put again, and are no error.
func TestReplayBlocksThatGo(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	var calls atomic.Int64
	s.match = func(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
		err := s.Store.Match(ctx, ns, hashLen, hashes, o, res)
		if err == nil && calls.Add(1) == 2 {
			_, err = s.Delete(ctx, ns, hashLen, hashes[hashLen:2*hashLen])
		}
		return err
	}
	addr, _ := startServer(t, s, nil)
	rep, _ := runReplay(t, addr, writeTrace(t, requestLine("0,1,2"), requestLine("0,1,2,3")), 0)
	if rep.Hits != 3 || rep.Gets != 3 || rep.Missed != 1 || rep.MissReasons["absent"] != 1 || rep.BytesPut != 500 || rep.BytesGot != 200 || rep.HitsByTier["g2"] != 2 {
		t.Errorf("replay: %+v", rep)
	}
}

func TestReplayRefused(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	var refusals atomic.Int64
	refusals.Store(5)
	s.reserve = func(ctx context.Context, ns block.NamespaceID, hashLen int, h block.Hash, n int64, o block.PutOptions) (block.Reserved, block.Existing, error) {
		if refusals.Add(-1) >= 0 {
			return block.Reserved{}, block.Existing{}, fmt.Errorf("reserve: %w", block.ErrNoSpace)
		}
		return s.Store.Reserve(ctx, ns, hashLen, h, n, o)
	}
	addr, _ := startServer(t, s, nil)
	trace := writeTrace(t, requestLine("0,1,2"), requestLine("0,1,2,3"))

	// All three of the first request are refused, then two of them again.
	rep, _ := runReplay(t, addr, trace, 0)
	if rep.Refused != 3 || rep.Retries != 5 || rep.Errors != 0 || rep.BytesPut != 400 || rep.Puts != 4 || rep.Hits != 3 {
		t.Errorf("replay with room after a while: %+v", rep)
	}

	refusals.Store(1 << 40)
	rep, stderr := runReplay(t, addr, writeTrace(t, requestLine("0,8"), requestLine("0,9")), 1, "--timeout", "300ms")
	if rep.Requests != 2 || rep.Refused != 2 || rep.Errors != 2 || rep.Retries == 0 || rep.Conflicts != 0 || rep.Hits != 2 || !strings.Contains(stderr, "no space") {
		t.Errorf("replay without room: %+v, %s", rep, stderr)
	}
}

// A put that waits in the store for room until its deadline is refused too.
func TestReplayFull(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Capacity: 250}), nil)
	rep, _ := runReplay(t, addr, writeTrace(t, requestLine("0,1"), requestLine("2")), 1, "--timeout", "300ms")
	if rep.Requests != 2 || rep.Errors == 0 || rep.BytesPut != 200 {
		t.Errorf("replay: %+v", rep)
	}
}

func TestReplayEvictions(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	var calls atomic.Int64
	s.stats = func() block.Stats {
		n := calls.Add(1)
		return block.Stats{Tiers: []block.TierStats{{Tier: block.G2, Evictions: 10 * n}, {Tier: block.G3, Evictions: 100 + n}}}
	}
	addr, _ := startServer(t, s, nil)
	rep, _ := runReplay(t, addr, writeTrace(t, requestLine("0")), 0)
	if rep.Evictions == nil || *rep.Evictions != 11 || rep.EvictionsByTier["g2"] != 10 || rep.EvictionsByTier["g3"] != 1 {
		t.Errorf("replay: %+v", rep)
	}
}

// dyingStats makes Stats calls of a store, from when dying is set, end with the
// test, so that a server that goes away answers none.
func dyingStats(t *testing.T, s *hookedStore) (dying *atomic.Bool) {
	dying = new(atomic.Bool)
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	s.stats = func() block.Stats {
		if dying.Load() {
			<-over
		}
		return s.Store.Stats()
	}
	return dying
}

// A replay whose server goes away ends, and says how far it was.
func TestReplayServerGoes(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	var calls atomic.Int64
	var srv atomic.Pointer[api.Server]
	var dying *atomic.Bool
	s.match = func(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
		if calls.Add(1) == 3 {
			dying.Store(true)
			go func() { _ = srv.Load().Drain(cancelled()) }()
			<-ctx.Done()
			return ctx.Err()
		}
		return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
	}
	addr, started := startServer(t, s, nil)
	srv.Store(started)
	dying = dyingStats(t, s)
	rep, stderr := runReplay(t, addr, writeTrace(t, requestLine("0"), requestLine("0,1"), requestLine("0,1,2"), requestLine("0,1,2,3")), 1)
	if rep.Requests != 3 || rep.BytesPut != 200 || rep.BytesGot != 100 || rep.Errors != 1 || rep.Error == "" || rep.Evictions != nil {
		t.Errorf("replay: %+v", rep)
	}
	if !strings.Contains(stderr, "ended after 3 requests") {
		t.Errorf("stderr %q", stderr)
	}
}

// Calls that a server does not answer end the replay after a few of them.
func TestReplayServerHangs(t *testing.T) {
	s := &hookedStore{Store: memstore.New(nil)}
	s.match = func(ctx context.Context, _ block.NamespaceID, _ int, _ []byte, _ block.MatchOptions, _ *block.MatchResult) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr, _ := startServer(t, s, nil)
	line := requestLine("0")
	rep, stderr := runReplay(t, addr, writeTrace(t, line, line, line, line, line), 1, "--timeout", "200ms")
	if rep.Requests != mostTimeouts || rep.Errors != mostTimeouts || !strings.Contains(stderr, "--timeout") {
		t.Errorf("replay: %+v, %s", rep, stderr)
	}
}

func TestReplayBrokenTrace(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	rep, stderr := runReplay(t, addr, writeTrace(t, requestLine("0"), requestLine("1"), `{"timestamp":`), 1)
	if rep.Requests != 2 || !strings.Contains(stderr, "line 3") {
		t.Errorf("replay: %+v, %s", rep, stderr)
	}
	kvtier(t, addr, "", "replay", "--check-only", writeTrace(t, requestLine("0"), "oops")).want(t, 1, "", "line 2")
	// A line behind the limit is not read.
	if rep, _ := runReplay(t, addr, writeTrace(t, requestLine("0"), "oops"), 0, "--limit", "1"); rep.Requests != 1 {
		t.Errorf("replay: %+v", rep)
	}
}

func TestReplayRefusesArguments(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	trace := writeTrace(t, requestLine("0"))
	runReplay(t, addr, trace, 0)
	for _, tc := range []struct {
		name   string
		args   []string
		code   int
		stderr string
	}{
		{"no trace", []string{"replay", filepath.Join(t.TempDir(), "absent.jsonl"), "--block-bytes", "8"}, 1, "absent.jsonl"},
		{"no block size", []string{"replay", trace}, 2, "--block-bytes"},
		{"block size too large", []string{"replay", trace, "--block-bytes", "1GiB"}, 2, "block_bytes 1073741824"},
		{"other block size", []string{"replay", trace, "--block-bytes", "8"}, 1, `block_bytes is "100", not "8"`},
		{"check of other block size", []string{"replay", trace, "--check-only", "--block-bytes", "8"}, 1, `block_bytes is "100", not "8"`},
		{"negative speed", []string{"replay", trace, "--block-bytes", "8", "--speed", "-1"}, 2, "-1"},
		{"speed no number", []string{"replay", trace, "--block-bytes", "8", "--speed", "fast"}, 2, "fast"},
		{"rate and speed", []string{"replay", trace, "--block-bytes", "8", "--rate", "5", "--speed", "1"}, 2, "--rate 5"},
		{"rate of a check", []string{"replay", trace, "--check-only", "--rate", "5"}, 2, "--rate 5"},
		{"rate no number", []string{"replay", trace, "--block-bytes", "8", "--rate", "NaN"}, 2, `"NaN": want a number of requests per second`},
		{"no clients", []string{"replay", trace, "--block-bytes", "8", "--clients", "0"}, 2, "--clients 0"},
		{"too many clients", []string{"replay", trace, "--block-bytes", "8", "--clients", "1025"}, 2, "--clients 1025"},
		{"share above one", []string{"replay", trace, "--block-bytes", "8", "--abandon", "1.5"}, 2, `"1.5": want a number from 0 to 1`},
		{"negative limit", []string{"replay", trace, "--block-bytes", "8", "--limit", "-1"}, 2, "--limit -1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			kvtier(t, addr, "", tc.args...).want(t, tc.code, "", tc.stderr)
		})
	}
}

// A recorded time that is scaled away delays nothing for long; an interrupted
// replay still reports.
func TestReplaySpeed(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	at := func(ms int, ids string) string {
		return fmt.Sprintf(`{"timestamp":%d,"input_length":1,"output_length":1,"hash_ids":[%s]}`, ms, ids)
	}
	trace := writeTrace(t, at(1000, "0"), at(3000, "1"), at(3_600_000, "2"))
	if rep, _ := runReplay(t, addr, trace, 0, "--speed", "1000x", "--limit", "2"); rep.Requests != 2 || rep.Seconds < 0.002 {
		t.Errorf("replay: %+v", rep)
	}

	// The third is due after 36 s. A machine that is busy may need long for two.
	for wait := 500 * time.Millisecond; ; wait *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		var stdout, stderr bytes.Buffer
		code := run(ctx, []string{"replay", trace, "--server", addr, "--block-bytes", "100", "--speed", "100", "--json"}, strings.NewReader(""), &stdout, &stderr)
		cancel()
		var rep replayReport
		err := json.Unmarshal(stdout.Bytes(), &rep)
		if err == nil && rep.Requests < 2 && wait < 16*time.Second {
			continue
		}
		if err != nil || code != 1 || rep.Requests != 2 || rep.Error == "" {
			t.Errorf("interrupted replay: exit %d, %+v, %v, %s", code, rep, err, stderr.String())
		}
		return
	}
}
