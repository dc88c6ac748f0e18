package tiers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/invariants"
)

// committer is the one goroutine that writes block records to the catalog. Its
// queue is in the order of the transitions in the table: operations are added
// under the lock of the block's shard, so a put and a delete of one key reach
// the catalog in the order in which they took effect in memory.
//
// A round takes all that is queued, and in this order:
//
//  1. flushes the slabs whose slots it is about to make known: bytes first,
//     catalog second, because a record without its bytes would be a lie, bytes
//     without a record are only free room;
//  2. commits one batch with one sync;
//  3. erases the headers of the slots that are nobody's now: not before the drop
//     of the record is synced, since a record whose header is gone is damage; and
//     not after, since a header without a record could raise the block again
//     when the catalog is rebuilt from the media;
//  4. writes the tombstones of keys that may have other headers, out of reach: when
//     all is done that makes such a header, and before the delete is answered;
//  5. tells everyone: only now may a durable put be answered, and only now may
//     the slot of a dropped record be used again, because until the drop is
//     synced a crash would bring the record back, and what is erased later would
//     be the next block's header.
//
// When the catalog fails, what must not be forgotten waits in the backlog until
// it works again, and nothing that was queued later overtakes it.
type committer struct {
	catalog *index.Catalog
	slabs   []*Slab
	tombs   *tombstones
	noSync  bool
	log     *slog.Logger
	// erase writes zeros over the slot headers of operations and notes in them what
	// failed.
	erase func(ops []*catalogOp)
	// up ends when the slab's device goes down; its cause says why.
	up func(dev int) context.Context

	mu struct {
		sync.Mutex
		ops    []catalogOp
		busy   bool // a round is under way, or there is a backlog
		closed bool
	}
	kick chan struct{}
	done chan struct{}

	// Of the goroutine.
	backlog []catalogOp
	why     error            // that there is a backlog
	zeroed  [maxSlabs]bool   // headers were erased since the slab was flushed
	note    [maxSlabs]uint64 // Slab.Failures before the first of them was
	apart   sync.WaitGroup   // what devices have not answered, and what waits for that

	lines   logRate
	rounds  atomic.Int64
	behind  atomic.Int64          // length of the backlog
	unclean [maxSlabs]atomic.Bool // on the slab a header may be left that should be erased
}

// maxSlabs is how many slabs a store may have.
const maxSlabs = 64

// errUnerased: the record is dropped, but the slot's header may still be there,
// so that rebuilding the catalog from the media would bring the block back.
var errUnerased = fmt.Errorf("%w: the header on the medium could not be erased", block.ErrUnavailable)

// catalogOp is one record to put, or a key to drop, or the clearing of a namespace,
// or a header to erase, or nothing but a place in the queue.
type catalogOp struct {
	put     *index.Record
	trace   *trace // of a put that may have to be taken back
	dev     int    // of G3, whose slab holds the record's slot
	note    uint64 // Slab.Failures before the slot was written
	rewrite bool   // the record was there before: the bytes of its slot need no flush
	key     block.Key
	hlen    int    // of a key to drop
	undo    *trace // of the put that the drop takes back, if it does no more than that
	clear   *block.Namespace
	more    func(*index.Batch) // what else to write; see ledger
	stones  []index.Tombstone  // written when they are needed
	lifts   bool               // removes those that are not, since the sweep has ended

	place  block.Place // of a slot whose header is to be erased
	header int64       // its length; 0: nothing is to be erased
	flush  bool        // what was erased must be on the medium before the end
	keep   bool        // tried again when the catalog works again

	// tell, which may be nil, is called once, with the first outcome. fin, which
	// may be nil, is called once, when nothing more will be tried, and before tell
	// unless a device holds it up. They must not block.
	tell func(err error)
	fin  func(err error)

	stuck <-chan struct{} // the header may be written until it is closed; nil: it is not

	err    error // so far
	failed bool  // err is the catalog's
	again  bool  // it comes from the backlog
}

// trace is what a put has left in the catalog, for who takes it back. It is the
// committer's.
type trace struct {
	tried bool          // the record may be there, also when the put failed
	away  *index.Record // that it took the place of, of a slab that is not here; nil: none
}

// inCatalog reports whether the operation is one on the catalog or waits for it.
func (op *catalogOp) inCatalog() bool { return op.put != nil || op.hlen > 0 || op.header == 0 }

func (op *catalogOp) end() {
	if op.fin != nil {
		op.fin(op.err)
	}
	op.told()
}

func (op *catalogOp) told() {
	if op.tell != nil {
		op.tell(op.err)
		op.tell = nil
	}
}

func newCommitter(c *index.Catalog, slabs []*Slab, tombs *tombstones, noSync bool, log *slog.Logger, erase func(ops []*catalogOp), up func(dev int) context.Context) *committer {
	m := &committer{
		catalog: c, slabs: slabs, tombs: tombs, noSync: noSync, log: log, erase: erase, up: up,
		kick: make(chan struct{}, 1), done: make(chan struct{}),
	}
	go m.run()
	return m
}

// add queues operations. The caller holds the lock of the block's shard, or has
// another reason to know that the order is right.
func (m *committer) add(ops ...catalogOp) {
	m.mu.Lock()
	closed := m.mu.closed
	if !closed {
		m.mu.ops = append(m.mu.ops, ops...)
	}
	m.mu.Unlock()
	if closed {
		// The callback takes the shard's lock, which the caller may hold.
		go func() {
			for _, op := range ops {
				op.err = fmt.Errorf("commit: %w", block.ErrClosed)
				op.end()
			}
		}()
		return
	}
	m.wake()
}

// wake makes the committer look at its queue, and at its backlog if the catalog
// works.
func (m *committer) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// barrier calls fin when all that is queued now is written, what was erased is on
// the medium, and keys that were deleted have their tombstones, if they need any; at
// once when that is nothing.
func (m *committer) barrier(stones []index.Tombstone, fin func(err error)) {
	m.mu.Lock()
	idle := len(m.mu.ops) == 0 && !m.mu.busy
	m.mu.Unlock()
	if idle && len(m.tombs.suspects()) == 0 {
		fin(m.catalog.Err())
		return
	}
	m.add(catalogOp{flush: true, stones: stones, fin: fin})
}

func (m *committer) run() {
	defer close(m.done)
	batch := m.catalog.NewBatch()
	var spare []catalogOp
	for range m.kick {
		for first := true; ; first = false {
			ops, closed := m.take(spare, first)
			if len(ops) == 0 {
				if closed {
					m.abandon()
					return
				}
				spare = ops
				break
			}
			m.round(batch, ops)
			clear(ops)
			spare = ops
		}
	}
}

// take takes what is queued, and the backlog before it if the catalog works: when
// anything is queued, else once for each wake.
func (m *committer) take(spare []catalogOp, first bool) (ops []catalogOp, closed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ops = m.mu.ops
	m.mu.ops = spare[:0]
	if len(m.backlog) > 0 && (first || len(ops) > 0) && m.catalog.Err() == nil {
		ops = append(m.backlog, ops...)
		m.backlog, m.why = nil, nil
		m.behind.Store(0)
	}
	m.mu.busy = len(ops) > 0 || len(m.backlog) > 0 || m.pending()
	return ops, m.mu.closed
}

// pending reports whether headers were erased that no flush has followed.
func (m *committer) pending() bool {
	for i := range m.slabs {
		if m.zeroed[i] {
			return true
		}
	}
	return false
}

func (m *committer) round(batch *index.Batch, ops []catalogOp) {
	m.rounds.Add(1)
	for len(ops) > 0 {
		// A clearing is a batch of its own: it must come after what was queued
		// before it and before what was queued behind it.
		n := 0
		for n < len(ops) && ops[n].clear == nil {
			n++
		}
		if n > 0 {
			m.write(batch, ops[:n])
			ops = ops[n:]
			continue
		}
		m.clear(&ops[0])
		ops = ops[1:]
	}
}

func (m *committer) clear(op *catalogOp) {
	err := m.why
	if len(m.backlog) == 0 {
		err = m.catalog.ClearNamespace(*op.clear)
	}
	if op.again && errors.Is(err, block.ErrInvalid) {
		err = nil // the first try got through, or the namespace was written since
	}
	op.err, op.failed = err, err != nil && (len(m.backlog) > 0 || m.catalog.Err() != nil)
	m.end(op)
}

// write commits records. A slab that cannot be flushed fails its own puts; the
// catalog fails all.
func (m *committer) write(batch *index.Batch, ops []catalogOp) {
	m.flushPuts(ops)
	invariants.CrashAt("g3-flushed")
	m.commit(batch, ops)
	invariants.CrashAt("g3-committed")
	m.invalidate(ops)
	invariants.CrashAt("erased")
	m.tombs.write(ops)
	invariants.CrashAt("tombstones")
	for i := range ops {
		m.end(&ops[i])
	}
}

func (m *committer) commit(batch *index.Batch, ops []catalogOp) {
	batch.Reset()
	for i := range ops {
		op := &ops[i]
		switch {
		case op.put != nil && op.err == nil:
			if op.err = m.tombs.supersede(m.catalog, op); op.err != nil {
				op.err = fmt.Errorf("commit to the catalog: %w", op.err)
				continue
			}
			if op.trace != nil {
				op.trace.tried = true
			}
			batch.Put(op.put)
		case op.put == nil && op.hlen > 0:
			op.drop(batch)
		case op.more != nil:
			op.more(batch)
		}
	}
	var err error
	switch {
	case len(m.backlog) > 0:
		err = m.why
		batch.Reset()
	case batch.Len() > 0:
		if err = m.catalog.Commit(batch, !m.noSync); err != nil {
			m.complain("catalog commit failed", "records", len(ops), "err", err)
			err = fmt.Errorf("commit to the catalog: %w", err)
		}
	default:
		err = m.catalog.Err()
	}
	if err == nil {
		return
	}
	for i := range ops {
		if op := &ops[i]; op.err == nil && op.inCatalog() {
			op.err, op.failed = err, true
		}
	}
}

// drop drops the record of a key. Who takes back a put leaves the catalog as it was
// before that: a put that failed has taken no block from a slab that is not here.
func (op *catalogOp) drop(batch *index.Batch) {
	switch {
	case op.undo == nil:
		batch.Drop(op.key, op.hlen)
	case op.undo.away != nil:
		batch.Put(op.undo.away)
	case op.undo.tried:
		batch.Drop(op.key, op.hlen)
	}
}

// end tells what became of an operation, or that it waits.
func (m *committer) end(op *catalogOp) {
	switch {
	case op.stuck != nil:
		op.told()
		late := *op
		m.apart.Go(func() {
			<-late.stuck
			late.end()
		})
		return
	case !op.failed || !op.keep:
		op.end()
		return
	}
	m.why = op.err
	waits := *op
	waits.err, waits.failed, waits.again, waits.tell = nil, false, true, nil
	m.backlog = append(m.backlog, waits)
	m.behind.Store(int64(len(m.backlog)))
	op.told() // last: whoever is told finds what waits counted
}

// abandon ends what is left in the backlog: it is lost as in a crash.
func (m *committer) abandon() {
	for i := range m.unclean {
		m.unclean[i].Store(m.unclean[i].Load() || len(m.backlog) > 0)
	}
	for i := range m.backlog {
		op := &m.backlog[i]
		op.err = fmt.Errorf("commit: %w", block.ErrClosed)
		op.end()
	}
	m.backlog = nil
}

// invalidate erases the headers of slots that are nobody's now, and flushes them
// for those who ask for it.
func (m *committer) invalidate(ops []catalogOp) {
	var list []*catalogOp
	sure := false
	for i := range ops {
		if op := &ops[i]; !op.failed {
			sure = sure || op.flush
			if op.header > 0 {
				list = append(list, op)
			}
		}
	}
	for _, op := range list {
		if dev := op.place.Device(); !m.zeroed[dev] {
			m.zeroed[dev], m.note[dev] = true, m.slabs[dev].Failures()
		}
	}
	if len(list) > 0 {
		m.erase(list)
	}
	for _, op := range list {
		if op.err != nil {
			m.unclean[op.place.Device()].Store(true)
			m.complain("slot header not erased", "slab", m.slabs[op.place.Device()].Path(), "offset", op.place.Offset(), "err", op.err)
			op.err = fmt.Errorf("%w: %w", errUnerased, op.err)
		}
	}
	if !sure {
		return
	}
	was := m.zeroed
	for dev, err := range m.flush(m.zeroed) {
		if err == nil && was[dev] && m.note[dev] != m.slabs[dev].Failures() {
			err = fmt.Errorf("slab %s: a flush failed since", m.slabs[dev].Path())
		}
		for i := range ops {
			op := &ops[i]
			if err != nil && op.flush && op.err == nil && (op.header == 0 || int(op.place.Device()) == dev) {
				op.err = fmt.Errorf("%w: %w", errUnerased, err)
			}
		}
	}
}

// flushPuts flushes the slabs that ops put records of, and fails the records of
// which it is not sure that all their bytes are there.
func (m *committer) flushPuts(ops []catalogOp) {
	var dirty [maxSlabs]bool
	for i := range ops {
		if ops[i].put != nil && !ops[i].rewrite {
			dirty[ops[i].dev] = true
		}
	}
	bad := m.flush(dirty)
	for i := range ops {
		op := &ops[i]
		if op.put == nil || op.rewrite {
			continue
		}
		op.err = bad[op.dev]
		// The kernel tells of lost writes once: a flush that succeeds says nothing of
		// what was written before one that failed.
		if op.err == nil && op.note != m.slabs[op.dev].Failures() {
			op.err = fmt.Errorf("%w: slab %s: a flush failed since the block was written", block.ErrUnavailable, m.slabs[op.dev].Path())
		}
	}
}

// flush flushes slabs, side by side when there are several, and returns the ones
// that failed.
func (m *committer) flush(dirty [maxSlabs]bool) (bad [maxSlabs]error) {
	n := 0
	for i := range m.slabs {
		if dirty[i] {
			n++
		}
	}
	one := func(i int) {
		err := m.flushSlab(i)
		if err != nil {
			m.complain("flush failed", "slab", m.slabs[i].Path(), "err", err)
			bad[i] = fmt.Errorf("%w: %w", block.ErrUnavailable, err)
		}
		if m.zeroed[i] && (err != nil || m.note[i] != m.slabs[i].Failures()) {
			m.unclean[i].Store(true)
		}
		m.zeroed[i] = false // what a flush that failed has lost, no later one brings back
	}
	var wg sync.WaitGroup
	for i := range m.slabs {
		switch {
		case !dirty[i]:
		case n == 1:
			one(i)
		default:
			wg.Go(func() { one(i) })
		}
	}
	wg.Wait()
	return bad
}

// complain logs a failure, unless there were many in this second.
func (m *committer) complain(what string, args ...any) {
	if more, ok := m.lines.next(); ok {
		m.log.Error(what, append(args, "more", more)...)
	}
}

// flushSlab flushes a slab as long as its device is up: one that never answers
// must not hold up what is recorded on the others. The flush then goes on, and
// nothing is taken for durable by it.
func (m *committer) flushSlab(i int) error {
	up := m.up(i)
	if up.Err() != nil {
		return context.Cause(up)
	}
	done := make(chan error, 1)
	m.apart.Go(func() { done <- m.slabs[i].Flush() })
	select {
	case err := <-done:
		return err
	case <-up.Done():
		return context.Cause(up)
	}
}

// close commits what is queued and ends the goroutine.
func (m *committer) close() {
	m.mu.Lock()
	was := m.mu.closed
	m.mu.closed = true
	m.mu.Unlock()
	if !was {
		m.wake()
	}
	<-m.done
	m.apart.Wait()
}
