package api

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// StartScrub starts a scrub and answers its state.
func (s *service) StartScrub(ctx context.Context, req *pb.StartScrubRequest) (*pb.ScrubStatus, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "a scrub"); err != nil {
		return nil, err
	}
	rate := req.GetBytesPerSecond()
	if rate < 0 {
		return nil, invalid("bytes_per_second: %d, want 0 or more", rate)
	}
	if err := s.store.StartScrub(block.ScrubOptions{BytesPerSecond: rate, Restart: req.GetRestart()}); err != nil {
		return nil, err
	}
	return scrubToPB(s.store.Stats().Scrub), nil
}

// StopScrub ends a scrub and answers how far it came.
func (s *service) StopScrub(ctx context.Context, _ *pb.StopScrubRequest) (*pb.ScrubStatus, error) {
	if err := identityOf(ctx).CheckAll(access.Read|access.Write, "a scrub"); err != nil {
		return nil, err
	}
	select {
	case <-s.stops.begin(s.store.StopScrub):
	case <-ctx.Done():
		return nil, fmt.Errorf("stop scrub: it has not ended yet: %w", ctx.Err())
	}
	return scrubToPB(s.store.Stats().Scrub), nil
}

// scrubStops lets the callers who stop a scrub wait for one and the same stop: it
// lasts as long as the device that the scrub reads, which may be longer than
// their deadlines.
type scrubStops struct {
	running sync.WaitGroup

	mu struct {
		sync.Mutex
		ended chan struct{} // closed when the stop under way has ended; nil: none
	}
}

// begin calls stop unless such a call is under way, and returns what is closed
// when it has ended.
func (s *scrubStops) begin(stop func()) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended != nil {
		return s.mu.ended
	}
	ended := make(chan struct{})
	s.mu.ended = ended
	s.running.Go(func() {
		stop()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.ended = nil
		close(ended)
	})
	return ended
}

// wait returns when no stop is under way.
func (s *scrubStops) wait() { s.running.Wait() }
