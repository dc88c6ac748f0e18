package tiers

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
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
//  3. tells everyone: only now may a durable put be answered, and only now may
//     the slot of a dropped record be used again, because until the drop is
//     synced a crash would bring the record back.
type committer struct {
	catalog *index.Catalog
	slabs   []*Slab
	noSync  bool
	log     *slog.Logger

	mu struct {
		sync.Mutex
		ops    []catalogOp
		busy   bool // a round is under way
		closed bool
	}
	kick chan struct{}
	done chan struct{}

	rounds atomic.Int64
}

// maxSlabs is how many slabs a store may have.
const maxSlabs = 64

// catalogOp is one record to put, or a key to drop, or the clearing of a namespace,
// or nothing but a place in the queue.
type catalogOp struct {
	put   *index.Record
	dev   int // of G3, whose slab holds the record's slot
	key   block.Key
	hlen  int // of a key to drop
	clear *block.Namespace
	// fin runs on the committer's goroutine with the outcome. It must not block.
	fin func(err error)
}

func newCommitter(c *index.Catalog, slabs []*Slab, noSync bool, log *slog.Logger) *committer {
	m := &committer{
		catalog: c, slabs: slabs, noSync: noSync, log: log,
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
				op.fin(fmt.Errorf("commit: %w", block.ErrClosed))
			}
		}()
		return
	}
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// barrier calls fin when all that is queued now is written, at once when that is
// nothing.
func (m *committer) barrier(fin func(err error)) {
	m.mu.Lock()
	idle := len(m.mu.ops) == 0 && !m.mu.busy
	m.mu.Unlock()
	if idle {
		fin(m.catalog.Err())
		return
	}
	m.add(catalogOp{fin: fin})
}

func (m *committer) run() {
	defer close(m.done)
	batch := m.catalog.NewBatch()
	var spare []catalogOp
	for range m.kick {
		for {
			m.mu.Lock()
			ops := m.mu.ops
			m.mu.ops = spare[:0]
			m.mu.busy = len(ops) > 0
			closed := m.mu.closed
			m.mu.Unlock()
			if len(ops) == 0 {
				if closed {
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
		err := m.catalog.ClearNamespace(*ops[0].clear)
		ops[0].fin(err)
		ops = ops[1:]
	}
}

// write commits records. A slab that cannot be flushed fails its own puts; the
// catalog fails all.
func (m *committer) write(batch *index.Batch, ops []catalogOp) {
	bad := m.flush(ops)
	batch.Reset()
	for i := range ops {
		op := &ops[i]
		switch {
		case op.put != nil && bad[op.dev] == nil:
			batch.Put(op.put)
		case op.put == nil && op.hlen > 0:
			batch.Drop(op.key, op.hlen)
		}
	}
	err := m.catalog.Err()
	if batch.Len() > 0 {
		err = m.catalog.Commit(batch, !m.noSync)
	}
	if err != nil {
		m.log.Error("catalog commit failed", "records", len(ops), "err", err)
		err = fmt.Errorf("commit to the catalog: %w", err)
	}
	for i := range ops {
		if op := &ops[i]; op.put != nil && bad[op.dev] != nil {
			op.fin(bad[op.dev])
		} else {
			op.fin(err)
		}
	}
}

// flush flushes the slabs that ops put records of, side by side when there are
// several, and returns the ones that failed.
func (m *committer) flush(ops []catalogOp) (bad [maxSlabs]error) {
	var dirty [maxSlabs]bool
	n := 0
	for i := range ops {
		if ops[i].put != nil && !dirty[ops[i].dev] {
			dirty[ops[i].dev] = true
			n++
		}
	}
	one := func(i int) {
		if err := m.slabs[i].Flush(); err != nil {
			m.log.Error("flush failed", "slab", m.slabs[i].Path(), "err", err)
			bad[i] = fmt.Errorf("%w: %w", block.ErrUnavailable, err)
		}
	}
	var wg sync.WaitGroup
	for i := range m.slabs {
		switch {
		case !dirty[i]:
		case n == 1:
			one(i) // without waking another goroutine for it
		default:
			wg.Go(func() { one(i) })
		}
	}
	wg.Wait()
	return bad
}

// close commits what is queued and ends the goroutine.
func (m *committer) close() {
	m.mu.Lock()
	was := m.mu.closed
	m.mu.closed = true
	m.mu.Unlock()
	if !was {
		select {
		case m.kick <- struct{}{}:
		default:
		}
	}
	<-m.done
}
