package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/api/session"
)

// TestServeLimits gives a daemon a list in which an identity may have one session. A
// second is refused; kvtier sessions and the metrics say so.
func TestServeLimits(t *testing.T) {
	args, data := serveArgs(t)
	list, token := filepath.Join(data, "access"), filepath.Join(data, "token")
	write(t, list, fmt.Sprintf(`{"identities": [{"name": "ops", "token_sha256": "%x", "read": ["*"], "write": ["*"], "max_sessions": 1, "max_leases": 5}]}`, sha256.Sum256([]byte("secret"))))
	write(t, token, "secret\n")
	d := startDaemon(t, append(args, "--access", list, "--metrics", "127.0.0.1:0")...)
	path := filepath.Join(data, "session.sock")
	o := &session.ClientOptions{Token: "secret"}
	c, err := session.Dial(t.Context(), "unix", path, o)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := session.Dial(t.Context(), "unix", path, o); !errors.Is(err, session.ErrBusy) || !strings.Contains(err.Error(), `identity "ops" has 1 sessions, at most 1`) {
		t.Errorf("a second session: error %v", err)
	}
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"sessions", "--json", "--server", d.addr, "--token-file", token}, nil, &stdout, &stderr); code != 0 {
		t.Fatalf("exit %d: %s", code, stderr.String())
	}
	var all []struct {
		Usage map[string]int `json:"identity_usage"`
	}
	if err := json.Unmarshal(stdout.Bytes(), &all); err != nil || len(all) != 1 {
		t.Fatalf("%s, error %v", stdout.String(), err)
	}
	want := map[string]int{"sessions": 1, "sessions_limit": 1, "sessions_refused": 1, "leases": 0, "leases_limit": 5, "leases_refused": 0}
	if got := all[0].Usage; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("usage %v, want %v", got, want)
	}
	said := regexp.MustCompile(`msg="metrics listen" address=(\S+)`).FindStringSubmatch(d.stderr.String())
	if said == nil {
		t.Fatalf("no metrics address in %s", d.stderr)
	}
	resp, err := http.Get("http://" + said[1] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if line := `kvtier_identity_sessions_refused_total{identity="ops"} 1`; err != nil || !strings.Contains(string(body), line) {
		t.Errorf("metrics without %q, error %v", line, err)
	}
}
