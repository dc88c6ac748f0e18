package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// TestAccess: a daemon that tells its clients apart. What a writer puts a reader gets,
// by gRPC and by sessions alike; neither does what the other may; a stranger gets
// nowhere; this user is known on the socket without a token; whoever may read is given
// the memory that he may; and only who may do everything administers.
func TestAccess(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	list := filepath.Join(dir, "access.json")
	sum := func(token string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(token))) }
	text := fmt.Sprintf(`{"identities": [
		{"name": "writer", "token_sha256": %q, "write": ["team-*"]},
		{"name": "reader", "token_sha256": %q, "read": ["team-*"]},
		{"name": "auditor", "token_sha256": %q, "read": ["*"]},
		{"name": "operator", "token_sha256": %q, "read": ["*"], "write": ["*"]},
		{"name": "me", "uid": %d, "read": ["*"], "write": ["*"]}]}`, sum("w"), sum("r"), sum("a"), sum("op"), os.Getuid())
	if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", "none", "--socket", socket, "--shared-memory", "on", "--access", list)
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o666 {
		t.Errorf("mode of the socket: %v, error %v", st.Mode(), err)
	}
	token := map[string]string{}
	for _, tok := range []string{"w", "r", "op", "x"} {
		token[tok] = filepath.Join(dir, tok)
		if err := os.WriteFile(token[tok], []byte(tok), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	as := func(tok string, args ...string) result {
		t.Helper()
		if tok != "" {
			args = append(args, "--token-file", token[tok])
		}
		return command(t, nil, append(args, "--server", d.addr)...)
	}
	denied := func(r result, words ...string) {
		t.Helper()
		if r.code != 1 || !strings.Contains(r.stderr, "denied") {
			t.Errorf("exit code %d, %s", r.code, r.stderr)
		}
		for _, w := range words {
			if !strings.Contains(r.stderr, w) {
				t.Errorf("%q is not in %s", w, r.stderr)
			}
		}
	}
	data := payload(1, 300_000)
	file := filepath.Join(dir, "block")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, way := range [][]string{nil, {"--inline"}} {
		hash := hashOf(i).Hex(hashBytes)
		put := append([]string{"put", hash, file, "--namespace", "team-a", "--block-bytes", "300000"}, way...)
		get := append([]string{"get", hash, "--namespace", "team-a"}, way...)
		if r := as("w", put...); r.code != 0 {
			t.Fatalf("the writer's put: %s", r.stderr)
		}
		if r := as("r", get...); r.code != 0 || r.stdout != string(data) {
			t.Errorf("the reader's get: %d bytes, %s", len(r.stdout), r.stderr)
		}
		denied(as("w", get...), `"writer"`, `"team-a"`, "read")
		denied(as("r", put...), `"reader"`, `"team-a"`, "write")
		denied(as("w", append([]string{"put", hash, file, "--namespace", "other", "--block-bytes", "300000"}, way...)...), `"writer"`, `"other"`)
		denied(as("x", get...))
		denied(as("", get...))
	}
	denied(as("r", "stat"), `"reader"`)
	denied(as("w", "sessions"), `"writer"`)
	if r := as("op", "stat"); r.code != 0 {
		t.Errorf("the operator's stat: %s", r.stderr)
	}
	if r := as("op", "get", hashOf(0).Hex(hashBytes), "--namespace", "team-a"); r.code != 0 || r.stdout != string(data) {
		t.Errorf("the operator's get: %s", r.stderr)
	}

	for _, tt := range []struct {
		network, token string
		shared         bool
		want           error
	}{
		{"unix", "", true, nil},
		{"unix", "op", true, nil},
		{"unix", "r", true, nil},
		{"unix", "a", true, nil},
		{"unix", "x", false, block.ErrDenied},
		{"tcp", "", false, block.ErrDenied},
		{"tcp", "r", false, nil},
	} {
		addr := socket
		if tt.network == "tcp" {
			client, err := api.Dial(timeout(t), d.addr, &api.ClientOptions{Token: "op"})
			if err != nil {
				t.Fatal(err)
			}
			info, err := client.Ping(timeout(t))
			if err := errors.Join(err, client.Close()); err != nil {
				t.Fatal(err)
			}
			addr = info.Sessions.Address
		}
		c, err := session.Dial(timeout(t), tt.network, addr, &session.ClientOptions{Token: tt.token})
		if !errors.Is(err, tt.want) {
			t.Errorf("%s with token %q: error %v, want %v", tt.network, tt.token, err, tt.want)
		}
		if err != nil {
			continue
		}
		if c.Shared() != tt.shared {
			t.Errorf("%s with token %q: shared %v, want %v", tt.network, tt.token, c.Shared(), tt.shared)
		}
		ns, err := c.Namespace(timeout(t), "team-a")
		if err != nil {
			t.Fatal(err)
		}
		into := make([]byte, len(data))
		res, err := c.Get(timeout(t), ns.Namespace, []session.GetItem{{Hash: hashOf(0), Into: into}}, block.GetOptions{})
		if err != nil || res[0].Reason != block.Hit || string(into) != string(data) {
			t.Errorf("%s with token %q: got %+v, error %v", tt.network, tt.token, res, err)
		}
		if inPlace := c.Stats().InPlace == 1; inPlace != tt.shared {
			t.Errorf("%s with token %q: copied in place %v", tt.network, tt.token, inPlace)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	d.stop(0)

	if err := os.WriteFile(list, []byte(`{"identities": [{"name": "a", "token_sha256": "12", "read": ["*"]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	r := command(t, nil, onLoopback("--data", filepath.Join(dir, "data"), "--nvme", "none", "--access", list)...)
	if r.code != 2 || !strings.Contains(r.stderr, "token_sha256: 1 bytes") || !strings.Contains(r.stderr, list) {
		t.Errorf("exit code %d, %s", r.code, r.stderr)
	}
}
