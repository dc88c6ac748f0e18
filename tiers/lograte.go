package tiers

import (
	"sync"
	"time"
)

// logRate lets a few lines of one kind through each second. It is safe for
// concurrent use.
type logRate struct {
	mu struct {
		sync.Mutex
		since   time.Time
		lines   int
		skipped int64
	}
}

// logLines is how many a second.
const logLines = 5

// next reports whether the next line may be written, and how many were not since
// the last one that was.
func (r *logRate) next() (skipped int64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); now.Sub(r.mu.since) >= time.Second {
		r.mu.since, r.mu.lines = now, 0
	}
	if r.mu.lines == logLines {
		r.mu.skipped++
		return 0, false
	}
	r.mu.lines++
	skipped, r.mu.skipped = r.mu.skipped, 0
	return skipped, true
}
