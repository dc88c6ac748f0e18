package azure

import (
	"context"
	"crypto/tls"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/kvtier/kvtier/xfer"
)

// The environment variables of Microsoft's tools.
const (
	envConnection = "AZURE_STORAGE_CONNECTION_STRING"
	envAccount    = "AZURE_STORAGE_ACCOUNT"
	envKey        = "AZURE_STORAGE_KEY"
	envSAS        = "AZURE_STORAGE_SAS_TOKEN"
)

// account and credentials of the environment.
type environment struct {
	endpoint string // with a slash at its end
	account  string
	key, sas string // one of them, or none
}

// readEnvironment finds out who we are there. The endpoint of l goes before.
func readEnvironment(l Location) (environment, error) {
	e := environment{endpoint: l.Endpoint, account: os.Getenv(envAccount), key: os.Getenv(envKey), sas: os.Getenv(envSAS)}
	if s := os.Getenv(envConnection); s != "" {
		if err := e.readConnection(s); err != nil {
			return e, err
		}
	}
	if e.endpoint == "" {
		if e.account == "" {
			return e, fmt.Errorf("open %s: %w: no account: set %s or %s, or add the parameter endpoint", l, xfer.ErrInvalid, envAccount, envConnection)
		}
		e.endpoint = "https://" + e.account + ".blob.core.windows.net"
	}
	if e.account == "" {
		e.account = account(e.endpoint)
	}
	if e.key != "" && e.account == "" {
		return e, fmt.Errorf("azure endpoint %s: %w: it does not say which account: set %s", e.endpoint, xfer.ErrInvalid, envAccount)
	}
	if err := checkEndpoint(e.endpoint); err != nil {
		return e, fmt.Errorf("open %s: %w: %w", l, xfer.ErrInvalid, err)
	}
	e.endpoint = strings.TrimRight(e.endpoint, "/") + "/"
	e.sas = strings.TrimLeft(e.sas, "?")
	return e, nil
}

// readConnection reads a connection string: NAME=VALUE, with semicolons between.
func (e *environment) readConnection(s string) error {
	fields := map[string]string{}
	for field := range strings.SplitSeq(strings.Trim(s, "; \n"), ";") {
		name, value, ok := strings.Cut(field, "=")
		if !ok {
			return fmt.Errorf("read %s: %w: want NAME=VALUE with semicolons between", envConnection, xfer.ErrInvalid)
		}
		fields[strings.ToLower(strings.TrimSpace(name))] = value
	}
	e.account, e.key, e.sas = fields["accountname"], fields["accountkey"], fields["sharedaccesssignature"]
	if e.key != "" {
		e.sas = ""
	}
	if e.endpoint != "" {
		return nil
	}
	switch {
	case fields["blobendpoint"] != "":
		e.endpoint = fields["blobendpoint"]
	case e.account != "":
		protocol, suffix := fields["defaultendpointsprotocol"], fields["endpointsuffix"]
		if protocol == "" {
			protocol = "https"
		}
		if suffix == "" {
			suffix = "core.windows.net"
		}
		e.endpoint = protocol + "://" + e.account + ".blob." + suffix
	default:
		return fmt.Errorf("read %s: %w: it has neither BlobEndpoint nor AccountName", envConnection, xfer.ErrInvalid)
	}
	return nil
}

// connect makes the SDK's client of the container. tokens is nil when credentials are no
// tokens.
func (e environment) connect(name string, o *container.ClientOptions) (*container.Client, *tokens, error) {
	where := e.endpoint + name
	switch {
	case e.key != "":
		cred, err := container.NewSharedKeyCredential(e.account, e.key)
		if err != nil {
			// Not the cause: it quotes the key.
			return nil, nil, fmt.Errorf("azure account %s: %w: the key in %s or %s is not in base64", e.account, xfer.ErrInvalid, envKey, envConnection)
		}
		c, err := container.NewClientWithSharedKeyCredential(where, cred, o)
		return c, nil, err
	case e.sas != "":
		c, err := container.NewClientWithNoCredential(where+"?"+e.sas, o)
		return c, nil, err
	}
	if !strings.HasPrefix(e.endpoint, "https://") {
		return nil, nil, fmt.Errorf("azure endpoint %s: %w: identities are for https only: set %s, or %s and %s", e.endpoint, xfer.ErrInvalid, envConnection, envAccount, envKey)
	}
	// The authority ca= is the endpoint's, not that of who issues tokens.
	issuer := web(&tls.Config{MinVersion: tls.VersionTLS12})
	chain, err := azidentity.NewDefaultAzureCredential(&azidentity.DefaultAzureCredentialOptions{
		ClientOptions: azcore.ClientOptions{Transport: issuer, Retry: policy.RetryOptions{MaxRetries: -1}},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("azure identity: %w: %w", xfer.ErrUnavailable, err)
	}
	t := newTokens(chain, issuer.CloseIdleConnections)
	c, err := container.NewClient(where, t, o)
	return c, t, err
}

// tokens keeps the token of an identity. The SDK does so too, but there all calls wait for
// the one that gets a new token, for as long as that takes: here each waits until its own
// context ends, in ready, and the SDK never waits.
type tokens struct {
	cred azcore.TokenCredential
	idle func() // closes idle connections
	stop context.CancelFunc
	ctx  context.Context // of the requests for tokens; ends with Close
	work sync.WaitGroup
	mu   struct {
		sync.Mutex
		token  azcore.AccessToken
		renew  time.Time // when to ask for the next one
		flight *flight   // nil when no token is under way
		closed bool
	}
}

// flight is a token that is under way.
type flight struct {
	done  chan struct{}
	token azcore.AccessToken
	err   error
}

const (
	tokenReserve  = 5 * time.Minute  // a token is renewed so long before it ends, or in the middle of its life
	tokenPatience = 30 * time.Second // of one request for a token
	tokenPause    = 30 * time.Second // until the next one, while the old token is good
)

func newTokens(cred azcore.TokenCredential, idle func()) *tokens {
	t := &tokens{cred: cred, idle: idle}
	t.ctx, t.stop = context.WithCancel(context.Background())
	return t
}

// identityError is a failure to get a token.
type identityError struct{ err error }

func (e *identityError) Error() string { return "get a token: " + e.err.Error() }
func (e *identityError) Unwrap() error { return e.err }

// NonRetriable is what the SDK asks errors for.
func (e *identityError) NonRetriable() {}

// storageScope is what tokens are for.
const storageScope = "https://storage.azure.com/.default"

// ready waits until there is a token.
func (t *tokens) ready(ctx context.Context) error {
	_, err := t.get(ctx, policy.TokenRequestOptions{Scopes: []string{storageScope}})
	return err
}

// GetToken gives the SDK the token that ready waited for.
func (t *tokens) GetToken(ctx context.Context, o policy.TokenRequestOptions) (azcore.AccessToken, error) {
	if o.Claims != "" { // the service wants another one than what it was given
		t.mu.Lock()
		t.mu.token, t.mu.renew = azcore.AccessToken{}, time.Time{}
		t.mu.Unlock()
	}
	return t.get(ctx, o)
}

func (t *tokens) get(ctx context.Context, o policy.TokenRequestOptions) (azcore.AccessToken, error) {
	t.mu.Lock()
	if time.Now().Before(t.mu.renew) {
		defer t.mu.Unlock()
		return t.mu.token, nil
	}
	if t.mu.closed {
		t.mu.Unlock()
		return azcore.AccessToken{}, &identityError{context.Canceled}
	}
	f := t.mu.flight
	if f == nil {
		f = &flight{done: make(chan struct{})}
		t.mu.flight = f
		t.work.Go(func() { t.fetch(f, o) })
	}
	t.mu.Unlock()
	select {
	case <-f.done:
		return f.token, f.err
	case <-ctx.Done():
		return azcore.AccessToken{}, &identityError{ctx.Err()}
	}
}

func (t *tokens) fetch(f *flight, o policy.TokenRequestOptions) {
	ctx, cancel := context.WithTimeout(t.ctx, tokenPatience)
	defer cancel()
	token, err := t.cred.GetToken(ctx, o)
	t.mu.Lock()
	now := time.Now()
	switch {
	case err == nil:
		t.mu.token = token
		t.mu.renew = token.ExpiresOn.Add(-min(tokenReserve, token.ExpiresOn.Sub(now)/2))
	case now.Before(t.mu.token.ExpiresOn):
		t.mu.renew = now.Add(min(tokenPause, t.mu.token.ExpiresOn.Sub(now)))
	default:
		f.err = &identityError{err}
	}
	f.token = t.mu.token
	t.mu.flight = nil
	t.mu.Unlock()
	close(f.done)
}

// close ends what is under way and waits for it.
func (t *tokens) close() {
	t.mu.Lock()
	t.mu.closed = true
	t.mu.Unlock()
	t.stop()
	t.work.Wait()
	t.idle()
}
