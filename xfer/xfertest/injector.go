package xfertest

import (
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/xfer"
)

// Injector makes backends go wrong by a rule that can be changed, or taken away,
// while they are used. The zero value lets all be well. It is safe for
// concurrent use.
type Injector struct {
	mu struct {
		sync.Mutex
		on    bool
		rule  Rule
		calls int
		rand  *rand.Rand
		count map[Fault]int
	}
}

// Wrap wraps a backend as Faulty does; the rule is the one that is set when a
// call begins.
func (in *Injector) Wrap(b xfer.Backend) xfer.Backend {
	return (&faulty{Backend: b, in: in}).withRoles()
}

// Set puts a rule in the place of the one before, and counts calls anew. It
// panics when the rule makes no sense. Transfers that stall by an earlier rule
// wait for that rule's Resume.
func (in *Injector) Set(rule Rule) {
	rule.check()
	in.mu.Lock()
	defer in.mu.Unlock()
	in.mu.on, in.mu.rule, in.mu.calls = true, rule, 0
	in.mu.rand = rand.New(rand.NewPCG(rule.Seed, 0))
}

// Clear lets all be well again.
func (in *Injector) Clear() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.mu.on = false
}

// Injected says how often a fault struck a call or a descriptor.
func (in *Injector) Injected(f Fault) int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.mu.count[f]
}

// hits counts a call and says which of its descriptors the rule is for.
func (in *Injector) hits(m Method, op xfer.Op, remote []xfer.Bound) (rule Rule, hit []bool) {
	hit = make([]bool, len(remote))
	in.mu.Lock()
	defer in.mu.Unlock()
	rule = in.mu.rule
	if !in.mu.on || m != rule.On || m != OnRegister && rule.Ops != nil && !slices.Contains(rule.Ops, op) {
		return rule, hit
	}
	in.mu.calls++
	if rule.Call > 0 && in.mu.calls != rule.Call {
		return rule, hit
	}
	for i := range hit {
		hit[i] = (m != OnTransfer || rule.Descs == nil || slices.Contains(rule.Descs, i)) &&
			(m != OnTransfer || rule.Devs == nil || slices.Contains(rule.Devs, remote[i].Dev)) &&
			(rule.Chance == 0 || in.mu.rand.Float64() < rule.Chance)
		if hit[i] {
			if in.mu.count == nil {
				in.mu.count = map[Fault]int{}
			}
			in.mu.count[rule.Fault]++
		}
	}
	return rule, hit
}
