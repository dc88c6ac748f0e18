package policy

import (
	"math"

	"github.com/kvtier/kvtier/index/block"
)

// GDSF is greedy dual size frequency (Cherkasova 1998) with leaves only: what
// leaves first is the block with the lowest priority, which is what its bytes
// save, the time to recompute it by its bytes, times how often it was used, on
// top of the priority of the latest victim. It is for tiers whose blocks are
// worth unequally much; without leaves only it would keep deep blocks whose parents
// are gone.
//
// State is 40 bytes a handle, and at most 8 a resident block for heap and scratch.
// Since priorities come in no order, a call costs the logarithm of the number of
// blocks that may leave.
type GDSF struct {
	l     leaves
	worth column[worth]
	floor float64 // the highest priority of a victim
	next  func() *queue
}

// worth is what GDSF knows of a block beside its node.
type worth struct {
	nsPerByte float32 // what a byte of it saves each time
	uses      uint32
}

// NewGDSF returns an empty policy.
func NewGDSF() *GDSF {
	p := &GDSF{}
	p.l.reset(1)
	p.next = func() *queue { return p.l.some(0) }
	return p
}

// Name is gdsf.
func (p *GDSF) Name() string { return "gdsf" }

// Len is the number of resident blocks.
func (p *GDSF) Len() int { return p.l.count }

// Request does nothing.
func (p *GDSF) Request([]uint64, int, uint8) {}

// Hit counts a use of h.
func (p *GDSF) Hit(h block.Handle) {
	n := p.l.resident(h)
	if n == nil {
		return
	}
	w := p.worth.at(h)
	if w.uses < math.MaxUint32 {
		w.uses++
	}
	p.l.move(h, n, 0, p.stamp(w))
}

// Insert makes h resident.
func (p *GDSF) Insert(h block.Handle, b Block) {
	if h == 0 {
		return
	}
	if p.l.resident(h) != nil {
		p.Hit(h)
		return
	}
	w := p.worth.grow(h)
	*w = worth{nsPerByte: float32(recompute(&b) / float64(max(b.Bytes, 1))), uses: 1}
	p.l.insert(h, b, 0, p.stamp(w))
}

// Leaf records what the store says of h.
func (p *GDSF) Leaf(h block.Handle, leaf bool) { p.l.setLeaf(h, leaf) }

// Remove forgets h. What stays is worth more from then on only if it is used
// again: new priorities are above that of the victim.
func (p *GDSF) Remove(h block.Handle, why block.Reason) {
	n := p.l.resident(h)
	if n == nil {
		return
	}
	p.l.remove(n)
	if evicted(why) {
		p.floor = max(p.floor, priority(n.stamp))
	}
}

// Victims appends the blocks of lowest priority that may leave.
func (p *GDSF) Victims(dst []block.Handle, need int64, ok func(block.Handle) bool) []block.Handle {
	return p.l.victims(dst, need, ok, p.next)
}

// A stamp is a priority in 40 bits, an exponent of 7 and a mantissa of 33, and the
// lowest bits of the clock, so that of blocks with the same priority the one that
// was used longest ago leaves first.
const (
	stampClockBits = 24
	stampSpare     = 5   // bits of a float64 that the exponent leaves free
	leastExponent  = -64 // of a priority; the greatest is 63
)

// leastPriority is the pattern that the least priority has in a float64.
const leastPriority = (1023 + leastExponent) << 52

// stamp makes the stamp for a use of a block now.
func (p *GDSF) stamp(w *worth) uint64 {
	v := p.floor + float64(w.uses)*float64(w.nsPerByte)
	v = min(max(v, math.Ldexp(1, leastExponent)), math.Ldexp(1, -leastExponent-1))
	key := (math.Float64bits(v) - leastPriority) << stampSpare
	return key>>stampClockBits<<stampClockBits | p.l.tick()&(1<<stampClockBits-1)
}

// priority is what stamp put into a stamp, rounded down.
func priority(stamp uint64) float64 {
	return math.Float64frombits(stamp>>stampClockBits<<stampClockBits>>stampSpare + leastPriority)
}

// Of a block for which nobody says how long it takes to recompute, the time is that
// of a model of 8 G parameters, 32 layers and hidden size 4096 on an accelerator
// that does 495 TFLOP/s: 16.06 GFLOP a token and 0.524 MFLOP for each token
// before it. Only the ratio matters.
const (
	tokenNS    = 32_444
	positionNS = 1.0586
)

// recompute is the time to recompute a block, in ns.
func recompute(b *Block) float64 {
	if b.Recompute > 0 {
		return float64(b.Recompute)
	}
	n := float64(max(b.Tokens, 1))
	return n * (tokenNS + positionNS*(float64(b.Depth)+n/2))
}
