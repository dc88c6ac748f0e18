package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
)

// startServer serves a store on a loopback port until the test ends.
func startServer(t *testing.T, s api.Store, o *api.ServerOptions) (addr string, srv *api.Server) {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv = api.NewServer(s, o)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := srv.Serve(lis); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	srv.SetReady(true)
	t.Cleanup(func() {
		_ = srv.Drain(cancelled())
		serving.Wait()
	})
	return lis.Addr().String(), srv
}

// cancelled is a context that has ended.
func cancelled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// result is how a command ended.
type result struct {
	code           int
	stdout, stderr string
}

// kvtier runs one command line against the server at addr.
func kvtier(t *testing.T, addr, stdin string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var stdout, stderr bytes.Buffer
	code := run(ctx, append(args, "--server", addr), strings.NewReader(stdin), &stdout, &stderr)
	if ctx.Err() != nil {
		t.Errorf("kvtier %q took a minute", args)
	}
	return result{code, stdout.String(), stderr.String()}
}

// want checks how a command ended. stderr need only hold the text.
func (r result) want(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || r.stdout != stdout || !strings.Contains(r.stderr, stderr) || (stderr == "" && r.stderr != "") {
		t.Errorf("exit %d, stdout %q, stderr %q; want %d, %q, %q", r.code, r.stdout, r.stderr, code, stdout, stderr)
	}
}

const (
	hashA = "00112233445566778899aabbccddeeff"
	hashB = "0123456789abcdef0123456789abcdef"
	hashC = "fedcba9876543210fedcba9876543210"
)

func TestPutAndGet(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	dir := t.TempDir()
	file, data := filepath.Join(dir, "in"), strings.Repeat("0123456789abcdef", 4)
	write(t, file, data)

	put := []string{"put", "--namespace", "demo", "--block-bytes", "64"}
	kvtier(t, addr, "", append(put, hashA, file)...).want(t, 0, "stored "+hashA+", 64 bytes, g2\n", "")
	kvtier(t, addr, data, append(put, hashA, "-")...).want(t, 0, "exists "+hashA+", 64 bytes, g2\n", "")
	kvtier(t, addr, data, append(put, "--json", "--durable", "g3", "--parent", hashA, hashB, "-")...).want(t, 0, `{
  "namespace": "demo",
  "hash": "`+hashB+`",
  "status": "stored",
  "bytes": 64,
  "durable": "g3"
}
`, "")
	kvtier(t, addr, strings.ToUpper(data), append(put, hashA, "-")...).want(t, 1, "", "conflict")

	get := []string{"get", "--namespace", "demo"}
	kvtier(t, addr, "", append(get, hashA)...).want(t, 0, data, "")
	kvtier(t, addr, "", append(get, strings.ToUpper(hashA))...).want(t, 0, data, "")
	kvtier(t, addr, "", append(get, hashA, "--range", "14:4")...).want(t, 0, data[14:18], "")
	kvtier(t, addr, "", append(get, hashA, "--range", "60:")...).want(t, 0, data[60:], "")
	kvtier(t, addr, "", append(get, hashA, "--range", "60:5")...).want(t, 1, "", "60")
	kvtier(t, addr, "", append(get, hashA, "--range", "64:")...).want(t, 1, "", "64")
	kvtier(t, addr, "", append(get, hashA, "--range", "60")...).want(t, 2, "", `range "60"`)
	kvtier(t, addr, "", append(get, hashA, "--range", "")...).want(t, 2, "", `range "": want OFF:LEN`)
	kvtier(t, addr, "", append(get, hashA, "--range", "-1:4")...).want(t, 2, "", `range "-1:4": size "-1": negative`)
	kvtier(t, addr, "", append(get, hashA, "--range", "1:-4")...).want(t, 2, "", `range "1:-4": size "-4": negative`)
	kvtier(t, addr, "", append(get, hashA, "--json")...).want(t, 2, "", "add -o")
	kvtier(t, addr, "", append(get, hashC)...).want(t, 3, "", "get "+hashC+": miss: absent")

	out := filepath.Join(dir, "out")
	kvtier(t, addr, "", append(get, hashC, "-o", out)...).want(t, 3, "", "absent")
	if _, err := os.Stat(out); err == nil {
		t.Error("a miss made the file")
	}
	if r := kvtier(t, addr, "", append(get, hashB, "-o", out, "--json")...); r.code != 0 || !strings.Contains(r.stdout, `"total": 64`) {
		t.Errorf("get -o --json: %+v", r)
	}
	if got, err := os.ReadFile(out); err != nil || string(got) != data {
		t.Errorf("the file holds %q, %v", got, err)
	}
}

func TestPutRefuses(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil) // no NVMe
	four := []string{"put", "--namespace", "demo", "--block-bytes", "4"}
	kvtier(t, addr, "abcd", append(four, hashA, "-")...).want(t, 0, "stored "+hashA+", 4 bytes, g2\n", "")
	for _, tc := range []struct {
		name   string
		stdin  string
		args   []string
		code   int
		stderr string
	}{
		{"short payload", "abc", append(four, hashB, "-"), 1, "payload of 3 bytes"},
		{"long payload", "abcde", append(four, hashB, "-"), 1, "payload of 5 bytes"},
		{"empty payload", "", []string{"put", "--namespace", "any", "--max-block-bytes", "4", hashB, "-"}, 1, "payload of 0 bytes"},
		{"payload beyond the largest block", strings.Repeat("x", block.MaxBlockBytes+1), append(four, hashB, "-"), 1, "more than 8388608 bytes"},
		{"no file", "", append(four, hashB, "/nonexistent/file"), 1, "/nonexistent/file"},
		{"not hex", "abcd", append(four, "hello", "-"), 2, `hash "hello": not hex`},
		{"odd hash length", "abcd", append(four, "0011", "-"), 2, "length 2 bytes"},
		{"other hash length than the namespace's", "abcd", append(four, "0011223344556677", "-"), 1, "length 8 bytes"},
		{"other hash length than the parent's", "abcd", append(four, "--parent", "0011223344556677", hashB, "-"), 2, `"0011223344556677": length 8`},
		{"other block size", "abcdefgh", []string{"put", "--namespace", "demo", "--block-bytes", "8", hashB, "-"}, 1, `block_bytes is "4", not "8"`},
		{"other block size, and a payload of the first", "abcd", []string{"put", "--namespace", "demo", "--block-bytes", "8", hashB, "-"}, 1, `block_bytes is "4", not "8"`},
		{"largest size instead of an exact one", "abcd", []string{"put", "--namespace", "demo", "--max-block-bytes", "4", hashB, "-"}, 1, `block_bytes is "4", not "0"`},
		{"no block size", "abcd", []string{"put", "--namespace", "demo", hashB, "-"}, 2, "block-bytes"},
		{"two block sizes", "abcd", append(four, "--max-block-bytes", "4", hashB, "-"), 2, "max-block-bytes"},
		{"block size too large", "abcd", []string{"put", "--namespace", "demo", "--block-bytes", "9MiB", hashB, "-"}, 2, "block_bytes 9437184"},
		{"no namespace", "abcd", []string{"put", "--block-bytes", "4", hashB, "-"}, 2, "namespace"},
		{"unknown tier", "abcd", append(four, "--durable", "g9", hashB, "-"), 2, "g9"},
		{"no NVMe", "abcd", append(four, "--durable", "g3", hashB, "-"), 1, "no NVMe"},
		{"one argument", "", append(four, hashB), 2, "2 arg"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			kvtier(t, addr, tc.stdin, tc.args...).want(t, tc.code, "", tc.stderr)
		})
	}
}

// A namespace that says more than put can is found by its name and block size.
func TestPutIntoDescribedNamespace(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	for _, args := range [][]string{
		{"ns", "open", "exact", "--model", "m", "--dtype", "bf16", "--block-bytes", "4"},
		{"ns", "open", "upto", "--model", "m", "--max-block-bytes", "8"},
	} {
		if r := kvtier(t, addr, "", args...); r.code != 0 {
			t.Fatalf("%q: %+v", args, r)
		}
	}
	exact, upto := []string{"put", "--namespace", "exact", hashA, "-"}, []string{"put", "--namespace", "upto", hashA, "-"}
	kvtier(t, addr, "abcd", append(exact, "--block-bytes", "5")...).want(t, 1, "", `namespace "exact": block_bytes is "4", not "5"`)
	kvtier(t, addr, "abcd", append(upto, "--max-block-bytes", "4")...).want(t, 1, "", `namespace "upto": max_block_bytes is "8", not "4"`)
	kvtier(t, addr, "abc", append(exact, "--block-bytes", "4")...).want(t, 1, "", `payload of 3 bytes: namespace "exact" has blocks of exactly 4`)
	kvtier(t, addr, "abcd", append(exact, "--block-bytes", "4")...).want(t, 0, "stored "+hashA+", 4 bytes, g2\n", "")
	kvtier(t, addr, "abcd", append(upto, "--max-block-bytes", "8")...).want(t, 0, "stored "+hashA+", 4 bytes, g2\n", "")
}

// A put that cannot be makes no namespace, which would stay with a wrong size.
func TestPutMakesNoNamespaceInVain(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	kvtier(t, addr, "abcd", "put", "--namespace", "new", "--block-bytes", "40", hashA, "-").want(t, 1, "", "payload of 4 bytes")
	kvtier(t, addr, "", "ns", "--json").want(t, 0, "[]\n", "")
}

func TestUnknownNamespace(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	for _, args := range [][]string{
		{"get", "--namespace", "nope", hashA},
		{"match", "--namespace", "nope", hashA},
		{"locate", "--namespace", "nope", hashA},
		{"prefetch", "--namespace", "nope", hashA},
		{"ls", "--namespace", "nope"},
		{"rm", "--namespace", "nope", hashA},
		{"pin", "--namespace", "nope", hashA},
		{"unpin", "--namespace", "nope", hashA},
		{"rm", "--namespace", "nope", "--all", "--yes"},
		{"ns", "show", "nope"},
		{"watch", "--namespace", "nope"},
		{"replay", "--check-only", "--namespace", "nope", os.DevNull},
	} {
		kvtier(t, addr, "", args...).want(t, 1, "", "nope")
	}
}

func TestNoServer(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := lis.Addr().String()
	lis.Close()
	kvtier(t, addr, "", "stat").want(t, 1, "", addr)
	kvtier(t, "unix:"+filepath.Join(t.TempDir(), "none"), "", "stat").want(t, 1, "", "none")
	kvtier(t, "localhost", "", "stat").want(t, 2, "", `"localhost": want HOST:PORT`)
	kvtier(t, addr, "", "stat", "--timeout", "0s").want(t, 2, "", "--timeout 0s")
}

// A server that takes connections and never answers must not hang a client.
func TestSilentServer(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lis.Close() })
	addr := lis.Addr().String()
	kvtier(t, addr, "", "stat", "--timeout", "200ms").want(t, 1, "", addr)
}

func TestTokenAndTLS(t *testing.T) {
	dir := t.TempDir()
	cert, key := selfSigned(t, dir)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	addr, _ := startServer(t, memstore.New(nil), &api.ServerOptions{
		Token: "secret", TLS: &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13},
	})
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	addr = net.JoinHostPort("localhost", port) // the certificate's name
	token, wrong := filepath.Join(dir, "token"), filepath.Join(dir, "wrong")
	write(t, token, "secret\n")
	write(t, wrong, "guess\n")

	ns := []string{"ns", "--json"}
	kvtier(t, addr, "", append(ns, "--tls-ca", cert, "--token-file", token)...).want(t, 0, "[]\n", "")
	kvtier(t, addr, "", append(ns, "--tls-ca", cert, "--token-file", wrong)...).want(t, 1, "", "wrong bearer token")
	kvtier(t, addr, "", append(ns, "--tls-ca", cert)...).want(t, 1, "", "no bearer token")
	kvtier(t, addr, "", append(ns, "--tls", "--token-file", token)...).want(t, 1, "", "certificate")
	kvtier(t, addr, "", append(ns, "--tls-ca", key)...).want(t, 1, "", "no certificate in it")
	kvtier(t, addr, "", append(ns, "--tls-cert", cert)...).want(t, 2, "", "both or none")
	kvtier(t, addr, "", append(ns, "--token-file", token, "--timeout", "1s")...).want(t, 1, "", addr) // plain text
	t.Setenv(tokenEnv, "secret")
	kvtier(t, addr, "", append(ns, "--tls-ca", cert)...).want(t, 0, "[]\n", "")
}
