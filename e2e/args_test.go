package e2e

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBadArguments: what cannot be accepted is refused before anything is done,
// on standard error, with the field and the value.
func TestBadArguments(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	// An address where nobody listens: it was free a moment ago.
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	d := serve(t, "--data", data, "--dram", "64MiB", "--nvme", "none")

	file := write("file", "text")
	unknown := write("unknown.yaml", "dram: 64MiB\ndramm: 1\nlow: 0.5\nlisten_on: x\n")
	broken := write("broken.jsonl", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}`+"\n{nonsense\n")
	const hash = "0123456789abcdef"
	long := strings.Repeat("long", 30)
	serveArgs := func(args ...string) []string {
		return append([]string{"serve", "--data", filepath.Join(dir, "new"), "--listen", "127.0.0.1:0", "--dram", "64MiB"}, args...)
	}
	toServer := func(args ...string) []string { return append(args, "--server", d.addr) }

	for _, tt := range []struct {
		name  string
		args  []string
		code  int
		wants []string // in standard error
	}{
		{"unknown command", []string{"swim"}, 2, []string{"swim"}},
		{"unknown flag", []string{"serve", "--dramm", "1"}, 2, []string{"dramm"}},
		{"size", serveArgs("--dram", "64MB!"), 2, []string{"--dram", "64MB!"}},
		{"small dram", serveArgs("--dram", "1MiB"), 2, []string{"--dram", "1MiB"}},
		{"watermarks", serveArgs("--high", "0.5", "--low", "0.6"), 2, []string{"0.5", "0.6"}},
		{"share", serveArgs("--high", "1.5"), 2, []string{"--high", "1.5"}},
		{"policy", serveArgs("--policy", "best"), 2, []string{"--policy", "best", "lru-leaf"}},
		{"slab without size", serveArgs("--nvme", "slab"), 2, []string{"--nvme", "slab"}},
		{"slab too small", serveArgs("--nvme", filepath.Join(dir, "tiny")+"=64KiB"), 1, []string{"tiny", "65536"}},
		{"none and a slab", serveArgs("--nvme", "none", "--nvme", "x=1GiB"), 2, []string{"none"}},
		{"address", serveArgs("--listen", "nowhere"), 2, []string{"--listen", "nowhere"}},
		{"open to others", serveArgs("--listen", "0.0.0.0:0"), 2, []string{"0.0.0.0:0", "--insecure"}},
		{"sessions open to others", serveArgs("--xfer", "0.0.0.0:0"), 2, []string{"--xfer", "0.0.0.0:0", "--insecure"}},
		{"sessions on a socket's address", serveArgs("--xfer", "unix:"+file), 2, []string{"--xfer", file}},
		{"sessions' address taken", serveArgs("--xfer", taken.Addr().String()), 1, []string{"--xfer", taken.Addr().String(), "in use"}},
		{"long socket", serveArgs("--socket", filepath.Join(dir, long)), 2, []string{"--socket", long, "107"}},
		{"socket is a file", serveArgs("--nvme", "none", "--socket", file), 1, []string{"--socket", file, "not a socket"}},
		{"address taken", serveArgs("--listen", taken.Addr().String()), 1, []string{taken.Addr().String(), "in use"}},
		{"data is a file", []string{"serve", "--listen", "127.0.0.1:0", "--dram", "64MiB", "--nvme", "none", "--data", file}, 1, []string{file}},
		{"config with unknown keys", serveArgs("--config", unknown), 2, []string{unknown, "dramm", "listen_on"}},
		{"no config", serveArgs("--config", filepath.Join(dir, "absent.yaml")), 2, []string{"absent.yaml"}},

		{"nobody listens", []string{"stat", "--server", nobody, "--timeout", "5s"}, 1, []string{nobody}},
		{"server", []string{"stat", "--server", "nowhere"}, 2, []string{"--server", "nowhere"}},
		{"hash of an odd length", toServer("get", "0123456789", "--namespace", "n"), 2, []string{"0123456789", "8, 16, 20 or 32"}},
		{"hash not in hex", toServer("get", "xyz", "--namespace", "n"), 2, []string{"xyz"}},
		{"range", toServer("get", hash, "--namespace", "n", "--range", "5"), 2, []string{"5", "OFF:LEN"}},
		{"no namespace", toServer("get", hash), 2, []string{"namespace"}},
		{"bad namespace", toServer("put", hash, file, "--namespace", "a/b", "--block-bytes", "4"), 2, []string{"a/b"}},
		{"block too large", toServer("put", hash, file, "--namespace", "n", "--block-bytes", "9MiB"), 2, []string{"9437184"}},
		{"block of another size", toServer("put", hash, file, "--namespace", "n", "--block-bytes", "5"), 1, []string{"4 bytes", "5"}},
		{"no file", toServer("put", hash, filepath.Join(dir, "absent"), "--namespace", "n", "--block-bytes", "4"), 1, []string{"absent"}},
		{"tier", toServer("put", hash, file, "--namespace", "n", "--block-bytes", "4", "--durable", "g9"), 2, []string{"g9"}},

		{"no trace", toServer("replay", filepath.Join(dir, "absent.jsonl"), "--block-bytes", "4KiB"), 1, []string{"absent.jsonl"}},
		{"broken trace", toServer("replay", broken, "--block-bytes", "4KiB"), 1, []string{broken, "line 2"}},
		{"broken trace, simulated", []string{"sim", broken, "--capacity", "10"}, 1, []string{broken, "line 2"}},
		{"no block size", toServer("replay", smallTrace), 2, []string{"block"}},
		{"limit", toServer("replay", smallTrace, "--block-bytes", "4KiB", "--limit", "-1"), 2, []string{"--limit", "-1"}},
		{"capacity", []string{"sim", smallTrace, "--capacity", "much"}, 2, []string{"much"}},

		{"verify nothing", []string{"verify", "--data", filepath.Join(dir, "absent")}, 1, []string{"absent"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := command(t, nil, tt.args...)
			if r.code != tt.code {
				t.Errorf("exit code %d, want %d", r.code, tt.code)
			}
			for _, want := range tt.wants {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("the message does not name %q", want)
				}
			}
			if !strings.HasPrefix(r.stderr, "kvtier: ") && !strings.Contains(r.stderr, "\nkvtier: ") {
				t.Error("there is no message")
			}
			if t.Failed() {
				t.Logf("kvtier %s\nstandard error: %s", strings.Join(tt.args, " "), r.stderr)
			}
		})
	}
	d.stop(0)
}
