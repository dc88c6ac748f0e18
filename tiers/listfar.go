package tiers

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// farCursor begins the cursors of the blocks in G4; the hash of the last one listed follows.
const farCursor = "g4:"

// errFull ends a scan that has found as much as it was to.
var errFull = errors.New("full")

// listFar lists blocks of G4 behind a cursor.
func (s *Store) listFar(ctx context.Context, nsID block.NamespaceID, cursor string, limit int) (entries []block.ListEntry, next string, err error) {
	after, err := hex.DecodeString(strings.TrimPrefix(cursor, farCursor))
	if err != nil || len(after) > 0 && !block.ValidHashLen(len(after)) {
		return nil, "", fmt.Errorf("list: %w: cursor %q", block.ErrInvalid, cursor)
	}
	recs, err := s.objects.scan(ctx, nsID, after, limit+1)
	if err != nil {
		return nil, "", fmt.Errorf("list: %w", err)
	}
	if len(recs) > limit {
		recs = recs[:limit]
		next = farCursor + recs[limit-1].Key.Hash.Hex(recs[limit-1].HashLen)
	}
	for i := range recs {
		r := &recs[i]
		le := block.ListEntry{Hash: r.Key.Hash, Parent: r.Parent, HasPar: r.HasParent, Len: r.Len, Sum: r.Sum}
		if _, e, ok := s.table.Lookup(r.Key); ok {
			le.Pinned = isPinned(&e)
			for ix, id := range [...]block.TierID{block.G2, block.G3} {
				if live(&e, ix) {
					le.Tiers = append(le.Tiers, id)
				}
			}
		}
		le.Tiers = append(le.Tiers, block.G4)
		if r.Expires != 0 {
			le.Expires = time.Unix(r.Expires, 0)
		}
		entries = append(entries, le)
	}
	return entries, next, nil
}

// scan gives up to limit blocks of a namespace that are found in G4, behind a hash.
func (o *objects) scan(ctx context.Context, nsID block.NamespaceID, after []byte, limit int) ([]index.PackedRecord, error) {
	ns, err := o.s.names.byID(nsID)
	if err != nil {
		return nil, err
	}
	epoch, now := ns.state.Load().Epoch, int64(nowUnix())
	return readCatalog(ctx, o.s, func() (recs []index.PackedRecord, err error) {
		looked := 0
		err = o.s.catalog.ScanPacked(nsID, after, func(r *index.PackedRecord) error {
			if looked++; looked%4096 == 0 && ctx.Err() != nil {
				return ctx.Err()
			}
			if r.Epoch == epoch && (r.Expires == 0 || r.Expires > now) && !o.isLeaving(r.Key) {
				recs = append(recs, *r)
			}
			if len(recs) == limit {
				return errFull
			}
			return nil
		})
		if err == errFull {
			err = nil
		}
		return recs, err
	})
}

// presentFar tells of the blocks in G4 of a namespace, or of all of them; see snapshot.
func (o *objects) presentFar(ctx context.Context, nsID block.NamespaceID, fn func(block.Event) error) (told int64, err error) {
	for _, ns := range o.s.names.all() {
		if nsID != 0 && ns.id != nsID {
			continue
		}
		for after := []byte(nil); ; {
			recs, err := o.scan(ctx, ns.id, after, eventBatch)
			if err != nil {
				return told, err
			}
			for i := range recs {
				ev := o.event(block.EventPresent, &recs[i])
				ev.Parent, ev.HasPar = recs[i].Parent, recs[i].HasParent
				if err := fn(ev); err != nil {
					return told, err
				}
				told++
			}
			if len(recs) < eventBatch {
				break
			}
			last := &recs[len(recs)-1]
			after = append([]byte(nil), last.Key.Hash[:last.HashLen]...)
		}
	}
	return told, nil
}
