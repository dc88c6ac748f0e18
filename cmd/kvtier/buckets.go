package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"github.com/kvtier/kvtier/backends/azure"
	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/backends/s3"
	"github.com/kvtier/kvtier/tiers/bucket"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

// bucketService is a backend as package bucket uses it.
type bucketService struct{ b *object.Backend }

func (s bucketService) String() string { return s.b.String() }

func (s bucketService) Check(ctx context.Context) error { return bucketErr(s.b.Check(ctx)) }

func (s bucketService) Answers(ctx context.Context) bool { return s.b.Answers(ctx) }

func (s bucketService) Get(ctx context.Context, key string, off int64, dst [][]byte) error {
	_, err := s.b.Get(ctx, key, off, dst, false)
	return bucketErr(err)
}

func (s bucketService) Put(ctx context.Context, key string, src [][]byte, ifAbsent bool) error {
	_, err := s.b.Put(ctx, key, src, ifAbsent)
	switch object.ClassOf(err) {
	case object.ClassFull, object.ClassDenied:
		return fmt.Errorf("%w: %w", bucket.ErrNoWrites, err)
	}
	return bucketErr(err)
}

func (s bucketService) Delete(ctx context.Context, keys []string) error {
	_, err := s.b.Delete(ctx, keys)
	return bucketErr(err)
}

func (s bucketService) List(ctx context.Context, prefix, cursor string) ([]bucket.Object, string, error) {
	page, err := s.b.List(ctx, prefix, cursor, 0)
	objects := make([]bucket.Object, len(page.Objects))
	for i, o := range page.Objects {
		objects[i] = bucket.Object{Key: o.Key, Bytes: o.Bytes, Modified: o.Modified}
	}
	return objects, page.Next, bucketErr(err)
}

// bucketErr says of a failure what package bucket tells apart.
func bucketErr(err error) error {
	switch class := object.ClassOf(err); {
	case err == nil:
		return nil
	case class == object.ClassExists:
		return fmt.Errorf("%w: %w", bucket.ErrExists, err)
	case class == object.ClassNoBucket: // not that an object is missing
		return fmt.Errorf("%w: %v", xfer.ErrUnavailable, err)
	case class.Retryable():
		return fmt.Errorf("%w: %w", bucket.ErrNoAnswer, err)
	}
	return err
}

// The kinds of buckets, by the schemes of their URLs.
const wantBucket = "want s3://BUCKET/PREFIX?endpoint=URL&path_style=true&region=R or azure://CONTAINER/PREFIX?endpoint=URL"

// checkBucket checks a value of --object.
func checkBucket(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return errors.New(wantBucket) // the text may hold a secret
	case u.Scheme == s3.Kind:
		_, err = s3.ParseURL(s)
	case u.Scheme == azure.Kind:
		_, err = azure.ParseURL(s)
	default:
		err = fmt.Errorf("bucket with the scheme %q: %s", u.Scheme, wantBucket)
	}
	return err
}

// openBucket makes the backend of a bucket. It asks the service nothing.
func openBucket(ctx context.Context, s string) (*object.Backend, error) {
	u, err := url.Parse(s)
	if err != nil {
		return nil, errors.New(wantBucket)
	}
	if u.Scheme == azure.Kind {
		return azure.New(&azure.Options{URL: s})
	}
	return s3.New(ctx, &s3.Options{URL: s})
}

// openBuckets makes the backends of --object.
func openBuckets(ctx context.Context, f *serveFlags, c *closers) (all []*object.Backend, err error) {
	for _, s := range f.object {
		b, err := openBucket(ctx, s)
		if err != nil {
			return nil, usageErrorf("--object: %w", err)
		}
		c.add(b.Close)
		all = append(all, b)
	}
	return all, nil
}

// checkCluster checks the value of --cluster.
func checkCluster(name string) error {
	if err := packed.CheckCluster(name); err != nil {
		return usageErrorf("--cluster: %w", err)
	}
	return nil
}
