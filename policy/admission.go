package policy

import (
	"fmt"

	"github.com/kvtier/kvtier/index/block"
)

// Admission decides which blocks are written to a tier that wears out: what leaves
// the tier above, or finds no room there. It is pure as the policies are: who calls
// it hands in the time, in the unit in which the budget is given. One goroutine
// calls it.
//
// Without a budget every block is written that there is room for, but the partial last
// one of a prompt, which is next to never asked for again. With one the writes are paid from a bucket that
// fills as time goes by, one for bytes and one for the requests that it takes to write
// them. While a bucket is less than half full the tier is under
// pressure: what is left in it is for blocks that were used more than once, in
// the tier above or so that they came back after they had been turned away.
//
// State is at most 24 bytes for each block remembered as turned away.
type Admission struct {
	bytes, requests bucket
	most            int    // ghosts
	ghosts          ghosts // turned away
	now             int64
}

// AdmissionOptions say what may be written.
type AdmissionOptions struct {
	// Bytes is the budget of bytes, Requests that of the requests that write them: many
	// blocks may go with one, so the blocks do not pay these, who writes does, by Charge.
	Bytes, Requests Budget
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
	// Worthless tells that loading it from the tier would take longer than to compute it.
	Worthless bool
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
	NotWorth           // computing it is faster than to load it again
)

// Verdicts is how many verdicts there are.
const Verdicts = int(NotWorth) + 1

// String names the verdict as counters do.
func (v Verdict) String() string {
	return [...]string{"admitted", "no_room", "tail", "used_once", "over_budget", "not_worth"}[v]
}

// NewAdmission returns an admission that has turned nothing away yet, at time 0. It
// fails with block.ErrInvalid on options that cannot be.
func NewAdmission(o AdmissionOptions) (*Admission, error) {
	if o.Ghosts < 0 {
		return nil, fmt.Errorf("%w: %d ghosts: want 0 or more", block.ErrInvalid, o.Ghosts)
	}
	a := &Admission{most: o.Ghosts}
	return a, a.SetBudgets(o.Bytes, o.Requests)
}

// SetBudgets changes the budgets. What is in a bucket stays there, as far as it has room; one
// that had no budget begins with its Start. It fails with block.ErrInvalid on budgets
// that cannot be, and has changed nothing then.
func (a *Admission) SetBudgets(bytes, requests Budget) error {
	if err := bytes.check("write budget"); err != nil {
		return err
	}
	if err := requests.check("request budget"); err != nil {
		return err
	}
	a.bytes.set(bytes)
	a.requests.set(requests)
	return nil
}

// SetLevels says what is in the buckets, as far as they have room for it.
func (a *Admission) SetLevels(bytes, requests float64) {
	a.bytes.level = min(bytes, a.bytes.Burst)
	a.requests.level = min(requests, a.requests.Burst)
}

// Admit decides about a block, and pays for it if it is to be written. A now that is
// before an earlier one is taken for that.
func (a *Admission) Admit(o Offer, now int64) Verdict {
	a.fill(now)
	seen := a.ghosts.take(o.Hash) || o.Used
	v := a.judge(o, seen)
	switch v {
	case Admitted:
		a.Charge(o.Bytes, 0)
	case NoRoom, UsedOnce, OverBudget:
		if !o.Stays || seen {
			a.remember(o.Hash)
		}
	}
	return v
}

func (a *Admission) remember(hash uint64) {
	a.ghosts.trim(a.most - 1)
	if a.most > 0 {
		a.ghosts.add(hash)
	}
}

// Levels is what the buckets hold, which is below 0 when they are overdrawn.
func (a *Admission) Levels(now int64) (bytes, requests float64) {
	a.fill(now)
	return a.bytes.level, a.requests.level
}

func (a *Admission) judge(o Offer, seen bool) Verdict {
	switch {
	case o.Full:
		return NoRoom
	case o.Needed:
		return Admitted
	case o.Partial:
		return TailOnly
	case o.Worthless:
		return NotWorth
	case a.bytes.empty() || a.requests.empty():
		return OverBudget
	case !seen && (a.bytes.low() || a.requests.low()):
		return UsedOnce
	}
	return Admitted
}

// Charge pays for bytes that are written whatever the budget is: puts that must be
// durable, and blocks that others need; and for requests that write. Then a bucket may
// be overdrawn. Less than 0 gives back what was paid for and not written.
func (a *Admission) Charge(bytes, requests int64) {
	a.bytes.charge(bytes)
	a.requests.charge(requests)
}

// fill lets time go by.
func (a *Admission) fill(now int64) {
	if now > a.now {
		a.bytes.fill(float64(now - a.now))
		a.requests.fill(float64(now - a.now))
		a.now = now
	}
}
