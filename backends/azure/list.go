package azure

import (
	"context"
	"fmt"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/bloberror"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/kvtier/kvtier/backends/object"
)

// List gives objects in the order of keys. A page may be empty and not the last.
func (c *client) List(ctx context.Context, prefix, cursor string, limit int) (object.Page, error) {
	return c.list(ctx, "list", prefix, cursor, limit)
}

func (c *client) list(ctx context.Context, op, prefix, cursor string, limit int) (object.Page, error) {
	if err := c.authorize(ctx, op, ""); err != nil {
		return object.Page{}, err
	}
	if limit <= 0 || limit > maxList {
		limit = maxList
	}
	prefix = c.loc.Prefix + prefix
	most := int32(limit)
	o := &container.ListBlobsFlatOptions{Prefix: &prefix, MaxResults: &most}
	if cursor != "" {
		o.Marker = &cursor
	}
	r, err := c.container.NewListBlobsFlatPager(o).NextPage(ctx)
	if err != nil {
		return object.Page{}, c.failure(ctx, op, "", err)
	}
	if r.Segment == nil {
		return object.Page{}, c.malformed(op, "", "the answer is no list: is this a blob service?")
	}
	var page object.Page
	if r.NextMarker != nil {
		page.Next = *r.NextMarker
	}
	for _, b := range r.Segment.BlobItems {
		if b == nil || b.Name == nil || b.Properties == nil || b.Properties.ContentLength == nil {
			return object.Page{}, c.malformed(op, "", "an object of the list has no name or no length")
		}
		key, ok := strings.CutPrefix(*b.Name, c.loc.Prefix)
		if !ok || !strings.HasPrefix(*b.Name, prefix) {
			return object.Page{}, c.malformed(op, "", "%q came, want what begins with %q", *b.Name, prefix)
		}
		page.Objects = append(page.Objects, info(key, *b.Properties.ContentLength, b.Properties.ETag, b.Properties.LastModified, nil))
	}
	return page, nil
}

// Delete removes objects, in one request.
func (c *client) Delete(ctx context.Context, keys []string) ([]error, error) {
	const op = "delete"
	if len(keys) == 0 {
		return nil, nil
	}
	if len(keys) > maxBatch {
		return nil, &object.Error{Op: op, Where: c.loc.String(), Err: fmt.Errorf("%d keys, want at most %d", len(keys), maxBatch)}
	}
	errs := make([]error, len(keys))
	// Names that the service would take for others are not in the batch.
	var sent []int
	for i, key := range keys {
		if errs[i] = c.begin(ctx, op, key); errs[i] == nil {
			sent = append(sent, i)
		}
	}
	if err := c.authorize(ctx, op, ""); err != nil {
		return nil, err
	}
	switch len(sent) {
	case 0:
		return errs, nil
	case 1: // a request of its own says more when it fails, and needs no right to make batches
		i := sent[0]
		_, err := c.blob(keys[i]).Delete(ctx, nil)
		errs[i] = c.deleted(ctx, keys[i], err)
		if e := object.ClassOf(errs[i]); errs[i] != nil && (e.Retryable() || e == object.ClassCanceled) {
			return nil, errs[i]
		}
		return errs, nil
	}
	answers, err := c.deleteBatch(ctx, keys, sent)
	if err != nil {
		return nil, c.failure(ctx, op, "", err)
	}
	answered := make([]bool, len(sent))
	for _, a := range answers {
		if a.ContentID == nil || *a.ContentID >= len(sent) || answered[*a.ContentID] {
			return nil, c.malformed(op, "", "an answer in the batch belongs to no request")
		}
		answered[*a.ContentID] = true
		i := sent[*a.ContentID]
		errs[i] = c.deleted(ctx, keys[i], a.Error)
	}
	for k, ok := range answered {
		if !ok {
			errs[sent[k]] = c.malformed(op, keys[sent[k]], "the batch has no answer for it")
		}
	}
	return errs, nil
}

// deleted is the failure of one delete. What is not there is deleted.
func (c *client) deleted(ctx context.Context, key string, err error) error {
	if err == nil || bloberror.HasCode(err, bloberror.BlobNotFound) {
		return nil
	}
	return c.failure(ctx, "delete", key, err)
}

// deleteBatch sends a batch of those keys that sent lists.
func (c *client) deleteBatch(ctx context.Context, keys []string, sent []int) (answers []*container.BatchResponseItem, err error) {
	batch, err := c.container.NewBatchBuilder()
	if err != nil {
		return nil, err
	}
	for _, i := range sent {
		if err := batch.Delete(c.loc.Prefix+keys[i], nil); err != nil {
			return nil, err
		}
	}
	// The SDK takes the numbers in an answer for indexes of its own, unchecked.
	defer func() {
		if r := recover(); r != nil {
			answers, err = nil, fmt.Errorf("the answer to a batch makes no sense: %v", r)
		}
	}()
	r, err := c.container.SubmitBatch(ctx, batch, nil)
	if err != nil {
		return nil, err
	}
	return r.Responses, nil
}

// Close closes idle connections.
func (c *client) Close() error {
	if c.tokens != nil {
		c.tokens.close()
	}
	c.web.CloseIdleConnections()
	return nil
}
