package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCommands walks through what a shell script would do.
func TestCommands(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "socket")
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=128MiB", "--listen", "unix:"+socket)
	// with adds the flags that every command here has.
	with := func(args ...string) []string {
		return append(args, "--server", d.addr, "--namespace", "shell")
	}
	const bytesEach = 10_000
	file := filepath.Join(dir, "block")
	one, two, three := payload(1, bytesEach), payload(2, bytesEach), payload(3, bytesEach)
	if err := os.WriteFile(file, one, 0o600); err != nil {
		t.Fatal(err)
	}
	const h1, h2, h3, h4 = "00000000000000000000000000000001", "00000000000000000000000000000002", "00000000000000000000000000000003", "00000000000000000000000000000004"

	for _, tt := range []struct {
		name   string
		args   []string
		stdin  []byte
		code   int
		stdout string // exactly
		stderr string // a part of it
	}{
		{"put a file", with("put", h1, file, "--block-bytes", "10000", "--durable", "g3"), nil, 0, "stored " + h1 + ", 10000 bytes, g3\n", ""},
		{"put it again", with("put", h1, file, "--block-bytes", "10000", "--durable", "g3"), nil, 0, "exists " + h1 + ", 10000 bytes, g3\n", ""},
		{"put standard input", with("put", h2, "-", "--block-bytes", "10000", "--parent", h1), two, 0, "stored " + h2 + ", 10000 bytes, g2\n", ""},
		{"put other bytes", with("put", h1, "-", "--block-bytes", "10000"), three, 1, "", "conflict"},
		{"put a block of another size", with("put", h3, "-", "--block-bytes", "10000"), three[1:], 1, "", "9999"},
		{"put into a changed namespace", with("put", h3, "-", "--block-bytes", "9999"), three[1:], 1, "", "block_bytes"},
		{"put with a hash of another length", with("put", "0000000000000003", "-", "--block-bytes", "10000"), three, 1, "", "8 bytes"},
		{"get", with("get", h1), nil, 0, string(one), ""},
		{"get from the socket", []string{"get", h2, "--server", "unix:" + socket, "--namespace", "shell"}, nil, 0, string(two), ""},
		{"get a range", with("get", h1, "--range", "100:50"), nil, 0, string(one[100:150]), ""},
		{"get to the end", with("get", h1, "--range", "9990:"), nil, 0, string(one[9990:]), ""},
		{"get past the end", with("get", h1, "--range", "9990:11"), nil, 1, "", "9990"},
		{"get into a file", with("get", h2, "-o", file), nil, 0, "", ""},
		{"miss", with("get", h4), nil, 3, "", "absent"},
		{"get of an unknown namespace", []string{"get", h1, "--server", d.addr, "--namespace", "nobody"}, nil, 1, "", "nobody"},
		{"rm", with("rm", h2, h4), nil, 0, "deleted 1 of 2\n", ""},
		{"get what was removed", with("get", h2), nil, 3, "", "absent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := command(t, strings.NewReader(string(tt.stdin)), tt.args...)
			if r.code != tt.code {
				t.Errorf("exit code %d, want %d: %s", r.code, tt.code, r.stderr)
			}
			if r.stdout != tt.stdout {
				t.Errorf("printed %d bytes %.200q, want %d bytes %.200q", len(r.stdout), r.stdout, len(tt.stdout), tt.stdout)
			}
			if !strings.Contains(r.stderr, tt.stderr) {
				t.Errorf("standard error is %q, want %q in it", r.stderr, tt.stderr)
			}
		})
	}
	if data, err := os.ReadFile(file); err != nil || string(data) != string(two) {
		t.Errorf("get -o wrote %d bytes (%v), want the block", len(data), err)
	}

	var match struct {
		Prefix int
		Blocks []struct {
			Hash, State, Tier string
			Bytes             int
		}
	}
	decode(t, must(t, with("match", "--all", "--json", h1, h2, h3)...), &match)
	if match.Prefix != 1 || len(match.Blocks) != 3 || match.Blocks[0].State != "resident" || match.Blocks[0].Bytes != bytesEach || match.Blocks[1].State != "absent" {
		t.Errorf("match: %+v", match)
	}

	// Whatever prints has --json, and prints JSON then.
	for _, args := range [][]string{
		with("put", h3, file, "--block-bytes", "10000"), with("get", h1, "-o", file), with("match", h1), with("locate", h1),
		with("prefetch", h1), with("rm", h3),
		{"ns", "--server", d.addr},
		{"stat", "--server", d.addr},
		{"version"},
	} {
		out := must(t, append(args, "--json")...)
		dec := json.NewDecoder(strings.NewReader(out))
		var n int
		for dec.More() {
			if err := dec.Decode(new(any)); err != nil {
				t.Errorf("%s --json: %v: %q", args[0], err, out)
				break
			}
			n++
		}
		if n == 0 {
			t.Errorf("%s --json printed no JSON: %q", args[0], out)
		}
	}
	d.stop(0)
}
