package object

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// The calls below are beside those of xfer.Backend. They share limit, budget and counters
// with transfers, and their memory may be anything.

// Check looks whether the bucket is there and may be used. Its errors say which setting to
// change.
func (b *Backend) Check(ctx context.Context) error {
	if err := b.begin(); err != nil {
		return err
	}
	defer b.inFlight.Done()
	_, err := b.call(ctx, request{KindCheck, "", 0}, b.client.Check)
	return err
}

// answerPause is between two tries of Answers.
const answerPause = 200 * time.Millisecond

// Answers reports whether the service answers a small request before ctx ends: also when it
// says no, or that it is busy. It is not held up by requests that are under way, nor by those
// that wait for the limit, and says nothing about the service's load.
func (b *Backend) Answers(ctx context.Context) bool {
	if b.begin() != nil {
		return false
	}
	defer b.inFlight.Done()
	for ctx.Err() == nil {
		b.count.requests[KindCheck].Add(1)
		err := b.client.Check(ctx)
		if err == nil {
			return true
		}
		if e := b.failure(request{kind: KindCheck}, err); e.Class != ClassNetwork && ctx.Err() == nil {
			return true
		}
		sleep(ctx, answerPause)
	}
	b.count.canceled.Add(1)
	return false
}

// Head says what the service knows of an object. xfer.ErrNotFound.
func (b *Backend) Head(ctx context.Context, key string) (Info, error) {
	if err := b.begin(); err != nil {
		return Info{}, err
	}
	defer b.inFlight.Done()
	return b.head(ctx, key)
}

// Get reads a range in one request. whole is as in Client.Get. xfer.ErrNotFound,
// xfer.ErrShort.
func (b *Backend) Get(ctx context.Context, key string, off int64, dst Vector, whole bool) (Got, error) {
	if err := b.begin(); err != nil {
		return Got{}, err
	}
	defer b.inFlight.Done()
	return b.get(ctx, key, off, dst, dst.Len(), whole)
}

// Put makes an object, in parts above Options.MultipartBytes; with ifAbsent only where
// there is none, ErrExists otherwise. An object that is there because a try whose answer
// was lost made it is no error.
func (b *Backend) Put(ctx context.Context, key string, src Vector, ifAbsent bool) (Info, error) {
	if err := b.begin(); err != nil {
		return Info{}, err
	}
	defer b.inFlight.Done()
	size := src.Len()
	if err := b.checkKey(key); err != nil {
		return Info{}, fmt.Errorf("%s put %q: %w", b.Name(), key, err)
	}
	if size <= b.opt.MultipartBytes {
		return b.put(ctx, key, src, size, ifAbsent)
	}
	part := b.partBytes(size)
	if part > b.limits.PartBytes {
		return Info{}, fmt.Errorf("%s put %q: %w: %d bytes are more than the service takes in %d parts", b.Name(), key, xfer.ErrInvalid, size, b.limits.Parts)
	}
	parts := int((size + part - 1) / part)
	u := newUploading(b, key, parts, size, ifAbsent)
	b.side(parts, func(i int) {
		at := int64(i) * part
		n := min(part, size-at)
		u.part(ctx, i+1, src.Slice(at, n), n)
	})
	return u.finish(ctx)
}

// Delete removes objects, as many as there are keys. errs has one entry for each key, nil
// where the object is gone; objects that never were are gone too. err is the first of
// them, or why nothing was asked.
func (b *Backend) Delete(ctx context.Context, keys []string) (errs []error, err error) {
	if err := b.begin(); err != nil {
		return nil, err
	}
	defer b.inFlight.Done()
	errs = make([]error, len(keys))
	most := b.limits.DeleteKeys
	b.side((len(keys)+most-1)/most, func(i int) {
		from := i * most
		to := min(from+most, len(keys))
		b.deleteSome(ctx, keys[from:to], errs[from:to])
	})
	for _, e := range errs {
		if e != nil {
			return errs, e
		}
	}
	return errs, nil
}

// deleteSome deletes what fits one request. Objects that the service was too busy for, one
// by one, are asked for again as a request is, under the name of the first of them.
func (b *Backend) deleteSome(ctx context.Context, keys []string, errs []error) {
	index := make([]int, len(keys)) // of what is left, in keys
	for i := range index {
		index[i] = i
	}
	left := keys
	_, err := b.call(ctx, request{KindDelete, "", 0}, func(ctx context.Context) error {
		answers, err := b.client.Delete(ctx, left)
		if err != nil {
			return err
		}
		var again []int
		var busy error
		for i, e := range answers {
			errs[index[i]] = e
			if e != nil && ClassOf(e).Retryable() {
				again = append(again, index[i])
				busy = e
			}
		}
		index, left = again, make([]string, len(again))
		for i, k := range again {
			left[i] = keys[k]
		}
		return busy
	})
	if err != nil {
		for _, i := range index {
			errs[i] = err
		}
	}
}

// List gives objects in the order of their keys: see Client.List.
func (b *Backend) List(ctx context.Context, prefix, cursor string, limit int) (Page, error) {
	if err := b.begin(); err != nil {
		return Page{}, err
	}
	defer b.inFlight.Done()
	var page Page
	_, err := b.call(ctx, request{KindList, prefix, 0}, func(ctx context.Context) (err error) {
		page, err = b.client.List(ctx, prefix, cursor, limit)
		return err
	})
	return page, err
}

// Query says which objects exist and how long they are. It is xfer.Querier's.
func (b *Backend) Query(ctx context.Context, t xfer.MemType, descs []xfer.Desc) ([]xfer.QueryResult, error) {
	if t != xfer.OBJ {
		return nil, fmt.Errorf("%s query: %w: memory type %s", b.Name(), xfer.ErrInvalid, t)
	}
	if err := b.begin(); err != nil {
		return nil, err
	}
	defer b.inFlight.Done()
	for i, d := range descs {
		if err := b.checkKey(d.Meta); err != nil {
			return nil, fmt.Errorf("%s query descriptor %d: %w", b.Name(), i, err)
		}
	}
	results, errs := make([]xfer.QueryResult, len(descs)), make([]error, len(descs))
	b.side(len(descs), func(i int) {
		info, err := b.head(ctx, descs[i].Meta)
		switch {
		case err == nil:
			results[i] = xfer.QueryResult{Exists: true, Bytes: uint64(info.Bytes)}
		case ClassOf(err) != ClassNotFound:
			errs[i] = fmt.Errorf("%s query descriptor %d: %w", b.Name(), i, err)
		}
	})
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return results, nil
}

// side calls f(0) to f(n-1), as many side by side as requests may run, and waits.
func (b *Backend) side(n int, f func(i int)) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			f(i)
		}
	}
	var workers sync.WaitGroup
	for range min(n, b.opt.Concurrency) - 1 {
		workers.Go(work)
	}
	work()
	workers.Wait()
}
