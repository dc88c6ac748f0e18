package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// clientEnv makes the test's own program a client, which the tests stop and kill:
// what it is to do, and the daemon's address.
const clientEnv = "E2E_CLIENT"

// clientMain is that client. It says "there" in the middle of what it does, and
// stays there.
func clientMain(args string) int {
	what, addr, _ := strings.Cut(args, " ")
	if what == "session" {
		return workerMain(addr)
	}
	if what == "region" {
		return regionMain(addr)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := func() error {
		c, err := api.Dial(ctx, addr, nil)
		if err != nil {
			return err
		}
		ns, err := c.Namespace(ctx, "peer")
		if err != nil {
			return err
		}
		ns.HashLen = hashBytes
		switch what {
		case "put":
			_, err = c.PutFrom(ctx, ns, api.PutItem{Hash: hashOf(peersBlock)}, largestBlock, &stuckReader{bytes.NewReader(payload(peersBlock, 280<<10))}, api.PutOptions{})
			return err
		case "get":
			var hashes []block.Hash
			var want []block.Wanted
			for _, i := range numbers(0, peersBlocks) {
				hashes = append(hashes, hashOf(i))
				want = append(want, block.Wanted{Hash: hashOf(i)})
			}
			m, err := c.Match(ctx, ns, hashes, block.MatchOptions{Lease: time.Hour})
			if err != nil || m.Prefix != peersBlocks {
				return fmt.Errorf("match: prefix %d, %w", m.Prefix, err)
			}
			return c.Get(ctx, ns, want, block.GetOptions{}, func(int, block.Payload) error {
				there()
				select {}
			})
		}
		return fmt.Errorf("client: %q", args)
	}()
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func there() { fmt.Println("there") }

// stuckReader gives a part of a block and then nothing.
type stuckReader struct{ r io.Reader }

func (s *stuckReader) Read(p []byte) (int, error) {
	if n, _ := s.r.Read(p); n > 0 {
		return n, nil
	}
	there()
	select {}
}

const (
	peersBlock  = 1_000_000
	peersBlocks = 200
)

// peer starts a client and stops it in the middle of what it does, when begun
// says that the daemon has come that far too.
func peer(t *testing.T, d *daemon, what string, begun func() bool) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{clientEnv + "=" + what + " " + d.addr}
	p := startCommand(t, cmd)
	select {
	case <-p.stdout.mu.line:
	case <-p.exited:
		t.Fatalf("the client's %s ended:\n%s", what, p.stderr)
	case <-time.After(patience):
		t.Fatalf("the client's %s has not begun:\n%s", what, p.stderr)
	}
	until(t, "the client's "+what+" has begun", begun)
	if err := p.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	until(t, "the client is stopped", p.isStopped)
	return p
}

// isStopped reports whether a process has been stopped.
func (p *process) isStopped() bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(p.cmd.Process.Pid) + "/stat")
	return err == nil && strings.Contains(string(stat), ") T ")
}

// TestStalledClients: clients that stand still in the middle of a put and of a
// get under a lease hurt nobody else, and what they hold ends with them.
func TestStalledClients(t *testing.T) {
	dir := t.TempDir()
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", filepath.Join(dir, "slab")+"=512MiB")
	c, err := api.Dial(timeout(t), d.addr, &api.ClientOptions{NoGrants: true}) // it counts what others hold
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // its daemon may be gone
	ns := open(t, c, "peer", largestBlock)
	put(t, c, ns, 0, peersBlocks, stopBytes, block.G2)
	held := func() (leases, reservations int64) {
		s, err := c.Stats(timeout(t))
		if err != nil {
			t.Fatal(err)
		}
		return s.Leases, s.Reservations
	}
	getter := peer(t, d, "get", func() bool { l, _ := held(); return l == 1 })
	putter := peer(t, d, "put", func() bool { _, r := held(); return r == 1 })

	// Others go on: more than fits into DRAM, and their calls keep their deadlines.
	for first := 1000; first < 3000; first += 100 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		var items []api.PutItem
		for _, i := range numbers(first, 100) {
			items = append(items, api.PutItem{Hash: hashOf(i), Data: payload(i, stopBytes)})
		}
		res, err := c.Put(ctx, ns, items, api.PutOptions{})
		for _, one := range res {
			if one.Err != nil {
				err = one.Err
			}
		}
		if err != nil {
			t.Fatalf("put beside stalled clients: %v", err)
		}
		if missed := get(ctx, t, c, ns, numbers(first, 100), sameSize); len(missed) != 0 {
			t.Fatalf("beside stalled clients %d of 100 blocks are missed: %v", len(missed), missed)
		}
		cancel()
	}
	// What is leased is where it was.
	hashes := make([]block.Hash, peersBlocks)
	for i := range hashes {
		hashes[i] = hashOf(i)
	}
	m, err := c.Match(timeout(t), ns, hashes, block.MatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range m.Blocks {
		if f.State != block.Resident || f.Tier != block.G2 {
			t.Fatalf("leased block %d is %v in %v", i, f.State, f.Tier)
		}
	}
	if l, r := held(); l != 1 || r != 1 {
		t.Errorf("%d leases and %d reservations are held, want one of each", l, r)
	}

	getter.kill()
	putter.kill()
	until(t, "what the clients held is free", func() bool { l, r := held(); return l == 0 && r == 0 })
	if missed := get(timeout(t), t, c, ns, []int{peersBlock}, sameSize); missed[peersBlock] != block.MissAbsent {
		t.Errorf("the block that was half put: miss %v, want %v", missed, block.MissAbsent)
	}
	d.stop(0)
}
