package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// TestReplayWays: a trace has the same hits whichever way its blocks move, and no
// wrong byte, also with several clients at once.
func TestReplayWays(t *testing.T) {
	trace, limit, size := smallTrace, "100", "64KiB"
	switch {
	case soak:
		trace, limit, size = conversation, "0", "4KiB" // all of it
	case raceEnabled:
		limit = "40" // of which each client gets some
	}
	t.Parallel()
	first := map[string]replayReport{} // by number of clients
	for _, tt := range []struct {
		way    string
		serve  []string // arguments
		client []string
		remove bool // the socket
	}{
		{api.WayGRPC, nil, []string{"--inline"}, false},
		{api.WayShared, []string{"--shared-memory", "on"}, nil, false},
		{api.WayUnix, []string{"--shared-memory", "off"}, nil, false},
		{api.WayTCP, nil, nil, true},
	} {
		if testing.Short() && (tt.way == api.WayUnix || tt.way == api.WayTCP) {
			continue
		}
		dir := t.TempDir()
		data := filepath.Join(dir, "data")
		// Blocks move down, and none is dropped.
		d := serve(t, append([]string{"--data", data, "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab") + "=2GiB"}, tt.serve...)...)
		if tt.remove {
			if err := os.Remove(filepath.Join(data, "session.sock")); err != nil {
				t.Fatal(err)
			}
		}
		for _, clients := range []string{"1", "8"} {
			r := replay(t, d, trace, append([]string{
				"--block-bytes", size, "--limit", limit, "--durable", "g3", "--clients", clients, "--namespace", "clients-" + clients,
			}, tt.client...)...)
			if r.Way != tt.way {
				t.Errorf("%s clients: blocks moved by %s, want %s", clients, r.Way, tt.way)
			}
			if _, ok := first[clients]; !ok {
				first[clients] = r
				t.Logf("%s clients by %s: %v of the hashes hit, %v with all before them", clients, r.Way, *r.HitRate, *r.PrefixHitRate)
				continue
			}
			// With several clients at once it is chance who is first with a block.
			slack := 0.0
			if clients != "1" {
				slack = 0.03
			}
			for _, rates := range [][2]float64{{*r.HitRate, *first[clients].HitRate}, {*r.PrefixHitRate, *first[clients].PrefixHitRate}} {
				if diff := rates[0] - rates[1]; diff > slack || diff < -slack {
					t.Errorf("%s clients by %s: hit rate %v, want %v as by %s", clients, r.Way, rates[0], rates[1], first[clients].Way)
				}
			}
		}
		d.stop(0)
	}
}

// TestSessionCommands: the commands that move blocks do it over sessions, unless they
// are told not to, and say the same.
func TestSessionCommands(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=128MiB", "--log-level", "debug")
	for i, inline := range [][]string{nil, {"--inline"}} {
		data := payload(i, 300_000)
		hash := hashOf(i).Hex(hashBytes)
		with := func(args ...string) []string {
			return append(append(args, hash, "--server", d.addr, "--namespace", "shell"), inline...)
		}
		file := filepath.Join(dir, "block")
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if out := must(t, append([]string{"put", hash, file, "--block-bytes", "300000", "--durable", "g3", "--server", d.addr, "--namespace", "shell"}, inline...)...); out != "stored "+hash+", 300000 bytes, g3\n" {
			t.Errorf("put printed %q", out)
		}
		if out := must(t, with("get")...); out != string(data) {
			t.Errorf("get printed %d bytes, want the block", len(out))
		}
		if out := must(t, with("get", "--range", "262100:100")...); out != string(data[262100:262200]) {
			t.Errorf("get of a range printed %d bytes, want those of the block", len(out))
		}
		if out := must(t, with("match")...); !strings.Contains(out, "resident") {
			t.Errorf("match printed %q", out)
		}
	}
	d.stop(0) // then its log is whole
	if n := sessionsBegun(d, "kvtier"); n != 4 {
		t.Errorf("%d sessions, want 4, one for each command without --inline", n)
	}
}

// TestLongSocket: where the socket's default path is too long for one, the daemon
// says so and serves sessions over TCP only.
func TestLongSocket(t *testing.T) {
	withoutRace(t)
	data := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	d := serve(t, "--data", data, "--dram", "64MiB", "--nvme", "none")
	until(t, "the daemon says that there is no socket", func() bool {
		return logged(d, "level=WARN", "no socket", "--socket PATH") == 1
	})
	c := dial(t, d)
	ns := open(t, c, "long", stopBytes)
	put(t, c, ns, 0, 10, stopBytes, block.G2)
	if i := c.SessionInfo(); i.Way != api.WayTCP {
		t.Errorf("blocks moved by %+v, want %s", i, api.WayTCP)
	}
	d.stop(0)
}

// TestSessionRestarts: a daemon is killed while a client puts durable blocks by
// sessions, and started again. The client goes on by itself, by a new session, and
// all that was answered is there.
func TestSessionRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// Of this address nobody else is given the port while the daemon is away.
	free, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	args := []string{"serve", "--listen", addr, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab") + "=512MiB"}
	d := mustReady(start(t, nil, args...))
	c := dial(t, d)
	ns := open(t, c, "restart", largestBlock)
	var there []int
	next := 0
	for range 4 {
		ended := make(chan error, 1)
		begun := make(chan struct{})
		go func() {
			for n := 0; ; n++ {
				if n == 8 {
					close(begun)
				}
				i := next
				next++
				res, err := c.Put(timeout(t), ns, []api.PutItem{{Hash: hashOf(i), Data: bytesOf(i, 0)}}, api.PutOptions{Durable: block.G3})
				if err == nil {
					err = res[0].Err
				}
				if err != nil {
					ended <- err
					return
				}
				there = append(there, i)
			}
		}()
		select {
		case <-begun:
		case err := <-ended:
			t.Fatalf("put: %v", err)
		}
		if i := c.SessionInfo(); i.Way == api.WayGRPC {
			t.Fatalf("blocks move by %+v, want a session", i)
		}
		d.kill()
		if err := <-ended; !errors.Is(err, block.ErrDisconnected) {
			t.Errorf("put to a daemon that was killed: %v, want %v", err, block.ErrDisconnected)
		}
		d = mustReady(start(t, nil, args...))
		until(t, "the client is connected again", func() bool { _, err := c.Ping(timeout(t)); return err == nil })
		if missed := get(timeout(t), t, c, ns, there, func(i int) int { return len(bytesOf(i, 0)) }); len(missed) != 0 {
			t.Errorf("of %d durable blocks are missed: %v", len(there), missed)
		}
		until(t, "blocks move by a session again", func() bool {
			get(timeout(t), t, c, ns, there[:1], func(i int) int { return len(bytesOf(i, 0)) })
			return c.SessionInfo().Way != api.WayGRPC
		})
	}
	d.stop(0)
	t.Attr("did", itoa(len(there))+" durable puts were answered, 4 kills")
}

// certificate makes one that is its own authority, for the loopback.
func certificate(t *testing.T, dir, name string) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IsCA:         true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(crand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	for path, b := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pool = x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})) {
		t.Fatal("no certificate")
	}
	return cert, key, pool
}

// TestSessionSecurity: beyond the loopback a daemon wants TLS and a token, of gRPC
// and of sessions, and whoever has not both gets nowhere.
func TestSessionSecurity(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	dir := t.TempDir()
	cert, key, pool := certificate(t, dir, "server")
	clientCert, clientKey, _ := certificate(t, dir, "client")
	const token = "a-token-of-the-test"
	tokenFile := filepath.Join(dir, "token")
	if err := os.WriteFile(tokenFile, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	d := serve(t, "--listen", "0.0.0.0:0", "--xfer", "0.0.0.0:0", "--socket", socket, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", "none", "--shared-memory", "on", "--log-level", "debug",
		"--tls-cert", cert, "--tls-key", key, "--tls-client-ca", clientCert, "--token-file", tokenFile)
	_, port, err := net.SplitHostPort(sessionAddr(t, d, "tcp"))
	if err != nil {
		t.Fatal(err)
	}
	sessions := net.JoinHostPort("127.0.0.1", port)
	_, port, err = net.SplitHostPort(d.addr)
	if err != nil {
		t.Fatal(err)
	}
	addr := net.JoinHostPort("127.0.0.1", port)
	own, err := tls.LoadX509KeyPair(clientCert, clientKey)
	if err != nil {
		t.Fatal(err)
	}
	mutual := &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13}
	anonymous := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
	stranger := &tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13}

	// Who has both moves blocks, over the socket and over TCP.
	for i, want := range []string{api.WayShared, api.WayTCP} {
		if want == api.WayTCP {
			if err := os.Rename(socket, socket+"2"); err != nil {
				t.Fatal(err)
			}
		}
		c, err := api.Dial(timeout(t), addr, &api.ClientOptions{Token: token, TLS: mutual})
		if err != nil {
			t.Fatal(err)
		}
		ns := open(t, c, "secure", largestBlock)
		put(t, c, ns, 10*i, 10, largestBlock, block.G2)
		if missed := get(timeout(t), t, c, ns, numbers(0, 10*i+10), func(int) int { return largestBlock }); len(missed) != 0 {
			t.Errorf("by %s: missed %v", want, missed)
		}
		if how := c.SessionInfo(); how.Way != want {
			t.Errorf("blocks moved by %+v, want %s", how, want)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	file := filepath.Join(dir, "block")
	if err := os.WriteFile(file, payload(99, 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--server", addr, "--namespace", "secure", "--token-file", tokenFile, "--tls-ca", cert, "--tls-cert", clientCert, "--tls-key", clientKey}
	must(t, append([]string{"put", hashOf(99).Hex(hashBytes), file, "--max-block-bytes", itoa(largestBlock)}, flags...)...)
	if out := must(t, append([]string{"get", hashOf(99).Hex(hashBytes)}, flags...)...); out != string(payload(99, 1000)) {
		t.Errorf("get printed %d bytes, want the block", len(out))
	}

	for _, tt := range []struct {
		name, token string
		tls         *tls.Config
		denied      bool // or not connected at all
	}{
		{"wrong token", token + "s", mutual, true},
		{"no token", "", mutual, true},
		{"no certificate", token, anonymous, false},
		{"unknown authority", token, stranger, false},
		{"no TLS", token, nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := block.ErrDisconnected
			if tt.denied {
				want = block.ErrDenied
			}
			for what, open := range map[string]func(ctx context.Context) (interface{ Close() error }, error){
				"gRPC": func(ctx context.Context) (interface{ Close() error }, error) {
					return api.Dial(ctx, addr, &api.ClientOptions{Token: tt.token, TLS: tt.tls})
				},
				"session": func(ctx context.Context) (interface{ Close() error }, error) {
					return session.Dial(ctx, "tcp", sessions, &session.ClientOptions{Token: tt.token, TLS: tt.tls})
				},
				"socket": func(ctx context.Context) (interface{ Close() error }, error) {
					if !tt.denied {
						return nil, want // TLS adds nothing there
					}
					return session.Dial(ctx, "unix", socket+"2", &session.ClientOptions{Token: tt.token})
				},
			} {
				ctx, cancel := context.WithTimeout(timeout(t), 3*time.Second)
				c, err := open(ctx)
				cancel()
				if err == nil {
					_ = c.Close() // it should not be
				}
				if !errors.Is(err, want) {
					t.Errorf("%s: %v, want %v", what, err, want)
				}
			}
		})
	}
	if c, err := session.Dial(timeout(t), "unix", socket+"2", &session.ClientOptions{Token: token}); err != nil {
		t.Errorf("the socket with a token: %v", err)
	} else if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := os.Rename(socket+"2", socket); err != nil {
		t.Fatal(err)
	}
	d.stop(0) // then its log is whole
	if n := sessionsBegun(d, "kvtier"); n != 2 {
		t.Errorf("%d sessions of two commands", n)
	}
}
