package tiers

import (
	"fmt"
	"sync"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// learnedPrefill is what the engines of a namespace have told of prefill.
type learnedPrefill struct {
	mu struct {
		sync.Mutex
		reports int64
		from    *policy.Prefills // nil: without reports
		cost    block.Prefill    // what they say
	}
}

func (l *learnedPrefill) get() block.PrefillCost {
	l.mu.Lock()
	defer l.mu.Unlock()
	return block.PrefillCost{Prefill: l.mu.cost, Learned: l.mu.reports > 0, Reports: l.mu.reports}
}

// ReportPrefill learns from what an engine has measured; see api.Store.
func (s *Store) ReportPrefill(nsID block.NamespaceID, reports []block.PrefillReport) error {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return fmt.Errorf("report prefill: %w", err)
	}
	for _, r := range reports {
		if err := r.Check(); err != nil {
			return fmt.Errorf("report prefill: %w", err)
		}
	}
	l := &ns.prefill
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.from == nil {
		l.mu.from = new(policy.Prefills)
	}
	for _, r := range reports {
		l.mu.from.Add(r)
	}
	l.mu.reports += int64(len(reports))
	l.mu.cost = l.mu.from.Cost()
	return nil
}

// prefillCost is what is known of prefill in a namespace: what is configured, or else what
// its engines have reported.
func (s *Store) prefillCost(ns *namespace) block.PrefillCost {
	known := ns.prefill.get()
	if s.opts.Prefill == nil {
		return known
	}
	if c := s.opts.Prefill(ns.state.Load().Desc.Name); c != (block.Prefill{}) {
		known.Prefill, known.Learned = c, false
	}
	return known
}
