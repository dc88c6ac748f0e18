package s3

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/kvtier/kvtier/backends/object"
)

// Get is object.Client's. The body is read by this goroutine, straight into the memory.
func (c *client) Get(ctx context.Context, key string, off int64, dst object.Vector, whole bool) (got object.Got, err error) {
	want := dst.Len()
	in := &s3.GetObjectInput{Bucket: &c.loc.Bucket, Key: c.key(key)}
	var options []func(*s3.Options)
	switch {
	case whole:
		options = append(options, withSum) // S3 tells it without a range only
	case want == 0: // no range says that
		got.Info, err = c.Head(ctx, key)
		return got, err
	default:
		in.Range = aws.String(fmt.Sprintf("bytes=%d-%d", off, off+want-1))
	}
	out, err := c.api.GetObject(ctx, in, options...)
	if err != nil {
		return got, c.failure("get", key, err)
	}
	// A body that was not read to its end takes its connection along.
	defer out.Body.Close()
	got.Info = object.Info{Key: key, ETag: aws.ToString(out.ETag), Modified: aws.ToTime(out.LastModified)}
	size := aws.ToInt64(out.ContentLength)
	switch {
	case out.ContentLength == nil || size < 0:
		return got, c.nonsense("get", key, "it does not say how long it is")
	case whole:
		got.Bytes, got.Sum = size, wholeSum(out.ChecksumCRC32C, out.ChecksumType)
	default:
		from, total, ok := contentRange(aws.ToString(out.ContentRange))
		if !ok || from != off || size > want || from+size > total || size < want && from+size != total {
			return got, c.nonsense("get", key, fmt.Sprintf("%d bytes of range %q, asked for %d at %d", size, aws.ToString(out.ContentRange), want, off))
		}
		got.Bytes = total
	}
	if size < want {
		dst = dst.Slice(0, size)
	}
	if got.N, err = object.ReadInto(out.Body, dst); err != nil {
		return got, c.cut(key, got.N, min(size, want), err)
	}
	if whole && size == want && got.Sum != (object.Sum{}) {
		if is := sum(dst); is != got.Sum {
			return got, &object.Error{
				Op: "get", Where: c.String(), Key: key, Class: object.ClassCorrupt,
				Err: fmt.Errorf("the bytes have CRC32C %08x, the object %08x", is.Value, got.Sum.Value),
			}
		}
		got.Verified = true
	}
	if size < want {
		return got, &object.Error{
			Op: "get", Where: c.String(), Key: key, Class: object.ClassRange,
			Err: fmt.Errorf("the object ends after %d bytes", off+size),
		}
	}
	return got, nil
}

// cut is the failure of a body that ended before its end.
func (c *client) cut(key string, n, want int64, err error) error {
	e := &object.Error{Op: "get", Where: c.String(), Key: key, Class: object.ClassNetwork, Err: fmt.Errorf("%d of %d bytes: %w", n, want, err)}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		e.Class = object.ClassTimeout
	}
	return e
}

// contentRange reads "bytes FROM-TO/TOTAL".
func contentRange(s string) (from, total int64, ok bool) {
	s, ok1 := strings.CutPrefix(s, "bytes ")
	span, all, ok2 := strings.Cut(s, "/")
	first, _, ok3 := strings.Cut(span, "-")
	from, err1 := strconv.ParseInt(first, 10, 64)
	total, err2 := strconv.ParseInt(all, 10, 64)
	return from, total, ok1 && ok2 && ok3 && err1 == nil && err2 == nil
}
