package main

import (
	"fmt"
	"sync"
	"time"
)

// What replay takes the time of.
const (
	matchCall = iota
	getCall
	putCall
	wholeRequest
	timedKinds
)

// latencies collects the times of all clients of a replay.
type latencies struct {
	mu   sync.Mutex
	each [timedKinds]histogram
}

func (l *latencies) record(kind int, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.each[kind].record(d)
}

// report sums the times up.
func (l *latencies) report() latencyReport {
	l.mu.Lock()
	defer l.mu.Unlock()
	var s [timedKinds]latencySummary
	for i := range l.each {
		h := &l.each[i]
		s[i] = latencySummary{
			Count: h.count, P50: millis(h.quantile(0.5)), P99: millis(h.quantile(0.99)), P999: millis(h.quantile(0.999)), Max: millis(h.longest),
		}
	}
	return latencyReport{Match: s[matchCall], Get: s[getCall], Put: s[putCall], Request: s[wholeRequest]}
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// latencyReport is how long calls and requests took; the help of replay says
// from which moments on.
type latencyReport struct {
	Match   latencySummary `json:"match"`
	Get     latencySummary `json:"get"`
	Put     latencySummary `json:"put"`
	Request latencySummary `json:"request"`
}

// latencySummary is in milliseconds. The quantiles are at most 0.8 % too long,
// and never too short.
type latencySummary struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50_ms"`
	P99   float64 `json:"p99_ms"`
	P999  float64 `json:"p999_ms"`
	Max   float64 `json:"max_ms"`
}

// String is the summary for people.
func (s latencySummary) String() string {
	if s.Count == 0 {
		return "none"
	}
	return fmt.Sprintf("p50 %.3f ms, p99 %.3f ms, p999 %.3f ms, max %.3f ms (%d)", s.P50, s.P99, s.P999, s.Max, s.Count)
}

// stopwatch takes the times of one client's requests. With a schedule they count
// from the moments at which things should have begun, so that a stall shows in
// the times of all that it held up.
type stopwatch struct {
	all       *latencies
	scheduled bool
	due       time.Time // when the request should have begun
	free      time.Time // when the next call should begin
}

// begin takes up a request that should have begun at due.
func (w *stopwatch) begin(due time.Time) { w.due, w.free = due, due }

// call starts the time of a call; what it returns ends it.
func (w *stopwatch) call(kind int) (done func()) {
	from := w.free
	if !w.scheduled {
		from = time.Now()
	}
	return func() {
		w.free = time.Now()
		w.all.record(kind, w.free.Sub(from))
	}
}

// end ends the time of a request.
func (w *stopwatch) end() { w.all.record(wholeRequest, time.Since(w.due)) }
