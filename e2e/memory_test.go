package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// memoryCgroup makes a cgroup, of version 2 or 1, whose processes may take limit
// bytes of memory together.
func memoryCgroup(t *testing.T, limit int64) (dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "cgroups need it")
	}
	root, file := "/sys/fs/cgroup", "memory.max"
	if _, err := os.Stat(filepath.Join(root, "memory", "memory.limit_in_bytes")); err == nil {
		root, file = filepath.Join(root, "memory"), "memory.limit_in_bytes"
	}
	dir, err := os.MkdirTemp(root, "kvtier-e2e-")
	if err != nil {
		servers.Missing(t, "cgroup", err)
	}
	t.Cleanup(func() {
		// A process that was killed may be in it for a moment.
		until(t, "the cgroup is empty", func() bool { return os.Remove(dir) == nil })
	})
	if err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.FormatInt(limit, 10)), 0o600); err != nil {
		servers.Missing(t, "cgroup", errors.Join(err, errors.New("no memory controller")))
	}
	return dir
}

// inCgroup is kvtier with args in a cgroup from its first instruction on.
func inCgroup(dir string, args ...string) *exec.Cmd {
	return exec.Command("sh", append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, dir, kvtier}, args...)...)
}

// TestMemoryLimit: in a small container the daemon takes a part of what it may
// take, or says that this is too little; and it is not killed when it works.
func TestMemoryLimit(t *testing.T) {
	withoutRace(t)
	t.Run("default", func(t *testing.T) {
		const limit = 512 << 20
		cg := memoryCgroup(t, limit)
		dir := t.TempDir()
		data := filepath.Join(dir, "data")
		d := mustReady(startCommand(t, inCgroup(cg, onLoopback("--data", data, "--nvme", filepath.Join(dir, "slab")+"=1GiB")...)))
		c := dial(t, d)
		if n := tierStats(t, c, block.G2).Capacity; n > limit/4 || n < limit/8 {
			t.Errorf("g2 has %d bytes, want about a quarter of the cgroup's %d", n, limit)
		}
		ns := open(t, c, "limit", 1<<20)
		// More than the limit goes through it, both ways.
		const blocks = 700
		put(t, c, ns, 0, blocks, 1<<20, block.G3)
		if missed := get(timeout(t), t, c, ns, numbers(0, blocks), func(int) int { return 1 << 20 }); len(missed) != 0 {
			t.Errorf("%d of %d blocks are missed", len(missed), blocks)
		}
		d.stop(0)
		if verify(t, data) != blocks {
			t.Errorf("not all of %d blocks are committed", blocks)
		}
	})
	refused := func(t *testing.T, p *process, code int, wants ...string) {
		t.Helper()
		if d, ok := p.ready(); ok {
			d.kill()
			t.Fatalf("%s is ready, want it refused", p)
		}
		if got := p.cmd.ProcessState.ExitCode(); got != code {
			t.Errorf("exit code %d, want %d", got, code)
		}
		for _, want := range wants {
			if !strings.Contains(p.stderr.String(), want) {
				t.Errorf("%q does not name %q", p.stderr, want)
			}
		}
	}
	t.Run("too little to choose from", func(t *testing.T) {
		cg := memoryCgroup(t, 128<<20)
		refused(t, startCommand(t, inCgroup(cg, onLoopback("--data", filepath.Join(t.TempDir(), "data"), "--nvme", "none")...)), 1, "--dram", "128.0 MiB")
	})
	t.Run("more than there is", func(t *testing.T) {
		cg := memoryCgroup(t, 256<<20)
		refused(t, startCommand(t, inCgroup(cg, onLoopback("--data", filepath.Join(t.TempDir(), "data"), "--nvme", "none", "--dram", "300MiB")...)), 2, "--dram", "300MiB", "256.0 MiB")
	})
	t.Run("address space", func(t *testing.T) {
		// No privilege is needed for this one, and nothing tells the daemon before
		// it asks for the memory.
		cmd := exec.Command("sh", append([]string{"-c", `ulimit -v 2000000 && exec "$0" "$@"`, kvtier}, onLoopback("--data", filepath.Join(t.TempDir(), "data"), "--nvme", "none", "--dram", "3GiB")...)...)
		refused(t, startCommand(t, cmd), 1, "3221225472", "cannot allocate memory")
	})
}
