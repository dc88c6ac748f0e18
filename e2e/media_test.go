package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

func itoa(n int) string { return fmt.Sprint(n) }

// rot changes one byte of a file, in the middle of what must be found there once.
func rot(t *testing.T, path string, what []byte) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(data, what)
	if at < 0 || bytes.Contains(data[at+1:], what) {
		t.Fatalf("%s does not hold the block exactly once", path)
	}
	at += len(what) / 2
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{data[at] ^ 1}, int64(at)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestRot: a bit that flips on the medium is a miss with a reason, never a wrong
// byte, and verify names the block.
func TestRot(t *testing.T) {
	withoutRace(t)
	const bytesEach, blocks, bad = 20 << 10, 20, 7
	dir := t.TempDir()
	data, slab := filepath.Join(dir, "data"), filepath.Join(dir, "slab")
	d := serve(t, "--data", data, "--dram", "64MiB", "--nvme", slab+"=128MiB")
	c := dial(t, d)
	ns := open(t, c, "rot", bytesEach)
	put(t, c, ns, 0, blocks, bytesEach, block.G3)
	d.stop(0)
	if n := verify(t, data); n != blocks {
		t.Fatalf("%d blocks are committed, want %d", n, blocks)
	}

	rot(t, slab, payload(bad, bytesEach))
	name := hashOf(bad).Hex(hashBytes)
	r := command(t, nil, "verify", "--data", data)
	if r.code != 1 || !strings.Contains(r.stdout, name) || !strings.Contains(r.stdout, "1 bad") {
		t.Errorf("verify: exit code %d, %q, want 1 and the block %s", r.code, r.stdout, name)
	}

	d = serve(t, "--data", data, "--dram", "64MiB")
	r = command(t, nil, "get", "--server", d.addr, "--namespace", "rot", name)
	if r.code != 3 || r.stdout != "" || !strings.Contains(r.stderr, "corrupt") {
		t.Errorf("get of a rotten block: exit code %d, %d bytes, %q, want 3, none and the reason", r.code, len(r.stdout), r.stderr)
	}
	c = dial(t, d)
	ns = open(t, c, "rot", bytesEach)
	missed := get(timeout(t), t, c, ns, numbers(0, blocks), func(int) int { return bytesEach })
	if _, ok := missed[bad]; !ok || len(missed) != 1 {
		t.Errorf("missed %v, want block %d alone", missed, bad)
	}

	// It can be put again, and is right then.
	put(t, c, ns, bad, 1, bytesEach, block.G3)
	d.stop(0)
	if n := verify(t, data); n != blocks {
		t.Errorf("%d blocks are committed, want %d", n, blocks)
	}
}

// TestSlabRefused: a slab that is not what the data directory knows is refused
// with its name, and left as it is.
func TestSlabRefused(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	data, slab := filepath.Join(dir, "data"), filepath.Join(dir, "slab")
	args := []string{"--data", data, "--dram", "64MiB", "--nvme", slab + "=128MiB"}
	d := serve(t, args...)
	c := dial(t, d)
	ns := open(t, c, "slab", stopBytes)
	put(t, c, ns, 0, 50, stopBytes, block.G3)
	d.stop(0)

	refused := func(what string, wants ...string) {
		t.Helper()
		r := command(t, nil, append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
		if r.code != 1 || r.stdout != "" {
			t.Errorf("%s: exit code %d, printed %q, want 1 and nothing", what, r.code, r.stdout)
		}
		for _, want := range wants {
			if !strings.Contains(r.stderr, want) {
				t.Errorf("%s: %q does not name %s", what, r.stderr, want)
			}
		}
	}
	whole, err := os.ReadFile(slab)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(slab, 64<<20); err != nil {
		t.Fatal(err)
	}
	refused("a slab that was cut", slab, itoa(64<<20), itoa(128<<20))
	if err := os.Remove(slab); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(slab, bytes.Repeat([]byte("not a slab\n"), (128<<20)/11+1)[:128<<20], 0o600); err != nil {
		t.Fatal(err)
	}
	refused("a file of something else", slab)
	if data, err := os.ReadFile(slab); err != nil || !bytes.HasPrefix(data, []byte("not a slab\n")) {
		t.Errorf("the file of something else was changed (%v)", err)
	}

	// With the slab back, all is back.
	if err := os.WriteFile(slab, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	d = serve(t, args...)
	c = dial(t, d)
	ns = open(t, c, "slab", stopBytes)
	if missed := get(timeout(t), t, c, ns, numbers(0, 50), sameSize); len(missed) != 0 {
		t.Errorf("%d blocks are gone", len(missed))
	}
	d.stop(0)
}

// TestOneDaemon: one data directory has one daemon, and verify does not read
// below a running one.
func TestOneDaemon(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	d := serve(t, "--data", data, "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=128MiB")
	for _, args := range [][]string{
		{"serve", "--listen", "127.0.0.1:0", "--dram", "64MiB", "--data", data},
		{"verify", "--data", data},
	} {
		r := command(t, nil, args...)
		if r.code != 1 || r.stdout != "" || !strings.Contains(r.stderr, data) || !strings.Contains(r.stderr, "in use") {
			t.Errorf("%s beside a daemon: exit code %d, %q, want 1 and that %s is in use", args[0], r.code, r.stderr, data)
		}
	}
	must(t, "stat", "--server", d.addr)
	d.stop(0)
}
