package sim

import (
	"io"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/policy/trace"
)

// TestPausesOfAgents: nine in ten of the agents' requests come while what Until said of
// the one before has not passed, and that is seconds, as the pauses are.
func TestPausesOfAgents(t *testing.T) {
	r, err := trace.Open(filepath.Join("..", "trace", "testdata", airline))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	type conversation struct {
		id          uint64
		last, until time.Duration
	}
	all := map[string]*conversation{}
	p := policy.NewPauses(1000)
	var known, covered int
	var sum time.Duration
	for {
		req, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		c := all[req.Session]
		if c == nil {
			c = &conversation{id: uint64(len(all))}
			all[req.Session] = c
		} else if c.until > 0 {
			known++
			sum += c.until
			if req.Time-c.last <= c.until {
				covered++
			}
		}
		p.Request(c.id, 0, req.Time)
		c.last, c.until = req.Time, p.Until(c.id, 0)
	}
	if share := float64(covered) / float64(known); len(all) < 100 || known < 2000 || share < 0.88 || share > 0.93 {
		t.Errorf("%d conversations: %.3f of %d pauses are covered", len(all), share, known)
	}
	if mean := sum / time.Duration(known); mean < 5*time.Second || mean > 15*time.Second {
		t.Errorf("until %v on average", mean)
	}
}
