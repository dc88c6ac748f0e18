package azure

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blockblob"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
)

// uploadBytes is how long the id of an upload is. The service knows no uploads, only
// blocks that belong to an object and have names: the id keeps those of two uploads apart.
const uploadBytes = 16

// Begin draws an id. It is no request.
func (c *client) Begin(ctx context.Context, key string) (object.Upload, error) {
	if err := c.begin(ctx, "begin", key); err != nil {
		return object.Upload{}, err
	}
	var id [uploadBytes]byte
	rand.Read(id[:]) // never fails
	return object.Upload{Key: key, ID: hex.EncodeToString(id[:])}, nil
}

// blockID is the name of a part. All names of an object's blocks must be equally long.
func blockID(u object.Upload, number int) (string, error) {
	id, err := hex.DecodeString(u.ID)
	if err != nil || len(id) != uploadBytes || number < 1 || number > maxParts {
		return "", fmt.Errorf("%w: part %d of upload %q", xfer.ErrInvalid, number, u.ID)
	}
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(id, uint32(number))), nil
}

// PutPart stores one part.
func (c *client) PutPart(ctx context.Context, u object.Upload, number int, src object.Vector, sum object.Sum) (object.Part, error) {
	const op = "part"
	if err := c.begin(ctx, op, u.Key); err != nil {
		return object.Part{}, err
	}
	id, err := blockID(u, number)
	if err != nil {
		return object.Part{}, &object.Error{Op: op, Where: c.loc.String(), Key: u.Key, Err: err}
	}
	body := object.NewBody(src)
	defer body.Detach()
	if _, err := c.blob(u.Key).StageBlock(ctx, id, body, &blockblob.StageBlockOptions{TransactionalValidation: validation(sum)}); err != nil {
		return object.Part{}, c.failure(ctx, op, u.Key, err)
	}
	return object.Part{Number: number, Bytes: src.Len(), Sum: sum}, nil
}

// Complete makes the object of all parts.
func (c *client) Complete(ctx context.Context, u object.Upload, parts []object.Part, ifAbsent bool) (object.Info, error) {
	const op = "complete"
	if err := c.begin(ctx, op, u.Key); err != nil {
		return object.Info{}, err
	}
	parts = slices.SortedFunc(slices.Values(parts), func(a, b object.Part) int { return a.Number - b.Number })
	ids := make([]string, len(parts))
	var n int64
	for i, p := range parts {
		id, err := blockID(u, p.Number)
		if err != nil {
			return object.Info{}, &object.Error{Op: op, Where: c.loc.String(), Key: u.Key, Err: err}
		}
		ids[i] = id
		n += p.Bytes
	}
	sum := join(parts)
	r, err := c.blob(u.Key).CommitBlockList(ctx, ids, &blockblob.CommitBlockListOptions{
		Metadata:         metadata(sum),
		AccessConditions: condition(ifAbsent),
	})
	if err != nil {
		return object.Info{}, c.refused(ctx, op, u.Key, err, ifAbsent)
	}
	if r.ETag == nil {
		return object.Info{}, c.malformed(op, u.Key, "the answer has no ETag: is this a blob service?")
	}
	i := info(u.Key, n, r.ETag, r.LastModified, nil)
	i.Sum = sum
	return i, nil
}

// Abort leaves the parts to the service, which drops them after a week: there is no
// request that does so before, but one that writes the object.
func (c *client) Abort(context.Context, object.Upload) error { return nil }
