package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// serveArgs are those of a daemon for the tests of sessions, with a data directory
// whose path is short enough for a socket.
func serveArgs(t *testing.T, more ...string) (args []string, data string) {
	t.Helper()
	data, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(data); err != nil {
			t.Error(err)
		}
	})
	return append([]string{"--data", data, "--listen", "127.0.0.1:0", "--dram", "64MiB", "--nvme", "none"}, more...), data
}

// A daemon serves sessions on a port and on a socket that only its user may open, says
// over gRPC where, and takes both away when it stops.
func TestServeSessions(t *testing.T) {
	for _, tc := range []struct{ shared, way string }{{"on", api.WayShared}, {"off", api.WayUnix}} {
		t.Run(tc.shared, func(t *testing.T) {
			args, data := serveArgs(t, "--shared-memory", tc.shared)
			d := startDaemon(t, args...)
			path := filepath.Join(data, "session.sock")
			st, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if st.Mode() != fs.ModeSocket|0o600 {
				t.Errorf("mode of the socket: %v", st.Mode())
			}
			s, err := session.Dial(t.Context(), "unix", path, nil)
			if err != nil {
				t.Fatal(err)
			}
			// Of the quarter of 64 MiB that all may have.
			if w := s.Welcome(); w.GrantBytes != 2<<20 {
				t.Errorf("a session may hold places of %d bytes", w.GrantBytes)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			r := kvtier(t, d.addr, "", "ns", "open", "told", "--block-bytes", "4KiB", "--json")
			var told namespaceOutput
			if err := json.Unmarshal([]byte(r.stdout), &told); err != nil {
				t.Fatalf("%+v: %v", r, err)
			}
			if told.SessionSocket != path || !strings.HasPrefix(told.SessionAddress, "127.0.0.1:") || told.SessionAddress == "127.0.0.1:0" {
				t.Errorf("ns open tells of sessions at %q and %q", told.SessionAddress, told.SessionSocket)
			}
			c := dial(t, d.addr, nil)
			ns := openTestNamespace(t, c)
			putBlocks(t, c, 4, block.G2)
			if i := c.SessionInfo(); i.Way != tc.way || i.Peer != "unix "+path {
				t.Errorf("blocks moved by %+v", i)
			}
			// Without the socket clients take the port.
			if err := os.Rename(path, path+".gone"); err != nil {
				t.Fatal(err)
			}
			c = dial(t, d.addr, nil)
			if _, err := c.Match(t.Context(), ns, []block.Hash{testHash(0)}, block.MatchOptions{}); err != nil {
				t.Fatal(err)
			}
			if i := c.SessionInfo(); i.Way != api.WayTCP || !strings.HasPrefix(i.Peer, "tcp 127.0.0.1:") {
				t.Errorf("without the socket blocks moved by %+v", i)
			}
			if err := os.Rename(path+".gone", path); err != nil {
				t.Fatal(err)
			}
			d.wait(t, 0)
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
}

// A default path that is too long is no reason not to serve.
func TestServeWithoutSocket(t *testing.T) {
	args, data := serveArgs(t)
	long := filepath.Join(data, strings.Repeat("d", 100))
	d := startDaemon(t, append(args, "--data", long)...)
	c := dial(t, d.addr, nil)
	openTestNamespace(t, c)
	putBlocks(t, c, 1, block.G2)
	if i := c.SessionInfo(); i.Way != api.WayTCP {
		t.Errorf("blocks moved by %+v", i)
	}
	d.wait(t, 0)
	if !strings.Contains(d.stderr.String(), "no socket for sessions") {
		t.Errorf("no warning in %s", d.stderr)
	}
}

// TLS and the token apply to sessions over TCP, the token to those over the socket.
func TestServeSessionsSecured(t *testing.T) {
	args, data := serveArgs(t)
	cert, key := selfSigned(t, data)
	write(t, filepath.Join(data, "token"), "secret\n")
	d := startDaemon(t, append(args, "--tls-cert", cert, "--tls-key", key, "--token-file", filepath.Join(data, "token"))...)
	f := clientFlags{server: d.addr, tlsCA: cert, tokenFile: filepath.Join(data, "token"), timeout: time.Minute}
	o, err := f.options(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(data, "session.sock")
	if _, err := session.Dial(t.Context(), "unix", path, nil); !errors.Is(err, block.ErrDenied) {
		t.Errorf("the socket without a token: %v", err)
	}
	for _, want := range []string{"unix " + path, "tcp "} {
		c := dial(t, d.addr, o)
		openTestNamespace(t, c)
		putBlocks(t, c, 1, block.G2)
		i := c.SessionInfo()
		if !strings.HasPrefix(i.Peer, want) {
			t.Errorf("blocks moved by %+v, want %s", i, want)
		}
		if addr, ok := strings.CutPrefix(i.Peer, "tcp "); ok {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			if _, err := session.Dial(ctx, "tcp", addr, &session.ClientOptions{Token: "secret"}); err == nil {
				t.Error("the port takes a session without TLS")
			}
			cancel()
			if _, err := session.Dial(t.Context(), "tcp", addr, &session.ClientOptions{TLS: o.TLS}); !errors.Is(err, block.ErrDenied) {
				t.Errorf("the port without a token: %v", err)
			}
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	d.wait(t, 0)
}

// The trace gives the same hits through sessions as through gRPC, and no wrong byte.
func TestReplayThroughSessions(t *testing.T) {
	reports := map[string]replayReport{}
	for _, tc := range []struct {
		way  string
		args []string
	}{{api.WayGRPC, []string{"--inline"}}, {api.WayShared, nil}, {api.WayShared, []string{"--clients", "8"}}} {
		args, _ := serveArgs(t, "--shared-memory", "on", "--dram", "256MiB")
		d := startDaemon(t, args...)
		var rep replayReport
		r := kvtier(t, d.addr, "", append([]string{"replay", "testdata/conversation_small.jsonl.gz", "--block-bytes", "16KiB", "--verify", "--json"}, tc.args...)...)
		if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil || r.code != 0 {
			t.Fatalf("%+v: %v", r, err)
		}
		d.wait(t, 0)
		if rep.Way != tc.way || rep.WrongBytes != 0 || rep.Errors != 0 || rep.Hits == 0 || rep.BytesGot == 0 {
			t.Errorf("%v: %+v", tc.args, rep)
		}
		if rep.Clients == 1 {
			reports[rep.Way] = rep
		}
	}
	a, b := reports[api.WayGRPC], reports[api.WayShared]
	if a.HitRate != b.HitRate || a.PrefixHitRate != b.PrefixHitRate || a.BytesPut != b.BytesPut || a.BytesGot != b.BytesGot || a.Puts != b.Puts {
		t.Errorf("through gRPC\n%+v\nthrough a session\n%+v", a, b)
	}
}
