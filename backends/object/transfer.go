package object

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// abortTimeout bounds giving up an upload, which has no caller any more.
const abortTimeout = 5 * time.Second

// transfer is a transfer under way.
type transfer struct {
	b       *Backend
	p       *prepared
	done    func(i int, err error) // called with mu held: by one goroutine at a time
	next    atomic.Int64           // the first job that nobody has taken
	uploads []*uploading
	mu      struct {
		sync.Mutex
		pairs []pairState
	}
}

// pairState is how far a pair is.
type pairState struct {
	left  int // jobs that have not ended
	moved int64
	etag  string // of the object that the first bytes came from
	err   error  // the first
}

// Transfer performs a prepared transfer by as many goroutines as requests may run at once,
// and waits for them.
func (b *Backend) Transfer(ctx context.Context, r xfer.Prepared, done func(i int, err error)) error {
	p := r.(*prepared)
	if err := b.begin(); err != nil {
		for i := range p.remote {
			done(i, err)
		}
		return err
	}
	defer b.inFlight.Done()
	t := &transfer{b: b, p: p, done: done}
	t.mu.pairs = make([]pairState, len(p.remote))
	for i, n := range p.parts {
		t.mu.pairs[i].left = n
	}
	for i := range p.uploads {
		t.uploads = append(t.uploads, newUploading(b, p.uploads[i].key, p.uploads[i].parts, p.uploads[i].size, false))
	}
	var workers sync.WaitGroup
	for range min(len(p.jobs), b.opt.Concurrency) - 1 {
		workers.Go(func() { t.work(ctx) })
	}
	t.work(ctx)
	workers.Wait()
	return nil
}

// work takes jobs until there are none. With an ended ctx each ends at once.
func (t *transfer) work(ctx context.Context) {
	for {
		i := int(t.next.Add(1)) - 1
		if i >= len(t.p.jobs) {
			return
		}
		j := &t.p.jobs[i]
		switch j.kind {
		case KindGet:
			t.get(ctx, j)
		case KindPut:
			_, err := t.b.put(ctx, j.key, j.v, j.size, false)
			moved := j.size
			if err != nil {
				moved = 0
			}
			t.credit(j, moved, "", err)
		case KindPart:
			t.part(ctx, j)
		}
	}
}

func (t *transfer) get(ctx context.Context, j *job) {
	got, err := t.b.get(ctx, j.key, j.off, j.v, j.size, j.whole)
	t.credit(j, got.N, got.ETag, err)
}

// part stores a part. Whoever ends the last one completes the upload; the pairs are done
// then, all of them, since none is there before.
func (t *transfer) part(ctx context.Context, j *job) {
	u := t.uploads[j.upload.index]
	if last := u.part(ctx, j.number, j.v, j.size); !last {
		return
	}
	_, err := u.finish(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pair := range j.upload.pairs {
		t.done(pair, err)
	}
}

// credit books the bytes that a job moved, from its first one on, to its pairs, and ends
// those that have no further job.
func (t *transfer) credit(j *job, moved int64, etag string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range j.spans {
		pr := &t.mu.pairs[s.pair]
		got := min(max(0, moved-s.at), s.n)
		pr.moved += got
		switch {
		case got < s.n && pr.err == nil:
			pr.err = err
			if errors.Is(err, xfer.ErrShort) {
				far := &t.p.remote[s.pair]
				pr.err = fmt.Errorf("%w: %d of %d bytes from %d on", err, pr.moved, far.Len, far.Addr)
			}
		case pr.etag == "":
			pr.etag = etag
		case pr.etag != etag && pr.err == nil:
			pr.err = &Error{
				Op: j.kind.String(), Where: t.b.client.String(), Key: j.key, Class: ClassCorrupt,
				Err: errors.New("the object was replaced while it was read"),
			}
		}
		if pr.left--; pr.left == 0 {
			t.done(s.pair, pr.err)
		}
	}
}

// get reads a range, with retries. Of what failed it says how much of the beginning is
// good, which is none unless the object just ends there.
func (b *Backend) get(ctx context.Context, key string, off int64, v Vector, size int64, whole bool) (Got, error) {
	var got Got
	_, err := b.call(ctx, request{KindGet, key, size}, func(ctx context.Context) (err error) {
		got, err = b.client.Get(ctx, key, off, v, whole)
		b.count.in.Add(uint64(got.N))
		return err
	})
	if err != nil && ClassOf(err) != ClassRange {
		got.N = 0
	}
	if got.Verified {
		b.count.verified.Add(uint64(got.N))
	}
	return got, err
}

// put makes an object in one request, with retries.
func (b *Backend) put(ctx context.Context, key string, v Vector, size int64, ifAbsent bool) (Info, error) {
	sum := b.client.Sum(v)
	var info Info
	doubt, err := b.call(ctx, request{KindPut, key, size}, func(ctx context.Context) (err error) {
		info, err = b.client.Put(ctx, key, v, sum, ifAbsent)
		return err
	})
	if err != nil && doubt && ClassOf(err) == ClassExists {
		info, err = b.landed(ctx, key, size, sum, err)
	}
	if err == nil {
		b.count.out.Add(uint64(size))
	}
	return info, err
}

// landed asks whether the object is the one that a try made whose answer was lost: then
// what the later try was told is no failure.
func (b *Backend) landed(ctx context.Context, key string, size int64, sum Sum, err error) (Info, error) {
	info, herr := b.head(ctx, key)
	if herr != nil || info.Bytes != size || sum == (Sum{}) || info.Sum != sum {
		return Info{}, err
	}
	b.count.landed.Add(1)
	return info, nil
}

func (b *Backend) head(ctx context.Context, key string) (Info, error) {
	var info Info
	_, err := b.call(ctx, request{KindHead, key, 0}, func(ctx context.Context) (err error) {
		info, err = b.client.Head(ctx, key)
		return err
	})
	return info, err
}
