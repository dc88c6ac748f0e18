package azure

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// The SDK reads answers that are no payload into memory, however long they are.
const (
	maxErrorBytes = 64 << 10
	maxListBytes  = 64 << 20
)

// web is the HTTP client of a container.
func web(t *tls.Config) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // the service speaks no other
	return &http.Client{
		// A redirect would send our signature to whoever it names.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &guard{Transport: http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			TLSClientConfig:       t,
			TLSHandshakeTimeout:   10 * time.Second,
			Protocols:             protocols,
			DisableCompression:    true,
			MaxIdleConnsPerHost:   1024, // package object bounds how many there are
			IdleConnTimeout:       60 * time.Second,
			ExpectContinueTimeout: time.Second,
			WriteBufferSize:       64 << 10,
			ReadBufferSize:        64 << 10,
		}},
	}
}

// guard bounds what the SDK reads, and closes what it forgets.
type guard struct{ http.Transport }

// RoundTrip is http.RoundTripper's.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := g.Transport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	comp := r.URL.Query().Get("comp")
	switch {
	case resp.StatusCode >= 300:
		resp.Body = &bounded{r: io.LimitReader(resp.Body, maxErrorBytes), body: resp.Body}
	case comp == "list" || comp == "batch":
		resp.Body = &bounded{r: io.LimitReader(resp.Body, maxListBytes), body: resp.Body}
	}
	if comp != "batch" {
		return resp, nil
	}
	// The SDK never closes the answer to a batch.
	answer, err := io.ReadAll(resp.Body)
	if closeErr := resp.Body.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, fmt.Errorf("read the answer to a batch: %w", err)
	}
	resp.Body = io.NopCloser(bytes.NewReader(answer))
	return resp, nil
}

// bounded is the beginning of a body.
type bounded struct {
	r    io.Reader
	body io.Closer
}

func (b *bounded) Read(p []byte) (int, error) { return b.r.Read(p) }
func (b *bounded) Close() error               { return b.body.Close() }

// believe is the client's side of TLS.
func believe(caFile string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if caFile == "" {
		return c, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("CA file: %w: %w", xfer.ErrInvalid, err)
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("CA file %s: %w: no certificate in it", caFile, xfer.ErrInvalid)
	}
	return c, nil
}
