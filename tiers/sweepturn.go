package tiers

import (
	"crypto/rand"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/packed"
)

// objectSweep is how far the sweep of one bucket is, and whose turn it is. Sweeps have
// numbers, so that it can be said which one answers a call: one that began after the call
// came, whoever began it.
type objectSweep struct {
	turn chan struct{} // held by who sweeps
	from uint64        // the objects of the catalog that are looked for next; whose turn it is has it
	mu   struct {
		sync.Mutex
		rec   index.ObjectSweepRecord
		begun int // sweeps since the store was opened; rec is the last one's, or an earlier store's
	}
}

// init reads the record of the sweep, or makes it, and with it the name by which this
// catalog's store writes objects.
func (w *objectSweep) init(c *index.Catalog, number uint16) (packed.Writer, error) {
	w.turn = make(chan struct{}, 1)
	rec, ok, err := c.ObjectSweep(number)
	if err == nil && !ok {
		rec.Bucket = number
		_, _ = rand.Read(rec.Writer[:]) // does not fail
		err = c.PutObjectSweep(rec)
	}
	w.mu.rec = rec
	return rec.Writer, err
}

func (w *objectSweep) get() index.ObjectSweepRecord {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.rec
}

// next is the number of the sweep that begins next.
func (w *objectSweep) next() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.begun + 1
}

// due is the number of the sweep that is to come to its end now: of the one that is under
// way, or of the next one when the last has ended long enough ago.
func (w *objectSweep) due(every time.Duration) (number int, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if underWay(&w.mu.rec) {
		return w.mu.begun, true
	}
	return w.mu.begun + 1, time.Since(w.mu.rec.Ended) >= every
}

// begin makes the record that of a sweep with a number, unless that one or a later one has
// begun already. ended says that it has ended, too. Whose turn it is calls it.
func (w *objectSweep) begin(number int) (ended bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := &w.mu.rec
	if w.mu.begun >= number {
		return !underWay(r)
	}
	w.mu.begun++
	if !underWay(r) {
		*r = index.ObjectSweepRecord{Bucket: r.Bucket, Writer: r.Writer}
	}
	// What one has done that did not come to its end is told with what this one does.
	r.Started, r.Listed, r.Cursor, r.After, r.Error = time.Now(), 0, "", "", ""
	return false
}

// underWay reports whether a sweep has begun, and is not at its end.
func underWay(r *index.ObjectSweepRecord) bool { return !r.Started.IsZero() && r.Ended.IsZero() }

// change changes the record, and says what it is then.
func (w *objectSweep) change(f func(r *index.ObjectSweepRecord)) index.ObjectSweepRecord {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.mu.rec)
	return w.mu.rec
}

func (p *objectBucket) sweepStatus() block.ObjectSweep {
	r := p.sweeps.get()
	return block.ObjectSweep{
		Bucket: p.service.String(), Started: r.Started, Ended: r.Ended, Listed: r.Listed, Orphans: r.Orphans, OrphanBytes: r.OrphanBytes,
		Missing: r.Missing, Lost: r.Lost, Expired: r.Expired, Rewritten: r.Rewritten, Moved: r.Moved, MovedBytes: r.MovedBytes, Error: r.Error,
	}
}
