package tiers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

const (
	// maxLeasedBlocks bounds the blocks that all leases hold, a block counted once
	// for each lease on it.
	maxLeasedBlocks = 1 << 20
	// maxPrefetchBlocks bounds the blocks that prefetches may have under way.
	maxPrefetchBlocks = 1 << 16
)

// Open opens the store of a data directory, made when absent, and returns when
// the blocks that were committed to its slabs are served. The memory of G2 may
// still be populated then. Errors: block.ErrInvalid for options that cannot be
// accepted; block.ErrUnavailable when another process uses the directory or a
// slab; ErrVersion when a newer program wrote it; block.ErrNoSpace when a slab
// cannot be made.
func Open(ctx context.Context, o Options) (_ *Store, err error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	s := &Store{opts: o, log: o.Logger, agent: o.Agent, start: time.Now(), gone: new(goneSet)}
	s.life, s.endLife = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = fmt.Errorf("open store %s: %w", o.Dir, err)
			_ = s.teardown() // the first failure is the one to tell
		}
	}()
	if s.dir, err = lockDir(o.Dir); err != nil {
		return nil, err
	}
	s.catalogRoom.init(o.Dir)
	if err := s.catalogRoom.check(); err != nil {
		return nil, err
	}
	s.catalog, err = index.OpenCatalog(filepath.Join(o.Dir, "catalog"), o.Catalog)
	if err != nil {
		return nil, err
	}
	s.catalogHealth.init(s.start)
	s.catalogReads.init()
	// Generations only grow, over restarts too.
	s.firstGen = uint64(s.catalog.Boot()) << genBits
	s.gen.Store(s.firstGen)
	if err := s.names.init(s.catalog); err != nil {
		return nil, err
	}
	if s.table, err = index.NewTable(); err != nil {
		return nil, err
	}
	s.events = newEventHub(0)
	s.leases = NewLeases(o.MaxLeases, maxLeasedBlocks)
	s.prefetches = newPrefetchQueue(maxPrefetchBlocks, o.PrefetchBytes)
	s.conversations.init()
	s.reservations.init(o)
	s.moves.init()
	s.pins.init()
	if s.staging, err = newStaging(s.agent); err != nil {
		return nil, err
	}
	if err := s.register(ctx, xfer.DRAM, stagingDescs(s.staging)); err != nil {
		return nil, err
	}
	if err := s.openG2(ctx); err != nil {
		return nil, err
	}
	known, err := s.catalog.Slabs()
	if err != nil {
		return nil, err
	}
	slabs, err := s.openSlabs(ctx, known)
	if err != nil {
		return nil, err
	}
	if err := s.openBudgets(); err != nil {
		return nil, err
	}
	if err := s.openTombstones(known); err != nil {
		return nil, err
	}
	s.commits = newCommitter(s.catalog, slabs, s.tombstones, o.NoSync, o.Logger, s.eraseHeaders, func(dev int) context.Context {
		return s.g3.devs[dev].health.up()
	})
	s.commits.add(catalogOp{lifts: true, keep: true}) // after a stop in order there is nothing under them
	var evictors []*evictor
	for _, t := range s.tiers() {
		p, err := o.Policy(t.id)
		if err != nil {
			return nil, fmt.Errorf("policy of %s: %w", t.id, err)
		}
		t.mu.policy = policyState{name: p.Name(), start: p.Name()}
		evictors = append(evictors, &evictor{s: s, t: t, p: p})
	}
	if err := s.openObjects(ctx); err != nil {
		return nil, err
	}
	if err := s.recover(evictors[len(evictors)-1]); err != nil {
		return nil, err
	}
	s.startWork(evictors)
	if err := s.resumeScrub(); err != nil {
		return nil, err
	}
	s.opened = true
	return s, nil
}

// genBits is how many bits of a generation count within one opening of the
// store; those above are the catalog's boot number.
const genBits = 40

// lockDir makes a directory if need be and takes it for this process.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory %s: %w: %w", dir, block.ErrUnavailable, err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "LOCK"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w: %w", dir, block.ErrUnavailable, err)
	}
	if err := lock(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("data directory %s: %w", dir, err)
	}
	return f, nil
}

func (s *Store) register(ctx context.Context, t xfer.MemType, descs []xfer.Desc) error {
	if err := s.agent.Register(ctx, xfer.DescList{Type: t, Descs: descs}, nil); err != nil {
		return fmt.Errorf("register %s: %w", t, err)
	}
	s.registered = append(s.registered, xfer.DescList{Type: t, Descs: descs})
	return nil
}

func stagingDescs(st *staging) []xfer.Desc { return arenaDescs(st.mem) }

// arenaDescs describe an arena's chunks.
func arenaDescs(a *arena.Arena) (out []xfer.Desc) {
	for _, c := range a.Chunks() {
		out = append(out, xfer.Desc{Addr: arena.Addr(c), Len: uint64(len(c))})
	}
	return out
}

// openSlabs opens or makes the slabs of G3 and returns them by device number. known
// are those of the catalog.
func (s *Store) openSlabs(ctx context.Context, known []index.SlabRecord) ([]*Slab, error) {
	if s.opts.NoSlabs {
		return nil, nil
	}
	specs, recorded := s.opts.Slabs, false
	if len(specs) == 0 {
		for _, path := range slabPaths(known) {
			specs, recorded = append(specs, SlabSpec{Path: path}), true
		}
	}
	if len(specs) == 0 && s.opts.DefaultSlab != nil {
		specs = []SlabSpec{*s.opts.DefaultSlab}
	}
	if len(specs) > maxSlabs {
		return nil, fmt.Errorf("%w: %d slabs, at most %d", block.ErrInvalid, len(specs), maxSlabs)
	}
	var missing []error
	for _, spec := range specs {
		slab, err := s.openSlab(ctx, spec, recorded, known)
		if recorded && errors.Is(err, ErrNoSlab) {
			// A device that is gone takes its blocks with it, not the others'.
			s.log.Error("slab is gone, its blocks are not served", "slab", spec.Path, "err", err)
			missing = append(missing, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		s.slabs = append(s.slabs, slab)
	}
	if len(missing) > 0 && len(s.slabs) == 0 {
		return nil, fmt.Errorf("%w: none of the slabs that the data directory records is there; name the slabs to use: %w",
			block.ErrUnavailable, errors.Join(missing...))
	}
	var devs []*device
	for i, slab := range s.slabs {
		rec, err := s.adopt(slab, known)
		if err != nil {
			return nil, err
		}
		s.slabNo = append(s.slabNo, rec.Number)
		kind := xfer.FILE
		if slab.IsDevice() {
			kind = xfer.BLK
		}
		if err := s.register(ctx, kind, []xfer.Desc{{Dev: uint64(i), Meta: slab.Path()}}); err != nil {
			return nil, err
		}
		d := &device{
			number: uint8(i), slab: slab, kind: kind, base: uint64(slab.DataOffset()),
			slots:  NewSlots(slab.DataBytes(), slab.ExtentBytes()),
			health: newHealth(slab.Path(), s.opts),
		}
		d.wear = newWearWatch(slab, d.rank, s.log)
		d.unswept.Store(!s.catalog.Clean() || rec.Unswept)
		slab.sync = d.health.watchFlush(slab.sync)
		devs = append(devs, d)
	}
	if len(devs) > 0 {
		s.g3 = newTier(block.G3, devs, s.opts)
	}
	return s.slabs, nil
}

// slabPaths are the paths at which the slabs in use were last seen. Several may
// have been seen at one: a slab that was put in another's place.
func slabPaths(known []index.SlabRecord) (paths []string) {
	for _, r := range known {
		if !r.Retired && r.Path != "" && !slices.Contains(paths, r.Path) {
			paths = append(paths, r.Path)
		}
	}
	return paths
}

// openSlab opens one slab, or makes it unless the data directory records it.
func (s *Store) openSlab(ctx context.Context, spec SlabSpec, recorded bool, known []index.SlabRecord) (*Slab, error) {
	path, err := filepath.Abs(spec.Path)
	if err != nil {
		return nil, fmt.Errorf("slab %s: %w: %w", spec.Path, block.ErrInvalid, err)
	}
	o := SlabOptions{Store: s.catalog.StoreID(), NoSync: s.opts.NoSync, Logger: s.log}
	slab, err := OpenSlab(path, o)
	if (errors.Is(err, errBlank) || errors.Is(err, errForeign)) && slices.Contains(slabPaths(known), path) {
		// It was one of ours: a new one in its place would be the end of its blocks.
		return nil, fmt.Errorf("slab %s: %w: its superblocks are gone; move it away to go on without its blocks", path, block.ErrCorrupt)
	}
	if errors.Is(err, ErrNoSlab) && !recorded {
		o.ExtentBytes = largeExtent
		if spec.Bytes > 0 {
			o.ExtentBytes = extentFor(spec.Bytes)
		}
		slab, err = CreateSlab(ctx, path, spec.Bytes, o)
	}
	if err != nil {
		return nil, err
	}
	switch {
	case slab.StoreID() != s.catalog.StoreID():
		err = fmt.Errorf("slab %s: %w: it belongs to another data directory", path, block.ErrInvalid)
	case spec.Bytes > slab.Bytes():
		err = fmt.Errorf("slab %s: %w: too short: it has %d bytes, %d are asked for", path, block.ErrInvalid, slab.Bytes(), spec.Bytes)
	case spec.Bytes > 0 && spec.Bytes < slab.Bytes():
		s.log.Warn("slab is larger than asked for and used whole", "slab", path, "bytes", slab.Bytes(), "asked", spec.Bytes)
	}
	if err != nil {
		return nil, errors.Join(err, slab.Close())
	}
	// One whole superblock is enough to go on, two are not needed until one fails.
	switch at, err := slab.mend(); {
	case err != nil:
		s.log.Warn("a superblock is damaged and could not be written anew from its twin", "slab", path, "offset", at, "err", err)
	case at >= 0:
		s.log.Warn("a superblock was damaged; it was written anew from its twin", "slab", path, "offset", at)
	}
	return slab, nil
}

// adopt finds the record by which the catalog knows a slab, or gives it one, on
// disk before any block's can point to it.
func (s *Store) adopt(slab *Slab, known []index.SlabRecord) (index.SlabRecord, error) {
	rec := index.SlabRecord{ID: slab.ID(), Path: slab.Path(), Bytes: slab.Bytes(), ExtentBytes: slab.ExtentBytes(), Device: slab.IsDevice()}
	for _, r := range known {
		if r.Path == rec.Path && r.ID != rec.ID {
			// It has taken another's place, of which nobody knows where it is now.
			r.Path = ""
			if err := s.catalog.PutSlab(r); err != nil {
				return rec, err
			}
		}
	}
	next := uint16(0)
	for _, r := range known {
		if r.ID == rec.ID {
			if r.Path == rec.Path && !r.Retired {
				return r, nil
			}
			rec.Number, rec.Unswept = r.Number, r.Unswept
			return rec, s.catalog.PutSlab(rec)
		}
		next = max(next, r.Number+1)
	}
	for _, no := range s.slabNo {
		next = max(next, no+1)
	}
	rec.Number = next
	return rec, s.catalog.PutSlab(rec)
}

// startWork starts the store's goroutines.
func (s *Store) startWork(evictors []*evictor) {
	for _, v := range evictors {
		s.wg.Go(v.run)
		s.wg.Go(func() { v.t.curves.run(s.life) })
	}
	s.wg.Go(s.sweeper)
	s.wg.Go(s.watchReclaim)
	s.wg.Go(s.keepCatalog)
	s.wg.Go(s.keepLevels)
	if s.g3 != nil || s.objects != nil {
		for range prefetchWorkers {
			s.wg.Go(s.prefetcher)
		}
	}
	if s.objects != nil {
		s.wg.Go(s.objects.ledger.run)
		s.wg.Go(s.objects.reaper)
		s.wg.Go(s.objects.uploads.run)
		s.wg.Go(s.objects.sweeper)
		for _, p := range s.objects.buckets {
			s.wg.Go(func() { s.attendBucket(p) })
			s.wg.Go(func() { s.attendWrites(p) })
		}
	}
	if s.g3 != nil {
		for _, d := range s.g3.devs {
			s.wg.Go(func() { s.attend(d) })
			s.wg.Go(func() { d.wear.run(s.life) })
		}
		s.wg.Go(s.keepSwept)
	}
}

// Close ends the store. What is only in G2 is lost: see Drain. It is safe to
// call twice; no other call may be under way.
func (s *Store) Close() error {
	s.closing.Do(func() { s.closeErr = s.teardown() })
	return s.closeErr
}

// markClean notes in the catalog that every header is erased that should be, but for
// those on slabs that are not here or not swept, each of which says so. The erasures
// that nobody waited for are flushed first.
func (s *Store) markClean() {
	if s.catalog.Err() != nil {
		return
	}
	swept := map[uint16]bool{}
	for i, slab := range s.slabs {
		// A flush beside the committer's, as a probe's, may have lost erasures, too.
		err := slab.Flush()
		swept[s.slabNo[i]] = err == nil && slab.Failures() == 0 && !s.suspect(i)
		if err != nil || slab.Failures() > 0 {
			s.log.Warn("the next opening looks for slots to erase", "slab", slab.Path(), "failures", slab.Failures(), "err", err)
		}
	}
	known, err := s.catalog.Slabs()
	for i := range known {
		// What was deleted or put anew may have a header on a slab that is not here.
		r := &known[i]
		if was := r.Unswept; err == nil {
			if r.Unswept = !swept[r.Number]; r.Unswept != was {
				err = s.catalog.PutSlab(*r)
			}
		}
	}
	if err == nil {
		err = s.catalog.MarkClean()
	}
	if err != nil {
		s.log.Warn("the next opening looks for slots to erase", "err", err)
	}
}

// teardown takes down what Open has built so far, in reverse.
func (s *Store) teardown() error {
	if s.prefetches != nil {
		s.prefetches.close()
	}
	if s.events != nil {
		s.events.close()
	}
	// The committer outlives the movers, which wait for it.
	s.endLife()
	s.wg.Wait()
	if s.commits != nil {
		s.commits.close()
	}
	if s.opened {
		s.saveLevels()
		s.markClean()
	}
	var errs []error
	for i := len(s.registered) - 1; i >= 0; i-- {
		if err := s.agent.Deregister(context.Background(), s.registered[i]); err != nil {
			errs = append(errs, fmt.Errorf("deregister: %w", err))
		}
	}
	for _, slab := range s.slabs {
		errs = append(errs, slab.Close())
	}
	if s.objects != nil {
		errs = append(errs, s.objects.room.mem.Close())
	}
	if s.arena != nil {
		errs = append(errs, s.arena.Close())
	}
	if s.staging != nil {
		errs = append(errs, s.staging.mem.Close())
	}
	if s.table != nil {
		errs = append(errs, s.table.Close())
	}
	if s.tombstones != nil {
		s.tombstones.file.Close()
	}
	if s.catalog != nil {
		errs = append(errs, s.catalog.Close())
	}
	if s.dir != nil {
		errs = append(errs, s.dir.Close())
	}
	return errors.Join(errs...)
}
