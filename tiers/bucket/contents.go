package bucket

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// What a bucket says of what is in it.

// Listed is a packed object of a listing.
type Listed struct {
	Name     packed.Name
	Bytes    int64
	Modified time.Time // by the service's clock; zero where it does not say
}

// List gives packed objects in the order of their keys, from where cursor says: empty at
// the beginning, then next, which is empty at the end. last is the last key that the
// service told of. What is not named as a packed object is left out.
func (b *Bucket) List(ctx context.Context, cursor string) (objects []Listed, last, next string, err error) {
	page, next, err := b.service.List(ctx, packed.Blocks(b.cluster), cursor)
	if err != nil {
		return nil, "", "", fmt.Errorf("list objects of %s: %w", b.service, err)
	}
	for _, o := range page {
		last = o.Key
		if name, err := packed.ParseName(o.Key); err == nil {
			objects = append(objects, Listed{Name: name, Bytes: o.Bytes, Modified: o.Modified})
		}
	}
	return objects, last, next, nil
}

// Graves reads all tombstones. It fails with index.ErrVersion when a newer program wrote
// some: who goes on without them might raise the dead.
func (b *Bucket) Graves(ctx context.Context) (*packed.Graves, error) {
	graves := &packed.Graves{}
	var mu sync.Mutex // guards graves
	for cursor := ""; ; {
		page, next, err := b.service.List(ctx, packed.AllTombstones(b.cluster), cursor)
		if err != nil {
			return nil, fmt.Errorf("list tombstones: %w", err)
		}
		err = eachOf(ctx, len(page), func(ctx context.Context, i int) error {
			_, stamp, _, err := packed.ParseTombstonesKey(page[i].Key)
			if err != nil {
				return err
			}
			whole, err := readWhole(ctx, b.service, page[i], packed.MaxTombstonesBytes)
			if err != nil {
				return err
			}
			t, err := packed.DecodeTombstones(whole)
			if err != nil {
				return fmt.Errorf("object %q: %w", page[i].Key, err)
			}
			b.clock.See(stamp)
			mu.Lock()
			defer mu.Unlock()
			graves.Add(t)
			return nil
		})
		if err != nil {
			return nil, err
		}
		if cursor = next; cursor == "" {
			return graves, nil
		}
	}
}

// contentReads is how many small objects, or ends of objects, are read side by side.
const contentReads = 16

// eachOf calls fn for 0 to n-1, some at once, and returns the first error. The others' ctx
// ends with it.
func eachOf(ctx context.Context, n int, fn func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	turns := make(chan struct{}, contentReads)
	for i := range n {
		turns <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		all.Go(func() {
			if err := fn(ctx, i); err != nil {
				cancel(err) // the first counts
			}
			<-turns
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// Found is an object that an import met.
type Found struct {
	Name   packed.Name
	Bytes  int64
	Footer *packed.Footer // nil with Err
	Dead   []bool         // of each member: it was deleted since, or its time has passed
	Err    error          // index.ErrVersion or block.ErrCorrupt: it is left as it is
}

// Import lists what is in the bucket, and reads what the objects say of themselves that
// want, if not nil, asks for. It fails when the tombstones cannot all be read, also when a
// newer program wrote some: it might raise the dead. An object that cannot be used is told
// to fn with its Err, one that vanishes meanwhile is not. fn is called for one object at a
// time, in the order of their keys. What other stores delete while it runs it may not know.
func (b *Bucket) Import(ctx context.Context, want func(packed.Name) bool, fn func(*Found) error) error {
	fail := func(err error) error { return fmt.Errorf("import from %s: %w", b.service, err) }
	graves, err := b.Graves(ctx)
	if err != nil {
		return fail(err)
	}
	for cursor := ""; ; {
		page, _, next, err := b.List(ctx, cursor)
		if err != nil {
			return fail(err)
		}
		var found []*Found
		for _, o := range page {
			if want == nil || want(o.Name) {
				found = append(found, &Found{Name: o.Name, Bytes: o.Bytes})
			}
		}
		err = eachOf(ctx, len(found), func(ctx context.Context, i int) error {
			f := found[i]
			f.Footer, f.Err = b.Footer(ctx, f.Name, f.Bytes)
			if f.Err == nil {
				f.Dead = Dead(f.Footer, graves, time.Now().Unix())
			} else if !errors.Is(f.Err, xfer.ErrNotFound) && !errors.Is(f.Err, index.ErrVersion) && !errors.Is(f.Err, block.ErrCorrupt) {
				return f.Err
			}
			return nil
		})
		if err != nil {
			return fail(err)
		}
		for _, f := range found {
			if errors.Is(f.Err, xfer.ErrNotFound) {
				continue
			}
			if err := fn(f); err != nil {
				return fail(err)
			}
		}
		if cursor = next; cursor == "" {
			return nil
		}
	}
}

// Dead says of each member of an object whether it was deleted since it was packed, or its
// time has passed at now, in Unix seconds.
func Dead(f *packed.Footer, graves *packed.Graves, now int64) []bool {
	dead := make([]bool, len(f.Members))
	for i := range dead {
		e := f.Members[i].Expires
		dead[i] = e != 0 && e <= now || graves.Dead(f, i)
	}
	return dead
}

// Footer reads what an object of so many bytes says of itself, in one request as a rule.
// xfer.ErrNotFound when the object is gone; index.ErrVersion and block.ErrCorrupt as those
// of packed.DecodeFooter.
func (b *Bucket) Footer(ctx context.Context, name packed.Name, bytes int64) (*packed.Footer, error) {
	key := name.String()
	tail := make([]byte, min(bytes, packed.TailBytes))
	if err := b.service.Get(ctx, key, bytes-int64(len(tail)), [][]byte{tail}); err != nil {
		return nil, err
	}
	n, err := packed.FooterBytes(tail, bytes)
	if err == nil && n > int64(len(tail)) {
		front := make([]byte, n-int64(len(tail)))
		if err := b.service.Get(ctx, key, bytes-n, [][]byte{front}); err != nil {
			return nil, err
		}
		tail = append(front, tail...)
	}
	var f *packed.Footer
	if err == nil {
		f, err = packed.DecodeFooter(tail, bytes)
	}
	if err == nil && packed.NameOf(b.cluster, f) != name {
		err = fmt.Errorf("%w: it is that of %s", block.ErrCorrupt, packed.NameOf(b.cluster, f))
	}
	if err != nil {
		return nil, fmt.Errorf("object %q: %w", key, err)
	}
	b.clock.See(f.Stamp)
	return f, nil
}
