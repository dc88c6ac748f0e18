package tiers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
)

// An import has the catalog know what is in a bucket and was not written by the catalog's
// store: by another node, or by this one when it had another catalog, which is lost. What
// it wrote itself the catalog knows, or has reason not to.
//
// It never raises the dead. A tombstone that is there when it begins is obeyed, as are the
// epochs and times in the footers. What is deleted or cleared here while it runs, or had
// begun to be, it leaves out: see mourning. And a record that is there stays as it is.

const (
	// importOpen is how many objects wait for the catalog's commit at most.
	importOpen = 64
	// importTell is how often an import tells how far it is.
	importTell = 200 * time.Millisecond
	// importProblems is how many problems it tells at most.
	importProblems = 20
)

// ImportObjects has the catalog know what the buckets of G4 hold, and tells how far it is;
// see api.Store.
func (s *Store) ImportObjects(ctx context.Context, progress func(block.ObjectImport) error) error {
	if s.objects == nil {
		return fmt.Errorf("import objects: %w: this store has no object tier", block.ErrUnavailable)
	}
	o := s.objects
	select {
	case o.importer <- struct{}{}:
	default:
		return fmt.Errorf("import objects: %w: an import is running", block.ErrUnavailable)
	}
	err := apart(ctx, s, progress, func(ctx context.Context, tell func(block.ObjectImport) error) error {
		defer func() { <-o.importer }()
		for _, p := range o.buckets {
			if err := o.importBucket(ctx, p, tell); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("import objects: %w", err)
	}
	return nil
}

// bucketImport is one import of a bucket.
type bucketImport struct {
	o        *objects
	p        *objectBucket
	ctx      context.Context
	progress func(block.ObjectImport) error
	told     time.Time
	unclear  map[block.NamespaceID]bool // those that are being cleared
	known    map[packed.ID]struct{}     // what others wrote and the catalog knows
	spaces   map[[32]byte]*importSpace
	open     []*importChange
	is       block.ObjectImport
}

// importSpace is a namespace of the bucket.
type importSpace struct {
	ns    *namespace
	epoch uint32 // when the import began, or the namespace was made
	err   error  // why its blocks are left out
}

// importChange is an object on its way into the catalog. What it counts is valid when the
// change is made.
type importChange struct {
	change
	blocks, bytes, known, refused, dead int64
	lost                                error // why it was not taken in: the ledger's own errors are all its changes'
}

func (o *objects) importBucket(ctx context.Context, p *objectBucket, progress func(block.ObjectImport) error) error {
	i := &bucketImport{
		o: o, p: p, ctx: ctx, progress: progress, told: time.Now(),
		known: map[packed.ID]struct{}{}, spaces: map[[32]byte]*importSpace{}, is: block.ObjectImport{Bucket: p.service.String()},
	}
	// Before the tombstones are read: of what is deleted from now on they need not tell.
	i.unclear = o.mourning.watch()
	defer o.mourning.unwatch()
	for _, ns := range o.s.names.all() {
		i.spaces[ns.digest] = &importSpace{ns: ns, epoch: ns.state.Load().Epoch}
	}
	if err := o.s.catalog.ScanObjects(0, func(r *index.ObjectRecord) error {
		if r.Bucket == p.no && !p.Wrote(r.ID) {
			i.known[r.ID] = struct{}{}
		}
		return ctx.Err()
	}); err != nil {
		return err
	}
	err := p.Through(watched{p: p}).Import(ctx, i.want, i.object)
	if e := i.settle(0); err == nil { // also after a failure: what is under way is counted
		err = e
	}
	if err != nil {
		return err
	}
	i.is.Done = true
	o.s.log.Info("bucket is imported", "bucket", p.health.name, "objects", i.is.Objects, "blocks", i.is.Blocks, "dead", i.is.Dead,
		"known", i.is.Known, "refused", i.is.Refused, "failed", i.is.Failed)
	return i.tell()
}

// want reports whether an object is to be read.
func (i *bucketImport) want(n packed.Name) bool {
	_, known := i.known[n.ID]
	return !known && !i.p.Wrote(n.ID)
}

func (i *bucketImport) tell() error {
	i.told = time.Now()
	return i.progress(i.is)
}

func (i *bucketImport) problem(text string) {
	if len(i.is.Problems) < importProblems {
		i.is.Problems = append(i.is.Problems, text)
	}
}

// settle waits until no more than n changes are under way.
func (i *bucketImport) settle(n int) (err error) {
	for len(i.open) > n {
		c := i.open[0]
		i.open = i.open[1:]
		<-c.done
		if c.err != nil || c.lost != nil {
			err = cmp.Or(err, c.err, c.lost)
			continue
		}
		i.is.Blocks += c.blocks
		i.is.Bytes += c.bytes
		i.is.Known += c.known
		i.is.Refused += c.refused
		i.is.Dead += c.dead
	}
	return err
}

// object takes in one object that the catalog does not know.
func (i *bucketImport) object(f *bucket.Found) error {
	if time.Since(i.told) >= importTell {
		if err := i.tell(); err != nil {
			return err
		}
	}
	i.is.Objects++
	if f.Err != nil {
		i.is.Failed++
		i.problem(f.Err.Error())
		return nil
	}
	space, err := i.space(f.Footer.Digest, f.Footer.HashLen)
	if err != nil {
		return err
	}
	if space.err != nil {
		i.is.Refused += int64(len(f.Footer.Members))
		return nil
	}
	ours := f.Footer.Store == i.o.s.catalog.StoreID() // under another catalog
	if ours && f.Footer.Epoch < space.epoch {
		for m := range f.Dead {
			f.Dead[m] = true // cleared, whether or not its tombstone could be written
		}
	}
	c := i.change(f, space)
	i.open = append(i.open, c)
	i.o.ledger.submit(&c.change)
	return i.settle(importOpen)
}

// space finds the namespace of a digest, or makes it.
func (i *bucketImport) space(digest [32]byte, hashLen uint8) (*importSpace, error) {
	space := i.spaces[digest]
	if space == nil {
		rec, err := i.p.Through(watched{p: i.p}).Namespace(i.ctx, digest)
		switch {
		case err == nil:
		case errors.Is(err, bucket.ErrNoAnswer), i.ctx.Err() != nil:
			return nil, err
		default:
			space = &importSpace{err: err}
		}
		if space == nil {
			ns, err := i.o.s.names.open(i.ctx, rec.Desc, rec.TTL)
			var mismatch *block.Mismatch
			switch {
			case err == nil:
				space = &importSpace{ns: ns, epoch: ns.state.Load().Epoch}
				i.is.Namespaces++
			case errors.As(err, &mismatch):
				space = &importSpace{err: err}
			default:
				return nil, err
			}
		}
		i.spaces[digest] = space
		if space.err != nil {
			i.problem(fmt.Sprintf("namespace %x: %v", digest[:8], space.err))
		}
	}
	if space.err == nil && i.unclear[space.ns.id] {
		space.err = fmt.Errorf("namespace %q: %w: it is being cleared, or its last clear could not write its tombstone: clear it again", space.ns.get().Desc.Name, block.ErrUnavailable)
		i.problem(space.err.Error())
	}
	if space.err == nil {
		if err := i.o.s.names.fixHashLen(i.ctx, space.ns, int(hashLen)); err != nil {
			if !errors.Is(err, block.ErrInvalid) {
				return nil, err
			}
			return &importSpace{err: err}, nil
		}
	}
	return space, nil
}

// change has the catalog know an object and what lives in it.
func (i *bucketImport) change(f *bucket.Found, space *importSpace) *importChange {
	o, foot, ns := i.o, f.Footer, space.ns
	obj := index.ObjectRecord{
		Number: o.s.gen.Add(1), Bucket: i.p.no, NS: ns.id, Digest: foot.Digest, First: f.Name.Hash, HashLen: int(foot.HashLen), ID: foot.ID,
		Epoch: space.epoch, Stamp: foot.Stamp, Bytes: f.Bytes, Members: uint32(len(foot.Members)),
	}
	c := &importChange{}
	var seated []index.PackedRecord
	c.change = change{
		ns: []*namespace{ns},
		plan: func(v *view) error {
			now := obj
			c.blocks, c.bytes, c.known, c.refused, c.dead, seated = 0, 0, 0, 0, 0, nil
			if c.lost = o.mourning.lost(); c.lost != nil {
				return nil
			}
			if ns.state.Load().Epoch != space.epoch {
				c.dead = int64(len(foot.Members)) // cleared meanwhile
				return nil
			}
			for m := range foot.Members {
				b := &foot.Members[m]
				r := index.PackedRecord{
					Key: block.Key{NS: ns.id, Hash: b.Hash}, HashLen: obj.HashLen, Parent: b.Parent, HasParent: b.HasParent, Sum: b.Sum, Len: b.Len,
					Object: obj.Number, Offset: b.Offset, Gen: b.Gen, Epoch: space.epoch, Expires: b.Expires,
				}
				gone, err := o.gone(v, &obj, &r)
				if err != nil {
					return err
				}
				if f.Dead[m] || gone {
					c.dead++
					continue
				}
				old, err := v.block(r.Key, r.HashLen)
				if err != nil {
					return err
				}
				if old != nil && old.Epoch == space.epoch && (old.Expires == 0 || old.Expires > int64(nowUnix())) {
					c.known++
					continue
				}
				if _, e, there := o.s.table.Lookup(r.Key); there && resident(&e) && (e.Sum != r.Sum || e.Len != r.Len) {
					c.refused++
					continue
				}
				if err := v.seat(&now, &r); err != nil {
					return err
				}
				seated = append(seated, r)
				c.blocks++
				c.bytes += int64(r.Len)
			}
			// One in which nothing lives the sweep is to know, too; one whose blocks are known from
			// elsewhere is none of this catalog's.
			if now.Live > 0 || c.dead == int64(len(foot.Members)) {
				v.putObject(&now)
			}
			return nil
		},
		applied: func() {
			for k := range seated {
				ev := o.event(block.EventStored, &seated[k])
				ev.Parent, ev.HasPar = seated[k].Parent, seated[k].HasParent
				o.s.events.publish(ev)
			}
		},
	}
	return c
}

// gone reports whether a block of an object was deleted since the import read the tombstones,
// or has none although it was deleted.
func (o *objects) gone(v *view, obj *index.ObjectRecord, r *index.PackedRecord) (bool, error) {
	owed, err := v.owed(obj.Bucket, r.Key, r.HashLen)
	return err == nil && owed != nil && owed.Stamp >= obj.Stamp || o.mourning.mourned(r.Key), err
}
