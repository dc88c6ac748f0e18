package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// island is a network namespace with one link to this one.
type island struct {
	t    *testing.T
	name string
	addr string // of the island's end
}

// islandLink is the island's end of it.
const islandLink = "veth0"

// newIsland makes a namespace and the link, or skips the test. It ends with the test.
func newIsland(t *testing.T) *island {
	t.Helper()
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "network namespaces need it")
	}
	pid := os.Getpid()
	i := &island{t: t, name: fmt.Sprintf("kvtier-e2e-%d", pid)}
	// A pair of addresses out of those that are for tests of networks, RFC 2544.
	near := fmt.Sprintf("198.18.%d.%d", pid>>6&0xff, pid&0x3f<<2|1)
	i.addr = fmt.Sprintf("198.18.%d.%d", pid>>6&0xff, pid&0x3f<<2|2)
	if _, err := tool("ip", "netns", "add", i.name); err != nil {
		servers.Missing(t, "root", err)
	}
	t.Cleanup(func() {
		if _, err := tool("ip", "netns", "delete", i.name); err != nil { // and the link
			t.Error(err)
		}
	})
	link := fmt.Sprintf("kvt%d", pid)
	if _, err := tool("ip", "link", "add", link, "type", "veth", "peer", "name", islandLink, "netns", i.name); err != nil {
		servers.Missing(t, "root", err)
	}
	for _, args := range [][]string{
		{"ip", "address", "add", near + "/30", "dev", link},
		{"ip", "link", "set", "dev", link, "up"},
		{"ip", "-n", i.name, "address", "add", i.addr + "/30", "dev", islandLink},
		{"ip", "-n", i.name, "link", "set", "dev", islandLink, "up"},
	} {
		if _, err := tool(args...); err != nil {
			t.Fatal(err)
		}
	}
	return i
}

// set takes the island's end of the link up or down. While it is down nobody hears of it:
// what is sent is lost.
func (i *island) set(state string) {
	i.t.Helper()
	if _, err := tool("ip", "-n", i.name, "link", "set", "dev", islandLink, state); err != nil {
		i.t.Error(err)
	}
}

// TestSessionBlackHole: the network loses every packet from the middle of calls on.
// Each call ends by its deadline, also those that begin then; when packets pass again
// calls do well, and what was answered as stored is there.
func TestSessionBlackHole(t *testing.T) {
	i := newIsland(t)
	at := i.addr + ":0"
	args := []string{
		"netns", "exec", i.name, kvtier, "serve", "--insecure", "--listen", at, "--xfer", at,
		"--data", filepath.Join(t.TempDir(), "data"), "--dram", "256MiB", "--nvme", "none", "--shared-memory", "off",
	}
	d := mustReady(startCommand(t, exec.Command("ip", args...)))
	c := dial(t, d)
	ns := open(t, c, "hole", cutBytes)
	put(t, c, ns, 0, cutFixed, cutBytes, block.G2)
	x := &cutTest{t: t, d: d, next: cutFixed}
	x.c = &cutSession{address: sessionAddr(t, d, "tcp"), ns: session.Namespace{ID: ns.ID, HashLen: hashBytes}}
	defer func() { x.c.close() }()
	rounds := 4
	if soak {
		rounds = 40
	}
	for round := range rounds {
		what := fmt.Sprintf("round %d", round)
		down := make(chan struct{})
		go func() {
			defer close(down)
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
			i.set("down")
		}()
		for isDown := false; !isDown; { // calls follow each other, so that it is in the middle of some
			x.judge(what)
			select {
			case <-down:
				isDown = true
			default:
			}
		}
		for range 3 {
			right := x.did.right
			x.judge(what + ", packets are lost")
			if x.did.right != right {
				t.Errorf("%s: calls did well when no packet passed", what)
			}
		}
		i.set("up")
		x.after(what)
		if t.Failed() {
			t.Fatalf("%s:\n%s", what, d.stderr)
		}
	}
	x.kept()
	if x.did.right == 0 || x.did.late == 0 {
		t.Errorf("the rounds did not do what they are for: %+v", x.did)
	}
	t.Attr("did", fmt.Sprintf("%d rounds, %+v; at most %v after a deadline", rounds, x.did, x.most))
	d.stop(0)
}
