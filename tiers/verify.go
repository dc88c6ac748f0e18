package tiers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// VerifyOptions go with Verify; nil works.
type VerifyOptions struct {
	Logger   *slog.Logger
	Progress func(done, total int64) // may be nil; called from one goroutine at a time
}

// VerifyReport is what Verify found. Every record is either Good or Bad.
type VerifyReport struct {
	Records  int64 // committed blocks, but for those past their time or of an older epoch
	Good     int64
	Bad      int64
	Bytes    int64    // of payload that was right
	Problems []string // the first maxProblems, one line each
}

const maxProblems = 100

// Verify reads every committed block of a data directory that no process has
// open, and compares slot headers and checksums with the catalog. It changes
// nothing. Errors: block.ErrUnavailable when the directory or a slab is in use
// or cannot be read; block.ErrNotFound when there is no catalog; ctx's error.
// Damage is in the report, not an error.
func Verify(ctx context.Context, dir string, o *VerifyOptions) (VerifyReport, error) {
	if o == nil {
		o = &VerifyOptions{}
	}
	v := &verifier{ctx: ctx, o: *o}
	err := v.run(dir)
	for _, s := range v.slabs {
		err = errors.Join(err, s.Close())
	}
	if err != nil {
		return v.report, fmt.Errorf("verify %s: %w", dir, err)
	}
	return v.report, nil
}

type verifier struct {
	ctx     context.Context
	o       VerifyOptions
	slabs   map[uint16]*Slab
	digests map[block.NamespaceID][32]byte
	epochs  map[block.NamespaceID]uint32

	mu     sync.Mutex
	report VerifyReport
	done   int64
}

func (v *verifier) run(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	f, err := os.Open(filepath.Join(dir, "LOCK"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	default:
		defer f.Close()
		if err := lock(f); err != nil {
			return err
		}
	}
	cat, err := index.OpenCatalog(filepath.Join(dir, "catalog"), &index.CatalogOptions{ReadOnly: true, Logger: v.o.Logger})
	if err != nil {
		return err
	}
	err = v.catalog(cat)
	return errors.Join(err, cat.Close())
}

func (v *verifier) catalog(cat *index.Catalog) error {
	v.slabs = map[uint16]*Slab{}
	known, err := cat.Slabs()
	if err != nil {
		return err
	}
	numbers := map[SlabID]uint16{}
	for _, r := range known {
		numbers[r.ID] = r.Number
	}
	for _, path := range slabPaths(known) {
		slab, err := OpenSlab(path, SlabOptions{})
		if errors.Is(err, block.ErrUnavailable) {
			return err
		}
		if err != nil {
			v.problem(err.Error()) // its blocks count as bad below
			continue
		}
		if no, ok := numbers[slab.ID()]; ok {
			v.slabs[no] = slab
			continue
		}
		v.problem(fmt.Sprintf("slab %s: not one of this data directory", path))
		if err := slab.Close(); err != nil {
			return err
		}
	}
	v.digests, v.epochs = map[block.NamespaceID][32]byte{}, map[block.NamespaceID]uint32{}
	spaces, err := cat.Namespaces()
	if err != nil {
		return err
	}
	for _, n := range spaces {
		v.digests[n.ID], v.epochs[n.ID] = n.Desc.Digest(), n.Epoch
	}
	var recs []index.Record
	now := time.Now().Unix()
	err = cat.Scan(func(r *index.Record) error {
		epoch, ok := v.epochs[r.Key.NS]
		if ok && epoch == r.Epoch && (r.Expires == 0 || now < r.Expires) {
			recs = append(recs, *r)
		}
		return v.ctx.Err()
	})
	if err != nil {
		return err
	}
	v.report.Records = int64(len(recs))
	return v.records(recs)
}

// records reads the blocks, as many side by side as there are processors.
func (v *verifier) records(recs []index.Record) error {
	var wg sync.WaitGroup
	work := make(chan *index.Record)
	for range max(2, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			size, _ := SlotBytes(block.MaxBlockBytes)
			buf := make([]byte, size)
			for r := range work {
				v.judge(r, v.read(r, buf))
			}
		})
	}
	var err error
	for i := range recs {
		select {
		case work <- &recs[i]:
			continue
		case <-v.ctx.Done():
			err = context.Cause(v.ctx)
		}
		break
	}
	close(work)
	wg.Wait()
	return err
}

func (v *verifier) read(r *index.Record, buf []byte) error {
	slab := v.slabs[r.Slab]
	if slab == nil {
		return fmt.Errorf("slab %d is not there", r.Slab)
	}
	size, header := SlotBytes(int64(r.Len))
	if r.Offset+size > slab.DataBytes() {
		return fmt.Errorf("%w: slot at %d goes past the end of the slab", block.ErrCorrupt, r.Offset)
	}
	buf = buf[:size]
	if _, err := slab.f.ReadAt(buf, slab.DataOffset()+r.Offset); err != nil {
		return fmt.Errorf("read slot: %w", err)
	}
	hd, err := DecodeHeader(buf, slab.Seal(r.Offset))
	if err != nil {
		return err
	}
	want := SlotHeader{Digest: v.digests[r.Key.NS], Hash: r.Key.Hash, HashLen: uint8(r.HashLen), Gen: r.Gen, Len: r.Len, Sum: r.Sum}
	if err := hd.differs(&want); err != nil {
		return fmt.Errorf("slot header: %w", err)
	}
	if hd.Epoch != r.Epoch {
		return fmt.Errorf("slot header: %w: epoch %d, want %d", block.ErrCorrupt, hd.Epoch, r.Epoch)
	}
	if sum := block.Sum(xxh3.Hash128(buf[header:][:r.Len]).Bytes()); sum != r.Sum {
		return fmt.Errorf("%w: checksum %s, want %s", block.ErrCorrupt, sum, r.Sum)
	}
	return nil
}

func (v *verifier) judge(r *index.Record, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err == nil {
		v.report.Good++
		v.report.Bytes += int64(r.Len)
	} else {
		v.report.Bad++
		v.problemLocked(fmt.Sprintf("block %d/%s on slab %d at %d: %v", r.Key.NS, r.Key.Hash.Hex(r.HashLen), r.Slab, r.Offset, err))
	}
	v.done++
	if v.o.Progress != nil {
		v.o.Progress(v.done, v.report.Records)
	}
}

func (v *verifier) problem(s string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.problemLocked(s)
}

func (v *verifier) problemLocked(s string) {
	if len(v.report.Problems) < maxProblems {
		v.report.Problems = append(v.report.Problems, s)
	}
}
