package tiers

import (
	"math"
	"sync"
	"time"

	"github.com/kvtier/kvtier/policy"
)

// speed is what a tier's reads have shown lately of how fast it is. It tells a plan
// what loading takes.
type speed struct {
	first float64 // bytes a second, until a read has shown more
	mu    struct {
		sync.Mutex
		ops, bytes int64     // under way
		since      time.Time // something is under way, or was counted last
		moved      int64     // bytes, and busy time, that are not counted yet
		busy       time.Duration
		bandwidth  float64 // bytes a second while something is under way; 0: not known
		latency    float64 // ns until the first byte, of reads that were alone
		at         time.Time
	}
}

const (
	// What a tier is taken to do as long as nobody has read from it: else a plan that does
	// not read would never learn.
	firstMemory = 10e9
	firstDevice = 1e9

	// speedMemory is how many bytes it takes to forget two thirds of what was before.
	speedMemory = 64 << 20
	// What was measured long ago is trusted less and less: a tier that was slow, and that
	// no plan has read from since, is tried again.
	speedFresh  = 10 * time.Second
	speedDouble = time.Minute
	// In memory small blocks are not measured: that would take as long as they do.
	speedBlock  = 64 << 10
	speedSample = 8 << 20 // bytes that are counted at once while it never rests
)

// speedRead is a read under way.
type speedRead struct {
	s     *speed
	bytes int64
	start time.Time
	alone bool
}

// begin tells of a read of so many bytes.
func (s *speed) begin(bytes int64) speedRead {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.mu.ops == 0 {
		s.mu.since = now
	}
	s.mu.ops++
	s.mu.bytes += bytes
	return speedRead{s, bytes, now, s.mu.ops == 1}
}

// end tells that it has ended, and whether it went well.
func (r *speedRead) end(ok bool) {
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.mu.ops--
	s.mu.bytes -= r.bytes
	s.mu.busy += now.Sub(s.mu.since)
	s.mu.since = now
	if ok {
		s.mu.moved += r.bytes
	}
	if s.mu.ops > 0 && s.mu.moved < speedSample {
		return
	}
	if s.mu.moved > 0 && s.mu.busy > 0 {
		was := s.mu.bandwidth
		fresh := 1 - math.Exp(-float64(s.mu.moved)/speedMemory)
		if was == 0 {
			fresh = 1
		}
		// Times add up, bandwidths do not.
		perByte := s.mu.busy.Seconds() / float64(s.mu.moved)
		s.mu.bandwidth = 1 / (fresh*perByte + (1-fresh)*perByteOf(was))
		s.mu.at = now
	}
	s.mu.moved, s.mu.busy = 0, 0
	if ok && r.alone && s.mu.ops == 0 {
		beyond := max(0, float64(now.Sub(r.start))-float64(r.bytes)/s.mu.bandwidth*1e9)
		s.mu.latency += (beyond - s.mu.latency) / 8
	}
}

func perByteOf(bandwidth float64) float64 {
	if bandwidth == 0 {
		return 0
	}
	return 1 / bandwidth
}

// source is what a plan is told.
func (s *speed) source(now time.Time) policy.Source {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := policy.Source{Latency: time.Duration(s.mu.latency), Bandwidth: s.mu.bandwidth, Queue: s.mu.bytes}
	if p.Bandwidth == 0 {
		p.Bandwidth = s.first
	} else if old := now.Sub(s.mu.at) - speedFresh; old > 0 && p.Bandwidth < s.first {
		p.Bandwidth = min(s.first, p.Bandwidth*math.Exp2(old.Seconds()/speedDouble.Seconds()))
	}
	return p
}
