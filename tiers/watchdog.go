package tiers

import "time"

// behindAfter is how long a tier may be above its high watermark before its evictor
// counts as behind, and behindEvery how often that is told while it lasts.
const (
	behindAfter = 2 * time.Second
	behindEvery = 30 * time.Second
	behindLook  = 500 * time.Millisecond
)

// watchdog sees whether a tier's evictor keeps up. It is not the evictor, which may
// wait for a device.
type watchdog struct {
	since  time.Time // above the high watermark without a break; zero: it is not
	told   time.Time // last; zero: not since then
	futile uint64    // passes of the evictor that freed nothing, at since
}

// watchReclaim tells of tiers whose evictors are behind.
func (s *Store) watchReclaim() {
	tick := time.NewTicker(behindLook)
	defer tick.Stop()
	dogs := make([]watchdog, len(s.tiers()))
	for {
		select {
		case <-tick.C:
		case <-s.life.Done():
			return
		}
		for i, t := range s.tiers() {
			s.lookAfter(t, &dogs[i], time.Now())
		}
	}
}

// lookAfter looks at one tier.
func (s *Store) lookAfter(t *tier, d *watchdog, now time.Time) {
	t.mu.Lock()
	used, futile := t.mu.used, t.mu.futile
	t.mu.Unlock()
	if used <= t.high {
		if !d.told.IsZero() {
			s.log.Info("eviction keeps up again", "tier", t.id, "after", now.Sub(d.since).Round(time.Second))
		}
		*d = watchdog{}
		t.behind.Store(0)
		return
	}
	if d.since.IsZero() {
		d.since, d.futile = now, futile
	}
	behind := now.Sub(d.since)
	if behind < behindAfter {
		return
	}
	t.behind.Store(int64(behind))
	if d.told.IsZero() {
		t.fellBehind.Add(1)
	} else if now.Sub(d.told) < behindEvery {
		return
	}
	d.told = now
	why := "blocks come faster than they leave"
	if t.leaving.Load() > 0 {
		why = "the object tier takes blocks more slowly than they come"
	} else if futile > d.futile {
		why = "nothing may leave: blocks are in use, leased, pinned, or too young"
	}
	s.log.Warn("eviction is behind", "tier", t.id, "for", behind.Round(time.Second), "above_high", used-t.high, "free", t.capacity-used, "why", why)
}
