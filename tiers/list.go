package tiers

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// List lists blocks of a namespace; see api.Store. The cursor is the handle of
// the last block listed: a handle is a block's as long as the block is there, so
// what stays while a listing goes on is in it once.
//
// Blocks of G4, whichever other tiers have them, come behind the others, in the order of
// their hashes. One that comes into G4 while a listing goes on may be in it twice.
func (s *Store) List(ctx context.Context, nsID block.NamespaceID, cursor string, limit int) (entries []block.ListEntry, next string, err error) {
	if _, err := s.names.byID(nsID); err != nil {
		return nil, "", fmt.Errorf("list: %w", err)
	}
	if limit <= 0 {
		return nil, "", fmt.Errorf("list: %w: limit %d", block.ErrInvalid, limit)
	}
	if s.objects != nil && strings.HasPrefix(cursor, farCursor) {
		return s.listFar(ctx, nsID, cursor, limit)
	}
	from := block.Handle(1)
	if cursor != "" {
		last, err := parseCursor(cursor)
		if err != nil {
			return nil, "", fmt.Errorf("list: %w", err)
		}
		from = last + 1
	}
	var hs []block.Handle
	for more := true; more && len(entries) <= limit; {
		var some []block.ListEntry
		var at []block.Handle
		some, at, more = s.listNear(ctx, nsID, from, min(limit+1-len(entries), listLook))
		if len(some) > 0 {
			from = at[len(at)-1] + 1
		}
		if err := ctx.Err(); err != nil {
			return nil, "", fmt.Errorf("list: %w", err)
		}
		if some, at, err = s.notFar(ctx, nsID, some, at); err != nil {
			return nil, "", fmt.Errorf("list: %w", err)
		}
		entries, hs = append(entries, some...), append(hs, at...)
	}
	switch {
	case len(entries) > limit:
		entries, next = entries[:limit], formatCursor(hs[limit-1])
	case s.objects != nil:
		next = farCursor
	}
	return entries, next, nil
}

// listLook is how many blocks of local tiers a listing looks for in G4 at a time.
const listLook = 1024

// listNear lists up to n blocks of local tiers from a handle on, each with its handle. more
// says that there may be others behind them.
func (s *Store) listNear(ctx context.Context, nsID block.NamespaceID, from block.Handle, n int) (entries []block.ListEntry, at []block.Handle, more bool) {
	now := nowUnix()
	looked := 0
	s.table.Range(from, func(h block.Handle, e *index.Entry) bool {
		// A namespace may be a small part of the table.
		if looked++; looked%4096 == 0 && ctx.Err() != nil {
			return false
		}
		if e.NS != nsID || !resident(e) || expired(e, now) {
			return true
		}
		if more = len(entries) == n; more {
			return false
		}
		le := block.ListEntry{Hash: e.Hash, Len: e.Len, Sum: e.Sum, Pinned: isPinned(e)}
		for ix, id := range [...]block.TierID{block.G2, block.G3} {
			if live(e, ix) {
				le.Tiers = append(le.Tiers, id)
			}
		}
		le.Parent, le.HasPar = s.parentHash(e)
		if e.Expires != 0 {
			le.Expires = time.Unix(int64(e.Expires), 0)
		}
		entries, at = append(entries, le), append(at, h)
		return true
	})
	return entries, at, more
}

// notFar leaves out of a listing what G4 has, too: it comes with the blocks of G4.
func (s *Store) notFar(ctx context.Context, nsID block.NamespaceID, entries []block.ListEntry, at []block.Handle) ([]block.ListEntry, []block.Handle, error) {
	if s.objects == nil || len(entries) == 0 {
		return entries, at, nil
	}
	keys := make([]block.Key, len(entries))
	for i := range keys {
		keys[i] = block.Key{NS: nsID, Hash: entries[i].Hash}
	}
	found, err := s.objects.findAll(ctx, keys, true)
	if err != nil {
		return nil, nil, err
	}
	n := 0
	for i := range found {
		if found[i].why != block.Hit {
			entries[n], at[n] = entries[i], at[i]
			n++
		}
	}
	return entries[:n], at[:n], nil
}
