package s3

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

// Bare is the SDK alone, with its own settings, for benchmarks that compare a backend
// with it.
type Bare struct {
	loc Location
	api *s3.Client
}

// NewBare makes one for a bucket.
func NewBare(ctx context.Context, url string) (*Bare, error) {
	loc, err := ParseURL(url)
	if err != nil {
		return nil, err
	}
	cfg, err := config.LoadDefaultConfig(ctx)
	if err != nil {
		return nil, fmt.Errorf("configuration of the AWS SDK: %w", err)
	}
	return &Bare{loc, s3.NewFromConfig(cfg, func(o *s3.Options) {
		if loc.Endpoint != "" {
			o.BaseEndpoint = aws.String(loc.Endpoint)
		}
		if loc.Region != "" {
			o.Region = loc.Region
		}
		o.UsePathStyle = loc.PathStyle
	})}, nil
}

func (b *Bare) key(key string) *string { return aws.String(b.loc.Prefix + key) }

// Put makes an object.
func (b *Bare) Put(ctx context.Context, key string, src []byte) error {
	_, err := b.api.PutObject(ctx, &s3.PutObjectInput{Bucket: aws.String(b.loc.Bucket), Key: b.key(key), Body: bytes.NewReader(src)})
	return err
}

// Get reads an object of len(dst) bytes.
func (b *Bare) Get(ctx context.Context, key string, dst []byte) error {
	out, err := b.api.GetObject(ctx, &s3.GetObjectInput{Bucket: aws.String(b.loc.Bucket), Key: b.key(key)})
	if err != nil {
		return err
	}
	_, err = io.ReadFull(out.Body, dst)
	if e := out.Body.Close(); err == nil {
		err = e
	}
	return err
}
