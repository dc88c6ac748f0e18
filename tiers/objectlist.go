package tiers

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// ListObjects lists the objects that the catalog knows; see api.Store.
func (s *Store) ListObjects(ctx context.Context, cursor string, limit int) (all []block.ObjectInfo, next string, err error) {
	if s.objects == nil {
		return nil, "", fmt.Errorf("list objects: %w: this store has no object tier", block.ErrUnavailable)
	}
	from := uint64(0)
	if cursor != "" {
		if from, err = strconv.ParseUint(cursor, 16, 64); err != nil {
			return nil, "", fmt.Errorf("list objects: %w: cursor %q", block.ErrInvalid, cursor)
		}
	}
	type page struct {
		all  []block.ObjectInfo
		next string
	}
	p, err := readCatalog(ctx, s, func() (p page, err error) {
		err = s.catalog.ScanObjects(from, func(r *index.ObjectRecord) error {
			if len(p.all) == limit {
				p.next = strconv.FormatUint(r.Number, 16)
				return errFull
			}
			p.all = append(p.all, s.objects.info(r))
			return ctx.Err()
		})
		return p, err
	})
	if err != nil && err != errFull {
		return nil, "", fmt.Errorf("list objects: %w", err)
	}
	return p.all, p.next, nil
}

func (o *objects) info(r *index.ObjectRecord) block.ObjectInfo {
	i := block.ObjectInfo{
		Bucket: o.urlOf(r.Bucket), Key: o.nameOf(r).String(), Bytes: r.Bytes, Blocks: int64(r.Members), Packed: packedAt(r.Stamp),
	}
	if p := o.byNo[r.Bucket]; p != nil {
		i.Own = p.Wrote(r.ID)
	}
	if ns, err := o.s.names.byID(r.NS); err == nil {
		i.Namespace = ns.get().Desc.Name
	}
	if o.current(r) {
		i.Live, i.LiveBytes = int64(r.Live), r.LiveBytes
	}
	return i
}

// urlOf is the URL of a bucket, empty for one that is not among those that are given.
func (o *objects) urlOf(number uint16) string {
	if p := o.byNo[number]; p != nil {
		return p.service.String()
	}
	return ""
}

// ObjectUsage sums up the objects of each namespace in each bucket; see api.Store.
func (s *Store) ObjectUsage(ctx context.Context) ([]block.ObjectUsage, error) {
	if s.objects == nil {
		return nil, fmt.Errorf("object usage: %w: this store has no object tier", block.ErrUnavailable)
	}
	type place struct{ bucket, namespace string }
	sums, err := readCatalog(ctx, s, func() (map[place]*block.ObjectUsage, error) {
		sums := map[place]*block.ObjectUsage{}
		err := s.catalog.ScanObjects(0, func(r *index.ObjectRecord) error {
			i := s.objects.info(r)
			at := place{i.Bucket, i.Namespace}
			u := sums[at]
			if u == nil {
				u = &block.ObjectUsage{Bucket: i.Bucket, Namespace: i.Namespace}
				sums[at] = u
			}
			u.Objects++
			u.Bytes += i.Bytes
			u.Blocks += i.Blocks
			u.Live += i.Live
			u.LiveBytes += i.LiveBytes
			return ctx.Err()
		})
		return sums, err
	})
	if err != nil {
		return nil, fmt.Errorf("object usage: %w", err)
	}
	out := make([]block.ObjectUsage, 0, len(sums))
	for _, u := range sums {
		out = append(out, *u)
	}
	slices.SortFunc(out, func(a, b block.ObjectUsage) int {
		return cmp.Or(cmp.Compare(a.Bucket, b.Bucket), cmp.Compare(a.Namespace, b.Namespace))
	})
	return out, nil
}
