package tiers

import (
	"context"
	"fmt"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// DrainProgress says how far a drain is.
type DrainProgress struct {
	Done, Total int64 // blocks
	Bytes       int64 // of payload written
}

// DrainResult says what a drain has kept.
type DrainResult struct {
	Kept  int64 // blocks that are on NVMe now
	Left  int64 // blocks that are only in memory still
	Bytes int64 // of payload kept
}

// drainBatch is how many bytes go down between two looks at the context.
const drainBatch = 64 << 20

// Drain writes the committed blocks that are only in G2 down to G3, so that a
// stop keeps them, until all are there, ctx ends, or no more fit. What it has
// brought down, and what is in both tiers, stays there: room for more is made by
// evicting what is in G3 only, and G3 is not filled above its high watermark,
// where its evictor, after a restart, would begin. progress, which may be nil, is
// called as it goes on. Without a G3 blocks go into G4; without either nothing can be kept. The error is nil also
// when blocks were left; it tells of a failing device.
func (s *Store) Drain(ctx context.Context, progress func(DrainProgress)) (DrainResult, error) {
	var hs []block.Handle
	var kept []block.Handle // a reference is held on each
	defer func() {
		for _, h := range kept {
			s.release(h)
		}
	}()
	s.table.Range(1, func(h block.Handle, e *index.Entry) bool {
		if !live(e, ixG2) || expired(e, nowUnix()) {
			return true
		}
		s.table.Update(h, func(e *index.Entry) {
			switch {
			case !live(e, ixG2):
			case live(e, ixG3): // its copy down there is not to make room
				e.Refs++
				kept = append(kept, h)
			default:
				hs = append(hs, h)
			}
		})
		return true
	})
	res := DrainResult{Left: int64(len(hs))}
	if s.g3 == nil {
		return s.drainFar(ctx, hs, res, progress)
	}
	var failed error
	most := min(drainBatch, s.g3.high/8)
	for at := 0; at < len(hs) && ctx.Err() == nil && failed == nil; {
		var batch []block.Handle // a reference is held on each
		var lens []int64
		var bytes int64
		for ; at < len(hs) && bytes < most; at++ {
			n := int64(-1)
			s.table.Update(hs[at], func(e *index.Entry) {
				if live(e, ixG2) && e.Flags&flagDeleted == 0 {
					e.Refs++
					n = int64(e.Len)
				}
			})
			if n < 0 {
				res.Left-- // deleted meanwhile, or moved down by itself
				continue
			}
			batch, lens = append(batch, hs[at]), append(lens, n)
			slot, _ := SlotBytes(n)
			bytes += slot
		}
		short := false
		for room := s.g3.makeRoom(ctx, bytes); bytes > room && len(batch) > 0; short = true {
			last := len(batch) - 1
			slot, _ := SlotBytes(lens[last])
			bytes -= slot
			s.release(batch[last])
			batch, lens = batch[:last], lens[:last]
		}
		full := 0
		invariants.CrashAt("drain")
		for i, err := range s.copyTo(ctx, s.g3, batch) {
			if err == nil {
				kept = append(kept, batch[i])
				res.Kept++
				res.Left--
				res.Bytes += lens[i]
				continue
			}
			s.release(batch[i])
			if lostDevice(err) {
				failed = err
			} else {
				full++
			}
		}
		if progress != nil {
			progress(DrainProgress{Done: res.Kept, Total: res.Kept + res.Left, Bytes: res.Bytes})
		}
		if short || full > 0 && full == len(batch) {
			break // no more fit
		}
	}
	if failed != nil {
		return res, fmt.Errorf("drain: %w", failed)
	}
	return res, nil
}
