package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
)

// Kind is the backend's name.
const Kind = "s3"

const (
	connectTimeout = 5 * time.Second
	idleTimeout    = 90 * time.Second
	// Larger buffers than the standard ones save system calls. What is read of a body is
	// not copied through them.
	readBufferBytes  = 16 << 10
	writeBufferBytes = 256 << 10
)

// Options configures a backend. URL is needed.
type Options struct {
	URL    string // see ParseURL
	CAFile string // certificates in PEM of whom to believe, instead of the system's
	Object object.Options
}

// New makes a backend. It reads the SDK's configuration files, and asks the service
// nothing: see object.Backend.Check. Errors: xfer.ErrInvalid, which says which setting to
// change.
func New(ctx context.Context, o *Options) (*object.Backend, error) {
	c, err := newClient(ctx, o)
	if err != nil {
		return nil, err
	}
	return object.New(c, &o.Object)
}

// client is an object.Client.
type client struct {
	loc       Location
	api       *s3.Client
	transport *http.Transport
}

func newClient(ctx context.Context, o *Options) (*client, error) {
	loc, err := ParseURL(o.URL)
	if err != nil {
		return nil, err
	}
	roots, err := readRoots(o.CAFile)
	if err != nil {
		return nil, err
	}
	// A BuildableClient, because the SDK adds what AWS_CA_BUNDLE says to it.
	base := awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) {
		t.DialContext = (&net.Dialer{Timeout: connectTimeout, KeepAlive: 30 * time.Second}).DialContext
		t.TLSHandshakeTimeout = connectTimeout
		t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, 1024 // the limit of requests bounds connections
		t.IdleConnTimeout = idleTimeout
		t.ReadBufferSize, t.WriteBufferSize = readBufferBytes, writeBufferBytes
		t.DisableCompression = true
		t.ForceAttemptHTTP2 = false // one stream a connection, so that a stuck one holds up no other
		t.Protocols = new(http.Protocols)
		t.Protocols.SetHTTP1(true)
		if roots != nil {
			t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		}
	})
	options := []func(*config.LoadOptions) error{
		config.WithHTTPClient(base),
		config.WithRetryer(func() aws.Retryer { return aws.NopRetryer{} }), // package object's are budgeted and counted
		config.WithLogger(logging.Nop{}),
	}
	if loc.Region != "" {
		options = append(options, config.WithRegion(loc.Region))
	}
	cfg, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("configuration of the AWS SDK: %w: %w", xfer.ErrInvalid, err)
	}
	if cfg.Region == "" {
		if loc.Endpoint == "" {
			return nil, fmt.Errorf("open %s: %w: no region: add the parameter %s, or set AWS_REGION", loc, xfer.ErrInvalid, paramRegion)
		}
		cfg.Region = "us-east-1" // what servers other than AWS's expect
	}
	built, ok := cfg.HTTPClient.(*awshttp.BuildableClient)
	if !ok {
		return nil, fmt.Errorf("configuration of the AWS SDK: %w: HTTP client of type %T", xfer.ErrInvalid, cfg.HTTPClient)
	}
	c := &client{loc: loc, transport: built.GetTransport()}
	c.api = s3.NewFromConfig(cfg, func(so *s3.Options) {
		if loc.Endpoint != "" {
			so.BaseEndpoint = aws.String(loc.Endpoint)
		}
		so.UsePathStyle = loc.PathStyle
		so.HTTPClient = &http.Client{
			Transport: c.transport,
			// A redirect is an answer: the request is signed for one host.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
		so.Credentials = credentials{cfg.Credentials}
		// The checksums are ours: of memory in pieces, computed once for all tries.
		so.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		so.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
		// To ask before each large body costs a round trip; a service that throttles answers
		// without reading it all.
		so.ContinueHeaderThresholdBytes = -1
	})
	return c, nil
}

func readRoots(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("CA file: %w: %w", xfer.ErrInvalid, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("CA file %s: %w: no certificate in it", file, xfer.ErrInvalid)
	}
	return roots, nil
}

// credentials marks the failures of the SDK's chain, which look like any other otherwise.
type credentials struct{ aws.CredentialsProvider }

// credentialsError is such a failure.
type credentialsError struct{ err error }

func (e *credentialsError) Error() string { return "credentials: " + e.err.Error() }
func (e *credentialsError) Unwrap() error { return e.err }

// Retrieve is aws.CredentialsProvider's.
func (c credentials) Retrieve(ctx context.Context) (aws.Credentials, error) {
	v, err := c.CredentialsProvider.Retrieve(ctx)
	if err != nil {
		return v, &credentialsError{err}
	}
	return v, nil
}

// Name is "s3".
func (c *client) Name() string { return Kind }

// String writes bucket and prefix as a URL.
func (c *client) String() string { return c.loc.String() }

// Limits are AWS's.
func (c *client) Limits() object.Limits {
	return object.Limits{
		PutBytes: 5 << 30, PartBytes: 5 << 30, MinPart: 5 << 20, Parts: 10_000,
		KeyBytes: 1024 - len(c.loc.Prefix), DeleteKeys: 1000, ListKeys: 1000,
	}
}

// Close closes idle connections.
func (c *client) Close() error {
	c.transport.CloseIdleConnections()
	return nil
}
