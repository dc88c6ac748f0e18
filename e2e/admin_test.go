package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

const (
	adminSpaces = 6
	adminBlocks = 8
	adminBytes  = 3000
)

// adminHistory is what one client knows of namespaces that it makes, fills, clears
// and pins in. It is the only one that works on them, one call at a time.
type adminHistory struct {
	evicts bool
	spaces [adminSpaces]adminSpace

	opened, cleared, pinned, unpinned int // answered
}

// adminSpace is one namespace. As in history, fate says what was answered.
type adminSpace struct {
	ns     block.Namespace
	opened bool // answered, with ns
	blocks [adminBlocks]adminBlock
}

// adminBlock is one block. Each clear changes the bytes of the next put.
type adminBlock struct {
	fate    fate
	version int
	pinned  pinFate
}

// pinFate is whether a block is pinned.
type pinFate uint8

const (
	notPinned pinFate = iota
	maybePinned
	isPinned
)

func adminName(s int) string { return fmt.Sprintf("admin-%d", s) }

func adminBytesOf(s, i, version int) []byte {
	return payload(1<<40+s<<32+i<<24+version, adminBytes+i)
}

// admin works until the daemon is gone, an answer is wrong, or ctx ends.
type admin struct {
	c      *api.Client
	h      *adminHistory
	r      *rand.Rand
	ending *atomic.Bool
}

// run works like traffic.run and says what was wrong.
func (w *admin) run(ctx context.Context) error {
	for ctx.Err() == nil {
		s := w.r.IntN(adminSpaces)
		var err error
		switch n := w.r.IntN(10); {
		case !w.h.spaces[s].opened:
			err = w.open(ctx, s)
		case n < 4:
			err = w.put(ctx, s)
		case n < 6:
			err = w.clear(ctx, s)
		case n < 8:
			err = w.pin(ctx, s)
		default:
			err = w.unpin(ctx, s)
		}
		if err != nil {
			return w.failed(ctx, err)
		}
	}
	return nil
}

// failed is nil for what follows from the end of the daemon or the test.
func (w *admin) failed(ctx context.Context, err error) error {
	if errors.Is(err, block.ErrDisconnected) || errors.Is(err, block.ErrClosed) || w.ending.Load() || ctx.Err() != nil {
		return nil
	}
	return err
}

func (w *admin) open(ctx context.Context, s int) error {
	sp := &w.h.spaces[s]
	ns, err := w.c.OpenNamespace(ctx, block.Descriptor{Name: adminName(s), MaxBlockBytes: 2 * adminBytes}, 0)
	if err != nil {
		return fmt.Errorf("open namespace: %w", err)
	}
	ns.HashLen = hashBytes
	sp.ns, sp.opened = ns, true
	w.h.opened++
	return nil
}

// put puts blocks that are not there, durably.
func (w *admin) put(ctx context.Context, s int) error {
	sp := &w.h.spaces[s]
	var items []api.PutItem
	var at []int
	for i := range sp.blocks {
		if b := &sp.blocks[i]; b.fate == gone {
			b.version++
			b.fate = unsure
			items = append(items, api.PutItem{Hash: hashOf(i), Data: adminBytesOf(s, i, b.version)})
			at = append(at, i)
		}
	}
	if len(items) == 0 {
		return nil
	}
	res, err := w.c.Put(ctx, sp.ns, items, api.PutOptions{Durable: block.G3})
	for k, one := range res {
		switch {
		case one.Err == nil:
			sp.blocks[at[k]].fate = durable
		case errors.Is(one.Err, block.ErrNoSpace), err != nil, w.ending.Load():
		default:
			return fmt.Errorf("put: %w", one.Err)
		}
	}
	return err
}

// clear empties a namespace: what is answered stays away.
func (w *admin) clear(ctx context.Context, s int) error {
	sp := &w.h.spaces[s]
	for i := range sp.blocks {
		if b := &sp.blocks[i]; b.fate != gone {
			b.fate = unsure
			b.pinned = min(b.pinned, maybePinned)
		}
	}
	if _, err := w.c.Clear(ctx, sp.ns); err != nil {
		return fmt.Errorf("clear: %w", err)
	}
	for i := range sp.blocks {
		sp.blocks[i].fate, sp.blocks[i].pinned = gone, notPinned
	}
	w.h.cleared++
	return nil
}

// some are the blocks of a namespace that ok agrees to.
func (sp *adminSpace) some(ok func(b *adminBlock) bool) (at []int, hashes []block.Hash) {
	for i := range sp.blocks {
		if ok(&sp.blocks[i]) {
			at, hashes = append(at, i), append(hashes, hashOf(i))
		}
	}
	return at, hashes
}

func (w *admin) pin(ctx context.Context, s int) error {
	sp := &w.h.spaces[s]
	at, hashes := sp.some(func(b *adminBlock) bool { return b.fate == durable && b.pinned != isPinned && w.r.IntN(2) == 0 })
	if len(at) == 0 {
		return nil
	}
	for _, i := range at {
		sp.blocks[i].pinned = maybePinned
	}
	each, err := w.c.Pin(ctx, sp.ns, hashes)
	if err != nil {
		return fmt.Errorf("pin: %w", err)
	}
	for k, i := range at {
		switch {
		case each[k] == nil:
			sp.blocks[i].pinned = isPinned
			w.h.pinned++
		case errors.Is(each[k], block.ErrNotFound) && w.h.evicts:
			sp.blocks[i].fate, sp.blocks[i].pinned = unsure, notPinned
		case errors.Is(each[k], block.ErrNoSpace):
		default:
			return fmt.Errorf("pin block %d of %s: %w", i, adminName(s), each[k])
		}
	}
	return nil
}

func (w *admin) unpin(ctx context.Context, s int) error {
	sp := &w.h.spaces[s]
	at, hashes := sp.some(func(b *adminBlock) bool { return b.pinned == isPinned })
	if len(at) == 0 {
		return nil
	}
	for _, i := range at {
		sp.blocks[i].pinned = maybePinned
	}
	n, err := w.c.Unpin(ctx, sp.ns, hashes)
	if err != nil {
		return fmt.Errorf("unpin: %w", err)
	}
	if n != len(at) {
		return fmt.Errorf("unpin of %d pinned blocks of %s: %d were pinned", len(at), adminName(s), n)
	}
	for _, i := range at {
		sp.blocks[i].pinned = notPinned
	}
	w.h.unpinned += n
	return nil
}

// judge compares what a daemon has after its start with what was answered.
func (w *admin) judge(ctx context.Context) error {
	for s := range w.h.spaces {
		if err := w.judgeSpace(ctx, s); err != nil {
			return fmt.Errorf("namespace %s: %w", adminName(s), err)
		}
	}
	return nil
}

func (w *admin) judgeSpace(ctx context.Context, s int) error {
	sp := &w.h.spaces[s]
	ns, err := w.c.Namespace(ctx, adminName(s))
	switch {
	case errors.Is(err, block.ErrNotFound) && !sp.opened:
		return nil
	case err != nil:
		return err
	case sp.opened && ns.ID != sp.ns.ID:
		return fmt.Errorf("handle %d, was answered %d", ns.ID, sp.ns.ID)
	}
	ns.HashLen = hashBytes
	want := make([]block.Wanted, adminBlocks)
	for i := range want {
		want[i].Hash = hashOf(i)
	}
	entries, _, err := w.c.List(ctx, ns, "", adminBlocks+1)
	if err != nil {
		return err
	}
	pinned := map[block.Hash]bool{}
	for _, e := range entries {
		pinned[e.Hash] = e.Pinned
	}
	return w.c.Get(ctx, ns, want, block.GetOptions{NoPromote: true}, func(i int, p block.Payload) error {
		b := &sp.blocks[i]
		switch {
		case p.Reason == block.Hit && b.fate == gone:
			return fmt.Errorf("block %d is there, and was answered as cleared or never put", i)
		case p.Reason == block.Hit && !bytes.Equal(p.Bytes, adminBytesOf(s, i, b.version)):
			return fmt.Errorf("block %d: wrong bytes for version %d", i, b.version)
		case p.Reason == block.Hit:
			if is := pinned[hashOf(i)]; is && b.pinned == notPinned || !is && b.pinned == isPinned {
				return fmt.Errorf("block %d: pinned %v, was answered otherwise", i, is)
			}
			b.fate = durable
			if b.pinned = notPinned; pinned[hashOf(i)] {
				b.pinned = isPinned
			}
		case p.Reason != block.MissAbsent:
			return fmt.Errorf("block %d: miss: %v", i, p.Reason)
		case b.pinned == isPinned:
			return fmt.Errorf("block %d was answered as pinned and is a miss", i)
		case b.fate == durable && !w.h.evicts:
			return fmt.Errorf("block %d was answered as durable and is a miss", i)
		case w.h.evicts && b.fate != gone:
			b.fate, b.pinned = unsure, min(b.pinned, maybePinned) // a drop may have come too late for the catalog
		default:
			b.fate, b.pinned = gone, notPinned
		}
		return nil
	})
}
