package session_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
)

// TestIdentityLimits shows that an identity has so many sessions and leases, however it
// spreads them, that others are not refused for it, and that the end of a session gives
// back what it held.
func TestIdentityLimits(t *testing.T) {
	sum := func(token string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(token))) }
	list, err := access.Parse(fmt.Appendf(nil, `{"identities": [
		{"name": "greedy", "token_sha256": %q, "read": ["*"], "write": ["*"], "max_sessions": 2, "max_leases": 3},
		{"name": "other", "token_sha256": %q, "read": ["*"]}]}`, sum("g"), sum("o")))
	if err != nil {
		t.Fatal(err)
	}
	st := memstore.New(&memstore.Options{Shared: 64 << 20})
	r := serve(t, st, st, &session.ServerOptions{Access: list})
	a, b := r.as("g"), r.as("g")
	c := dial(t, "tcp", r.tcp)
	if err := c.hello(session.HelloMessage{Token: "g"}); !errors.Is(err, session.ErrBusy) || !strings.Contains(err.Error(), `identity "greedy" has 2 sessions, at most 2`) {
		t.Errorf("a session too many: error %v", err)
	}
	other := r.as("o")

	a.store(r.keys("a"), []byte("hello"))
	match := func(c *client, ms uint32) (uint64, error) {
		t.Helper()
		var m session.MatchedMessage
		err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a"), LeaseMS: ms}), session.CodeMatched, &m)
		return m.Lease, err
	}
	take := func(c *client) uint64 {
		t.Helper()
		id, err := match(c, 60000)
		if err != nil || id == 0 {
			t.Fatalf("lease %d, error %v", id, err)
		}
		return id
	}
	refused := func(c *client) {
		t.Helper()
		if _, err := match(c, 60000); !errors.Is(err, session.ErrBusy) || !strings.Contains(err.Error(), `identity "greedy" has 3 leases, at most 3`) {
			t.Errorf("a lease too many: error %v", err)
		}
	}
	first := take(a)
	take(b)
	take(b)
	refused(a)
	refused(b)
	if _, err := match(a, 0); err != nil {
		t.Errorf("a match without a lease: %v", err)
	}
	take(other)
	var done session.ReleasedMessage
	if err := a.answer(a.send(session.CodeRelease, &session.ReleaseMessage{Leases: []uint64{first}}), session.CodeReleased, &done); err != nil {
		t.Fatal(err)
	}
	take(a)
	refused(b)
	want := access.Usage{Name: "greedy", Sessions: 2, SessionsLimit: 2, SessionsRefused: 1, Leases: 3, LeasesLimit: 3, LeasesRefused: 3}
	if i := r.server.Sessions()[0]; i.IdentityUsage != want {
		t.Errorf("usage %+v, want %+v", i.IdentityUsage, want)
	}
	if n := r.server.Stats().Busy; n != 3 {
		t.Errorf("%d calls were refused as busy, want 3", n)
	}
	// What fails, and a match that finds nothing, takes no room.
	_ = b.c.Close()
	r.await("the end of a session", func() bool { return list.ByToken("g").Usage().Sessions == 1 })
	for range 5 {
		var m session.MatchedMessage
		if err := a.answer(a.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("z"), LeaseMS: 60000}), session.CodeMatched, &m); err != nil || m.Lease != 0 {
			t.Fatalf("a match of nothing: %+v, error %v", m, err)
		}
		bad := &session.MatchMessage{Keys: r.keys("a"), LeaseMS: 60000}
		bad.Hashes = bad.Hashes[:8]
		bad.HashLen = 16
		if err := a.answer(a.send(session.CodeMatch, bad), session.CodeMatched, &m); err == nil {
			t.Fatal("a match that should fail")
		}
	}
	take(a)
	take(a)
	refused(a)
	_, _ = a.c.Close(), other.c.Close()
	r.quiet()
	for _, u := range list.Usage() {
		if u.Sessions != 0 || u.Leases != 0 {
			t.Errorf("left behind: %+v", u)
		}
	}
}

// TestIdentityLimitsLent shows that blocks lent in place count too, and that a loan of
// nothing does not.
func TestIdentityLimitsLent(t *testing.T) {
	list, err := access.Parse(fmt.Appendf(nil, `{"identities": [
		{"name": "greedy", "token_sha256": "%x", "read": ["*"], "write": ["*"], "max_leases": 2}]}`, sha256.Sum256([]byte("g"))))
	if err != nil {
		t.Fatal(err)
	}
	st := memstore.New(&memstore.Options{Shared: 64 << 20})
	r := serve(t, st, st, &session.ServerOptions{Access: list})
	c := dial(t, "unix", r.unix)
	if err := c.hello(session.HelloMessage{Token: "g", Features: session.FeatureShared}); err != nil {
		t.Fatal(err)
	}
	for _, fd := range c.files {
		_ = unix.Close(fd)
	}
	other := r.as("g")
	other.store(r.keys("a"), []byte("hello"))
	lend := func(name string, flags uint16) (m session.GotMessage, err error) {
		err = c.answer(c.send(session.CodeGet, &session.GetMessage{Keys: r.keys(name), Flags: flags | session.FlagInPlace}), session.CodeGot, &m)
		return m, err
	}
	for range 5 {
		if m, err := lend("z", 0); err != nil || m.Lease != 0 {
			t.Fatalf("a loan of nothing: %+v, error %v", m, err)
		}
	}
	for _, flags := range []uint16{0, session.FlagVerify} { // at once, and by a goroutine
		if m, err := lend("a", flags); err != nil || m.Lease == 0 {
			t.Fatalf("a loan: %+v, error %v", m, err)
		}
	}
	if _, err := lend("a", 0); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a loan too many: error %v", err)
	}
	_, _ = c.c.Close(), other.c.Close()
	r.quiet()
}
