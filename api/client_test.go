package api_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
)

// listen serves an empty store at a real address until the test ends.
func listen(t testing.TB, network, addr string, o *api.ServerOptions) net.Addr {
	t.Helper()
	return serveStore(t, memstore.New(nil), network, addr, o)
}

func listenStore(t testing.TB, s api.Store) string {
	t.Helper()
	return serveStore(t, s, "tcp", "127.0.0.1:0", nil).String()
}

func serveStore(t testing.TB, s api.Store, network, addr string, o *api.ServerOptions) net.Addr {
	t.Helper()
	lis, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	srv := api.NewServer(s, o)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	t.Cleanup(func() {
		if err := srv.Drain(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return lis.Addr()
}

func TestDialAddresses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kvtier.sock")
	listen(t, "unix", path, nil)
	tcp := listen(t, "tcp", "127.0.0.1:0", nil).String()
	for _, addr := range []string{tcp, "unix:" + path} {
		c, err := api.Dial(t.Context(), addr, nil)
		if err != nil {
			t.Fatal(err)
		}
		if serving, err := c.Health(t.Context()); serving || err != nil {
			t.Errorf("health of a server that is not ready: %v, %v", serving, err)
		}
		if c.Addr() != addr {
			t.Errorf("address %q", c.Addr())
		}
		for range 2 {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if _, err := c.Ping(t.Context()); err == nil {
			t.Error("a closed client answers")
		}
	}
	for _, addr := range []string{"", "host", "host:", "unix:", "1.2.3.4"} {
		if _, err := api.Dial(t.Context(), addr, nil); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), `"`+addr+`"`) {
			t.Errorf("address %q: %v", addr, err)
		}
	}
}

// An address where nothing answers is ErrDisconnected, names itself and the
// cause, and does not outlast the context.
func TestDialUnreachable(t *testing.T) {
	const closed = "127.0.0.1:1" // of a service that nobody has had for decades
	missing := "unix:" + filepath.Join(t.TempDir(), "nobody.sock")
	for addr, cause := range map[string]string{closed: "connection refused", missing: "no such file"} {
		_, err := api.Dial(t.Context(), addr, nil)
		if !errors.Is(err, block.ErrDisconnected) || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), cause) {
			t.Errorf("dial %s: %v", addr, err)
		}
	}

	mute, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never says a word
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = api.Dial(ctx, mute.Addr().String(), nil)
	if !errors.Is(err, block.ErrDisconnected) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), mute.Addr().String()) {
		t.Errorf("dial a mute server: %v", err)
	}
}

func TestDialDenied(t *testing.T) {
	addr := listen(t, "tcp", "127.0.0.1:0", &api.ServerOptions{Token: "right"}).String()
	for _, token := range []string{"", "wrong", "right "} {
		if _, err := api.Dial(t.Context(), addr, &api.ClientOptions{Token: token}); !errors.Is(err, block.ErrDenied) || !strings.Contains(err.Error(), addr) {
			t.Errorf("token %q: %v", token, err)
		}
	}
	c, err := api.Dial(t.Context(), addr, &api.ClientOptions{Token: "right"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
}

func TestDialTLS(t *testing.T) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvtier"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	addr := listen(t, "tcp", "127.0.0.1:0", &api.ServerOptions{
		Token: "s", TLS: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: k}}},
	}).String()
	c, err := api.Dial(t.Context(), addr, &api.ClientOptions{Token: "s", TLS: &tls.Config{RootCAs: roots}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for name, o := range map[string]*api.ClientOptions{
		"unknown authority": {Token: "s", TLS: &tls.Config{RootCAs: x509.NewCertPool()}},
		"plain text":        {Token: "s"},
	} {
		if _, err := api.Dial(t.Context(), addr, o); !errors.Is(err, block.ErrDisconnected) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// connected is a client of s with a namespace of blocks of up to 1 MiB.
func connected(t testing.TB, s api.Store) (*api.Client, block.Namespace) {
	t.Helper()
	c := apitest.Serve(t, s, nil)()
	ns, err := c.OpenNamespace(context.Background(), block.Descriptor{Name: "ns", MaxBlockBytes: 1 << 20}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns.HashLen = 16
	return c, ns
}

func TestPutFrom(t *testing.T) {
	c, ns := connected(t, memstore.New(nil))
	payload := bytes.Repeat([]byte("0123456789"), 60_000)
	size := int64(len(payload))
	item := api.PutItem{Hash: block.Hash{1}}
	broken := errors.New("broken reader")
	for name, x := range map[string]struct {
		r    io.Reader
		want error
		says string
	}{
		"too short": {bytes.NewReader(payload[:size-1]), block.ErrInvalid, "announced 600000 bytes, the reader ended after 599999"},
		"too long":  {io.MultiReader(bytes.NewReader(payload), strings.NewReader("x")), block.ErrInvalid, "announced 600000 bytes, the reader has more"},
		"broken":    {io.MultiReader(bytes.NewReader(payload[:300_000]), iotest.ErrReader(broken)), broken, "read payload"},
	} {
		_, err := c.PutFrom(t.Context(), ns, item, size, x.r, api.PutOptions{})
		if !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: %v", name, err)
		}
		if m, err := c.Match(t.Context(), ns, []block.Hash{item.Hash}, block.MatchOptions{}); err != nil || m.Prefix != 0 {
			t.Errorf("%s: a block that did not come whole is there: %+v, %v", name, m, err)
		}
	}
	if _, err := c.PutFrom(t.Context(), ns, item, 0, strings.NewReader(""), api.PutOptions{}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("an empty block: %v", err)
	}
	for _, want := range []block.PutStatus{block.Stored, block.Exists} {
		r, err := c.PutFrom(t.Context(), ns, item, size, iotest.OneByteReader(bytes.NewReader(payload)), api.PutOptions{})
		if err != nil || r.Err != nil || r.Status != want {
			t.Errorf("put from a reader: %+v, %v, want %v", r, err, want)
		}
	}
	err := c.Get(t.Context(), ns, []block.Wanted{{Hash: item.Hash}}, block.GetOptions{}, func(_ int, p block.Payload) error {
		if !bytes.Equal(p.Bytes, payload) {
			return errors.New("other bytes came back")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// Bytes that are not what the checksum says are a miss, not bytes.
func TestGetChecksWholeBlocks(t *testing.T) {
	s := memstore.New(nil)
	c, ns := connected(t, s)
	h := block.Hash{1}
	if _, err := c.Put(t.Context(), ns, []api.PutItem{{Hash: h, Data: bytes.Repeat([]byte{7}, 500_000)}}, api.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Corrupt(ns.ID, h)
	err := c.Get(t.Context(), ns, []block.Wanted{{Hash: h}}, block.GetOptions{}, func(_ int, p block.Payload) error {
		if p.Reason != block.MissCorrupt || p.Bytes != nil {
			t.Errorf("a corrupt block: %v with %d bytes", p.Reason, len(p.Bytes))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// What can be refused without the server is.
func TestClientChecksArguments(t *testing.T) {
	c, ns := connected(t, memstore.New(nil))
	unset := ns
	unset.HashLen = 0
	ctx := t.Context()
	h := []block.Hash{{1}}
	_, putErr := c.Put(ctx, unset, []api.PutItem{{Data: []byte("x")}}, api.PutOptions{})
	_, emptyErr := c.Put(ctx, ns, []api.PutItem{{}}, api.PutOptions{})
	_, matchErr := c.Match(ctx, unset, h, block.MatchOptions{})
	_, reserveErr := c.Reserve(ctx, ns, []api.ReserveItem{{Len: block.MaxBlockBytes + 1}}, api.PutOptions{})
	_, _, listErr := c.List(ctx, ns, "", -1)
	_, nameErr := c.Namespace(ctx, "")
	for name, err := range map[string]error{
		"put without a hash length": putErr, "put of nothing": emptyErr, "match without a hash length": matchErr,
		"reserve too much": reserveErr, "list limit": listErr, "namespace name": nameErr,
		"get without a hash length": c.Get(ctx, unset, []block.Wanted{{}}, block.GetOptions{}, nil),
		"fill with nothing":         c.Fill(ctx, ns, 1, 0, nil),
	} {
		if !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Nothing asked is nothing answered.
	if r, err := c.Put(ctx, ns, nil, api.PutOptions{}); r != nil || err != nil {
		t.Error(r, err)
	}
	if r, err := c.Match(ctx, ns, nil, block.MatchOptions{}); r.Prefix != 0 || err != nil {
		t.Error(r, err)
	}
	if err := c.Get(ctx, ns, nil, block.GetOptions{}, nil); err != nil {
		t.Error(err)
	}
}

// Errors of calls say the address when the server is gone.
func TestCallWithoutServer(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := api.NewServer(memstore.New(nil), nil)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	c, err := api.Dial(t.Context(), lis.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := srv.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	_, err = c.Stats(t.Context())
	if !errors.Is(err, block.ErrDisconnected) || !strings.Contains(err.Error(), lis.Addr().String()) {
		t.Errorf("a call to a server that is gone: %v", err)
	}
}
