package mem

import (
	"math"
	"sync"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

const (
	// sampleBytes is the size from which a transfer is timed: reading the clock
	// costs nothing beside it.
	sampleBytes = 256 << 10

	// Before the first sample: what one core of a server copies, more or less.
	initialNsPerByte = 0.125
	initialDeviation = 0.06

	weight = 1.0 / 8 // of a new sample in the averages
)

// speed learns how long a byte takes.
type speed struct {
	mu struct {
		sync.Mutex
		nsPerByte, deviation float64 // moving averages; 0 before the first sample
	}
}

// timer measures one transfer. The zero value measures nothing.
type timer struct {
	s     *speed
	bytes uint64
	start time.Time
}

func (s *speed) begin(bytes uint64) timer {
	if bytes < sampleBytes {
		return timer{}
	}
	return timer{s, bytes, time.Now()}
}

func (t timer) end() {
	if t.s == nil {
		return
	}
	sample := float64(time.Since(t.start)) / float64(t.bytes)
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.s.mu.nsPerByte == 0 {
		t.s.mu.nsPerByte, t.s.mu.deviation = sample, sample/2
		return
	}
	off := math.Abs(sample - t.s.mu.nsPerByte)
	t.s.mu.nsPerByte += weight * (sample - t.s.mu.nsPerByte)
	t.s.mu.deviation += weight * (off - t.s.mu.deviation)
}

func (s *speed) estimate(bytes uint64) xfer.Cost {
	s.mu.Lock()
	per, deviation := s.mu.nsPerByte, s.mu.deviation
	s.mu.Unlock()
	if per == 0 {
		per, deviation = initialNsPerByte, initialDeviation
	}
	return xfer.Cost{
		Time:   time.Duration(math.Ceil(per * float64(bytes))),
		Margin: time.Duration(math.Ceil(2 * deviation * float64(bytes))),
	}
}
