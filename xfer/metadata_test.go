package xfer_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/wire"
)

// What a peer registers, gives back and registers again is followed by partial and
// full metadata; what a request refers to is unloaded when it is released.
func TestMetadataFollowsRegistrations(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 4)
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	register(t, a, d[0])
	register(t, b, d[1])
	introduce(t, a, b)
	try := func(remote xfer.Desc) error {
		r, err := a.NewRequest(xfer.Write, dram(d[0]), dram(remote), at("b"))
		if err != nil {
			return err
		}
		defer r.Release()
		return r.Run(ctx)
	}
	regions := func(want int) {
		t.Helper()
		if got := a.Peers()[0].Regions; got != want {
			t.Errorf("agent knows %d regions, want %d", got, want)
		}
		if _, got := node.counts(); got != want {
			t.Errorf("backend knows %d regions, want %d", got, want)
		}
	}
	regions(1)

	register(t, b, d[2], d[3])
	if _, err := b.PartialMetadata(dram(d[0])); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("partial metadata of what is not registered: %v", err)
	}
	wantFailure(t, try(d[2]), xfer.ErrNotFound)
	for range 2 { // the second brings nothing new
		part, err := b.PartialMetadata(dram(d[2]))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.LoadMetadata(part); err != nil {
			t.Fatal(err)
		}
		regions(2)
	}
	if err := try(d[2]); err != nil {
		t.Error(err)
	}
	wantFailure(t, try(d[3]), xfer.ErrNotFound)

	// d[1] is registered anew, d[2] given back.
	kept := request(t, a, xfer.Write, dram(d[0]), dram(d[1]), at("b"))
	if err := b.Deregister(ctx, dram(d[1], d[2])); err != nil {
		t.Fatal(err)
	}
	wantFailure(t, kept.Run(ctx), xfer.ErrInvalid)
	register(t, b, d[1])
	introduce(t, a, b)
	if err := try(d[1]); err != nil {
		t.Error(err)
	}
	wantFailure(t, try(d[2]), xfer.ErrNotFound)
	if err := try(d[3]); err != nil {
		t.Error(err)
	}
	wantFailure(t, kept.Run(ctx), xfer.ErrInvalid)
	if _, got := node.counts(); got != 3 {
		t.Errorf("%d regions, want d[1] twice and d[3]", got)
	}
	if err := kept.Release(); err != nil {
		t.Error(err)
	}
	regions(2)
	if g := a.Peers()[0].Generation; g != 1 {
		t.Errorf("generation %d after loads of one life, want 1", g)
	}
}

// A blob that is refused leaves nothing behind, in the agent or in the backend.
func TestLoadMetadataKeepsNothingOnError(t *testing.T) {
	d, _ := pages(t, 3)
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	b, other := net.agent("b", &xfer.AgentOptions{Incarnation: 7})
	good := func() *wire.Metadata {
		return &wire.Metadata{
			Agent: "b", Incarnation: 7,
			Conns: []wire.Conn{{Backend: "net", Info: []byte(other.addr)}},
			Sections: []wire.Section{{Backend: "net", Regions: []wire.Region{
				{Addr: d[1].Addr, Len: 4096, Info: make([]byte, 8)},
				{Addr: d[2].Addr, Len: 4096, Info: make([]byte, 8)},
			}}},
		}
	}
	edit := func(f func(m *wire.Metadata)) *wire.Metadata { m := good(); f(m); return m }
	regions := func(m *wire.Metadata) []wire.Region { return m.Sections[0].Regions }
	cases := map[string]struct {
		m    *wire.Metadata
		want error
		says string
	}{
		"own name":       {edit(func(m *wire.Metadata) { m.Agent = "a" }), xfer.ErrInvalid, "this one's name"},
		"no connection":  {edit(func(m *wire.Metadata) { m.Incarnation, m.Conns = 8, nil }), xfer.ErrNotFound, "was not loaded"},
		"unknown NIXL":   {edit(func(m *wire.Metadata) { m.Agent, m.Incarnation, m.Conns = "c", 0, nil }), xfer.ErrNotFound, "was not loaded"},
		"no common":      {edit(func(m *wire.Metadata) { m.Incarnation = 8; m.Conns[0].Backend = "UCX"; m.Sections = nil }), xfer.ErrNoBackend, `"UCX"`},
		"twice":          {edit(func(m *wire.Metadata) { m.Conns = append(m.Conns, m.Conns...) }), xfer.ErrInvalid, "twice"},
		"bad connection": {edit(func(m *wire.Metadata) { m.Incarnation = 8; m.Conns[0].Info = []byte("no such") }), xfer.ErrInvalid, "no such"},
		"length 0":       {edit(func(m *wire.Metadata) { regions(m)[1].Len = 0 }), xfer.ErrInvalid, "length is 0"},
		"wraps":          {edit(func(m *wire.Metadata) { regions(m)[1].Addr = ^uint64(0) }), xfer.ErrInvalid, "wrap"},
		"two infos": {edit(func(m *wire.Metadata) {
			regions(m)[1] = wire.Region{Addr: d[1].Addr, Len: 4096, Info: []byte("other...")}
		}), xfer.ErrInvalid, "different ways"},
		"bad region": {edit(func(m *wire.Metadata) { regions(m)[1].Info = []byte("short") }), xfer.ErrInvalid, "region info"},
	}
	for name, c := range cases {
		blob, err := wire.Encode(c.m)
		if err != nil {
			t.Fatal(name, err)
		}
		_, err = a.LoadMetadata(blob)
		wantFailure(t, err, c.want, c.says, "connect")
		if peers, loaded := node.counts(); peers+loaded+len(a.Peers()) != 0 {
			t.Errorf("%s: backend knows %d peers, %d regions; agent %v", name, peers, loaded, a.Peers())
		}
	}

	// Within a life, what was known before stays.
	blob, err := wire.Encode(good())
	if err != nil {
		t.Fatal(err)
	}
	if id, err := a.LoadMetadata(blob); err != nil || id != b.ID() {
		t.Fatal(id, err)
	}
	cases["changed"] = struct {
		m    *wire.Metadata
		want error
		says string
	}{edit(func(m *wire.Metadata) { m.Conns[0].Info = []byte(node.addr) }), xfer.ErrInvalid, "has changed"}
	for _, name := range []string{"changed", "bad region", "two infos", "twice"} {
		c := cases[name]
		c.m.Sections[0].Regions = append([]wire.Region{{Addr: d[0].Addr, Len: 4096, Info: make([]byte, 8)}}, c.m.Sections[0].Regions...)
		blob, err := wire.Encode(c.m)
		if err != nil {
			t.Fatal(name, err)
		}
		_, err = a.LoadMetadata(blob)
		wantFailure(t, err, c.want, c.says)
		if peers, loaded := node.counts(); peers != 1 || loaded != 2 || len(a.Peers()) != 1 || a.Peers()[0].Regions != 2 {
			t.Errorf("%s: backend knows %d peers, %d regions; agent %v", name, peers, loaded, a.Peers())
		}
	}
}

// TestLoadMetadataOfElsewhere: a backend that can never reach the peer is left out for
// it, unless it is the only one.
func TestLoadMetadataOfElsewhere(t *testing.T) {
	n := newNetwork(t)
	a, near := n.agent("a", nil)
	b, _ := n.agent("b", nil)
	away := n.node("away", 4)
	for agent, more := range map[*xfer.Agent]*node{a: away, b: n.node("away", 4)} {
		if err := agent.AddBackend(more); err != nil {
			t.Fatal(err)
		}
	}
	away.loadConn = func() error { return fmt.Errorf("%w: another host", xfer.ErrUnavailable) }
	blob, err := b.Metadata()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.LoadMetadata(blob); err != nil {
		t.Fatal(err)
	}
	if p := a.Peers(); len(p) != 1 || !slices.Equal(p[0].Backends, []string{"net"}) {
		t.Errorf("peers %v, want one by net", p)
	}
	if err := a.Invalidate("b"); err != nil {
		t.Fatal(err)
	}
	near.loadConn = away.loadConn
	if _, err := a.LoadMetadata(blob); !errors.Is(err, xfer.ErrUnavailable) {
		t.Errorf("by no backend: %v, want ErrUnavailable", err)
	}
	if p := a.Peers(); len(p) != 0 {
		t.Errorf("peers %v, want none", p)
	}
}

// Every NIXL capture loads into an agent that has a backend of that name.
func TestLoadMetadataOfNIXL(t *testing.T) {
	load := func(a *xfer.Agent, name string) (xfer.PeerID, error) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join("wire", "testdata", name+".hex"))
		if err != nil {
			t.Fatal(err)
		}
		var digits strings.Builder
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "#") {
				digits.WriteString(strings.TrimSpace(line))
			}
		}
		blob, err := hex.DecodeString(digits.String())
		if err != nil {
			t.Fatal(err)
		}
		return a.LoadMetadata(blob)
	}
	ucx := newScript("UCX")
	ucx.caps.Remote, ucx.caps.Notify = true, true
	a := newAgent(t, nil, networkScript{remoteScript: remoteScript{ucx}})
	if _, err := load(a, "partial_2of5_noconn"); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("partial blob of an unknown agent: %v", err)
	}
	var ids []xfer.PeerID
	for _, name := range []string{"partial_empty_noconn", "partial_2of5_noconn", "full_5reg_unsorted"} {
		id, err := load(a, name)
		if err != nil {
			t.Fatal(name, err)
		}
		ids = append(ids, id)
	}
	if ids[0].Name != "vec-sort" || ids[0].Incarnation == 0 || ids[1] != ids[0] || ids[2] != ids[0] {
		t.Errorf("one agent's blobs gave %v", ids)
	}
	if p := a.Peers(); len(p) != 1 || p[0].Regions != 5 {
		t.Errorf("peers %+v, want one with 5 regions", p)
	}
	lacks := newAgent(t, nil)
	if _, err := load(lacks, "full_1reg"); !errors.Is(err, xfer.ErrNoBackend) {
		t.Errorf("no common backend: %v", err)
	}
}

// FuzzLoadMetadata: whatever the blob is, agent and backend agree afterwards on what is
// known, and after an error nothing more is known than before.
func FuzzLoadMetadata(f *testing.F) {
	const life = 7
	blob := func(edit func(m *wire.Metadata)) []byte {
		m := &wire.Metadata{
			Agent: "b", Incarnation: life,
			Conns: []wire.Conn{{Backend: "net", Info: []byte("node 1")}},
			Sections: []wire.Section{{Backend: "net", Regions: []wire.Region{
				{Addr: 0x1000, Len: 0x1000, Info: make([]byte, 8)}, {Addr: 0x2000, Len: 0x1000, Info: make([]byte, 8)},
			}}},
		}
		edit(m)
		b, err := wire.Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	first := blob(func(*wire.Metadata) {})
	f.Add(first)
	f.Add(blob(func(m *wire.Metadata) { m.Partial, m.Sections[0].Regions[1].Info = true, []byte("changed!") }))
	f.Add(blob(func(m *wire.Metadata) { m.Incarnation, m.Sections = 8, nil }))
	f.Add(blob(func(m *wire.Metadata) { m.Incarnation = 0 }))
	f.Add(blob(func(m *wire.Metadata) { m.Sections[0].Type, m.Conns[0].Info = 4, []byte("node 2") }))
	f.Add(blob(func(m *wire.Metadata) { m.Agent, m.Sections[0].Regions[1].Info = "c", nil }))
	f.Fuzz(func(t *testing.T, b []byte) {
		net := newNetwork(t)
		a, node := net.agent("a", nil)
		net.agent("b", &xfer.AgentOptions{Incarnation: life})
		net.agent("c", nil)
		if _, err := a.LoadMetadata(first); err != nil {
			t.Fatal(err)
		}
		_, failure := a.LoadMetadata(b)
		peers, regions := a.Peers(), 0
		for _, p := range peers {
			regions += p.Regions
			if failure != nil && (p.Incarnation != life || p.Regions != 2) {
				t.Errorf("after %v: %+v", failure, p)
			}
		}
		if nodePeers, nodeRegions := node.counts(); nodePeers != len(peers) || nodeRegions != regions || (failure == nil && len(peers) == 0) {
			t.Errorf("after %v the backend knows %d peers, %d regions, the agent %+v", failure, nodePeers, nodeRegions, peers)
		}
		for _, p := range peers {
			if err := a.Invalidate(p.Name); err != nil {
				t.Error(err)
			}
		}
		if nodePeers, nodeRegions := node.counts(); nodePeers+nodeRegions > 0 {
			t.Errorf("forgotten, the backend knows %d peers, %d regions", nodePeers, nodeRegions)
		}
	})
}

// A piece that was registered twice is sent once, and is there until it is given back
// twice; memory of another backend only is not for peers.
func TestMetadataSendsEachPieceOnce(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 2)
	net := newNetwork(t)
	a, _ := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	if err := b.AddBackend(newScript("here")); err != nil {
		t.Fatal(err)
	}
	register(t, b, d[0])
	register(t, b, d[0])
	if err := b.Register(ctx, dram(d[1]), &xfer.RegisterOptions{Backends: []string{"here"}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{1, 1, 0} {
		introduce(t, a, b)
		if got := a.Peers()[0].Regions; got != want {
			t.Errorf("%d regions, want %d", got, want)
		}
		if want > 0 {
			if err := b.Deregister(ctx, dram(d[0])); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, err := b.PartialMetadata(dram(d[1]))
	wantFailure(t, err, xfer.ErrNotFound, "that a peer can address")
	_, err = b.PartialMetadata(dram())
	wantFailure(t, err, xfer.ErrInvalid)
	_, err = newAgent(t, nil, newScript("here")).Metadata()
	wantFailure(t, err, xfer.ErrNoBackend, "Remote role")
}

// A backend that either side adds later comes with the next metadata, without another
// life.
func TestMetadataBringsLaterBackends(t *testing.T) {
	d, _ := pages(t, 2)
	net := newNetwork(t)
	a, _ := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	introduce(t, a, b)
	for _, x := range []*xfer.Agent{a, b} {
		if err := x.AddBackend(net.node("more", 4)); err != nil {
			t.Fatal(err)
		}
		introduce(t, a, b)
	}
	register(t, a, d[0])
	register(t, b, d[1])
	introduce(t, a, b)
	if p := a.Peers()[0]; !slices.Equal(p.Backends, []string{"net", "more"}) || p.Generation != 1 || p.Regions != 2 {
		t.Errorf("peer %+v", p)
	}
	if got, want := a.Peers()[0].String(), b.ID().String()+", generation 1, 2 regions by net, more"; got != want {
		t.Errorf("in words %q, want %q", got, want)
	}
	r := request(t, a, xfer.Write, dram(d[0]), dram(d[1]), &xfer.RequestOptions{Peer: "b", Backend: "more"})
	if err := r.Run(context.Background()); err != nil {
		t.Error(err)
	}
}
