package xfertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/xfer"
)

// sector is what a medium writes whole or not at all.
const sector = 512

// Volatile wraps a backend that writes files in one whose writes can be lost in
// a power failure. Writes go to the files at once, and what they replace is
// remembered until the file is flushed by Flush. PowerLoss takes back what a medium
// with a cache might not have kept. It is safe for concurrent use.
//
// It knows only FILE memory that is registered with a path in Desc.Meta, and
// writes of whole sectors.
type Volatile struct {
	xfer.Backend
	mu struct {
		sync.Mutex
		lost   bool
		paths  map[uint64]string // by Desc.Dev
		writes []*volatileWrite  // in the order in which they began
		busy   sync.WaitGroup
	}
}

// volatileWrite is a write that may be lost.
type volatileWrite struct {
	path   string
	off    int64
	before []byte
	done   bool // it ended; only then a flush can cover it
}

// volatileTransfer remembers where a transfer writes.
type volatileTransfer struct {
	xfer.Prepared
	remote []xfer.Bound // nil for a read
}

// ErrPowerLost is how writes and flushes fail after PowerLoss.
var ErrPowerLost = fmt.Errorf("%w: the power is gone", xfer.ErrUnavailable)

// NewVolatile wraps a backend. The wrapper has none of its optional roles.
func NewVolatile(b xfer.Backend) *Volatile {
	v := &Volatile{Backend: b}
	v.mu.paths = map[uint64]string{}
	return v
}

// Register is part of xfer.Backend.
func (v *Volatile) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	if t == xfer.FILE {
		v.mu.Lock()
		v.mu.paths[d.Dev] = d.Meta
		v.mu.Unlock()
	}
	return v.Backend.Register(ctx, t, d)
}

// Prepare is part of xfer.Backend.
func (v *Volatile) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	p, err := v.Backend.Prepare(op, local, remote)
	if err != nil {
		return nil, err
	}
	t := &volatileTransfer{Prepared: p}
	if op == xfer.Write && remote[0].Type == xfer.FILE {
		t.remote = remote
	}
	return t, nil
}

// Release is part of xfer.Backend.
func (v *Volatile) Release(p xfer.Prepared) { v.Backend.Release(p.(*volatileTransfer).Prepared) }

// Transfer is part of xfer.Backend.
func (v *Volatile) Transfer(ctx context.Context, p xfer.Prepared, done func(i int, err error)) error {
	t := p.(*volatileTransfer)
	if t.remote == nil {
		return v.Backend.Transfer(ctx, t.Prepared, done)
	}
	writes, err := v.begin(t.remote)
	if err != nil {
		for i := range t.remote {
			done(i, err)
		}
		return err
	}
	defer v.mu.busy.Done()
	return v.Backend.Transfer(ctx, t.Prepared, func(i int, err error) {
		v.mu.Lock()
		writes[i].done = true
		v.mu.Unlock()
		done(i, err)
	})
}

// begin remembers what a transfer is about to replace.
func (v *Volatile) begin(remote []xfer.Bound) (writes []*volatileWrite, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.lost {
		return nil, ErrPowerLost
	}
	for _, r := range remote {
		w := &volatileWrite{path: v.mu.paths[r.Dev], off: int64(r.Addr), before: make([]byte, r.Len)}
		if w.off%sector != 0 || len(w.before)%sector != 0 {
			return nil, fmt.Errorf("%w: a write of %d bytes at %d is not of whole sectors", xfer.ErrInvalid, r.Len, r.Addr)
		}
		if err := w.look(); err != nil {
			return nil, err
		}
		writes = append(writes, w)
	}
	v.mu.writes = append(v.mu.writes, writes...)
	v.mu.busy.Add(1)
	return writes, nil
}

// look reads what is there before the write.
func (w *volatileWrite) look() error {
	f, err := os.Open(w.path)
	if err != nil {
		return fmt.Errorf("%w: %w", xfer.ErrUnavailable, err)
	}
	defer f.Close()
	if _, err := f.ReadAt(w.before, w.off); err != nil {
		return fmt.Errorf("%w: %w", xfer.ErrUnavailable, err)
	}
	return nil
}

// Flush calls flush, which flushes a file, and remembers that the writes to it
// that ended before are on the medium. It fails also when the power went before
// that was known: then they may be lost.
func (v *Volatile) Flush(path string, flush func() error) error {
	stable := map[*volatileWrite]bool{}
	v.mu.Lock()
	for _, w := range v.mu.writes {
		if w.done && w.path == path {
			stable[w] = true
		}
	}
	v.mu.Unlock()
	if err := flush(); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.lost {
		return ErrPowerLost
	}
	v.mu.writes = slices.DeleteFunc(v.mu.writes, func(w *volatileWrite) bool { return stable[w] })
	return nil
}

// PowerLoss ends all writing and takes back, sector by sector, a part of the
// writes that were not flushed: some whole, some torn, some not at all, whatever
// their order. From then on writes fail with ErrPowerLost. It returns how many
// sectors were kept and how many lost.
func (v *Volatile) PowerLoss(r *rand.Rand) (kept, lost int, err error) {
	v.mu.Lock()
	v.mu.lost = true
	v.mu.Unlock()
	v.mu.busy.Wait() // what is on its way is written or not, and then it is decided here
	type place struct {
		path string
		off  int64
	}
	settled := map[place]bool{} // by a later write that was kept
	for i := len(v.mu.writes) - 1; i >= 0; i-- {
		w := v.mu.writes[i]
		chance := [...]float64{0, 0.5, 1}[r.IntN(3)]
		f, oerr := os.OpenFile(w.path, os.O_RDWR, 0)
		if oerr != nil {
			return kept, lost, fmt.Errorf("power loss: %w", oerr)
		}
		for off := int64(0); off < int64(len(w.before)); off += sector {
			at := place{w.path, w.off + off}
			switch {
			case settled[at]:
			case r.Float64() < chance:
				settled[at] = true
				kept++
			default:
				lost++
				if _, werr := f.WriteAt(w.before[off:off+sector], w.off+off); werr != nil {
					err = errors.Join(err, werr)
				}
			}
		}
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		err = fmt.Errorf("power loss: %w", err)
	}
	return kept, lost, err
}
