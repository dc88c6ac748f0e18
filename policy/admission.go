package policy

import (
	"fmt"
	"math"

	"github.com/kvtier/kvtier/index/block"
)

// Admission decides which blocks are written to a tier that wears out: what leaves
// the tier above, or finds no room there. It is pure as the policies are: who calls
// it hands in the time, in the unit in which the budget is given. One goroutine
// calls it.
//
// Without a budget every block is written that there is room for, but the partial last
// one of a prompt, which is next to never asked for again. With one the writes are paid from a bucket that
// fills as time goes by. While the bucket is less than half full the tier is under
// pressure: what is left in it is for blocks that were used more than once, in
// the tier above or so that they came back after they had been turned away.
//
// State is at most 24 bytes for each block remembered as turned away.
type Admission struct {
	o      AdmissionOptions
	ghosts ghosts // turned away
	level  float64
	now    int64
}

// AdmissionOptions say what may be written.
type AdmissionOptions struct {
	// Budget is how many bytes may be written in a unit of time; 0: any number.
	Budget float64
	// Burst is how many bytes at most the bucket holds: in no span of time more is
	// written than the budget allows and this, but for blocks that others need. With
	// a budget it is above 0.
	Burst float64
	// Start is how many it holds at time 0, at most Burst.
	Start float64
	// Ghosts is how many of those turned away are remembered.
	Ghosts int
}

// Offer is a block that could be written.
type Offer struct {
	Hash    uint64 // fingerprint of the key
	Bytes   int64  // that the device would write
	Partial bool   // the last block of a prompt, not full
	// Used tells that it was used since it came into the tier above.
	Used bool
	// Needed tells that blocks in the tier are its children: without it they would
	// be lost to every prompt.
	Needed bool
	// Stays tells that it stays above when it is turned away now, to be offered again:
	// that counts for nothing.
	Stays bool
	// Full tells that the tier has no room for it and nothing can leave now.
	Full bool
}

// Verdict says whether a block is written, or why not.
type Verdict uint8

// The verdicts. What is not admitted is dropped with the tier above, so a store
// counts them as reasons.
const (
	Admitted   Verdict = iota
	NoRoom             // the tier is full
	TailOnly           // it is the partial last block of a prompt
	UsedOnce           // under pressure, a block that was used once
	OverBudget         // nothing is left of the budget
)

// String names the verdict as counters do.
func (v Verdict) String() string {
	return [...]string{"admitted", "no_room", "tail", "used_once", "over_budget"}[v]
}

// NewAdmission returns an admission that has turned nothing away yet, at time 0. It
// fails with block.ErrInvalid on options that cannot be.
func NewAdmission(o AdmissionOptions) (*Admission, error) {
	switch {
	case !(o.Budget >= 0) || math.IsInf(o.Budget, 0):
		return nil, fmt.Errorf("%w: write budget %v: want 0 (none) or more", block.ErrInvalid, o.Budget)
	case o.Budget > 0 && !(o.Burst > 0):
		return nil, fmt.Errorf("%w: burst %v of a write budget: want above 0", block.ErrInvalid, o.Burst)
	case !(o.Start >= 0 && o.Start <= o.Burst):
		return nil, fmt.Errorf("%w: start %v of a write budget: want 0 to the burst, %v", block.ErrInvalid, o.Start, o.Burst)
	case o.Ghosts < 0:
		return nil, fmt.Errorf("%w: %d ghosts: want 0 or more", block.ErrInvalid, o.Ghosts)
	}
	return &Admission{o: o, level: o.Start}, nil
}

// Admit decides about a block, and pays for it if it is to be written. A now that is
// before an earlier one is taken for that.
func (a *Admission) Admit(o Offer, now int64) Verdict {
	a.fill(now)
	seen := a.ghosts.take(o.Hash) || o.Used
	v := a.judge(o, seen)
	switch v {
	case Admitted:
		a.Charge(o.Bytes)
	case NoRoom, UsedOnce, OverBudget:
		if !o.Stays || seen {
			a.remember(o.Hash)
		}
	}
	return v
}

func (a *Admission) remember(hash uint64) {
	a.ghosts.trim(a.o.Ghosts - 1)
	if a.o.Ghosts > 0 {
		a.ghosts.add(hash)
	}
}

// Level is how many bytes the bucket holds, which is below 0 when it is overdrawn.
func (a *Admission) Level(now int64) float64 {
	a.fill(now)
	return a.level
}

func (a *Admission) judge(o Offer, seen bool) Verdict {
	switch {
	case o.Full:
		return NoRoom
	case o.Needed:
		return Admitted
	case o.Partial:
		return TailOnly
	case a.o.Budget == 0:
		return Admitted
	case a.level <= 0:
		return OverBudget
	case !seen && a.level < a.o.Burst/2:
		return UsedOnce
	}
	return Admitted
}

// Charge pays for bytes that are written whatever the budget is: puts that must be
// durable, and blocks that others need. Then the bucket may be overdrawn. Less than 0
// gives back what was paid for and not written.
func (a *Admission) Charge(bytes int64) {
	if a.o.Budget > 0 {
		a.level -= float64(bytes)
	}
}

// fill lets time go by.
func (a *Admission) fill(now int64) {
	if now > a.now {
		a.level = min(a.level+a.o.Budget*float64(now-a.now), a.o.Burst)
		a.now = now
	}
}
