package frame

import (
	"testing"
	"time"
)

// TestHover: a reader looks for the peer's bytes before it parks, until that has not
// paid for some time; now and then it tries again.
func TestHover(t *testing.T) {
	h := &hover{among: new(readers), trust: hoverTrust}
	h.among.last.Store(h)
	soon := func() bool {
		n := 0
		h.looks = time.Hour
		return h.wait(func() bool { n++; return n == 3 })
	}
	looks := func() (n int) { // in vain
		h.looks = 0
		if h.wait(func() bool { n++; return false }) {
			t.Fatal("something came that did not")
		}
		return n
	}
	for range 100 {
		if !soon() {
			t.Fatal("what comes soon is not waited for")
		}
	}
	for i := range hoverTrust {
		if looks() == 0 {
			t.Fatalf("no look after %d waits in vain", i)
		}
	}
	for round := range 3 {
		for i := range hoverRest {
			if looks() != 0 {
				t.Fatalf("round %d: a look at wait %d, want none at %d", round, i, hoverRest)
			}
		}
		if looks() == 0 {
			t.Fatalf("round %d: not tried again", round)
		}
	}
	for range hoverRest + 2 { // of which the last two are not at rest
		soon()
	}
	for i := range 2 {
		if looks() == 0 {
			t.Errorf("no trust gained by waits that paid: none left after %d in vain", i)
		}
	}
	h = &hover{among: h.among, rest: -1}
	if looks() != 0 {
		t.Error("a look where there is one core")
	}
}

// TestHoverAmongOthers: while two readers wait by turns neither looks, and one that is alone
// again does so from its second wait on.
func TestHoverAmongOthers(t *testing.T) {
	var all readers
	a, b := &hover{among: &all, trust: hoverTrust}, &hover{among: &all, trust: hoverTrust}
	waits := func(h *hover) (looked bool) {
		h.wait(func() bool { looked = true; return true })
		return looked
	}
	for i := range 10 {
		if waits(a) || waits(b) {
			t.Fatalf("round %d: a look while another reader waits", i)
		}
	}
	if waits(a) {
		t.Error("a look right behind another reader's wait")
	}
	for range 3 {
		if !waits(a) {
			t.Error("no look by the only one that waits")
		}
	}
}
