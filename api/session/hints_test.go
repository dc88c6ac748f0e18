package session_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// hinted is a store that notes what it is told of requests.
type hinted struct {
	*memstore.Store
	lease time.Duration // of conversations; 0: as long as they ask for
	mu    struct {
		sync.Mutex
		told
	}
}

// told is what requests came with, in order.
type told struct {
	matches    []block.MatchOptions
	prefetches []block.PrefetchOptions
	reports    []block.PrefillReport
}

// told is what came until now.
func (s *hinted) told() told {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.told
}

func (s *hinted) Match(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	s.mu.Lock()
	s.mu.matches = append(s.mu.matches, o)
	if o.Conversation != "" && s.lease > 0 {
		o.Lease = min(o.Lease, s.lease)
	}
	s.mu.Unlock()
	return s.Store.Match(ctx, ns, hashLen, hashes, o, res)
}

func (s *hinted) Prefetch(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error {
	s.mu.Lock()
	s.mu.prefetches = append(s.mu.prefetches, o)
	s.mu.Unlock()
	return s.Store.Prefetch(ctx, ns, hashLen, hashes, o, progress)
}

func (s *hinted) ReportPrefill(ns block.NamespaceID, reports []block.PrefillReport) error {
	if _, err := s.NamespaceByID(ns); err != nil {
		return err
	}
	for _, r := range reports {
		if err := r.Check(); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.reports = append(s.mu.reports, reports...)
	return nil
}

func newHinted(t *testing.T, o *session.ServerOptions) (*rig, *hinted) {
	st := memstore.New(nil)
	s := &hinted{Store: st}
	return serve(t, st, s, o), s
}

// TestHints shows that what clients tell of their requests comes to the store, and that
// what cannot be is refused, as over gRPC.
func TestHints(t *testing.T) {
	r, s := newHinted(t, nil)
	c := dial(t, "tcp", r.tcp)
	if err := c.hello(session.HelloMessage{Features: session.FeatureHints}); err != nil || c.welcome.Features != session.FeatureHints {
		t.Fatalf("features %#x, error %v", c.welcome.Features, err)
	}
	k := r.keys("a")
	ask := func(code session.Code, m message, want session.Code, into message) error {
		t.Helper()
		return c.answer(c.send(code, m), want, into)
	}
	match := func(name string) error {
		t.Helper()
		return ask(session.CodeMatch, &session.MatchMessage{Keys: k, Class: 3, Flags: session.FlagConversation, Conversation: name}, session.CodeMatched, &session.MatchedMessage{})
	}
	prefetch := func(priority uint8, within uint32) error {
		t.Helper()
		return ask(session.CodePrefetch, &session.PrefetchMessage{Keys: k, Flags: session.FlagUrgency, Priority: priority, WithinMS: within}, session.CodePrefetched, &session.PrefetchedMessage{})
	}
	report := func(m session.ReportPrefillMessage) error {
		t.Helper()
		return ask(session.CodeReportPrefill, &m, session.CodeReported, &session.ReportedMessage{})
	}
	for _, name := range []string{"agent 7", "", strings.Repeat("x", 255)} {
		if err := match(name); err != nil {
			t.Errorf("match of %q: %v", name, err)
		}
	}
	if err := errors.Join(prefetch(9, 250), prefetch(0, 0), prefetch(1, math.MaxUint32)); err != nil {
		t.Error(err)
	}
	if err := report(session.ReportPrefillMessage{NS: k.NS, Tag: k.Tag, Position: 4096, Tokens: 512, Micros: 20000}); err != nil {
		t.Error(err)
	}
	got := s.told()
	var names []string
	for _, o := range got.matches {
		names = append(names, o.Conversation)
	}
	if want := []string{"agent 7", "", strings.Repeat("x", 255)}; !reflect.DeepEqual(names, want) || got.matches[0].Class != 3 {
		t.Errorf("matches of %q, want %q", names, want)
	}
	if want := []block.PrefetchOptions{{Priority: 9, Within: 250 * time.Millisecond}, {}, {Priority: 1, Within: math.MaxUint32 * time.Millisecond}}; !reflect.DeepEqual(got.prefetches, want) {
		t.Errorf("prefetches with %+v, want %+v", got.prefetches, want)
	}
	if want := []block.PrefillReport{{Position: 4096, Tokens: 512, Took: 20 * time.Millisecond}}; !reflect.DeepEqual(got.reports, want) {
		t.Errorf("reported %+v, want %+v", got.reports, want)
	}
	good := session.ReportPrefillMessage{NS: k.NS, Tokens: 1, Micros: 1}
	bad := func(change func(m *session.ReportPrefillMessage)) error {
		t.Helper()
		m := good
		change(&m)
		return report(m)
	}
	for _, tt := range []struct {
		err  error
		want error
		text string
	}{
		{match(strings.Repeat("x", 256)), block.ErrInvalid, "conversation: 256 bytes, at most 255"},
		{prefetch(10, 0), block.ErrInvalid, "priority: 10, at most 9"},
		{ask(session.CodeGet, &session.GetMessage{Keys: k, Flags: session.FlagConversation}, session.CodeGot, &session.GotMessage{}), block.ErrInvalid, "flags"},
		{ask(session.CodeMatch, &session.MatchMessage{Keys: k, Flags: session.FlagUrgency}, session.CodeMatched, &session.MatchedMessage{}), block.ErrInvalid, "flags"},
		{bad(func(m *session.ReportPrefillMessage) { m.NS = 99 }), block.ErrNotFound, "99"},
		{bad(func(m *session.ReportPrefillMessage) { m.NS = 0 }), block.ErrInvalid, "namespace: 0"},
		{bad(func(m *session.ReportPrefillMessage) { m.Tag = 1 }), block.ErrNotFound, "another store"},
		{bad(func(m *session.ReportPrefillMessage) { m.Tokens = 0 }), block.ErrInvalid, "0 tokens"},
		{bad(func(m *session.ReportPrefillMessage) { m.Tokens = math.MaxUint32 }), block.ErrInvalid, "4294967295 tokens"},
		{bad(func(m *session.ReportPrefillMessage) { m.Position = block.MaxPrefillTokens + 1 }), block.ErrInvalid, "position"},
		{bad(func(m *session.ReportPrefillMessage) { m.Micros = 0 }), block.ErrInvalid, "took"},
		{bad(func(m *session.ReportPrefillMessage) { m.Micros = math.MaxUint64 }), block.ErrInvalid, "micros"},
	} {
		if !errors.Is(tt.err, tt.want) || !strings.Contains(tt.err.Error(), tt.text) {
			t.Errorf("error %v, want %v with %q", tt.err, tt.want, tt.text)
		}
	}
	if err := report(good); err != nil {
		t.Errorf("the session does not go on: %v", err)
	}
	if n := r.server.Stats().Calls[session.CodeReportPrefill]; n != 10 {
		t.Errorf("%d reports are counted, want 10", n)
	}
}

// TestNoHints shows that a session without the feature has no such flags, nor the message.
func TestNoHints(t *testing.T) {
	r, s := newHinted(t, nil)
	c := r.client()
	k := r.keys("a")
	for _, tt := range []struct {
		name       string
		code, want session.Code
		m, into    message
		text       string
	}{
		{"conversation", session.CodeMatch, session.CodeMatched, &session.MatchMessage{Keys: k, Flags: session.FlagConversation, Conversation: "x"}, &session.MatchedMessage{}, "flags: 0x400"},
		{"urgency", session.CodePrefetch, session.CodePrefetched, &session.PrefetchMessage{Keys: k, Flags: session.FlagUrgency}, &session.PrefetchedMessage{}, "flags: 0x800"},
		{"report", session.CodeReportPrefill, session.CodeReported, &session.ReportPrefillMessage{NS: k.NS, Tokens: 1, Micros: 1}, &session.ReportedMessage{}, "code: 29"},
	} {
		if err := c.answer(c.send(tt.code, tt.m), tt.want, tt.into); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: error %v, want ErrInvalid with %q", tt.name, err, tt.text)
		}
	}
	if got := s.told(); !reflect.DeepEqual(got, told{}) {
		t.Errorf("the store was told %+v", got)
	}
}

// TestClientHints shows that the client tells what it is told, that a conversation's
// request is one for all the messages that it takes, and that all of them are leased for
// as long as the first.
func TestClientHints(t *testing.T) {
	r, s := newHinted(t, &session.ServerOptions{Keys: 4})
	s.lease = time.Minute
	c := r.open("tcp", nil)
	ns := r.handle()
	sizes := map[int]int{}
	for i := range 10 {
		sizes[i] = 10
	}
	putBlocks(t, c, ns, sizes)
	if !c.Hints() {
		t.Fatal("no hints")
	}
	var res block.MatchResult
	err := c.Match(t.Context(), ns, packedFrom(0, 10), block.MatchOptions{Lease: time.Hour, Conversation: "agent"}, &res)
	if err != nil || res.Prefix != 10 || res.Lease.Count != 10 || res.Lease.Left > time.Minute {
		t.Errorf("%+v, error %v", res.Lease, err)
	}
	if err := c.Release(t.Context(), res.Lease.ID); err != nil {
		t.Error(err)
	}
	for i, o := range s.told().matches {
		if first := i == 0; first != (o.Conversation == "agent") || first != (o.Lease == time.Hour) || o.Lease <= 0 {
			t.Errorf("match %d: %+v", i, o)
		}
	}
	if len(s.told().matches) != 3 {
		t.Errorf("%d messages", len(s.told().matches))
	}
	o := block.PrefetchOptions{Priority: 4, Within: time.Hour}
	if err := c.Prefetch(t.Context(), ns, packedFrom(0, 10), o, nil); err != nil {
		t.Error(err)
	}
	for _, got := range s.told().prefetches {
		if got.Priority != 4 || got.Within > time.Hour || got.Within < 30*time.Minute {
			t.Errorf("prefetch with %+v, want %+v", got, o)
		}
	}
	if err := c.Prefetch(t.Context(), ns, packedFrom(0, 1), block.PrefetchOptions{}, nil); err != nil || s.told().prefetches[3] != (block.PrefetchOptions{}) {
		t.Errorf("prefetches with %+v, error %v", s.told().prefetches, err)
	}
	for _, took := range []time.Duration{1, time.Microsecond, 1001} {
		if err := c.ReportPrefill(t.Context(), ns, block.PrefillReport{Position: 3, Tokens: 7, Took: took}); err != nil {
			t.Error(err)
		}
	}
	if want := []block.PrefillReport{
		{Position: 3, Tokens: 7, Took: time.Microsecond}, {Position: 3, Tokens: 7, Took: time.Microsecond}, {Position: 3, Tokens: 7, Took: 2 * time.Microsecond},
	}; !reflect.DeepEqual(s.told().reports, want) {
		t.Errorf("reported %+v, want %+v", s.told().reports, want)
	}
	for _, err := range []error{
		c.Match(t.Context(), ns, packedFrom(0, 1), block.MatchOptions{Conversation: strings.Repeat("x", 256)}, &res),
		c.Prefetch(t.Context(), ns, packedFrom(0, 1), block.PrefetchOptions{Priority: 10}, nil),
		c.Prefetch(t.Context(), ns, packedFrom(0, 1), block.PrefetchOptions{Within: -1}, nil),
		c.ReportPrefill(t.Context(), ns, block.PrefillReport{Tokens: 1}),
		c.ReportPrefill(t.Context(), ns, block.PrefillReport{Tokens: 1 << 30, Took: 1}),
	} {
		if !errors.Is(err, block.ErrInvalid) {
			t.Errorf("error %v, want ErrInvalid", err)
		}
	}
	if err := c.ReportPrefill(t.Context(), session.Namespace{ID: 99}, block.PrefillReport{Tokens: 1, Took: 1}); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("error %v, want ErrNotFound", err)
	}
}

// TestClientHintsOlderServer shows that a server without the feature is sent what it was
// sent before there was one, and is told nothing that it does not know.
func TestClientHintsOlderServer(t *testing.T) {
	c := played(t, welcome(), func(s *server) {
		for _, want := range []struct {
			code, answer session.Code
			m, reply     message
		}{
			{session.CodeMatch, session.CodeMatched, &session.MatchMessage{Keys: oneKeys(), LeaseMS: 1000, Deadline: 0}, &session.MatchedMessage{Blocks: make([]block.Found, 1)}},
			{session.CodePrefetch, session.CodePrefetched, &session.PrefetchMessage{Keys: oneKeys()}, &session.PrefetchedMessage{Results: make([]session.PrefetchResult, 1)}},
		} {
			h, p, ok := s.recv()
			if b := want.m.Append(nil); !ok || session.Code(h.Flags) != want.code || !bytes.Equal(p, b) {
				t.Errorf("code %d, %x, want %d, %x", h.Flags, p, want.code, b)
				return
			}
			s.reply(want.answer, h.ID, want.reply)
		}
	})
	if c.Hints() {
		t.Error("hints")
	}
	var res block.MatchResult
	if err := c.Match(t.Context(), oneNS, packedFrom(0, 1), block.MatchOptions{Lease: time.Second, Conversation: "agent"}, &res); err != nil {
		t.Error(err)
	}
	if err := c.ReportPrefill(t.Context(), oneNS, block.PrefillReport{Tokens: 1, Took: 1}); err != nil {
		t.Error(err)
	}
	if err := c.Prefetch(t.Context(), oneNS, packedFrom(0, 1), block.PrefetchOptions{Priority: 9, Within: time.Second}, nil); err != nil {
		t.Error(err)
	}
}

func oneKeys() session.Keys {
	return session.Keys{NS: oneNS.ID, Tag: oneNS.Tag, HashLen: uint8(oneNS.HashLen), Hashes: packedFrom(0, 1)}
}
