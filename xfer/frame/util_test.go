package frame_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/xfer/frame"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair connects two ends over one of networks.
func pair(tb testing.TB, network string) (near, far net.Conn) {
	tb.Helper()
	listen, addr := network, "127.0.0.1:0"
	switch network {
	case "pipe", "tlspipe":
		near, far = net.Pipe()
		tb.Cleanup(func() { _ = near.Close(); _ = far.Close() })
		if network == "tlspipe" {
			return secured(tb, near, far)
		}
		return near, far
	case "tcp6":
		addr = "[::1]:0"
	case "unix":
		addr = filepath.Join(tb.TempDir(), "s")
	case "tls":
		listen = "tcp"
	}
	l, err := net.Listen(listen, addr)
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	near, err = net.Dial(l.Addr().Network(), l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	far, err = l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = near.Close(); _ = far.Close() })
	if network == "tls" {
		near, far = secured(tb, near, far)
	}
	return near, far
}

// secured makes TLS of two ends.
func secured(tb testing.TB, near, far net.Conn) (net.Conn, net.Conn) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"kvtier"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		tb.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	client := tls.Client(near, &tls.Config{RootCAs: roots, ServerName: "kvtier"})
	server := tls.Server(far, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	shaken := make(chan error, 1)
	go func() { shaken <- server.Handshake() }()
	if err := client.Handshake(); err != nil {
		tb.Fatal(err)
	}
	if err := <-shaken; err != nil {
		tb.Fatal(err)
	}
	return client, server
}

var networks = []string{"tcp", "tcp6", "unix", "tls", "pipe", "tlspipe"}

// over runs a test once for each kind of stream but those left out.
func over(t *testing.T, f func(t *testing.T, near, far net.Conn), without ...string) {
	for _, network := range networks {
		if slices.Contains(without, network) {
			continue
		}
		t.Run(network, func(t *testing.T) {
			near, far := pair(t, network)
			f(t, near, far)
		})
	}
}

// calls is a handler made of functions; those that are nil do nothing.
type calls struct {
	land   func(h *frame.Header) []byte
	landed func(h *frame.Header, p []byte, err error) error
	frame  func(h *frame.Header, p []byte) error
}

func (c calls) Land(h *frame.Header) []byte {
	if c.land == nil {
		return nil
	}
	return c.land(h)
}

func (c calls) Landed(h *frame.Header, p []byte, err error) error {
	if c.landed == nil {
		return err
	}
	return c.landed(h, p, err)
}

func (c calls) Frame(h *frame.Header, p []byte) error {
	if c.frame == nil {
		return nil
	}
	return c.frame(h, p)
}

// serve runs a connection until the test ends. What Serve returns comes by the
// channel.
func serve(t *testing.T, c net.Conn, o *frame.Options, h frame.Handler) (*frame.Conn, <-chan error) {
	t.Helper()
	conn := frame.NewConn(c, o)
	served := make(chan error, 1)
	done := make(chan struct{})
	go func() { defer close(done); served <- conn.Serve(h) }()
	t.Cleanup(func() { _ = conn.Close(); <-done })
	return conn, served
}

// encode is a frame as it is on the wire.
func encode(h frame.Header, payload string) []byte {
	h.Length = uint32(len(payload))
	return append(h.Append(nil), payload...)
}

// next receives a frame from an end that has no Conn.
func next(t *testing.T, c net.Conn) (frame.Header, string) {
	t.Helper()
	b := make([]byte, frame.HeaderBytes)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatalf("receive a header: %v", err)
	}
	h, err := frame.ParseHeader(b)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, h.Length)
	if _, err := io.ReadFull(c, p); err != nil {
		t.Fatalf("receive a payload of %d bytes: %v", h.Length, err)
	}
	return h, string(p)
}

func write(t *testing.T, c net.Conn, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}
