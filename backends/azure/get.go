package azure

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"

	"github.com/kvtier/kvtier/backends/object"
)

// Get reads a range into dst, straight from the connection.
func (c *client) Get(ctx context.Context, key string, off int64, dst object.Vector, whole bool) (object.Got, error) {
	const op = "get"
	n := dst.Len()
	if n == 0 {
		i, err := c.Head(ctx, key) // the service knows no empty range
		return object.Got{Info: i}, err
	}
	if err := c.begin(ctx, op, key); err != nil {
		return object.Got{}, err
	}
	r, err := c.blob(key).DownloadStream(ctx, &blob.DownloadStreamOptions{Range: blob.HTTPRange{Offset: off, Count: n}})
	if err != nil {
		return object.Got{}, c.failure(ctx, op, key, err)
	}
	if r.Body == nil { // the SDK's way to say "not modified", which nobody asked for
		return object.Got{}, c.malformed(op, key, "the answer has no body")
	}
	defer r.Body.Close()
	if r.ETag == nil {
		return object.Got{}, c.malformed(op, key, "the answer has no ETag: is this a blob service?")
	}
	total, length, err := extent(&r, off, n)
	if err != nil {
		return object.Got{}, c.malformed(op, key, "%w", err)
	}
	got := object.Got{Info: info(key, total, r.ETag, r.LastModified, r.Metadata)}
	got.N, err = object.ReadInto(r.Body, dst.Slice(0, length))
	if err == nil {
		err = atEnd(r.Body) // without which the connection would not be used again
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return got, c.failure(ctx, op, key, err)
	case err != nil:
		return got, c.malformed(op, key, "%d of %d bytes came: %w", got.N, length, err)
	case length < n:
		return got, &object.Error{
			Op: op, Where: c.loc.String(), Key: key, Class: object.ClassRange, Status: http.StatusPartialContent,
			Err: fmt.Errorf("the object has %d bytes, want %d at %d", total, n, off),
		}
	case whole && off == 0 && total == n && got.Sum != object.Sum{}:
		if s := sum(dst); s != got.Sum {
			return got, &object.Error{
				Op: op, Where: c.loc.String(), Key: key, Class: object.ClassCorrupt, Status: http.StatusOK,
				Err: fmt.Errorf("%s %016x, want %016x as it was put", s.Algorithm, s.Value, got.Sum.Value),
			}
		}
		got.Verified = true
	}
	return got, nil
}

// extent reads from an answer how long the object is and how much of it comes: up to n
// bytes from off on, less only at the object's end.
func extent(r *blob.DownloadStreamResponse, off, n int64) (total, length int64, err error) {
	if r.ContentLength == nil || *r.ContentLength < 0 {
		return 0, 0, errors.New("the answer has no length")
	}
	length = *r.ContentLength
	first := int64(0)
	if r.ContentRange == nil { // the service did as if there were no range
		total = length
	} else if first, total, err = parseRange(*r.ContentRange); err != nil {
		return 0, 0, err
	}
	if first != off || length != min(n, total-off) {
		return 0, 0, fmt.Errorf("%d bytes at %d of %d came, want %d at %d", length, first, total, n, off)
	}
	return total, length, nil
}

// parseRange reads bytes FIRST-LAST/TOTAL.
func parseRange(s string) (first, total int64, err error) {
	span, all, ok := strings.Cut(strings.TrimPrefix(s, "bytes "), "/")
	from, _, ok2 := strings.Cut(span, "-")
	first, err = strconv.ParseInt(from, 10, 64)
	total, err2 := strconv.ParseInt(all, 10, 64)
	if !ok || !ok2 || err != nil || err2 != nil || first < 0 || total < 0 {
		return 0, 0, fmt.Errorf("range %q makes no sense", s)
	}
	return first, total, nil
}

// atEnd is nil when nothing comes any more.
func atEnd(r io.Reader) error {
	var b [1]byte
	n, err := io.ReadFull(r, b[:])
	switch {
	case n > 0:
		return errors.New("more came than was announced")
	case errors.Is(err, io.EOF):
		return nil
	}
	return err
}
