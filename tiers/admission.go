package tiers

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// admission decides which of the blocks that leave G2 are written to G3, so that no
// more is written there than a budget allows. What puts, pins and drains need there
// is written in any case, and paid for from the same budget. A store without a
// budget has none, and writes all.
type admission struct {
	budget   int64 // bytes a day
	start    time.Time
	verdicts [policy.OverBudget + 1]atomic.Int64
	mu       struct {
		sync.Mutex
		a *policy.Admission
	}
}

const (
	// An hour's budget may come at once, so that a store that was idle is not held to
	// what the mean second allows.
	admissionBurst = 24 // parts of a day
	// Ghosts of four times as many blocks as G3 holds, if they are of a size that is
	// small for blocks: what it holds can change at any time.
	admissionGhosts   = 4
	admissionSlot     = 64 << 10
	admissionGhostMax = 1 << 20
)

// MinWriteBudget is the least of Options.WriteBudget: a largest block an hour.
const MinWriteBudget = admissionBurst * block.MaxBlockBytes

// newAdmission returns the admission to a tier of that capacity, nil for a budget of 0.
func newAdmission(budget, capacity int64) (*admission, error) {
	if budget == 0 {
		return nil, nil
	}
	a := &admission{budget: budget, start: time.Now()}
	var err error
	a.mu.a, err = policy.NewAdmission(policy.AdmissionOptions{
		Budget: float64(budget) / float64(24*time.Hour),
		Burst:  float64(budget) / admissionBurst,
		Start:  float64(budget) / admissionBurst / 2, // not under pressure
		Ghosts: int(min(admissionGhosts*capacity/admissionSlot, admissionGhostMax)),
	})
	return a, err
}

// now is the clock of the bucket.
func (a *admission) now() int64 { return int64(time.Since(a.start)) }

func (a *admission) admit(o policy.Offer) policy.Verdict {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.a.Admit(o, a.now())
}

// charge pays for bytes that are written to G3, whoever wants that; it takes back what
// was paid ahead if they are less than 0.
func (a *admission) charge(bytes int64) {
	if a == nil {
		return
	}
	a.mu.Lock()
	a.mu.a.Charge(bytes)
	a.mu.Unlock()
}

func (a *admission) stats() *block.AdmissionStats {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	level := a.mu.a.Level(a.now())
	a.mu.Unlock()
	st := &block.AdmissionStats{Budget: a.budget, Available: int64(level), Admitted: a.verdicts[policy.Admitted].Load(), Rejected: map[string]int64{}}
	for v := policy.NoRoom; v <= policy.OverBudget; v++ {
		st.Rejected[v.String()] = a.verdicts[v].Load()
	}
	return st
}

// sift asks which of the blocks that leave G2, and are nowhere else, go down to G3.
// Those turned away go past it into G4, where there is one that takes them, else they are
// dropped. It returns those for G3, which keep the order in hs, those for G4, the bytes
// that came free, and what those for G3 have paid: their writing pays again.
func (s *Store) sift(hs []block.Handle) (down, past []block.Handle, freed, paid int64) {
	if s.admission == nil {
		return hs, nil, 0, 0
	}
	down = hs[:0]
	for _, h := range hs {
		o, ok := s.offer(h)
		if !ok {
			continue
		}
		switch v := s.admission.admit(o); {
		case v == policy.Admitted:
			down = append(down, h)
			paid += o.Bytes
			s.admission.verdicts[v].Add(1)
		case s.objects.takes():
			past = append(past, h)
			s.admission.verdicts[v].Add(1)
		default:
			if n, _ := s.dropG2(h, block.Rejected); n > 0 { // else it is in use, or too young
				freed += n
				s.admission.verdicts[v].Add(1)
			}
		}
	}
	return down, past, freed, paid
}

// offer says what the admission may know of a block, and whether it is one to ask for.
func (s *Store) offer(h block.Handle) (o policy.Offer, ok bool) {
	var e index.Entry
	s.table.View(h, func(now *index.Entry) { e = *now })
	if e.Refs > 0 || !live(&e, ixG2) || live(&e, ixG3) {
		return o, false
	}
	size, _ := SlotBytes(int64(e.Len))
	o = policy.Offer{
		Hash:    fingerprint(e.NS, &e.Hash),
		Bytes:   size,
		Used:    e.Flags&flagUsed != 0,
		Partial: s.isTail(&e),
		// What may not be dropped has nowhere else to go.
		Needed: isPinned(&e) || e.Kids[ixG2] > 0 || e.Kids[ixG3] > 0,
		Stays:  s.graced(&e),
		Full:   s.g3.lost() == nil && (s.catalogRoom.isFull() || s.g3.isFull(size)),
	}
	return o, true
}

// isTail reports whether a block is the last one of a prompt, and not full: it has no
// children and is shorter than its parent, which is full.
func (s *Store) isTail(e *index.Entry) (tail bool) {
	if e.Parent == 0 || e.Kids[ixG2] > 0 || e.Kids[ixG3] > 0 {
		return false
	}
	s.table.View(e.Parent, func(p *index.Entry) { tail = e.Len < p.Len })
	return tail
}

// isFull reports whether there is no slot of that size and the evictor has found
// nothing that may leave, and has it look again.
func (t *tier) isFull(size int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.mu.stuck {
		return false
	}
	for _, d := range t.devs {
		if d.rank() != rankDown && d.slots.CanAlloc(size) {
			return false
		}
	}
	t.mu.want = max(t.mu.want, size)
	t.wake()
	return true
}

// checkWriteBudget says what is wrong with a budget.
func (o Options) checkWriteBudget() error {
	switch {
	case o.WriteBudget == 0:
		return nil
	case o.WriteBudget < MinWriteBudget:
		return fmt.Errorf("%w: write budget: %d bytes a day, at least %d", block.ErrInvalid, o.WriteBudget, int64(MinWriteBudget))
	case o.NoSlabs:
		return fmt.Errorf("%w: write budget: %d bytes a day for a store without NVMe tier", block.ErrInvalid, o.WriteBudget)
	}
	return nil
}
