package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// The blocks of the tests of sessions. All clients put the same bytes under a hash,
// so that whoever reads knows what it must be.
const (
	crowdBlocks  = 400
	crowdLargest = 1 << 20
)

// crowdBytes is how long block i is: of one frame and of several, on both sides of
// where places change their size.
func crowdBytes(i int) int {
	sizes := [...]int{4096, 64 << 10, crowdLargest, 100_001, 256 << 10, 300<<10 + 1}
	return sizes[i%len(sizes)]
}

// The ways of a session.
var sessionWays = []string{"tcp", "unix", "shared"}

// workerLease is longer than any worker lives.
const workerLease = 10 * time.Minute

// worker is a client that the tests stop and kill. It has nothing but a session.
type worker struct {
	c      *session.Client
	ns     session.Namespace
	r      *rand.Rand
	blocks map[int][]byte // that it has put, since they take time to make
	leases []uint64
	into   []byte
}

// workerArgs is what makes the test's own program a worker.
func workerArgs(way, address, name string, ns block.Namespace, seed uint64) string {
	return fmt.Sprintf("session %s %s %s %d %d", way, address, name, ns.ID, seed)
}

// workerMain works over one session after another. It ends when something is wrong.
func workerMain(args string) int {
	err := func() error {
		var way, address, name string
		var seed uint64
		w := worker{ns: session.Namespace{HashLen: hashBytes}, blocks: map[int][]byte{}, into: make([]byte, 4*crowdLargest)}
		if _, err := fmt.Sscan(args, &way, &address, &name, &w.ns.ID, &seed); err != nil {
			return err
		}
		w.r = rand.New(rand.NewPCG(seed, 0))
		network := "unix"
		if way == "tcp" {
			network = way
		}
		ctx, cancel := context.WithTimeout(context.Background(), workerLease)
		defer cancel()
		for {
			var err error
			w.c, err = session.Dial(ctx, network, address, &session.ClientOptions{Name: name, NoShared: way == "unix"})
			if err != nil {
				return err
			}
			if w.c.Shared() != (way == "shared") {
				return fmt.Errorf("way %s: the store's memory is shared: %v", way, w.c.Shared())
			}
			w.leases = nil
			there()
			for err == nil {
				err = w.step(ctx)
			}
			if cerr := w.c.Close(); cerr != nil {
				return cerr
			}
			if !errors.Is(err, block.ErrDisconnected) {
				return err
			}
		}
	}()
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func (w *worker) step(ctx context.Context) error {
	var blocks []int
	for range 1 + w.r.IntN(4) {
		blocks = append(blocks, w.r.IntN(crowdBlocks))
	}
	switch n := w.r.IntN(100); {
	case n < 50:
		return w.put(ctx, blocks)
	case n < 90:
		return w.get(ctx, blocks)
	default:
		return w.lease(ctx, blocks)
	}
}

func (w *worker) put(ctx context.Context, blocks []int) error {
	var items []session.PutBlock
	for _, i := range blocks {
		if w.blocks[i] == nil {
			w.blocks[i] = payload(i, crowdBytes(i))
		}
		items = append(items, session.PutBlock{Hash: hashOf(i), Bytes: w.blocks[i]})
	}
	o := session.PutOptions{}
	if w.r.IntN(4) == 0 {
		o.Durable = block.G3
	}
	res, err := w.c.Put(ctx, w.ns, items, o)
	if err != nil {
		return err
	}
	for k, r := range res {
		switch {
		case r.Err == nil:
		case errors.Is(r.Err, block.ErrNoSpace): // others hold it
		case o.Durable == block.G3 && errors.Is(r.Err, block.ErrNotFound): // another deleted it on its way down
		default:
			return fmt.Errorf("put block %d: %w", blocks[k], r.Err)
		}
	}
	return nil
}

func (w *worker) get(ctx context.Context, blocks []int) error {
	items := make([]session.GetItem, len(blocks))
	for k, i := range blocks {
		items[k] = session.GetItem{Hash: hashOf(i), Into: w.into[k*crowdLargest:][:crowdLargest:crowdLargest]}
	}
	res, err := w.c.Get(ctx, w.ns, items, block.GetOptions{NoPromote: w.r.IntN(4) == 0})
	if err != nil {
		return err
	}
	for k, r := range res {
		i := blocks[k]
		switch {
		case r.Err != nil:
			return fmt.Errorf("get block %d: %w", i, r.Err)
		case r.Reason != block.Hit:
			// One that wakes late may see, and say, that what it was lent is gone.
		case !bytes.Equal(items[k].Into[:r.Len], payload(i, crowdBytes(i))):
			return fmt.Errorf("get block %d: %d wrong bytes", i, r.Len)
		}
	}
	return nil
}

// lease leases blocks, and gives back the oldest of several leases.
func (w *worker) lease(ctx context.Context, blocks []int) error {
	var hashes []byte
	for _, i := range blocks {
		h := hashOf(i)
		hashes = append(hashes, h[:hashBytes]...)
	}
	var m block.MatchResult
	if err := w.c.Match(ctx, w.ns, hashes, block.MatchOptions{All: true, Lease: workerLease}, &m); err != nil {
		return err
	}
	if m.Lease.ID != 0 {
		w.leases = append(w.leases, m.Lease.ID)
	}
	if len(w.leases) < 4 {
		return nil
	}
	first := w.leases[0]
	w.leases = w.leases[1:]
	return w.c.Release(ctx, first)
}

// startWorker starts a worker, and waits until it has a session.
func startWorker(t *testing.T, d *daemon, way, name string, ns block.Namespace, seed uint64) *process {
	t.Helper()
	network := "unix"
	if way == "tcp" {
		network = way
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{clientEnv + "=" + workerArgs(way, sessionAddr(t, d, network), name, ns, seed)}
	p := startCommand(t, cmd)
	select {
	case <-p.stdout.mu.line:
	case <-p.exited:
		t.Fatalf("worker %s ended:\n%s", name, p.stderr)
	case <-time.After(patience):
		t.Fatalf("worker %s has not begun:\n%s", name, p.stderr)
	}
	return p
}

// working fails the test when a worker has ended by itself.
func working(t *testing.T, p *process, name string) {
	t.Helper()
	select {
	case <-p.exited:
		t.Fatalf("worker %s ended by itself: %v:\n%s", name, p.cmd.ProcessState, p.stderr)
	default:
	}
}

var sessionsListen = regexp.MustCompile(`msg="sessions listen" network=(\S+) address=(\S+)`)

// sessionAddr is where a daemon serves sessions over "tcp" or "unix".
func sessionAddr(t *testing.T, d *daemon, network string) (addr string) {
	t.Helper()
	until(t, "the daemon says where it serves sessions", func() bool {
		for _, m := range sessionsListen.FindAllStringSubmatch(d.stderr.String(), -1) {
			if m[1] == network {
				addr = m[2]
			}
		}
		return addr != ""
	})
	return addr
}

// logged counts the lines of a daemon's log in which all of parts are.
func logged(d *daemon, parts ...string) (n int) {
next:
	for line := range strings.Lines(d.stderr.String()) {
		for _, p := range parts {
			if !strings.Contains(line, p) {
				continue next
			}
		}
		n++
	}
	return n
}

// sessionsBegun counts the sessions of clients of a name, by the log of a daemon that
// has --log-level debug.
func sessionsBegun(d *daemon, name string) int {
	return logged(d, `msg="session begins"`, "client="+name+" ")
}

// sessionsEnded counts those that have ended.
func sessionsEnded(d *daemon, name string) int {
	return logged(d, `msg="session ends"`, "client="+name+" ") + logged(d, `msg="session is broken off"`, "client="+name+" ")
}
