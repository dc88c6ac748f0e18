package frame

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// hoverFor is for how long a reader looks again and again before it parks. Parking and
	// being woken costs both sides up to 100 us where an idle core is halted, as in most
	// virtual machines; what comes back sooner is had without.
	hoverFor = 100 * time.Microsecond
	// hoverTrust is how many looks in vain, less those that paid, it takes until hovering
	// rests, and hoverRest for how many reads it does then.
	hoverTrust = 4
	hoverRest  = 64
)

// hover decides whether a reader waits for the peer by looking, which is worth it only
// while peer and reader both have a core: it learns from how the last ones ended, and
// does not look while others wait as well. It is used by one goroutine.
type hover struct {
	among *readers
	looks time.Duration // for this long, and once at least
	trust int           // 0 to hoverTrust
	rest  int           // reads that park at once; below 0: all do
}

// readers are those that share the processors.
type readers struct {
	last atomic.Pointer[hover] // the one that waited last
}

// all are the readers of this process.
var all readers

func newHover() *hover {
	h := &hover{among: &all, looks: hoverFor, trust: hoverTrust}
	if runtime.GOMAXPROCS(0) == 1 {
		h.rest = -1
	}
	return h
}

// wait looks until it sees something or has looked for long enough, and reports
// whether it did. It does not yield meanwhile: that wakes another thread, which takes
// the goroutine over, and the core that the peer needs. Others have the other
// processors.
func (h *hover) wait(look func() bool) bool {
	switch {
	case h.rest < 0:
		return false
	case h.among.last.Swap(h) != h:
		// Looking would keep a core from what the other one waits for.
		return false
	case h.rest > 0:
		h.rest--
		return false
	}
	for begin := time.Now(); ; {
		if look() {
			h.trust = min(h.trust+1, hoverTrust)
			return true
		}
		if time.Since(begin) >= h.looks {
			break
		}
	}
	if h.trust--; h.trust <= 0 {
		h.trust, h.rest = 1, hoverRest
	}
	return false
}
