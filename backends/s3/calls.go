package s3

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/kvtier/kvtier/backends/object"
)

// unsigned leaves the payload out of the signature: that would cost a SHA-256 of it. The
// CRC32C, which is signed, protects it.
func unsigned(o *s3.Options) {
	o.APIOptions = append(o.APIOptions, v4.SwapComputePayloadSHA256ForUnsignedPayloadMiddleware)
}

// withSum asks for the object's checksum. Through the input's own field the SDK would also
// verify it, byte by byte as they come; here that is done once, over the memory.
func withSum(o *s3.Options) {
	o.APIOptions = append(o.APIOptions, smithyhttp.SetHeaderValue("x-amz-checksum-mode", string(types.ChecksumModeEnabled)))
}

func (c *client) key(key string) *string { return aws.String(c.loc.Prefix + key) }

// Check lists one object, which says more than HEAD when it fails.
func (c *client) Check(ctx context.Context) error {
	if _, err := c.List(ctx, "", "", 1); err != nil {
		var e *object.Error
		if errors.As(err, &e) {
			e.Op = "check"
		}
		return err
	}
	return nil
}

// Head is object.Client's.
func (c *client) Head(ctx context.Context, key string) (object.Info, error) {
	out, err := c.api.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &c.loc.Bucket, Key: c.key(key)}, withSum)
	if err != nil {
		return object.Info{}, c.failure("head", key, err)
	}
	if out.ContentLength == nil {
		return object.Info{}, c.nonsense("head", key, "it does not say how long the object is")
	}
	return object.Info{
		Key: key, Bytes: *out.ContentLength, ETag: aws.ToString(out.ETag), Modified: aws.ToTime(out.LastModified),
		Sum: wholeSum(out.ChecksumCRC32C, out.ChecksumType),
	}, nil
}

// wholeSum is a checksum if it is of the object's bytes.
func wholeSum(crc *string, typ types.ChecksumType) object.Sum {
	if typ == types.ChecksumTypeComposite {
		return object.Sum{}
	}
	return decode(crc)
}

// nonsense is an answer that no service would give: whatever sent it, it is not to be
// believed.
func (c *client) nonsense(op, key, why string) error {
	return &object.Error{Op: op, Where: c.String(), Key: key, Class: object.ClassNetwork, Err: errors.New("the answer makes no sense: " + why)}
}

// Put is object.Client's.
func (c *client) Put(ctx context.Context, key string, src object.Vector, sum object.Sum, ifAbsent bool) (object.Info, error) {
	body := object.NewBody(src)
	defer body.Detach()
	in := &s3.PutObjectInput{Bucket: &c.loc.Bucket, Key: c.key(key), Body: body, ChecksumCRC32C: encode(sum)}
	if ifAbsent {
		in.IfNoneMatch = aws.String("*")
	}
	out, err := c.api.PutObject(ctx, in, unsigned)
	if err != nil {
		return object.Info{}, c.failure("put", key, err)
	}
	return object.Info{Key: key, Bytes: src.Len(), ETag: aws.ToString(out.ETag), Sum: sum}, nil
}

// Begin is object.Client's.
func (c *client) Begin(ctx context.Context, key string) (object.Upload, error) {
	out, err := c.api.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
		Bucket: &c.loc.Bucket, Key: c.key(key),
		ChecksumAlgorithm: types.ChecksumAlgorithmCrc32c, ChecksumType: types.ChecksumTypeFullObject,
	})
	if err != nil {
		return object.Upload{}, c.failure("begin", key, err)
	}
	if aws.ToString(out.UploadId) == "" {
		return object.Upload{}, c.nonsense("begin", key, "it has no upload id")
	}
	return object.Upload{Key: key, ID: *out.UploadId}, nil
}

// PutPart is object.Client's.
func (c *client) PutPart(ctx context.Context, u object.Upload, number int, src object.Vector, sum object.Sum) (object.Part, error) {
	body := object.NewBody(src)
	defer body.Detach()
	out, err := c.api.UploadPart(ctx, &s3.UploadPartInput{
		Bucket: &c.loc.Bucket, Key: c.key(u.Key), UploadId: &u.ID, PartNumber: aws.Int32(int32(number)),
		Body: body, ChecksumCRC32C: encode(sum),
	}, unsigned)
	if err != nil {
		return object.Part{}, c.failure("part", u.Key, err)
	}
	return object.Part{Number: number, Bytes: src.Len(), ETag: aws.ToString(out.ETag), Sum: sum}, nil
}

// Complete is object.Client's.
func (c *client) Complete(ctx context.Context, u object.Upload, parts []object.Part, ifAbsent bool) (object.Info, error) {
	in := &s3.CompleteMultipartUploadInput{
		Bucket: &c.loc.Bucket, Key: c.key(u.Key), UploadId: &u.ID,
		ChecksumType: types.ChecksumTypeFullObject, MultipartUpload: &types.CompletedMultipartUpload{},
	}
	var size int64
	for _, p := range parts {
		size += p.Bytes
		in.MultipartUpload.Parts = append(in.MultipartUpload.Parts, types.CompletedPart{
			PartNumber: aws.Int32(int32(p.Number)), ETag: aws.String(p.ETag), ChecksumCRC32C: encode(p.Sum),
		})
	}
	sum := c.Join(parts)
	in.ChecksumCRC32C, in.MpuObjectSize = encode(sum), &size
	if ifAbsent {
		in.IfNoneMatch = aws.String("*")
	}
	out, err := c.api.CompleteMultipartUpload(ctx, in)
	if err != nil {
		return object.Info{}, c.failure("complete", u.Key, err)
	}
	if told := wholeSum(out.ChecksumCRC32C, out.ChecksumType); told != (object.Sum{}) && told != sum {
		return object.Info{}, &object.Error{
			Op: "complete", Where: c.String(), Key: u.Key, Class: object.ClassCorrupt,
			Err: fmt.Errorf("the object has CRC32C %08x, its parts %08x", told.Value, sum.Value),
		}
	}
	return object.Info{Key: u.Key, Bytes: size, ETag: aws.ToString(out.ETag), Sum: sum}, nil
}

// Abort is object.Client's.
func (c *client) Abort(ctx context.Context, u object.Upload) error {
	_, err := c.api.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &c.loc.Bucket, Key: c.key(u.Key), UploadId: &u.ID})
	if err == nil {
		return nil
	}
	if err = c.failure("abort", u.Key, err); object.ClassOf(err) == object.ClassNotFound {
		return nil
	}
	return err
}

// Delete is object.Client's.
func (c *client) Delete(ctx context.Context, keys []string) ([]error, error) {
	in := &s3.DeleteObjectsInput{Bucket: &c.loc.Bucket, Delete: &types.Delete{Quiet: aws.Bool(true)}}
	index := make(map[string][]int, len(keys))
	for i, k := range keys {
		full := c.key(k)
		if index[*full] == nil {
			in.Delete.Objects = append(in.Delete.Objects, types.ObjectIdentifier{Key: full})
		}
		index[*full] = append(index[*full], i)
	}
	out, err := c.api.DeleteObjects(ctx, in)
	if err != nil {
		return nil, c.failure("delete", "", err)
	}
	errs := make([]error, len(keys))
	request, _ := awsmiddleware.GetRequestIDMetadata(out.ResultMetadata)
	for _, o := range out.Errors {
		at, ok := index[aws.ToString(o.Key)]
		if !ok {
			return nil, c.nonsense("delete", "", fmt.Sprintf("it is about %q, which was not asked for", aws.ToString(o.Key)))
		}
		e := &object.Error{
			Op: "delete", Where: c.String(), Key: keys[at[0]], Code: aws.ToString(o.Code), Request: request,
			Err: errors.New(aws.ToString(o.Message)),
		}
		e.Class = classes[e.Code]
		c.hint(e)
		for _, i := range at {
			if e.Class != object.ClassNotFound {
				errs[i] = e
			}
		}
	}
	return errs, nil
}

// List is object.Client's. The cursor is the last key, which stays good for ever.
func (c *client) List(ctx context.Context, prefix, cursor string, limit int) (object.Page, error) {
	most := c.Limits().ListKeys
	if limit <= 0 || limit > most {
		limit = most
	}
	in := &s3.ListObjectsV2Input{Bucket: &c.loc.Bucket, Prefix: c.key(prefix), MaxKeys: aws.Int32(int32(limit))}
	if cursor != "" {
		in.StartAfter = c.key(cursor)
	}
	out, err := c.api.ListObjectsV2(ctx, in)
	if err != nil {
		return object.Page{}, c.failure("list", prefix, err)
	}
	page := object.Page{Objects: make([]object.Info, 0, len(out.Contents))}
	last := cursor
	for _, o := range out.Contents {
		key, ours := strings.CutPrefix(aws.ToString(o.Key), c.loc.Prefix)
		if !ours || !strings.HasPrefix(key, prefix) || key <= last && last != "" {
			return object.Page{}, c.nonsense("list", prefix, fmt.Sprintf("key %q is not of this list, or not in order", aws.ToString(o.Key)))
		}
		last = key
		page.Objects = append(page.Objects, object.Info{Key: key, Bytes: aws.ToInt64(o.Size), ETag: aws.ToString(o.ETag), Modified: aws.ToTime(o.LastModified)})
	}
	if aws.ToBool(out.IsTruncated) {
		if len(page.Objects) == 0 {
			return object.Page{}, c.nonsense("list", prefix, "it goes on, but has nothing")
		}
		page.Next = last
	}
	return page, nil
}
