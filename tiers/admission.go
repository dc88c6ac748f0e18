package tiers

import (
	"path"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
	"github.com/kvtier/kvtier/tiers/packed"
)

// admission decides which of the blocks that leave the tier above are written to a tier,
// so that no more is written there than its budgets allow: see SetWriteBudget. What
// puts, pins and drains need there is written in any case, and paid for from the same
// budgets. Without a budget all is written.
//
//	budgets.go   the budgets, and how what is left of them outlives the process
type admission struct {
	tier     block.TierID
	ghosts   int64 // of each budget
	start    time.Time
	bounded  atomic.Bool // there are budgets
	spent    atomic.Bool // since their levels were saved last
	verdicts [policy.Verdicts]atomic.Int64
	mu       struct {
		sync.Mutex
		spend []*spending
		of    map[block.NamespaceID][]*spending // those that pay for a namespace; filled in when it is asked for
	}
}

func newAdmission(tier block.TierID, ghosts int64) *admission {
	a := &admission{tier: tier, ghosts: ghosts, start: time.Now()}
	a.mu.of = map[block.NamespaceID][]*spending{}
	return a
}

// asks reports whether there is anything to ask: a may be nil.
func (a *admission) asks() bool { return a != nil && a.bounded.Load() }

// now is the clock of the buckets.
func (a *admission) now() int64 { return int64(time.Since(a.start)) }

// payers are the budgets from which a namespace's writes are paid: the first whose glob
// matches its name, and that of all. It is called under the lock.
func (a *admission) payers(ns block.NamespaceID, names *namespaces) []*spending {
	payers, known := a.mu.of[ns]
	if known {
		return payers
	}
	name := names.name(ns)
	var all, own *spending
	for _, s := range a.mu.spend {
		if s.Namespaces == "" {
			all = s
		} else if ok, err := path.Match(s.Namespaces, name); own == nil && ok && err == nil {
			own = s
		}
	}
	for _, s := range []*spending{own, all} {
		if s != nil {
			payers = append(payers, s)
		}
	}
	a.mu.of[ns] = payers
	return payers
}

// admit asks all who pay for the namespace, and has them pay if all of them admit the block.
func (a *admission) admit(ns block.NamespaceID, names *namespaces, o policy.Offer) policy.Verdict {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	payers := a.payers(ns, names)
	for i, s := range payers {
		if v := s.a.Admit(o, now); v != policy.Admitted {
			for _, paid := range payers[:i] {
				paid.a.Charge(-o.Bytes, 0)
			}
			return v
		}
	}
	a.spent.Store(true)
	return policy.Admitted
}

// charge pays for bytes and requests, whoever wants that; it takes back what
// was paid ahead if they are less than 0. a may be nil.
func (a *admission) charge(ns block.NamespaceID, names *namespaces, bytes, requests int64) {
	if !a.asks() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	for _, s := range a.payers(ns, names) {
		s.a.Levels(now) // what has come until now makes no room for what is given back
		s.a.Charge(bytes, requests)
	}
	a.spent.Store(true)
}

// paid is what was paid ahead for a block, whose writing pays again.
type paid struct {
	ns    block.NamespaceID
	bytes int64
}

// giveBack takes back what was paid ahead.
func (a *admission) giveBack(names *namespaces, all ...paid) {
	for _, p := range all {
		a.charge(p.ns, names, -p.bytes, 0)
	}
}

// sift asks which of the blocks that leave G2, and are nowhere else, go down to G3.
// Those turned away go past it into G4, where there is one that takes them, else they are
// dropped. It returns those for G3, which keep the order in hs, those for G4, the bytes
// that came free, and what those for G3 have paid.
func (s *Store) sift(hs []block.Handle) (down, past []block.Handle, freed int64, ahead []paid) {
	if !s.toG3.asks() {
		return hs, nil, 0, nil
	}
	down = hs[:0]
	for _, h := range hs {
		ns, o, ok := s.offer(h)
		if !ok {
			continue
		}
		switch v := s.toG3.admit(ns, &s.names, o); {
		case v == policy.Admitted:
			down = append(down, h)
			ahead = append(ahead, paid{ns, o.Bytes})
			s.toG3.verdicts[v].Add(1)
		case s.objects.takes():
			past = append(past, h)
			s.toG3.verdicts[v].Add(1)
		default:
			if n, _ := s.dropG2(h, block.Rejected); n > 0 { // else it is in use, or too young
				freed += n
				s.toG3.verdicts[v].Add(1)
			}
		}
	}
	return down, past, freed, ahead
}

// offer says what the admission to G3 may know of a block, and whether it is one to ask for.
func (s *Store) offer(h block.Handle) (ns block.NamespaceID, o policy.Offer, ok bool) {
	e := s.look(h)
	if e.Refs > 0 || !live(&e, ixG2) || live(&e, ixG3) {
		return 0, o, false
	}
	size, _ := SlotBytes(int64(e.Len))
	o = s.offerOf(&e, size)
	o.Full = s.g3.lost() == nil && (s.catalogRoom.isFull() || s.g3.isFull(size))
	return e.NS, o, true
}

// offerOf is what any admission may know of a block that leaves a tier.
func (s *Store) offerOf(e *index.Entry, bytes int64) policy.Offer {
	return policy.Offer{
		Hash:    fingerprint(e.NS, &e.Hash),
		Bytes:   bytes,
		Used:    e.Flags&flagUsed != 0,
		Partial: s.isTail(e),
		// What may not be dropped has nowhere else to go.
		Needed: isPinned(e) || e.Kids[ixG2] > 0 || e.Kids[ixG3] > 0,
		Stays:  s.graced(e),
	}
}

func (s *Store) look(h block.Handle) (e index.Entry) {
	s.table.View(h, func(now *index.Entry) { e = *now })
	return e
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
// nothing that may leave, and has it look again. It is for tiers of one share.
func (t *tier) isFull(size int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.mu.stuck {
		return false
	}
	if t.hasLocked(want{size: size}) {
		return false
	}
	t.wantLocked(0, size)
	t.wake()
	return true
}

// siftFar asks which of the blocks that leave the lowest local tier go into G4, children
// before their parents as they come. Those turned away are dropped. It returns the others,
// in their order, the bytes that came free, and what each to be written has paid.
func (s *Store) siftFar(t *tier, hs []block.Handle) (left []block.Handle, freed int64, ahead map[block.Handle]paid) {
	if !s.toG4.asks() || !s.objects.takes() {
		return hs, 0, nil
	}
	left, ahead = hs[:0], map[block.Handle]paid{}
	var out []block.Handle
	// A block without which one that goes up would be lost to every prompt goes up, too.
	needed := map[block.Handle]bool{}
	for _, h := range hs {
		e := s.look(h)
		if e.Refs > 0 || !live(&e, t.ix) || e.Flags&flagPacked != 0 {
			left = append(left, h) // no bytes of it go up
			continue
		}
		o := s.offerOf(&e, packed.HeaderBytes+int64(e.Len))
		o.Needed = o.Needed || needed[h]
		o.Worthless = s.worthless(&e)
		v := s.toG4.admit(e.NS, &s.names, o)
		if v == policy.Admitted {
			left = append(left, h)
			ahead[h] = paid{e.NS, o.Bytes}
			if e.Parent != 0 {
				needed[e.Parent] = true
			}
			s.toG4.verdicts[v].Add(1)
			continue
		}
		if t.ix == ixG3 {
			s.toG4.verdicts[v].Add(1)
			out = append(out, h)
		} else if n, _ := s.dropG2(h, block.Rejected); n > 0 { // else it is in use, or too young
			freed += n
			s.toG4.verdicts[v].Add(1)
		}
	}
	if len(out) > 0 {
		freed += s.dropG3(out, block.Rejected)
	}
	return left, freed, ahead
}

// worthless reports whether the engines of a block's namespace compute the prompt up to
// its end faster than G4 would bring it. When nobody knows what that costs them, no
// block is.
func (s *Store) worthless(e *index.Entry) bool {
	ns, err := s.names.byID(e.NS)
	if err != nil {
		return false
	}
	cost, tokens := s.prefillCost(ns).Prefill, int64(ns.state.Load().Desc.TokensPerBlock)
	if cost == (block.Prefill{}) || tokens == 0 {
		return false
	}
	from := s.objects.speed.source(time.Now())
	from.Queue = 0 // of now, and it is for later
	return !policy.Worth(policy.Run{Blocks: int(int64(e.Depth)/tokens) + 1, Bytes: int64(e.Len)}, from, tokens, cost)
}
