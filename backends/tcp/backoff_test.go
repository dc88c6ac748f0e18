package tcp

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// TestBackOff: the time in which a peer is left alone doubles with each attempt that
// fails, up to the longest, and is over when one succeeds.
func TestBackOff(t *testing.T) {
	o := Options{BackoffMin: time.Minute, BackoffMax: 7 * time.Minute} // none is over before the test is
	b := newBackend(t, o)
	self, id := xfer.PeerID{Name: "near", Incarnation: 1}, xfer.PeerID{Name: "far", Incarnation: 2}
	if err := b.Bind(self); err != nil {
		t.Fatal(err)
	}
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := nobody.Addr().String()
	if err := errors.Join(nobody.Close(), b.LoadConnInfo(id, appendConnInfo(nil, []string{addr}))); err != nil {
		t.Fatal(err)
	}
	p, err := b.peer(id)
	if err != nil {
		t.Fatal(err)
	}
	now := func() (backoff time.Duration, until time.Time) {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.mu.backoff, p.mu.until
	}
	for i, want := range []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute, 7 * time.Minute, 7 * time.Minute} {
		began := time.Now()
		if err := b.Connect(t.Context(), id); !errors.Is(err, xfer.ErrDisconnected) {
			t.Fatalf("connect to nobody: %v", err)
		}
		got, until := now()
		if got != want || until.Before(began.Add(want)) {
			t.Fatalf("attempt %d: it is left alone for %v, until %v after the attempt began, want %v", i, got, until.Sub(began), want)
		}
		// Who does not insist makes no attempt.
		failures := b.Stats().ConnectFailures
		if err := b.Notify(t.Context(), id, nil); !errors.Is(err, xfer.ErrDisconnected) || b.Stats().ConnectFailures != failures {
			t.Errorf("a notification to a peer that is left alone: %v, %d attempts", err, b.Stats().ConnectFailures-failures)
		}
	}
	far := newBackend(t, Options{Listen: addr})
	if err := far.Bind(id); err != nil {
		t.Fatal(err)
	}
	if err := b.Connect(t.Context(), id); err != nil {
		t.Fatalf("connect to a peer that is there: %v", err)
	}
	if got, until := now(); got != 0 || !until.IsZero() {
		t.Errorf("a peer that is there is left alone for %v", got)
	}
}
