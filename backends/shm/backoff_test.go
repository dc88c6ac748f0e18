package shm

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// TestBackOff: the time in which a peer is left alone doubles with each attempt that
// fails, up to the longest, and is over when one succeeds.
func TestBackOff(t *testing.T) {
	b := bound(t, nearID, &Options{})
	p := &peer{id: farID, socket: filepath.Join(t.TempDir(), "s"), dialing: make(chan struct{}, 1)}
	b.mu.peers[farID] = p
	now := func() (backoff time.Duration, after time.Time) {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.mu.backoff, p.mu.after
	}
	for want := minBackoff; ; want = min(2*want, maxBackoff) {
		began := time.Now()
		if err := b.Connect(t.Context(), farID); !errors.Is(err, xfer.ErrDisconnected) {
			t.Fatalf("connect to nobody: %v", err)
		}
		before, after := now()
		if before != want || after.Before(began.Add(want)) {
			t.Fatalf("it is left alone for %v, until %v after the attempt began, want %v", before, after.Sub(began), want)
		}
		if want == maxBackoff {
			break
		}
	}
	for range 2 { // the longest stays the longest, and who does not insist changes nothing
		if _, err := b.link(t.Context(), p, false); !errors.Is(err, xfer.ErrDisconnected) {
			t.Fatalf("a link to a peer that is left alone: %v", err)
		}
		if err := b.Connect(t.Context(), farID); !errors.Is(err, xfer.ErrDisconnected) {
			t.Fatalf("connect to nobody: %v", err)
		}
		if got, _ := now(); got != maxBackoff {
			t.Errorf("it is left alone for %v, want %v at most", got, maxBackoff)
		}
	}
	far, err := New(&Options{Socket: p.socket})
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	if err := far.Bind(farID); err != nil {
		t.Fatal(err)
	}
	if err := b.Connect(t.Context(), farID); err != nil {
		t.Fatalf("connect to a peer that is there: %v", err)
	}
	if got, after := now(); got != 0 || !after.IsZero() {
		t.Errorf("a peer that is there is left alone for %v", got)
	}
}
