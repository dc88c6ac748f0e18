package tiers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// RepairOptions go with Repair; nil works.
type RepairOptions struct {
	// Slabs are the paths of slabs that are not where they were seen last.
	Slabs []string
	// Partial goes on without slabs that are not there, and without blocks of
	// namespaces that the manifest does not know. Their room is free afterwards, and
	// the blocks of an absent slab are not served when it comes back.
	Partial bool
	// Unsealed trusts the headers of slabs of version 1. They are not sealed to their
	// places, so that a payload can hold what passes for one, of any namespace.
	Unsealed bool
	// NoTombstones goes on without tombstones that are damaged or lost: blocks that
	// were deleted while a slab was not there, or between a crash and the sweep behind
	// it, come back where their headers are on the slabs still.
	NoTombstones bool
	// Force makes a new catalog although the old one can be read whole.
	Force    bool
	Logger   *slog.Logger
	Progress func(done, total int64) // bytes of the slabs; may be nil
}

// RepairReport is what Repair found on the slabs.
type RepairReport struct {
	Blocks  int64 // in the new catalog
	Bytes   int64 // of their payload
	Damaged int64 // headers of blocks whose payload is not what they say
	Stale   int64 // blocks that are no more: older copies, deleted, cleared, past their time
	Unknown int64 // blocks of namespaces that the manifest does not know
	// Problems are the first of what else was found, one line each.
	Problems []string
	Old      string // where the old catalog lies now; empty: there was none
}

// Repair makes a new catalog for a data directory that no process has open, from
// its manifest and from the headers on its slabs, when the old catalog is lost or
// damaged. Nothing on the slabs is changed, and the old catalog is kept under
// another name.
//
// Every payload is read and compared. Of several copies of a block the youngest
// counts; when that is damaged, an older one with the same bytes, and when it is past
// its time, none. Where nothing is left of the youngest, not even its header, an older
// one counts that is no more than evicted: its bytes are what was put under the key at
// some time since it was deleted last. What was deleted, cleared or is past its time
// does not come back: its header was invalidated or its key has a tombstone, the header
// is of an older epoch, or carries the time. Pins are gone, since only the catalog
// knows them, and so is what it knew of G4: the objects stay in their buckets, none of
// them is removed or written over, and an import finds what lives in them.
//
// Errors: block.ErrInvalid when the catalog is whole, or a slab of version 1 is not
// to be trusted; block.ErrNotFound without a manifest; ErrVersion when a newer
// program wrote to a slab or the tombstones; block.ErrUnavailable when the directory or a slab is in
// use or not there; block.ErrCorrupt for blocks of an unknown namespace, which
// Partial gives up, and for tombstones that are damaged or lost, which NoTombstones does
// without; ctx's error. After an error the data directory is as it was.
func Repair(ctx context.Context, dir string, o *RepairOptions) (RepairReport, error) {
	if o == nil {
		o = &RepairOptions{}
	}
	r := &repairer{ctx: ctx, o: *o, dir: dir, best: map[repairKey]repairBlock{}, over: map[repairKey]repairOver{}}
	if r.o.Logger == nil {
		r.o.Logger = slog.New(slog.DiscardHandler)
	}
	err := r.run()
	for _, s := range r.slabs {
		err = errors.Join(err, s.slab.Close())
	}
	if err != nil {
		return r.report, fmt.Errorf("repair %s: %w", dir, err)
	}
	return r.report, nil
}

// repairer is one repair.
type repairer struct {
	ctx      context.Context
	o        RepairOptions
	dir      string
	manifest index.Manifest
	spaces   map[[32]byte]block.Namespace
	stones   *index.Tombstones
	spoiled  string // the file of tombstones that is left aside; empty: none is
	slabs    []repairSlab
	now      int64
	best     map[repairKey]repairBlock
	over     map[repairKey]repairOver
	maxGen   uint64
	done     int64
	total    int64
	report   RepairReport
}

type repairSlab struct {
	no    uint16 // by which records know it
	slab  *Slab
	below int64 // blocks on it that are left out since so many were deleted
}

type repairKey struct {
	block.Key
	hashLen uint8
}

// repairBlock is a block that was found whole.
type repairBlock struct {
	at  int // of repairer.slabs
	off int64
	hd  SlotHeader
}

// repairOver is what is known of the youngest copy of a key that is not to be there.
type repairOver struct {
	gen uint64
	sum block.Sum // of its bytes, which an older copy must have; zero: none is to be there
}

func (r *repairer) run() error {
	r.now = time.Now().Unix()
	f, err := lockExisting(r.dir)
	if err != nil {
		return err
	}
	defer f.Close()
	catalog := filepath.Join(r.dir, "catalog")
	if r.manifest, err = index.ReadManifest(index.ManifestPath(catalog)); err != nil {
		return err
	}
	if err := r.checkCatalog(catalog); err != nil {
		return err
	}
	if err := r.readTombstones(index.TombstonesPath(catalog)); err != nil {
		return err
	}
	r.spaces = map[[32]byte]block.Namespace{}
	for _, n := range r.manifest.Spaces {
		if !n.Dropped {
			r.spaces[n.Desc.Digest()] = n.Namespace
		}
	}
	if err := r.openSlabs(); err != nil {
		return err
	}
	for i := range r.slabs {
		if err := r.scan(i); err != nil {
			return err
		}
		if n := r.slabs[i].below; n > 0 {
			r.problem(fmt.Sprintf("slab %s: %d blocks are left out: so many were deleted while it was not there or not swept that it is not known which", r.slabs[i].slab.Path(), n))
		}
	}
	if r.report.Unknown > 0 && !r.o.Partial {
		return fmt.Errorf("%w: %d blocks are of namespaces that the manifest does not know, and their room would be free afterwards", block.ErrCorrupt, r.report.Unknown)
	}
	return r.replace(catalog)
}

// readTombstones reads the tombstones, or goes on without.
func (r *repairer) readTombstones(path string) (err error) {
	if r.stones, err = index.ReadTombstones(path, &r.manifest); !errors.Is(err, block.ErrCorrupt) {
		return err
	}
	if !r.o.NoTombstones {
		return fmt.Errorf("%w; without them blocks that were deleted while a slab was not there, or after a crash, may come back; --no-tombstones goes on all the same", err)
	}
	r.problem(err.Error())
	r.stones, r.manifest.Tombstones = &index.Tombstones{}, false
	r.spoiled = path
	return nil
}

// lockExisting takes a data directory that is there for this process.
func lockExisting(dir string) (*os.File, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return lockDir(dir)
}

// checkCatalog fails when the catalog needs no repair, or must not have one.
func (r *repairer) checkCatalog(dir string) error {
	err := readWhole(dir, r.o.Logger)
	switch {
	case errors.Is(err, ErrVersion):
		return err
	case err == nil && !r.o.Force:
		return fmt.Errorf("%w: the catalog can be read whole and needs no repair", block.ErrInvalid)
	case err != nil:
		r.o.Logger.Warn("the catalog cannot be read", "err", err)
	}
	return nil
}

// readWhole reads every record of a catalog.
func readWhole(dir string, log *slog.Logger) error {
	c, err := index.OpenCatalog(dir, &index.CatalogOptions{ReadOnly: true, Logger: log})
	if err != nil {
		return err
	}
	_, spaces := c.Namespaces()
	_, slabs := c.Slabs()
	return errors.Join(spaces, slabs, c.Scan(func(*index.Record) error { return nil }), c.Close())
}

// openSlabs opens the slabs of the manifest where they were last or where they are
// said to be now.
func (r *repairer) openSlabs() error {
	numbers := map[SlabID]uint16{}
	for _, s := range r.manifest.Slabs {
		if !s.Retired {
			numbers[s.ID] = s.Number
		}
	}
	paths := slices.Clone(r.o.Slabs)
	for _, p := range slabPaths(r.manifest.Slabs) {
		if !slices.Contains(paths, p) {
			paths = append(paths, p)
		}
	}
	for _, path := range paths {
		slab, err := OpenSlab(path, SlabOptions{})
		switch {
		case errors.Is(err, block.ErrUnavailable), errors.Is(err, ErrVersion):
			return err
		case err != nil:
			r.problem(err.Error())
			continue
		}
		no, known := numbers[slab.ID()]
		if !known || slab.StoreID() != r.manifest.Store {
			r.problem(fmt.Sprintf("slab %s: not one of this data directory, or named twice", path))
			if err := slab.Close(); err != nil {
				return err
			}
			continue
		}
		delete(numbers, slab.ID())
		unsealed := slab.Seal(0).Version < 2
		r.slabs = append(r.slabs, repairSlab{no: no, slab: slab})
		r.total += slab.DataBytes()
		if unsealed && !r.o.Unsealed {
			return fmt.Errorf("%w: slab %s is of version 1: what lies on it could pass for other blocks' headers, if somebody put it there on purpose", block.ErrInvalid, path)
		}
	}
	for _, s := range r.manifest.Slabs {
		if _, absent := numbers[s.ID]; !absent {
			continue
		}
		err := fmt.Errorf("%w: slab %s, last seen at %q, is not there", block.ErrUnavailable, SlabID(s.ID), s.Path)
		if !r.o.Partial {
			return err
		}
		r.problem(err.Error())
	}
	return nil
}

// found takes a block that is whole at a place of a slab, and keeps it if it is
// one that is to be there.
func (r *repairer) found(at int, off int64, hd *SlotHeader) {
	r.maxGen = max(r.maxGen, hd.Gen)
	ns, known := r.spaces[hd.Digest]
	k := repairKey{block.Key{NS: ns.ID, Hash: hd.Hash}, hd.HashLen}
	switch {
	case !known:
		r.report.Unknown++
		return
	case hd.Epoch != ns.Epoch:
		r.report.Stale++
		return
	case int(hd.HashLen) != ns.HashLen && ns.HashLen != 0:
		r.report.Damaged++
		return
	case hd.Expires != 0 && r.now >= hd.Expires:
		r.report.Stale++
		r.supersede(k, repairOver{gen: hd.Gen})
		return
	}
	slab := &r.slabs[at]
	below := r.stones.Below(slab.slab.ID(), hd.Gen)
	if below || r.stones.Dead(k.Key, hd.Gen) {
		r.report.Stale++
		if below {
			slab.below++
		}
		return
	}
	old, again := r.best[k]
	if again {
		r.report.Stale++
	}
	if !again || hd.Gen > old.hd.Gen {
		r.best[k] = repairBlock{at: at, off: off, hd: *hd}
	}
}

// damaged takes a header whose block is not whole. An older copy of the key is as good
// as that when it has the same bytes. Others may have been put in between.
func (r *repairer) damaged(hd *SlotHeader) {
	r.report.Damaged++
	r.maxGen = max(r.maxGen, hd.Gen)
	if ns, known := r.spaces[hd.Digest]; known && hd.Epoch == ns.Epoch {
		r.supersede(repairKey{block.Key{NS: ns.ID, Hash: hd.Hash}, hd.HashLen}, repairOver{hd.Gen, hd.Sum})
	}
}

func (r *repairer) supersede(k repairKey, by repairOver) {
	if old, again := r.over[k]; !again || by.gen > old.gen {
		r.over[k] = by
	}
}

// replace makes the new catalog and puts it in the place of the old one.
func (r *repairer) replace(catalog string) error {
	temp := catalog + ".repaired"
	tempManifest := index.ManifestPath(temp)
	if err := os.RemoveAll(temp); err != nil { // of a repair that was broken off
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	boot := max(r.manifest.Boot, uint32(r.maxGen>>genBits)) + 1
	if err := index.RestoreCatalog(temp, &r.manifest, boot, r.records, &index.CatalogOptions{Logger: r.o.Logger}); err != nil {
		return err
	}
	old, err := r.setAside(catalog)
	if err != nil {
		return err
	}
	r.report.Old = old
	if err := os.Rename(temp, catalog); err != nil {
		if old != "" {
			err = errors.Join(err, os.Rename(old, catalog))
		}
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	if r.spoiled != "" {
		if _, err := r.setAside(r.spoiled); err != nil {
			return err
		}
	}
	// The next opening writes a manifest; until then the one that is there holds.
	if err := os.Remove(tempManifest); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return syncDir(r.dir)
}

// setAside gives the old catalog another name, or something else beside it.
func (r *repairer) setAside(path string) (string, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	old := path + ".broken-" + time.Now().UTC().Format("20060102T150405.000000000")
	if err := os.Rename(path, old); err != nil {
		return "", fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return old, nil
}

// records gives put a record of each block, the youngest first: where two claim
// the same room, the older one has lost it.
func (r *repairer) records(put func(*index.Record) error) error {
	var slots []*Slots
	for _, s := range r.slabs {
		slots = append(slots, NewSlots(s.slab.DataBytes(), s.slab.ExtentBytes()))
	}
	type keyed struct {
		repairKey
		repairBlock
	}
	var all []keyed
	for k, b := range r.best {
		if by, ok := r.over[k]; ok && by.gen > b.hd.Gen && by.sum != b.hd.Sum {
			r.report.Stale++
			continue
		}
		all = append(all, keyed{k, b})
	}
	slices.SortFunc(all, func(a, b keyed) int { return cmp.Compare(b.hd.Gen, a.hd.Gen) })
	for i := range all {
		b := &all[i]
		if err := slots[b.at].Take(b.off, int64(b.hd.Slot), reserved); err != nil {
			r.report.Stale++
			continue
		}
		err := put(&index.Record{
			Key: b.Key, HashLen: int(b.hashLen), Parent: b.hd.Parent, HasParent: b.hd.HasParent, Sum: b.hd.Sum, Len: b.hd.Len,
			Slab: r.slabs[b.at].no, Offset: b.off, Slot: b.hd.Slot, Gen: b.hd.Gen, Epoch: b.hd.Epoch, Expires: b.hd.Expires,
		})
		if err != nil {
			return err
		}
		r.report.Blocks++
		r.report.Bytes += int64(b.hd.Len)
	}
	return r.ctx.Err()
}

func (r *repairer) problem(s string) {
	r.o.Logger.Warn("repair", "problem", s)
	if len(r.report.Problems) < maxProblems {
		r.report.Problems = append(r.report.Problems, s)
	}
}
