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
	now := nowUnix()
	looked := 0
	var last block.Handle
	s.table.Range(from, func(h block.Handle, e *index.Entry) bool {
		// A namespace may be a small part of the table.
		if looked++; looked%4096 == 0 && ctx.Err() != nil {
			return false
		}
		if e.NS != nsID || !resident(e) || expired(e, now) {
			return true
		}
		if _, why := s.objects.find(block.Key{NS: e.NS, Hash: e.Hash}); why == block.Hit {
			return true // it comes with those of G4
		}
		if len(entries) == limit {
			next = formatCursor(last)
			return false
		}
		last = h
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
		entries = append(entries, le)
		return true
	})
	if err := ctx.Err(); err != nil {
		return nil, "", fmt.Errorf("list: %w", err)
	}
	if next == "" && s.objects != nil {
		next = farCursor
	}
	return entries, next, nil
}
