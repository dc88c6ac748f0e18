package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
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
)

// fakeEnv is a host with 16 of 32 GiB of memory and 100 GiB of space free.
func fakeEnv(env map[string]string) environment {
	return environment{
		getenv:      func(k string) string { return env[k] },
		freeMemory:  func() (int64, string, error) { return 16 << 30, "available memory", nil },
		totalMemory: func() (int64, string, error) { return 32 << 30, "the machine's memory", nil },
		freeSpace:   func(string) (int64, error) { return 100 << 30, nil },
	}
}

func TestPlanDefaults(t *testing.T) {
	f, _ := newServeFlags(t)
	p, err := f.plan(context.Background(), fakeEnv(map[string]string{"HOME": "/h"}))
	if err != nil {
		t.Fatal(err)
	}
	if p.data != "/h/.local/share/kvtier" || p.dram != 4<<30 {
		t.Errorf("data %s, dram %d", p.data, p.dram)
	}
	if p.defaultSlab == nil || *p.defaultSlab != (slab{"/h/.local/share/kvtier/g3.slab", 10 << 30}) || p.noSlabs || p.slabs != nil {
		t.Errorf("default slab %v, none %v, slabs %v", p.defaultSlab, p.noSlabs, p.slabs)
	}
	if len(p.endpoints) != 1 || p.endpoints[0] != (endpoint{"tcp", "127.0.0.1:7070"}) || p.metrics != nil {
		t.Errorf("endpoints %v, metrics %v", p.endpoints, p.metrics)
	}
	if p.xfer != (endpoint{"tcp", "127.0.0.1:0"}) || p.socket != "/h/.local/share/kvtier/session.sock" || p.socketNote != "" {
		t.Errorf("sessions at %v and %q, %s", p.xfer, p.socket, p.socketNote)
	}
}

// The socket lies in the data directory unless its path would be too long; one that is
// given is made absolute, for clients with another working directory.
func TestPlanSocket(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	fits, long := "/"+strings.Repeat("d", maxUnixPath-len("//session.sock")), "/"+strings.Repeat("d", maxUnixPath-len("/session.sock"))
	for _, tc := range []struct{ args, want, note string }{
		{"--data " + fits, fits + "/session.sock", ""},
		{"--data " + long, "", "give --socket PATH"},
		{"--data " + long + " --socket /run/s", "/run/s", ""},
		{"--socket s", wd + "/s", ""},
	} {
		f, _ := newServeFlags(t, strings.Fields(tc.args)...)
		p, err := f.plan(context.Background(), fakeEnv(nil))
		if err != nil {
			t.Fatalf("%s: %v", tc.args, err)
		}
		if p.socket != tc.want || !strings.Contains(p.socketNote, tc.note) || (tc.note == "") != (p.socketNote == "") {
			t.Errorf("%s: socket %q, %q", tc.args, p.socket, p.socketNote)
		}
	}
}

func TestPlanSlabs(t *testing.T) {
	f, _ := newServeFlags(t, "--nvme", "/a=b=1GiB", "--nvme", "rel=64MiB")
	p, err := f.plan(context.Background(), fakeEnv(nil))
	if err != nil {
		t.Fatal(err)
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	want := []slab{{"/a=b", 1 << 30}, {filepath.Join(wd, "rel"), 64 << 20}}
	if len(p.slabs) != 2 || p.slabs[0] != want[0] || p.slabs[1] != want[1] || p.defaultSlab != nil {
		t.Errorf("slabs %v, default %v, want %v", p.slabs, p.defaultSlab, want)
	}

	f, _ = newServeFlags(t, "--nvme", "none")
	if p, err = f.plan(context.Background(), fakeEnv(nil)); err != nil || !p.noSlabs || p.defaultSlab != nil {
		t.Errorf("none: %+v, %v", p, err)
	}

	full := fakeEnv(nil)
	full.freeSpace = func(string) (int64, error) { return 1 << 30, nil }
	f, _ = newServeFlags(t)
	if p, err = f.plan(context.Background(), full); err != nil || p.defaultSlab != nil || !strings.Contains(p.slabNote, "1.0 GiB free") {
		t.Errorf("no room: %+v, %v", p, err)
	}
}

// A size that is given counts up to all memory, and where that is unknown.
func TestPlanDRAM(t *testing.T) {
	unknown := fakeEnv(nil)
	unknown.totalMemory = func() (int64, string, error) { return 0, "", errors.New("no /proc") }
	for size, env := range map[string]environment{"32GiB": fakeEnv(nil), "33GiB": unknown} {
		f, _ := newServeFlags(t, "--dram", size)
		if p, err := f.plan(context.Background(), env); err != nil || p.dram != f.dram {
			t.Errorf("%s: %+v, %v", size, p, err)
		}
	}
}

func TestPlanRefuses(t *testing.T) {
	dir := t.TempDir()
	cert, key := selfSigned(t, dir)
	empty := filepath.Join(dir, "empty")
	write(t, empty, "\n")
	token := filepath.Join(dir, "token")
	write(t, token, "secret\n")
	spaced := filepath.Join(dir, "spaced")
	write(t, spaced, "two words\n")
	long := "/tmp/" + strings.Repeat("s", 103)
	list, bad := filepath.Join(dir, "access"), filepath.Join(dir, "bad")
	write(t, list, `{"identities": [{"name": "me", "uid": 1000, "read": ["*"]}]}`)
	write(t, bad, `{"identities": [{"name": "me", "uid": 1000, "reads": ["*"]}]}`)
	for _, tc := range []struct {
		name  string
		args  string
		want  string
		usage bool
	}{
		{"none with a path", "--nvme none --nvme /a=1GiB", "--nvme none excludes other --nvme values, have none, /a=1GiB", true},
		{"path with none", "--nvme /a=1GiB --nvme none", "--nvme none excludes", true},
		{"a slab twice", "--nvme /a=1GiB --nvme /x/../a=2GiB", "--nvme: /a is given twice", true},
		{"watermarks", "--low 0.9 --high 0.8", "--low 0.9 is above --high 0.8", true},
		{"low watermark 0", "--low 0", "--low 0: want more than 0", true},
		{"little DRAM", "--dram 16MiB", "--dram 16MiB: want at least 32MiB", true},
		{"more DRAM than memory", "--dram 33GiB", "--dram 33GiB: more than the machine's memory, 32.0 GiB (34359738368 bytes)", true},
		{"little to record in", "--record /a --record-bytes 4KiB", "--record-bytes 4KiB: want at least 1MiB", true},
		{"grace", "--grace -1s", "--grace -1s", true},
		{"object grace", "--object-grace 0s", "--object-grace 0s: want more than 0", true},
		{"drain timeout", "--drain-timeout -1s", "--drain-timeout -1s", true},
		{"open to all", "--listen 0.0.0.0:7070", "--listen 0.0.0.0:7070: other machines can reach this address; add TLS (--tls-cert and --tls-key) and a token (--token-file or KVTIER_TOKEN),", true},
		{"one of two open", "--listen 127.0.0.1:1 --listen :7070", "--listen :7070: other machines", true},
		{"token only", "--listen :7070 --token-file " + token, "add TLS (--tls-cert and --tls-key), listen", true},
		{"TLS only", "--listen :7070 --tls-cert " + cert + " --tls-key " + key, "add a token (--token-file or KVTIER_TOKEN), listen", true},
		{"sessions open to all", "--xfer 0.0.0.0:7071", "--xfer 0.0.0.0:7071: other machines can reach this address; add TLS (--tls-cert and --tls-key) and a token (--token-file or KVTIER_TOKEN), use 127.0.0.1", true},
		{"sessions with a token only", "--xfer :7071 --token-file " + token, "--xfer :7071: other machines can reach this address; add TLS (--tls-cert and --tls-key), use", true},
		{"no address for sessions", "--xfer=", "--xfer: address", true},
		{"a long socket", "--socket " + long, "--socket " + long + ": address", true},
		{"metrics open to all", "--metrics :9090", "--metrics :9090: other machines", true},
		{"certificate without key", "--tls-cert " + cert, "both or none", true},
		{"client CA alone", "--tls-client-ca " + cert, "needs --tls-cert", true},
		{"no certificate", "--tls-cert " + key + " --tls-key " + key, "load --tls-cert " + key, false},
		{"empty client CA", "--tls-cert " + cert + " --tls-key " + key + " --tls-client-ca " + empty, "no certificate in it", false},
		{"no token file", "--token-file " + dir + "/absent", dir + "/absent", false},
		{"empty token file", "--token-file " + empty, "no token in it", false},
		{"list and token", "--access " + list + " --token-file " + token, "--access " + list + " and --token-file " + token + ": one of them", true},
		{"no list", "--access " + dir + "/absent", dir + "/absent", true},
		{"bad list", "--access " + bad, "--access " + bad + `: invalid: unknown field "reads"`, true},
		{"list without TLS", "--listen :7070 --access " + list, "add TLS (--tls-cert and --tls-key), listen", true},
		{"token with a space", "--token-file " + spaced, "no spaces", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, _ := newServeFlags(t, strings.Fields(tc.args)...)
			_, err := f.plan(context.Background(), fakeEnv(nil))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("got  %v\nwant %s", err, tc.want)
			}
			var ee *exitError
			if got := errors.As(err, &ee) && ee.code == exitUsage; got != tc.usage {
				t.Errorf("usage error %v, want %v", got, tc.usage)
			}
		})
	}
}

func TestPlanSecurity(t *testing.T) {
	dir := t.TempDir()
	cert, key := selfSigned(t, dir)
	token := filepath.Join(dir, "token")
	write(t, token, "from-file\n")
	f, _ := newServeFlags(t, "--listen", ":7070", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert)
	p, err := f.plan(context.Background(), fakeEnv(map[string]string{tokenEnv: "from-env"}))
	if err != nil {
		t.Fatal(err)
	}
	if p.security.token != "from-env" || p.security.tls == nil || p.security.tls.ClientAuth != tls.RequireAndVerifyClientCert {
		t.Errorf("security %+v", p.security)
	}
	f.tokenFile = token
	if p, err = f.plan(context.Background(), fakeEnv(map[string]string{tokenEnv: "from-env"})); err != nil || p.security.token != "from-file" {
		t.Errorf("with a file: %+v, %v", p, err)
	}
	list := filepath.Join(dir, "access")
	write(t, list, `{"identities": [{"name": "me", "uid": 1000, "read": ["*"]}]}`)
	f, _ = newServeFlags(t, "--listen", ":7070", "--tls-cert", cert, "--tls-key", key, "--access", list)
	if p, err = f.plan(context.Background(), fakeEnv(nil)); err != nil || p.security.access.ByUID(1000).Name() != "me" || p.security.token != "" {
		t.Errorf("with a list: %+v, %v", p, err)
	}
	if _, err = f.plan(context.Background(), fakeEnv(map[string]string{tokenEnv: "from-env"})); err == nil || !strings.Contains(err.Error(), tokenEnv) {
		t.Errorf("with a list and a token in the environment: %v", err)
	}
	f, _ = newServeFlags(t, "--listen", ":7070", "--xfer", ":7071", "--metrics", ":9", "--insecure")
	if _, err = f.plan(context.Background(), fakeEnv(nil)); err != nil {
		t.Errorf("--insecure: %v", err)
	}
}

// selfSigned writes a certificate and its key and returns their paths.
func selfSigned(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IsCA:         true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	write(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	write(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})))
	return cert, key
}

// Bad command lines end with exit code 2 and one line that names the flag and
// the value.
func TestUsageErrors(t *testing.T) {
	for _, tc := range []struct{ args, want string }{
		{"bogus", `unknown command "bogus"`},
		{"serve --bogus", "unknown flag: --bogus"},
		{"serve extra", `kvtier serve takes no arguments: "extra"`},
		{"version extra", `kvtier version takes no arguments: "extra"`},
		{"prefetch --cancel a extra", `kvtier prefetch --cancel takes no arguments: "extra"`},
		{"ns lst", `unknown command "lst" for "kvtier ns"`},
		{"serve --dram 4Gx", `invalid argument "4Gx" for "--dram" flag: size "4Gx": unknown unit "Gx"`},
		{"serve --dram -1", `invalid argument "-1" for "--dram" flag: size "-1": negative`},
		{"serve --prefetch-bytes auto", `invalid argument "auto" for "--prefetch-bytes"`},
		{"serve --nvme /a", `slab "/a": want PATH=SIZE or none`},
		{"serve --nvme /a=", `slab "/a=": size ""`},
		{"serve --nvme =1GiB", `slab "=1GiB"`},
		{"serve --nvme /a=0", `slab "/a=0": size 0`},
		{"serve --listen nowhere", `address "nowhere": want HOST:PORT or unix:PATH`},
		{"serve --xfer unix:/a", `address "unix:/a": want HOST:PORT`},
		{"serve --xfer nowhere", `address "nowhere": want HOST:PORT`},
		{"serve --shared-memory maybe", `invalid argument "maybe" for "--shared-memory" flag: "maybe": want auto, on, off`},
		{"serve --metrics unix:/a", `address "unix:/a": want HOST:PORT`},
		{"serve --high 98", `invalid argument "98" for "--high"`},
		{"serve --high NaN", `invalid argument "NaN" for "--high"`},
		{"serve --policy mru", `invalid argument "mru" for "--policy"`},
		{"serve --policy g4=arc", `invalid argument "g4=arc" for "--policy"`},
		{"serve --policy g3=mru", `policy "mru": want one of lru-leaf`},
		{"serve --log-level loud", `invalid argument "loud" for "--log-level" flag: "loud": want debug, info, warn, error`},
		{"serve --config /nonexistent/kvtier.yaml", "read config: open /nonexistent/kvtier.yaml: no such file or directory"},
	} {
		t.Run(tc.args, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := run(context.Background(), strings.Fields(tc.args), nil, &stdout, &stderr)
			if code != exitUsage || stdout.Len() != 0 {
				t.Errorf("exit code %d, standard output %q", code, &stdout)
			}
			if got := stderr.String(); !strings.HasPrefix(got, "kvtier: ") || strings.Count(got, "\n") != 1 || !strings.Contains(got, tc.want) {
				t.Errorf("got  %swant %s", got, tc.want)
			}
		})
	}
}
