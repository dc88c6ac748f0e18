package tiers

import (
	"context"
	"errors"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// memDesc is the descriptor of n bytes at off in a slot of G2.
func (t *tier) memDesc(p block.Place, off, n int64) xfer.Desc {
	mem := t.devs[p.Device()].mem.Slice(p.Offset()+off, n)
	return xfer.Desc{Addr: arena.Addr(mem), Len: uint64(n)}
}

// fileDesc is the descriptor of n bytes at off in a slot of G3.
func (t *tier) fileDesc(p block.Place, off, n int64) xfer.Desc {
	d := t.devs[p.Device()]
	return xfer.Desc{Dev: uint64(d.number), Addr: d.base + uint64(p.Offset()+off), Len: uint64(n)}
}

// lengthOf is how many bytes descriptors have.
func lengthOf(l xfer.DescList) (n int64) {
	for i := range l.Descs {
		n += int64(l.Descs[i].Len)
	}
	return n
}

// transfer runs one request between memory and one device of G3 on this goroutine
// and calls each for its descriptors in order, as they complete. A device that is
// down is not asked.
func (s *Store) transfer(ctx context.Context, op xfer.Op, local, remote xfer.DescList, each func(i int, err error)) {
	d := s.g3.devs[remote.Descs[0].Dev]
	under, err := d.health.begin()
	if err != nil {
		for i := range local.Descs {
			each(i, err)
		}
		return
	}
	defer d.health.end(under)
	req, err := s.agent.NewRequest(op, local, remote, nil)
	if err != nil {
		under.failure(err)
		for i := range local.Descs {
			each(i, err)
		}
		return
	}
	defer req.Release()
	if op == xfer.Read {
		read := s.g3.speed.begin(lengthOf(local))
		defer func() { read.end(err == nil) }()
	}
	seen := 0
	err = req.Each(ctx, func(i int, err error) error {
		under.goesOn()
		if err != nil {
			d.blame(under, remote.Descs[i], err)
		} else {
			under.worked = true
		}
		each(i, err)
		seen = i + 1
		return nil
	})
	for ; seen < len(local.Descs); seen++ {
		if err == nil {
			err = errors.New("transfer ended early")
		}
		d.blame(under, remote.Descs[seen], err)
		each(seen, err)
	}
}
