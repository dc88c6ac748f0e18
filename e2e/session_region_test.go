package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// regionWorker is a client that has its blocks in a region. It gets into the first
// half, and puts from the second.
type regionWorker struct {
	c    *session.Client
	ns   session.Namespace
	r    *rand.Rand
	file *os.File
	mem  []byte
	cut  atomic.Bool // the file was cut short: what is in it means nothing
}

const regionHalf = 4 * crowdLargest

// regionMain works over one session after another, each with a region of its own,
// which it cuts short in the end when it is told to. It ends when something is wrong.
func regionMain(args string) int {
	err := func() error {
		var way, address, name string
		var seed uint64
		ns := session.Namespace{HashLen: hashBytes}
		if _, err := fmt.Sscan(args, &way, &address, &name, &ns.ID, &seed); err != nil {
			return err
		}
		r := rand.New(rand.NewPCG(seed, 0))
		ctx, cancel := context.WithTimeout(context.Background(), workerLease)
		defer cancel()
		for {
			w := regionWorker{ns: ns, r: r}
			if err := w.session(ctx, way == "cut", address, name); err != nil {
				return err
			}
		}
	}()
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// session works over one session, until its region is cut short.
func (w *regionWorker) session(ctx context.Context, cut bool, address, name string) error {
	fd, err := unix.MemfdCreate("e2e-region", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	w.file = os.NewFile(uintptr(fd), "e2e-region")
	defer w.file.Close()
	if err := w.file.Truncate(2 * regionHalf); err != nil {
		return err
	}
	if w.mem, err = unix.Mmap(fd, 0, 2*regionHalf, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return err
	}
	defer unix.Munmap(w.mem)
	w.c, err = session.Dial(ctx, "unix", address, &session.ClientOptions{
		Name: name, NoShared: true, Regions: []session.Region{{Fd: fd, Length: 2 * regionHalf}},
	})
	if err != nil {
		return err
	}
	there()
	if cut {
		after := time.Duration(w.r.IntN(30)) * time.Millisecond
		to := w.r.Int64N(2 * regionHalf)
		timer := time.AfterFunc(after, func() {
			w.cut.Store(true)
			_ = w.file.Truncate(to) // it is this process's own
		})
		defer timer.Stop()
	}
	for n := 0; ; n++ {
		if w.cut.Load() && n > 20 {
			return w.c.Close()
		}
		if err := w.step(ctx, cut); err != nil {
			return err
		}
	}
}

// step puts or gets some blocks. What a session puts that cuts its region short has
// hashes that nobody reads: it may be anything.
func (w *regionWorker) step(ctx context.Context, cut bool) error {
	var blocks []int
	for range 1 + w.r.IntN(4) {
		blocks = append(blocks, w.r.IntN(crowdBlocks))
	}
	if w.r.IntN(2) == 0 {
		return w.get(ctx, blocks)
	}
	items := make([]session.RegionBlock, len(blocks))
	for k, i := range blocks {
		hash := hashOf(i)
		if cut {
			hash = hashOf(1<<20 + w.r.IntN(1<<20))
		} else {
			copy(w.mem[regionHalf+k*crowdLargest:], payload(i, crowdBytes(i)))
		}
		items[k] = session.RegionBlock{Hash: hash, Segments: w.segments(regionHalf+k*crowdLargest, crowdBytes(i))}
	}
	o := session.PutOptions{}
	if w.r.IntN(4) == 0 {
		o.Durable = block.G3
	}
	res, err := w.c.RegionPut(ctx, w.ns, items, o)
	if err != nil {
		return err
	}
	for k, r := range res {
		switch {
		case r.Err == nil:
		case errors.Is(r.Err, block.ErrNoSpace): // others hold it
		case o.Durable == block.G3 && errors.Is(r.Err, block.ErrNotFound): // another deleted it on its way down
		case w.cut.Load() && errors.Is(r.Err, block.ErrInvalid) && strings.Contains(r.Err.Error(), "region 0 was truncated"):
		default:
			return fmt.Errorf("put block %d: %w", blocks[k], r.Err)
		}
	}
	return nil
}

// segments are where n bytes at an offset lie, in some pieces.
func (w *regionWorker) segments(at, n int) (s []session.Segment) {
	for n > 0 {
		part := min(n, 1+w.r.IntN(512<<10))
		s = append(s, session.Segment{Length: uint32(part), Offset: uint64(at)})
		at, n = at+part, n-part
	}
	return s
}

func (w *regionWorker) get(ctx context.Context, blocks []int) error {
	items := make([]session.RegionItem, len(blocks))
	for k, i := range blocks {
		items[k] = session.RegionItem{Hash: hashOf(i), Segments: w.segments(k*crowdLargest, crowdLargest)}
	}
	res, err := w.c.RegionGet(ctx, w.ns, items, block.GetOptions{NoPromote: w.r.IntN(4) == 0})
	if err != nil {
		return err
	}
	for k, r := range res {
		i := blocks[k]
		switch {
		case w.cut.Load() && (r.Err == nil || errors.Is(r.Err, block.ErrInvalid)):
		case r.Err != nil:
			return fmt.Errorf("get block %d: %w", i, r.Err)
		case r.Reason == block.MissAbsent, r.Reason == block.MissPending:
		case r.Reason != block.Hit:
			return fmt.Errorf("get block %d: %v", i, r.Reason)
		case !w.holds(k*crowdLargest, r.Len, payload(i, crowdBytes(i))) && !w.cut.Load():
			return fmt.Errorf("get block %d: %d wrong bytes", i, r.Len)
		}
	}
	return nil
}

// holds says whether want is what lies in the region, as far as it is there: it is not
// touched, since it may be cut short meanwhile.
func (w *regionWorker) holds(at, n int, want []byte) bool {
	got := make([]byte, n)
	_, err := w.file.ReadAt(got, int64(at))
	return err == nil && bytes.Equal(got, want)
}

// regionsOf counts the regions that a daemon has mapped, and its open files that have no
// name: of those in its directories the catalog has now more, now fewer.
func regionsOf(t *testing.T, d *daemon) (maps, files int) {
	t.Helper()
	proc := "/proc/" + strconv.Itoa(d.cmd.Process.Pid)
	b, err := os.ReadFile(proc + "/maps")
	if err != nil {
		t.Fatal(err)
	}
	open, err := os.ReadDir(proc + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range open {
		name, err := os.Readlink(proc + "/fd/" + f.Name())
		if err == nil && (!strings.HasPrefix(name, "/") || strings.HasPrefix(name, "/memfd:")) {
			files++
		}
	}
	return strings.Count(string(b), "memfd:e2e-region"), files
}

// TestSessionRegionsEnd: clients that have their blocks in regions are killed at random
// moments, and cut their regions short while the daemon copies. It lives, what they
// held is free soon, nothing stays mapped, and nobody else notices.
func TestSessionRegionsEnd(t *testing.T) {
	t.Parallel()
	rounds := 24
	switch {
	case soak:
		rounds = 200
	case raceEnabled, testing.Short():
		rounds = 8
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	x := newCrowd(t, "64MiB", 0)
	until(t, "the crowd has its sessions", func() bool { return len(listed(t, x.d)) == 2 })
	_, files := regionsOf(t, x.d)
	var slowest time.Duration
	most := 0
	for round := range rounds {
		var clients []*process
		for k, way := range []string{"keep", "cut"} {
			name := fmt.Sprintf("%s-%d", way, round)
			cmd := exec.Command(os.Args[0])
			cmd.Env = []string{clientEnv + "=region " + strings.TrimPrefix(workerArgs(way, sessionAddr(t, x.d, "unix"), name, x.ns, r.Uint64()+uint64(k)), "session ")}
			p := startCommand(t, cmd)
			clients = append(clients, p)
			select {
			case <-p.stdout.mu.line:
			case <-p.exited:
				t.Fatalf("client %s ended:\n%s", name, p.stderr)
			}
		}
		time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
		maps, _ := regionsOf(t, x.d)
		most = max(most, maps)
		for k, p := range clients {
			working(t, p, strconv.Itoa(k))
			p.kill()
		}
		mapped := startWatch()
		slowest = max(slowest, x.freed(startWatch()))
		looks := 0
		until(t, "no region is mapped", func() bool {
			looks++
			maps, _ := regionsOf(t, x.d)
			return maps == 0
		})
		if took := mapped.took(); looks > 1 {
			x.soon("a client's region is unmapped", took)
		}
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	faults := logged(x.d, "a client's region was cut short")
	if most == 0 || faults == 0 {
		t.Errorf("%d regions were mapped at once, %d cut short while they were used, want some", most, faults)
	}
	until(t, "no file is left open", func() bool { _, now := regionsOf(t, x.d); return now <= files })
	x.end()
	t.Attr("did", fmt.Sprintf("%d clients ended, %d regions were cut short while they were used, all free within %v; %s",
		2*rounds, faults, slowest.Round(time.Millisecond), x.sum()))
}
