package tiers

import (
	"log/slog"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// catalogHealth is since when the catalog works, or fails and why.
type catalogHealth struct {
	mu struct {
		sync.Mutex
		err    error
		since  time.Time
		errors int64 // times that it failed
	}
}

func (c *catalogHealth) init(now time.Time) { c.mu.since = now }

// note takes what the catalog says of itself.
func (c *catalogHealth) note(err error, log *slog.Logger) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.mu.err
	c.mu.err = err
	switch {
	case was == nil && err != nil:
		c.mu.since = time.Now()
		c.mu.errors++
		log.Warn("catalog: nothing new is recorded until it works again", "err", err)
	case was != nil && err == nil:
		c.mu.since = time.Now()
		log.Info("catalog: it works again")
	}
}

func (s *Store) catalogStats() block.CatalogStats {
	s.catalogHealth.note(s.catalog.Err(), s.log)
	c := &s.catalogHealth.mu
	c.Lock()
	defer c.Unlock()
	st := block.CatalogStats{State: block.Healthy, Since: c.since, Errors: c.errors}
	if c.err != nil {
		st.State, st.Reason = block.Degraded, c.err.Error()
	}
	return st
}

// keepCatalog brings the catalog back when it has failed and there is room for
// it, and has the committer make up for what waited.
func (s *Store) keepCatalog() {
	tick := time.NewTicker(s.opts.ProbeEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.life.Done():
			return
		}
		err := s.catalog.Err()
		s.catalogHealth.note(err, s.log)
		if err != nil && s.catalogRoom.check() == nil {
			err = s.catalog.Reopen()
			s.catalogHealth.note(err, s.log)
		}
		if err == nil && s.commits.behind.Load() > 0 {
			s.commits.wake()
		}
	}
}
