package tiers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// objects is G4: blocks in packed objects of one or more buckets. There may be far more
// of them than memory can list, so the resident table does not have them: what is not
// there is looked for in the catalog. A block that comes up from G4 stays there too.
//
//	uploads.go   blocks that leave the lowest local tier wait for their turn
//	offload.go   they go into objects
//	onboard.go   they come back
//	ledger.go    what the catalog says of both
//	bury.go      deletes, and the removal of objects that nothing lives in any more
//	objectsweep.go   what the bucket and the catalog say of each other
//	objectimport.go  the catalog learns what others have written
//	repack.go        what lives in objects that are half dead goes into new ones
type objects struct {
	s       *Store
	buckets []*objectBucket // new objects go to the first of the healthiest
	byNo    map[uint16]*objectBucket
	partial bool // the catalog knows of buckets that are not among these
	ledger  ledger
	room    *uploadRoom
	uploads uploads
	rules   objectRules
	reap    chan struct{} // buffer of 1: there may be objects to remove

	speed                   speed
	blocks, payload         atomic.Int64
	hits, bytesIn, bytesOut atomic.Int64

	nLeaving atomic.Int64 // keys in mu.leaving
	mu       struct {
		sync.Mutex
		// fetches are the blocks on their way up.
		fetches map[block.Key]*fetch
		lead    int64 // bytes of slots of those that were begun before somebody waited for them
		// leaving are the keys whose records are being dropped, each with how many do so:
		// they are found no more. A key is here before its block leaves the table.
		leaving map[block.Key]int
		// packing are the blocks that an object under way to a bucket may hold.
		packing map[block.Key]*objectBucket
		// doubted are the blocks of which it is being found out whether they are lost; closed
		// when that is known.
		doubted map[block.Key]chan struct{}
		// underWay are the numbers of these objects.
		underWay map[uint64]struct{}
		// rested are the numbers of objects whose blocks have gone into others, and when: who
		// reads them may still do so.
		rested map[uint64]time.Time
	}
	mourning mourning
	importer chan struct{} // held by an import
	rest     time.Duration // restObject
	opened   time.Time
}

// objectBucket is one bucket of G4.
type objectBucket struct {
	no      uint16 // by which the catalog knows it
	service bucket.Service
	*bucket.Bucket
	health  *health
	writes  writes
	doubts  sync.Mutex // held while one block is looked into
	burials burials
	sweeps  objectSweep
	mu      struct {
		sync.Mutex
		claimed   bool
		described map[block.NamespaceID]bool
	}
}

const (
	// bucketPatience is how long one call of a bucket may take, beside a second for each
	// MiB: it includes the tries of the service's client.
	bucketPatience = 15 * time.Second
	// maxMourned is how many deleted blocks an import remembers while it runs.
	maxMourned = 1 << 16
)

// openObjects opens the buckets of G4 and counts what the catalog has there. A bucket that
// cannot be used is an error, unless the store has used it before and it only does not
// answer now: then it is down until it does.
func (s *Store) openObjects(ctx context.Context) error {
	if len(s.opts.Objects) == 0 {
		return nil
	}
	o := &objects{s: s, byNo: map[uint16]*objectBucket{}, reap: make(chan struct{}, 1)}
	o.mu.fetches, o.mu.leaving = map[block.Key]*fetch{}, map[block.Key]int{}
	o.mu.packing, o.mu.underWay = map[block.Key]*objectBucket{}, map[uint64]struct{}{}
	o.mu.doubted, o.mu.rested = map[block.Key]chan struct{}{}, map[uint64]time.Time{}
	o.opened = time.Now()
	o.mourning.init()
	o.importer, o.rest = make(chan struct{}, 1), restObject
	o.speed.first = firstDevice
	o.ledger.init(s)
	o.uploads.init(o)
	known, err := s.catalog.Buckets()
	if err != nil {
		return err
	}
	for _, service := range s.opts.Objects {
		p, err := o.open(ctx, service, known)
		if err != nil {
			return fmt.Errorf("object tier: %w", err)
		}
		if o.byNo[p.no] != nil {
			return fmt.Errorf("object tier: %w: %s is given twice", block.ErrInvalid, service)
		}
		o.buckets, o.byNo[p.no] = append(o.buckets, p), p
		if !slices.ContainsFunc(known, func(r index.BucketRecord) bool { return r.Number == p.no }) {
			known = append(known, index.BucketRecord{Number: p.no})
		}
	}
	o.partial = len(known) > len(o.buckets)
	if err := o.count(); err != nil {
		return err
	}
	if o.room, err = newUploadRoom(); err != nil {
		return err
	}
	s.objects = o // what follows is taken back by teardown
	return s.register(ctx, xfer.DRAM, arenaDescs(o.room.mem))
}

// open opens one bucket and finds the number by which the catalog knows it, or gives it one.
func (o *objects) open(ctx context.Context, service bucket.Service, known []index.BucketRecord) (*objectBucket, error) {
	s := o.s
	p := &objectBucket{service: service, health: newHealth(service.String(), s.opts)}
	p.health.what, p.health.stallAfter, p.health.answers = "bucket", s.opts.StallAfter/2, service.Answers
	p.mu.described = map[block.NamespaceID]bool{}
	p.writes.kick = make(chan struct{}, 1)
	rec := index.BucketRecord{URL: service.String(), Cluster: s.opts.Cluster}
	used := false
	for _, r := range known {
		if r.URL == rec.URL && r.Cluster == rec.Cluster {
			rec.Number, used = r.Number, true
			break
		}
		rec.Number = max(rec.Number, r.Number+1)
	}
	p.no = rec.Number
	writer, err := p.sweeps.init(s.catalog, p.no)
	if err != nil {
		return nil, err
	}
	if p.Bucket, err = bucket.New(service, s.opts.Cluster, s.catalog.StoreID(), writer); err != nil {
		return nil, err
	}
	switch err := p.claim(ctx); {
	case err == nil:
	case used && errors.Is(err, bucket.ErrNoAnswer):
		s.log.Warn("bucket does not answer; its blocks are not served until it does", "bucket", p.health.name, "err", err)
		p.health.sinks(err.Error())
	default:
		return nil, err
	}
	if used {
		return p, nil
	}
	return p, s.catalog.PutBucket(rec)
}

// claim makes sure, once, that the bucket is this cluster's.
func (p *objectBucket) claim(ctx context.Context) error {
	p.mu.Lock()
	claimed := p.mu.claimed
	p.mu.Unlock()
	if claimed {
		return nil
	}
	err := p.Claim(ctx)
	if err == nil {
		p.mu.Lock()
		p.mu.claimed = true
		p.mu.Unlock()
	}
	return err
}

// count counts the blocks that the catalog has in objects, by the records of these. Those of
// namespaces that were cleared the reaper counts out.
func (o *objects) count() error {
	return o.s.catalog.ScanObjects(0, func(r *index.ObjectRecord) error {
		o.blocks.Add(int64(r.Live))
		o.payload.Add(r.LiveBytes)
		return nil
	})
}

// current reports whether an object is of its namespace's epoch: else nothing in it is
// alive, whatever its record says.
func (o *objects) current(r *index.ObjectRecord) bool {
	ns, err := o.s.names.byID(r.NS)
	return err == nil && ns.state.Load().Epoch == r.Epoch
}

// takes reports whether there is a bucket that takes new objects.
func (o *objects) takes() bool { return o != nil && o.target() != nil }

// target is the bucket that the next object goes to; nil when none takes it.
func (o *objects) target() (best *objectBucket) {
	for _, p := range o.buckets {
		if r, ok := p.takes(); ok && (best == nil || r < best.health.rank()) {
			best = p
		}
	}
	return best
}

// do makes one call of a bucket with n bytes of payload, and notes how the bucket does. A
// bucket that is down is not asked. What is missing, or there already, is an answer.
func (p *objectBucket) do(ctx context.Context, n int64, call func(ctx context.Context) error) error {
	op, err := p.health.begin()
	if err != nil {
		return err
	}
	defer p.health.end(op)
	ctx, leave := p.health.while(ctx)
	defer leave()
	patience := bucketPatience + time.Duration(n>>20)*time.Second
	slow := fmt.Errorf("%w: bucket %s: no answer within %v", block.ErrUnavailable, p.health.name, patience)
	ctx, cancel := context.WithTimeoutCause(ctx, patience, slow)
	defer cancel()
	err = call(ctx)
	switch {
	case err == nil, errors.Is(err, xfer.ErrNotFound), errors.Is(err, xfer.ErrShort), errors.Is(err, bucket.ErrExists), errors.Is(err, index.ErrVersion):
		op.worked = true
	case errors.Is(err, bucket.ErrNoWrites):
		op.void = true // of its reads it says nothing
		p.refuse(err)
	case ctx.Err() != nil && context.Cause(ctx) != slow:
		op.void = true // the caller's, or the bucket has been found down
	default:
		op.failure(err)
	}
	return err
}

// find looks for a block in G4. It asks no bucket. Without a G4, when o is nil, no block is
// there. It fails when ctx ends before the catalog answers: why is MissDeadline then.
func (o *objects) find(ctx context.Context, k block.Key) (r index.PackedRecord, why block.MissReason, err error) {
	if o == nil {
		return r, block.MissAbsent, nil
	}
	found, err := o.findAll(ctx, []block.Key{k}, true)
	if err != nil {
		return r, missOf(err), err
	}
	return found[0].rec, found[0].why, nil
}

// farRecord is what the catalog says of a block in G4.
type farRecord struct {
	rec index.PackedRecord
	why block.MissReason // Hit, or why there is none
}

// findAll is find for some keys, which stay as they are; unless all says so, for no more
// than up to the first that is not there.
func (o *objects) findAll(ctx context.Context, keys []block.Key, all bool) ([]farRecord, error) {
	return readCatalog(ctx, o.s, func() ([]farRecord, error) {
		found := make([]farRecord, 0, len(keys))
		for _, k := range keys {
			var f farRecord
			f.rec, f.why = o.lookUp(k)
			if found = append(found, f); f.why != block.Hit && !all {
				break
			}
		}
		return found, nil
	})
}

// lookUp is find for who may wait for the catalog's disk: see catalogReads.
func (o *objects) lookUp(k block.Key) (r index.PackedRecord, why block.MissReason) {
	if o.isLeaving(k) {
		return r, block.MissAbsent
	}
	ns, err := o.s.names.byID(k.NS)
	if err != nil {
		return r, block.MissAbsent
	}
	st := ns.state.Load()
	if st.HashLen == 0 {
		return r, block.MissAbsent
	}
	r, ok, err := o.s.catalog.GetPacked(k, st.HashLen)
	switch {
	case err != nil:
		o.s.log.Error("look for a block in objects", "key", k, "err", err)
		return r, block.MissUnavailable
	case !ok || r.Epoch != st.Epoch:
		return r, block.MissAbsent
	case r.Expires != 0 && r.Expires <= int64(nowUnix()):
		return r, block.MissExpired
	case o.partial:
		if obj, ok, err := o.s.catalog.GetObject(r.Object); err != nil || !ok || o.byNo[obj.Bucket] == nil {
			return r, block.MissAbsent
		}
	}
	return r, block.Hit
}

// found is what a match says of a block that no local tier has.
func (f *farRecord) found() block.Found {
	if f.why == block.Hit {
		return block.Found{State: block.Resident, Tier: block.G4, Len: f.rec.Len}
	}
	return block.Found{}
}

// matchFar completes a match: keys that no local tier has are looked for in G4, in order
// and as far as the match goes. res has all keys, by what the table says of them.
func (o *objects) matchFar(ctx context.Context, nsID block.NamespaceID, hashLen int, hashes []byte, all bool, res *block.MatchResult) error {
	res.Prefix = 0
	broken := false
	var found []farRecord // of the next keys that no local tier has
	for i := range res.Blocks {
		f := &res.Blocks[i]
		if f.State != block.Resident {
			if len(found) == 0 {
				var keys []block.Key
				for j := i; j < len(res.Blocks) && len(keys) < windowKeys; j++ {
					if res.Blocks[j].State != block.Resident {
						keys = append(keys, keyAt(nsID, hashLen, hashes, j))
					}
				}
				var err error
				if found, err = o.findAll(ctx, keys, all); err != nil {
					return err
				}
			}
			if far := found[0].found(); far.State == block.Resident {
				*f = far
			}
			found = found[1:]
		}
		broken = broken || f.State != block.Resident
		if !broken {
			res.Prefix++
		} else if !all {
			res.Blocks = res.Blocks[:i+1]
			break
		}
	}
	return nil
}

// keyAt is the key of a call's hash i.
func keyAt(nsID block.NamespaceID, hashLen int, hashes []byte, i int) (k block.Key) {
	k.NS = nsID
	copy(k.Hash[:], hashes[i*hashLen:(i+1)*hashLen])
	return k
}

func (o *objects) isLeaving(k block.Key) bool {
	if o.nLeaving.Load() == 0 {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mu.leaving[k] > 0
}

// object finds the record of an object and its bucket.
func (o *objects) object(ctx context.Context, number uint64) (r index.ObjectRecord, p *objectBucket, err error) {
	r, err = readCatalog(ctx, o.s, func() (index.ObjectRecord, error) {
		r, ok, err := o.s.catalog.GetObject(number)
		if err == nil && !ok {
			err = block.ErrNotFound
		}
		return r, err
	})
	if err != nil {
		return r, nil, fmt.Errorf("object %d: %w", number, err)
	}
	if p = o.byNo[r.Bucket]; p == nil {
		return r, nil, fmt.Errorf("object %d: %w: its bucket is not among those that are given", number, block.ErrUnavailable)
	}
	return r, p, nil
}

// nameOf is the name of a recorded object.
func (o *objects) nameOf(r *index.ObjectRecord) packed.Name {
	return packed.Name{Cluster: o.s.opts.Cluster, Digest: r.Digest, Hash: r.First, HashLen: uint8(r.HashLen), ID: r.ID}
}

// event is what watchers are told of a block in G4.
func (o *objects) event(kind block.EventKind, r *index.PackedRecord) block.Event {
	return block.Event{Kind: kind, NS: o.s.names.name(r.Key.NS), Hash: r.Key.Hash, Hlen: uint8(r.HashLen), Tier: block.G4, Len: r.Len}
}

func (o *objects) stats() block.TierStats {
	st := block.TierStats{
		Tier: block.G4, Blocks: o.blocks.Load(), Payload: o.payload.Load(), Used: o.payload.Load(),
		BytesIn: o.bytesIn.Load(), BytesOut: o.bytesOut.Load(), Hits: o.hits.Load(), Uploads: o.uploads.stats(),
	}
	for _, p := range o.buckets {
		d := block.DeviceStats{Path: p.service.String()}
		p.health.stats(&d)
		if r := p.writes.refused.Load(); r != nil && d.State == block.Healthy {
			d.State, d.Reason, d.Since = block.Degraded, r.err.Error(), r.since
		}
		st.Devices = append(st.Devices, d)
	}
	return st
}
