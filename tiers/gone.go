package tiers

import (
	"math/rand/v2"
	"sync/atomic"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// goneBits is the number of buckets of goneSet, as a power of two.
const goneBits = 17

// goneSet remembers why the blocks left the store that left it last, about a million of
// them, in 4 MiB: it tells a key that was evicted from one that was never stored. A
// block that left longer ago is forgotten: of eight that share a bucket, any. A key
// that was never stored is taken for one that left in one case of 33 million. It
// has no lock: when two write one bucket at once, one may be forgotten.
type goneSet struct {
	buckets [1 << goneBits]goneBucket
}

// goneBucket has tags, 0 where there is none: 28 bits of the fingerprint and, in the
// low four, why the block left.
type goneBucket [8]atomic.Uint32

// at returns the bucket of a fingerprint and its tag, without a reason.
func (g *goneSet) at(print uint64) (*goneBucket, uint32) {
	// Keys may be numbered densely: the bits are mixed as in SplitMix64.
	print = (print ^ print>>30) * 0xbf58476d1ce4e5b9
	print = (print ^ print>>27) * 0x94d049bb133111eb
	print ^= print >> 31
	return &g.buckets[print>>(64-goneBits)], uint32(print) &^ 15
}

// note remembers why a block left.
func (g *goneSet) note(print uint64, why block.Reason) {
	b, tag := g.at(print)
	to := &b[rand.Uint32N(uint32(len(b)))]
	for i := range b {
		was := b[i].Load()
		if was != 0 && was&^15 == tag {
			to = &b[i]
			break
		}
		if was == 0 {
			to = &b[i]
		}
	}
	to.Store(tag | uint32(why))
}

// forget is told that a block is there again.
func (g *goneSet) forget(print uint64) {
	b, tag := g.at(print)
	for i := range b {
		if was := b[i].Load(); was != 0 && was&^15 == tag {
			b[i].CompareAndSwap(was, 0)
		}
	}
}

// why says why a block left, NoReason when it is not known to have been there.
func (g *goneSet) why(print uint64) block.Reason {
	b, tag := g.at(print)
	for i := range b {
		if was := b[i].Load(); was != 0 && was&^15 == tag {
			return block.Reason(was & 15)
		}
	}
	return block.NoReason
}

// lookups counts what a namespace was asked for.
type lookups struct {
	asked, matched atomic.Int64
	misses         [block.MissRecompute + 1]atomic.Int64 // by MissReason, but for MissAbsent
	absent         [16]atomic.Int64                      // by the Reason for which the block is not there
}

// neverStored is the reason of a key that the store does not know to have had.
const neverStored = "never_stored"

func (l *lookups) stats(name string) block.NamespaceStats {
	st := block.NamespaceStats{Name: name, Asked: l.asked.Load(), Matched: l.matched.Load(), Misses: map[string]int64{}}
	for r := block.MissPending; r <= block.MissRecompute; r++ {
		st.Misses[r.String()] = l.misses[r].Load()
	}
	st.Misses[neverStored] = l.absent[block.NoReason].Load()
	st.Misses[block.MissExpired.String()] += l.absent[block.Expired].Load()
	st.Misses[block.MissCorrupt.String()] += l.absent[block.Damaged].Load()
	for _, r := range []block.Reason{block.Evicted, block.Deleted, block.Discarded, block.Unreadable, block.Rejected} {
		st.Misses[r.String()] = l.absent[r].Load()
	}
	return st
}

// missed counts a key that a get did not serve.
func (s *Store) missed(k block.Key, r block.MissReason) {
	s.misses[r].Add(1)
	s.countMiss(k, r)
}

// countMiss counts a key of a namespace that was not there, or not served.
func (s *Store) countMiss(k block.Key, r block.MissReason) {
	n, err := s.names.byID(k.NS)
	if err != nil {
		return
	}
	if r != block.MissAbsent {
		n.lookups.misses[r].Add(1)
		return
	}
	why := s.gone.why(fingerprint(k.NS, &k.Hash))
	if why == block.NoReason && s.mortal.Load() {
		if _, e, ok := s.table.Lookup(k); ok && resident(&e) && expired(&e, nowUnix()) {
			why = block.Expired // it has not been taken out yet
		}
	}
	n.lookups.absent[why].Add(1)
}

// countMatch counts a match of n keys.
func (s *Store) countMatch(nsID block.NamespaceID, hashLen int, hashes []byte, n int, res *block.MatchResult) {
	ns, err := s.names.byID(nsID)
	if err != nil {
		return
	}
	ns.lookups.asked.Add(int64(n))
	ns.lookups.matched.Add(int64(res.Prefix))
	for i := res.Prefix; i < len(res.Blocks); i++ {
		reason := block.MissAbsent
		switch res.Blocks[i].State {
		case block.Resident:
			continue
		case block.Pending:
			reason = block.MissPending
		}
		s.countMiss(keyAt(nsID, hashLen, hashes, i), reason)
	}
}

// noteGone remembers why the last copy of a block left.
func (s *Store) noteGone(e *index.Entry, why block.Reason) {
	s.gone.note(fingerprint(e.NS, &e.Hash), why)
}
