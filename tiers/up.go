package tiers

import (
	"errors"
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer"
)

// A large slot is read in pieces. When it is the only one, they are small, so
// that one is hashed while the next ones are on their way; when there are others,
// whose transfers go on meanwhile, they are what the device is fastest with.
const (
	smallPiece = 256 << 10
	largePiece = 1 << 20
)

// beginReads counts reads from G3 and says in which pieces to read.
func (s *Store) beginReads(n int) (piece int64) {
	if s.reads.Add(int64(n)) > 1 {
		return largePiece
	}
	return smallPiece
}

func (s *Store) endReads(n int) { s.reads.Add(-int64(n)) }

// readUp reads claimed blocks from one device of G3 into G2, verifies them, and
// makes them resident there.
func (s *Store) readUp(d *device, jobs []*job) {
	piece := s.beginReads(len(jobs))
	defer s.endReads(len(jobs))
	local := xfer.DescList{Type: xfer.DRAM}
	remote := xfer.DescList{Type: d.kind}
	var owner []int // of each descriptor
	checks := make([]check, len(jobs))
	for i, j := range jobs {
		for off := int64(0); off < j.size; off += piece {
			n := min(piece, j.size-off)
			local.Descs = append(local.Descs, s.g2.memDesc(j.place, off, n))
			remote.Descs = append(remote.Descs, s.g3.fileDesc(j.e.Place[ixG3], off, n))
			owner = append(owner, i)
		}
		slot := s.g2.slot(j.place, j.size)
		_, header := SlotBytes(int64(j.e.Len))
		checks[i].begin(s, &j.e, slot[:header], slot[header:])
	}
	s.transfer(s.life, xfer.Read, local, remote, func(i int, err error) {
		j, c := jobs[owner[i]], &checks[owner[i]]
		if err != nil && j.err == nil {
			j.err = s.readFailure(&j.e, err)
		}
		if j.err == nil {
			if j.err = c.piece(local.Descs[i].Len); j.err == nil {
				j.m.rise.tell(s.g2.slot(j.place, j.size), c.have)
			}
		}
	})
	for _, j := range jobs {
		if j.err == nil {
			s.table.Update(j.h, func(e *index.Entry) {
				if e.Flags&flagDeleted != 0 {
					j.err = fmt.Errorf("copy to g2: %w: deleted meanwhile", block.ErrNotFound)
					return
				}
				e.Place[ixG2], e.State[ixG2] = j.place, index.SlotResident
				s.arrive(j.h, e, ixG2, j.above)
			})
		}
		if j.err != nil {
			s.g2.own(j.place, reserved) // no block's any more, while somebody looks at it still
			s.unclaim(s.g2, j)
			j.m.rise.forsake(func() { s.g2.free(j.place) })
			if errors.Is(j.err, block.ErrCorrupt) {
				j.err = s.damagedG3(j.h, &j.e, j.err)
			}
		}
	}
}
