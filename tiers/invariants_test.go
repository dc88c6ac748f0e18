//go:build invariants

package tiers

import (
	"context"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/internal/arena"
)

func wantPanic(t *testing.T, with string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if got, ok := recover().(string); !ok || !strings.Contains(got, with) {
			t.Errorf("panic %q, want one with %q", got, with)
		}
	}()
	f()
}

func TestWriteToFreeSlotPanics(t *testing.T) {
	mem, err := arena.New(1<<20, &arena.Options{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	d := &device{mem: mem}
	d.poisonSlot(4096, 8192)
	d.wantPoisoned(4096, 8192)
	for _, at := range []int64{4096, 8000, 4096 + 8192 - 1} {
		b := mem.Slice(at, 1)
		b[0]++
		wantPanic(t, "was written to while it was free", func() { d.wantPoisoned(4096, 8192) })
		b[0]--
	}
	d.wantPoisoned(4096, 8192)
}

func TestStaleHandlePanics(t *testing.T) {
	s := &Store{}
	var end context.CancelFunc
	s.life, end = context.WithCancel(t.Context())
	s.known(7, true)
	wantPanic(t, "stale handle 7", func() { s.known(7, false) })
	end()
	s.known(7, false) // the table of a store that is closed is empty
}

func TestCountBelowZeroPanics(t *testing.T) {
	wantCounts(7, &index.Entry{Refs: 1, Ops: 1, Named: 1})
	minus := func(change func(e *index.Entry)) {
		t.Helper()
		var e index.Entry
		change(&e)
		wantPanic(t, "handle 7", func() { wantCounts(7, &e) })
	}
	minus(func(e *index.Entry) { e.Refs-- })
	minus(func(e *index.Entry) { e.Ops-- })
	minus(func(e *index.Entry) { e.Named-- })
	minus(func(e *index.Entry) { e.Kids[ixG2]-- })
	minus(func(e *index.Entry) { e.Kids[ixG3]-- })
}
