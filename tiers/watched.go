package tiers

import (
	"context"
	"sync"

	"github.com/kvtier/kvtier/tiers/bucket"
)

// watched is a bucket's service as long work uses it: each request is one call of the
// bucket, which notes how it does, and has a time of its own.
type watched struct {
	p    *objectBucket
	pace *sharedPacer // may be nil
}

// sharedPacer is a pacer of requests for several goroutines.
type sharedPacer struct {
	mu sync.Mutex
	p  pacer
}

// wait returns when n more may be made.
func (s *sharedPacer) wait(ctx context.Context, n int64) error {
	if s == nil {
		return ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock() // those who come now have to wait for this one anyway
	return s.p.wait(ctx, n)
}

func (w watched) do(ctx context.Context, bytes int64, call func(ctx context.Context) error) error {
	if err := w.pace.wait(ctx, 1); err != nil {
		return err
	}
	return w.p.do(ctx, bytes, call)
}

// String is bucket.Service's, and so are the calls below.
func (w watched) String() string { return w.p.service.String() }

func (w watched) Check(ctx context.Context) error { return w.do(ctx, 0, w.p.service.Check) }

func (w watched) Answers(ctx context.Context) bool { return w.p.service.Answers(ctx) }

func (w watched) Get(ctx context.Context, key string, off int64, dst [][]byte) error {
	return w.do(ctx, bytesOf(dst), func(ctx context.Context) error { return w.p.service.Get(ctx, key, off, dst) })
}

func (w watched) Put(ctx context.Context, key string, src [][]byte, ifAbsent bool) error {
	return w.do(ctx, bytesOf(src), func(ctx context.Context) error { return w.p.service.Put(ctx, key, src, ifAbsent) })
}

func (w watched) Delete(ctx context.Context, keys []string) error {
	return w.do(ctx, 0, func(ctx context.Context) error { return w.p.service.Delete(ctx, keys) })
}

func (w watched) List(ctx context.Context, prefix, cursor string) (objects []bucket.Object, next string, err error) {
	err = w.do(ctx, 0, func(ctx context.Context) (err error) {
		objects, next, err = w.p.service.List(ctx, prefix, cursor)
		return err
	})
	return objects, next, err
}

func bytesOf(parts [][]byte) (n int64) {
	for _, p := range parts {
		n += int64(len(p))
	}
	return n
}
