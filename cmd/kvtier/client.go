package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// clientFlags are the flags of every command that speaks to a daemon.
type clientFlags struct {
	server    string
	tokenFile string
	useTLS    bool
	tlsCA     string
	tlsCert   string
	tlsKey    string
	timeout   time.Duration
	json      bool
	inline    bool
}

// add adds the flags to c. The help of --json says what is printed.
func (f *clientFlags) add(c *cobra.Command, jsonHelp string) {
	fs := c.Flags()
	fs.SortFlags = false
	fs.StringVar(&f.server, "server", "127.0.0.1:7070", "`address` of the daemon, HOST:PORT or unix:PATH")
	fs.DurationVar(&f.timeout, "timeout", 30*time.Second, "most time that a call to the daemon may take")
	fs.BoolVar(&f.json, "json", false, jsonHelp)
	fs.StringVar(&f.tokenFile, "token-file", "", "`file` with the token to give (or set "+tokenEnv+")")
	fs.BoolVar(&f.useTLS, "tls", false, "use TLS; implied by the other --tls flags")
	fs.StringVar(&f.tlsCA, "tls-ca", "", "`file` of certificates (PEM) of which one must have signed the server's (default the system's)")
	fs.StringVar(&f.tlsCert, "tls-cert", "", "client certificate `file` (PEM); with --tls-key")
	fs.StringVar(&f.tlsKey, "tls-key", "", "private key `file` (PEM)")
}

// addInline adds the flag of the commands that move blocks or look them up.
func (f *clientFlags) addInline(c *cobra.Command) {
	c.Flags().BoolVar(&f.inline, "inline", false, "use gRPC only: do not open a session with the daemon")
}

// options reads what the flags name.
func (f *clientFlags) options(getenv func(string) string) (*api.ClientOptions, error) {
	if f.timeout <= 0 {
		return nil, usageErrorf("--timeout %v: want more than 0", f.timeout)
	}
	if _, err := parseEndpoint(f.server); err != nil {
		return nil, usageErrorf("--server: %w", err)
	}
	if (f.tlsCert == "") != (f.tlsKey == "") {
		return nil, usageErrorf("--tls-cert %q and --tls-key %q: both or none", f.tlsCert, f.tlsKey)
	}
	token, err := loadToken(f.tokenFile, getenv)
	if err != nil {
		return nil, err
	}
	o := &api.ClientOptions{Token: token, Inline: f.inline, Name: "kvtier"}
	if !f.useTLS && f.tlsCA == "" && f.tlsCert == "" {
		return o, nil
	}
	o.TLS = &tls.Config{MinVersion: tls.VersionTLS13}
	if f.tlsCA != "" {
		pem, err := os.ReadFile(f.tlsCA)
		if err != nil {
			return nil, fmt.Errorf("load --tls-ca: %w", err)
		}
		o.TLS.RootCAs = x509.NewCertPool()
		if !o.TLS.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("load --tls-ca %s: no certificate in it", f.tlsCA)
		}
	}
	if f.tlsCert != "" {
		cert, err := tls.LoadX509KeyPair(f.tlsCert, f.tlsKey)
		if err != nil {
			return nil, fmt.Errorf("load --tls-cert %s with --tls-key %s: %w", f.tlsCert, f.tlsKey, err)
		}
		o.TLS.Certificates = []tls.Certificate{cert}
	}
	return o, nil
}

// call bounds one call to the daemon.
func (f *clientFlags) call(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, f.timeout)
}

// batches calls fn with the hashes, as many at a time as one call may name, until
// it fails.
func (f *clientFlags) batches(ctx context.Context, hashes []block.Hash, fn func(ctx context.Context, part []block.Hash) error) error {
	for part := range slices.Chunk(hashes, api.MaxKeys) {
		cctx, cancel := f.call(ctx)
		err := fn(cctx, part)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// connect runs fn with a connection to the daemon.
func (f *clientFlags) connect(ctx context.Context, fn func(*api.Client) error) error {
	return f.connectAll(ctx, 1, func(clients []*api.Client) error { return fn(clients[0]) })
}

// connectAll runs fn with n connections to the daemon.
func (f *clientFlags) connectAll(ctx context.Context, n int, fn func([]*api.Client) error) (err error) {
	o, err := f.options(os.Getenv)
	if err != nil {
		return err
	}
	clients := make([]*api.Client, 0, n)
	defer func() {
		for _, client := range clients {
			err = errors.Join(err, client.Close())
		}
	}()
	for range n {
		dctx, cancel := f.call(ctx)
		client, err := api.Dial(dctx, f.server, o)
		cancel()
		if err != nil {
			return err
		}
		clients = append(clients, client)
	}
	return fn(clients)
}

// namespaceFlag adds the flag that names a namespace, which must be given.
func namespaceFlag(c *cobra.Command, p *string) {
	c.Flags().StringVar(p, "namespace", "", "`name` of the namespace (required)")
	mustRequire(c, "namespace")
}

// mustRequire marks a flag as required. It panics when c has no such flag.
func mustRequire(c *cobra.Command, flag string) {
	if err := c.MarkFlagRequired(flag); err != nil {
		panic(fmt.Sprintf("kvtier: command %s: %v", c.Name(), err))
	}
}

// findNamespace finds a namespace for hashes of hashLen bytes. A namespace into
// which nothing was put yet takes any length.
func (f *clientFlags) findNamespace(ctx context.Context, client *api.Client, name string, hashLen int) (block.Namespace, error) {
	ctx, cancel := f.call(ctx)
	defer cancel()
	ns, err := client.Namespace(ctx, name)
	if err != nil {
		return ns, err
	}
	return withHashLen(ns, hashLen)
}

// openNamespace opens or makes a namespace for hashes of hashLen bytes.
func (f *clientFlags) openNamespace(ctx context.Context, client *api.Client, d block.Descriptor, hashLen int) (block.Namespace, error) {
	ctx, cancel := f.call(ctx)
	defer cancel()
	ns, err := client.OpenNamespace(ctx, d, 0)
	if err != nil {
		return ns, err
	}
	return withHashLen(ns, hashLen)
}

func withHashLen(ns block.Namespace, hashLen int) (block.Namespace, error) {
	if err := ns.CheckHashLen(hashLen); err != nil {
		return ns, err
	}
	ns.HashLen = hashLen
	return ns, nil
}

// tierNames writes tiers as flags and JSON name them.
func tierNames(tiers []block.TierID) []string {
	names := make([]string, len(tiers))
	for i, t := range tiers {
		names[i] = t.String()
	}
	return names
}
