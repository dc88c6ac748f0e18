package azure

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blockblob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
)

// Kind is the name of the client and of the backend that is made of it.
const Kind = "azure"

// What the service accepts, by its documentation.
const (
	maxName  = 1024
	maxPut   = 5000 << 20
	maxPart  = 4000 << 20
	maxParts = 50000
	maxBatch = 256
	maxList  = 5000
)

// Options configures a backend. URL is needed.
type Options struct {
	URL    string // see ParseURL
	CAFile string // certificates in PEM of whom to believe, instead of the system's
	Object object.Options
}

// New makes a backend. It reads the environment, and asks the service nothing: see
// object.Backend.Check. Errors: xfer.ErrInvalid, which says which setting to change, and
// xfer.ErrUnavailable when the SDK knows no kind of identity.
func New(o *Options) (*object.Backend, error) {
	c, err := newClient(o)
	if err != nil {
		return nil, err
	}
	return object.New(c, &o.Object)
}

// client is an object.Client.
type client struct {
	loc       Location
	endpoint  string
	account   string
	container *container.Client
	web       *http.Client
	tokens    *tokens // nil when the credentials are no tokens
}

func newClient(o *Options) (*client, error) {
	loc, err := ParseURL(o.URL)
	if err != nil {
		return nil, err
	}
	env, err := readEnvironment(loc)
	if err != nil {
		return nil, err
	}
	t, err := believe(o.CAFile)
	if err != nil {
		return nil, err
	}
	c := &client{loc: loc, endpoint: env.endpoint, account: env.account, web: web(t)}
	c.container, c.tokens, err = env.connect(loc.Container, &container.ClientOptions{ClientOptions: azcore.ClientOptions{
		Transport: c.web,
		Retry:     policy.RetryOptions{MaxRetries: -1}, // none: package object's are budgeted and counted
		Telemetry: policy.TelemetryOptions{ApplicationID: "kvtier"},
	}})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", loc, err)
	}
	return c, nil
}

// Name is "azure".
func (c *client) Name() string { return Kind }

// String writes container and prefix as a URL.
func (c *client) String() string { return c.loc.String() }

// Limits says what the service accepts.
func (c *client) Limits() object.Limits {
	return object.Limits{
		PutBytes: maxPut, PartBytes: maxPart, MinPart: 1, Parts: maxParts,
		KeyBytes: maxName - len(c.loc.Prefix), DeleteKeys: maxBatch, ListKeys: maxList,
	}
}

// begin is what each request of an object starts with.
func (c *client) begin(ctx context.Context, op, key string) error {
	// The service takes a dot at the end of a part of a name away.
	if key == "" || len(key) > maxName-len(c.loc.Prefix) || strings.HasSuffix(key, ".") || strings.HasSuffix(key, "/") || strings.Contains(key, "./") || strings.Contains(key, "//") {
		return &object.Error{Op: op, Where: c.loc.String(), Key: key, Err: fmt.Errorf("%w: the service knows no such name", xfer.ErrInvalid)}
	}
	return c.authorize(ctx, op, key)
}

// authorize waits for what the request is signed with.
func (c *client) authorize(ctx context.Context, op, key string) error {
	if err := ctx.Err(); err != nil {
		return c.failure(ctx, op, key, err)
	}
	if c.tokens == nil {
		return nil
	}
	if err := c.tokens.ready(ctx); err != nil {
		return c.failure(ctx, op, key, err)
	}
	return nil
}

func (c *client) blob(key string) *blockblob.Client {
	return c.container.NewBlockBlobClient(c.loc.Prefix + key)
}

// malformed is the failure of an answer that makes no sense.
func (c *client) malformed(op, key, format string, args ...any) *object.Error {
	return &object.Error{Op: op, Where: c.loc.String(), Key: key, Class: object.ClassNetwork, Err: fmt.Errorf(format, args...)}
}

// Check lists nothing, which shows that the container exists and that we may read it.
func (c *client) Check(ctx context.Context) error {
	_, err := c.list(ctx, "check", "", "", 1)
	return err
}

// Head says what the service knows of an object.
func (c *client) Head(ctx context.Context, key string) (object.Info, error) {
	const op = "head"
	if err := c.begin(ctx, op, key); err != nil {
		return object.Info{}, err
	}
	r, err := c.blob(key).GetProperties(ctx, nil)
	if err != nil {
		return object.Info{}, c.failure(ctx, op, key, err)
	}
	if r.ContentLength == nil || r.ETag == nil {
		return object.Info{}, c.malformed(op, key, "the answer has no length or no ETag: is this a blob service?")
	}
	return info(key, *r.ContentLength, r.ETag, r.LastModified, r.Metadata), nil
}

func info(key string, n int64, tag *azcore.ETag, modified *time.Time, metadata map[string]*string) object.Info {
	i := object.Info{Key: key, Bytes: n}
	if tag != nil {
		i.ETag = string(*tag)
	}
	if modified != nil {
		i.Modified = modified.UTC()
	}
	for name, value := range metadata {
		// HTTP leaves the case of a header's name to whoever passes it on.
		if strings.EqualFold(name, sumKey) && value != nil {
			i.Sum = parseSum(*value)
		}
	}
	return i
}

// Put makes or replaces an object, in one request.
func (c *client) Put(ctx context.Context, key string, src object.Vector, sum object.Sum, ifAbsent bool) (object.Info, error) {
	const op = "put"
	if err := c.begin(ctx, op, key); err != nil {
		return object.Info{}, err
	}
	body := object.NewBody(src)
	defer body.Detach()
	r, err := c.blob(key).Upload(ctx, body, &blockblob.UploadOptions{
		Metadata:                metadata(sum),
		TransactionalValidation: validation(sum),
		AccessConditions:        condition(ifAbsent),
	})
	if err != nil {
		return object.Info{}, c.refused(ctx, op, key, err, ifAbsent)
	}
	if r.ETag == nil {
		return object.Info{}, c.malformed(op, key, "the answer has no ETag: is this a blob service?")
	}
	i := info(key, src.Len(), r.ETag, r.LastModified, nil)
	i.Sum = sum
	return i, nil
}

// metadata keeps the checksum with the object.
func metadata(s object.Sum) map[string]*string {
	if s.Algorithm != object.CRC64 {
		return nil
	}
	text := sumText(s)
	return map[string]*string{sumKey: &text}
}

// validation makes the service verify the checksum.
func validation(s object.Sum) blob.TransferValidationType {
	if s.Algorithm != object.CRC64 {
		return nil
	}
	return blob.TransferValidationTypeCRC64(s.Value)
}

func condition(ifAbsent bool) *blob.AccessConditions {
	if !ifAbsent {
		return nil
	}
	tag := azcore.ETagAny
	return &blob.AccessConditions{ModifiedAccessConditions: &blob.ModifiedAccessConditions{IfNoneMatch: &tag}}
}
