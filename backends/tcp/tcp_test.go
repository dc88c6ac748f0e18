package tcp

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newBackend(t testing.TB, o Options) *Backend {
	t.Helper()
	b, err := New(&o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{key: key, pool: x509.NewCertPool()}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) issue(t testing.TB) (certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "agent"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
}

func (a *authority) config(t testing.TB) *tls.Config {
	t.Helper()
	cert, err := tls.X509KeyPair(a.issue(t))
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: a.pool, ClientCAs: a.pool, MinVersion: tls.VersionTLS13}
}

// tlsEnv names the directory in which a child finds its parent's certificates.
const tlsEnv = "KVTIER_TEST_TLS"

// sharedTLS is a configuration that a child of this process gets as well.
func sharedTLS(t *testing.T) *tls.Config {
	t.Helper()
	dir := os.Getenv(tlsEnv)
	if dir == "" {
		dir = t.TempDir()
		t.Setenv(tlsEnv, dir)
		a := newAuthority(t)
		cert, key := a.issue(t)
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
		for name, b := range map[string][]byte{"cert": cert, "key": key, "ca": ca} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "cert"), filepath.Join(dir, "key"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca"))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		t.Fatal("the authority's certificate cannot be read")
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool, MinVersion: tls.VersionTLS13}
}

// node is a backend with memory that its peer may reach.
type node struct {
	*Backend
	id     xfer.PeerID
	mem    xfertest.Memory
	region xfer.Region
}

func newNode(t testing.TB, name string, size int64, o Options) *node {
	t.Helper()
	n := &node{Backend: newBackend(t, o), id: xfer.PeerID{Name: name, Incarnation: random()}, mem: xfertest.DRAM(t, size)}
	if err := n.Bind(n.id); err != nil {
		t.Fatal(err)
	}
	var err error
	if n.region, err = n.Register(t.Context(), xfer.DRAM, n.mem.Desc); err != nil {
		t.Fatal(err)
	}
	return n
}

// meets loads what a peer says of itself, and gives the peer's memory as a remote side.
func (n *node) meets(t testing.TB, peer *node) xfer.Region {
	t.Helper()
	info, err := peer.ConnInfo()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.LoadConnInfo(peer.id, info); err != nil {
		t.Fatal(err)
	}
	return n.loads(t, peer)
}

func (n *node) loads(t testing.TB, peer *node) xfer.Region {
	t.Helper()
	info, err := peer.RegionInfo(peer.region)
	if err != nil {
		t.Fatal(err)
	}
	r, err := n.LoadRegion(peer.id, xfer.DRAM, peer.mem.Desc, info)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// move moves n bytes from the same offset of both memories.
func (n *node) move(ctx context.Context, t testing.TB, op xfer.Op, remote xfer.Region, peer *node, off, size uint64) error {
	t.Helper()
	local := xfer.Bound{Desc: xfer.Desc{Addr: n.mem.Desc.Addr + off, Len: size}, Region: n.region}
	far := xfer.Bound{Desc: xfer.Desc{Addr: peer.mem.Desc.Addr + off, Len: size}, Region: remote}
	p, err := n.Prepare(op, []xfer.Bound{local}, []xfer.Bound{far})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Release(p)
	calls := 0
	var got error
	_ = n.Transfer(ctx, p, func(_ int, err error) { calls, got = calls+1, err }) // it is also got
	if calls != 1 {
		t.Errorf("done was called %d times", calls)
	}
	return got
}

func TestTLSRefuses(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	server := newNode(t, "server", 1<<20, Options{TLS: a.config(t)})
	info, err := server.ConnInfo()
	if err != nil {
		t.Fatal(err)
	}
	stranger := b.config(t)
	stranger.RootCAs = a.pool // it believes the server, but the server not it
	for name, o := range map[string]Options{
		"no TLS":          {},
		"other authority": {TLS: stranger},
		"doubting client": {TLS: b.config(t)},
	} {
		t.Run(name, func(t *testing.T) {
			o.DialTimeout = 2 * time.Second
			client := newNode(t, "client", 1<<20, o)
			if err := client.LoadConnInfo(server.id, info); err != nil {
				t.Fatal(err)
			}
			if err := client.Connect(t.Context(), server.id); !errors.Is(err, xfer.ErrDisconnected) {
				t.Errorf("connect: %v, want ErrDisconnected", err)
			}
		})
	}
	// Without a certificate of one's own a backend is not even made; the listener
	// refuses who tries all the same.
	if _, err := New(&Options{TLS: &tls.Config{RootCAs: a.pool, ClientCAs: a.pool}}); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("TLS without a certificate: %v", err)
	}
	addrs, _ := parseConnInfo(info)
	c, err := tls.Dial("tcp", addrs[0], &tls.Config{RootCAs: a.pool})
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, err = c.Read(make([]byte, 1))
	}
	var alert *net.OpError
	if !errors.As(err, &alert) || alert.Op != "remote error" {
		t.Errorf("without a certificate: %v, want an alert of the listener", err)
	}
	good := newNode(t, "good", 1<<20, Options{TLS: a.config(t)})
	r := good.meets(t, server)
	if err := good.move(t.Context(), t, xfer.Write, r, server, 0, 1<<20); err != nil {
		t.Error(err)
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"Listen":        {Listen: "nowhere"},
		"Conns":         {Conns: -1},
		"many Conns":    {Conns: 65},
		"Calls":         {Calls: 1025},
		"Inbound":       {Inbound: -1},
		"Notifications": {Notifications: -1},
		"DialTimeout":   {DialTimeout: -1},
		"Advertise":     {Advertise: make([]string, 17)},
		"TLS, no CA":    {TLS: &tls.Config{Certificates: make([]tls.Certificate, 1)}},
	} {
		if b, err := New(&o); !errors.Is(err, xfer.ErrInvalid) || b != nil {
			t.Errorf("%s: %v, %v", name, b, err)
		}
	}
}

func TestAddresses(t *testing.T) {
	for _, tt := range []struct {
		name string
		o    Options
		want func(port string) []string // nil: only that it works
	}{
		{"IPv4", Options{}, func(p string) []string { return []string{"127.0.0.1:" + p} }},
		{"IPv6", Options{Listen: "[::1]:0"}, func(p string) []string { return []string{"[::1]:" + p} }},
		{"name", Options{Listen: "localhost:0", Advertise: []string{"localhost"}}, func(p string) []string { return []string{"localhost:" + p} }},
		{"any", Options{Listen: ":0"}, nil},
		{"any IPv4", Options{Listen: "0.0.0.0:0"}, nil},
		{"the second works", Options{Advertise: []string{"127.0.0.1:1", "127.0.0.1"}}, func(p string) []string { return []string{"127.0.0.1:1", "127.0.0.1:" + p} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.name == "IPv6" {
				l, err := net.Listen("tcp", "[::1]:0")
				if err != nil {
					servers.Missing(t, "ipv6", err)
				}
				l.Close()
			}
			server := newNode(t, "server", 1<<20, tt.o)
			info, err := server.ConnInfo()
			if err != nil {
				t.Fatal(err)
			}
			addrs, err := parseConnInfo(info)
			if err != nil {
				t.Fatal(err)
			}
			_, port, _ := net.SplitHostPort(server.mu.listener.Addr().String())
			if tt.want != nil {
				if want := tt.want(port); fmt.Sprint(addrs) != fmt.Sprint(want) {
					t.Errorf("advertises %q, want %q", addrs, want)
				}
			}
			client := newNode(t, "client", 1<<20, Options{})
			r := client.meets(t, server)
			for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
				if err := client.move(t.Context(), t, op, r, server, 0, 1<<20); err != nil {
					t.Errorf("%s via %q: %v", op, addrs, err)
				}
			}
		})
	}
}
