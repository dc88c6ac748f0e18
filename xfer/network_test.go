package xfer_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// network joins the nodes of one test: backends with all roles whose peers are in this
// process, and which check what the agent guarantees them.
type network struct {
	t  testing.TB
	mu struct {
		sync.Mutex
		nodes map[string]*node // by connection info
	}
}

// node is one agent's backend on a network. It does what a test tells it to.
type node struct {
	net  *network
	name string
	addr string
	caps xfer.Caps

	transfer   func(ctx context.Context) error // before the bytes are moved
	loadConn   func() error
	loadRegion func(d xfer.Desc) error
	notify     func() error
	estimate   func()
	prepare    func()

	notes chan xfer.Notification
	mu    struct {
		sync.Mutex
		self     xfer.PeerID
		closed   bool
		peers    map[xfer.PeerID]*node
		regions  map[uint64]xfer.Desc // registered, by token
		tokens   uint64
		loaded   map[*farRegion]int // to how many Prepared refer to it
		connects int
	}
}

// farRegion is a region of a peer.
type farRegion struct {
	peer  xfer.PeerID
	token uint64
}

type nodeTransfer struct {
	scriptTransfer
	released bool
}

func newNetwork(t testing.TB) *network {
	n := &network{t: t}
	n.mu.nodes = make(map[string]*node)
	return n
}

// node adds a node with room for some notifications.
func (n *network) node(name string, notes int) *node {
	b := &node{
		net: n, name: name, notes: make(chan xfer.Notification, notes),
		caps: xfer.Caps{
			Pairs:  []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}},
			Remote: true, Notify: true, Align: 1, Engine: "network",
		},
	}
	b.mu.peers = make(map[xfer.PeerID]*node)
	b.mu.regions = make(map[uint64]xfer.Desc)
	b.mu.loaded = make(map[*farRegion]int)
	n.mu.Lock()
	defer n.mu.Unlock()
	b.addr = fmt.Sprintf("node %d", len(n.mu.nodes))
	n.mu.nodes[b.addr] = b
	return b
}

// agent makes an agent with a node, closed at the end of the test.
func (n *network) agent(name string, o *xfer.AgentOptions) (*xfer.Agent, *node) {
	n.t.Helper()
	a, err := xfer.NewAgent(name, o)
	if err != nil {
		n.t.Fatal(err)
	}
	b := n.node("net", 4)
	if err := a.AddBackend(b); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := a.Close(); err != nil {
			n.t.Error(err)
		}
	})
	return a, b
}

func (b *node) Name() string    { return b.name }
func (b *node) Caps() xfer.Caps { return b.caps }

func (b *node) Register(_ context.Context, _ xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.tokens++
	b.mu.regions[b.mu.tokens] = d
	return b.mu.tokens, nil
}

func (b *node) Deregister(r xfer.Region) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.regions, r.(uint64))
	return nil
}

func (b *node) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	if b.prepare != nil {
		b.prepare()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range remote {
		far := r.Region.(*farRegion)
		if _, ok := b.mu.loaded[far]; !ok {
			b.net.t.Errorf("%s: prepare with a region that is not loaded", b.addr)
		}
		b.mu.loaded[far]++
	}
	return &nodeTransfer{scriptTransfer: scriptTransfer{op, local, remote}}, nil
}

func (b *node) Release(p xfer.Prepared) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := p.(*nodeTransfer)
	if t.released {
		b.net.t.Errorf("%s: released twice", b.addr)
	}
	t.released = true
	for _, r := range t.remote {
		b.mu.loaded[r.Region.(*farRegion)]--
	}
}

func (b *node) Transfer(ctx context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*nodeTransfer)
	b.mu.Lock()
	if t.released {
		b.net.t.Errorf("%s: transfer of what was released", b.addr)
	}
	b.mu.Unlock()
	if b.transfer != nil {
		if err := b.transfer(ctx); err != nil {
			for i := range t.local {
				done(i, err)
			}
			return nil
		}
	}
	for i, r := range t.remote {
		far := r.Region.(*farRegion)
		done(i, func() error {
			to := b.peer(far.peer)
			if to == nil {
				return xfer.ErrDisconnected
			}
			to.mu.Lock()
			defer to.mu.Unlock()
			if d, ok := to.mu.regions[far.token]; !ok || r.Addr < d.Addr || r.End() > d.End() {
				return fmt.Errorf("%w: token %d", xfer.ErrInvalid, far.token)
			}
			t.copyPair(i)
			return nil
		}())
	}
	return nil
}

func (b *node) Estimate(p xfer.Prepared) (xfer.Cost, error) {
	if b.estimate != nil {
		b.estimate()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.(*nodeTransfer).released {
		b.net.t.Errorf("%s: estimate of what was released", b.addr)
	}
	return xfer.Cost{}, nil
}

func (b *node) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		return nil
	}
	b.mu.closed = true
	if len(b.mu.loaded)+len(b.mu.peers)+len(b.mu.regions) > 0 {
		b.net.t.Errorf("%s: closed with %d regions, %d of peers, %d peers", b.addr, len(b.mu.regions), len(b.mu.loaded), len(b.mu.peers))
	}
	close(b.notes)
	return nil
}

func (b *node) Bind(self xfer.PeerID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.self != (xfer.PeerID{}) {
		b.net.t.Errorf("%s: bound twice", b.addr)
	}
	b.mu.self = self
	return nil
}

func (b *node) ConnInfo() ([]byte, error) { return []byte(b.addr), nil }

func (b *node) LoadConnInfo(peer xfer.PeerID, info []byte) error {
	if b.loadConn != nil {
		if err := b.loadConn(); err != nil {
			return err
		}
	}
	b.net.mu.Lock()
	to := b.net.mu.nodes[string(info)]
	b.net.mu.Unlock()
	if to == nil {
		return fmt.Errorf("%w: address %q", xfer.ErrInvalid, info)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for known := range b.mu.peers {
		if known.Name == peer.Name {
			b.net.t.Errorf("%s: %s comes while %s is known", b.addr, peer, known)
		}
	}
	b.mu.peers[peer] = to
	return nil
}

func (b *node) ForgetPeer(peer xfer.PeerID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.peers[peer] == nil {
		b.net.t.Errorf("%s: forgets %s, which it does not know", b.addr, peer)
	}
	for far := range b.mu.loaded {
		if far.peer == peer {
			b.net.t.Errorf("%s: forgets %s, of which regions are loaded", b.addr, peer)
		}
	}
	delete(b.mu.peers, peer)
}

func (b *node) RegionInfo(r xfer.Region) ([]byte, error) {
	return binary.LittleEndian.AppendUint64(nil, r.(uint64)), nil
}

func (b *node) LoadRegion(peer xfer.PeerID, _ xfer.MemType, d xfer.Desc, info []byte) (xfer.Region, error) {
	if b.loadRegion != nil {
		if err := b.loadRegion(d); err != nil {
			return nil, err
		}
	}
	if len(info) != 8 {
		return nil, fmt.Errorf("%w: %d bytes of region info", xfer.ErrInvalid, len(info))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.peers[peer] == nil {
		b.net.t.Errorf("%s: a region of %s, which it does not know", b.addr, peer)
	}
	far := &farRegion{peer, binary.LittleEndian.Uint64(info)}
	b.mu.loaded[far] = 0
	return far, nil
}

func (b *node) UnloadRegion(r xfer.Region) {
	b.mu.Lock()
	defer b.mu.Unlock()
	far := r.(*farRegion)
	if n, ok := b.mu.loaded[far]; !ok || n > 0 {
		b.net.t.Errorf("%s: unloads a region: loaded %v, %d refer to it", b.addr, ok, n)
	}
	delete(b.mu.loaded, far)
}

func (b *node) Connect(_ context.Context, peer xfer.PeerID) error {
	if b.peer(peer) == nil {
		return xfer.ErrDisconnected
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.connects++
	return nil
}

func (b *node) Disconnect(xfer.PeerID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.connects--
}

// Notify believes the peer whatever life it is in: the tests look at the sender.
func (b *node) Notify(ctx context.Context, peer xfer.PeerID, msg []byte) error {
	if b.notify != nil {
		if err := b.notify(); err != nil {
			return err
		}
	}
	to := b.peer(peer)
	if to == nil {
		return xfer.ErrDisconnected
	}
	b.mu.Lock()
	n := xfer.Notification{Peer: b.mu.self, Msg: bytes.Clone(msg)}
	b.mu.Unlock()
	select {
	case to.notes <- n:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", xfer.ErrCanceled, ctx.Err())
	}
}

func (b *node) Notifications() <-chan xfer.Notification { return b.notes }

// peer gives the peer's node, if it is known and of that life.
func (b *node) peer(id xfer.PeerID) *node {
	b.mu.Lock()
	to := b.mu.peers[id]
	b.mu.Unlock()
	if to == nil {
		return nil
	}
	to.mu.Lock()
	defer to.mu.Unlock()
	if to.mu.self != id || to.mu.closed {
		return nil
	}
	return to
}

// counts says what the node knows of peers: how many, and how many of their regions.
func (b *node) counts() (peers, regions int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.peers), len(b.mu.loaded)
}

// pages gives n descriptors of 4096 bytes of fresh memory with gaps between them, and
// their bytes. It comes before the agents, which must be gone before the memory is.
func pages(t testing.TB, n int) ([]xfer.Desc, [][]byte) {
	t.Helper()
	memory, err := arena.New(int64(n)*8192, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = memory.Close() })
	descs, bytes := make([]xfer.Desc, n), make([][]byte, n)
	for i := range n {
		bytes[i] = memory.Slice(int64(i)*8192, 4096)
		descs[i] = xfer.Desc{Addr: arena.Addr(bytes[i]), Len: 4096}
	}
	return descs, bytes
}

func dram(d ...xfer.Desc) xfer.DescList {
	return xfer.DescList{Type: xfer.DRAM, Descs: slices.Clone(d)}
}

func register(t testing.TB, a *xfer.Agent, d ...xfer.Desc) {
	t.Helper()
	if err := a.Register(context.Background(), dram(d...), nil); err != nil {
		t.Fatal(err)
	}
}

// introduce loads all that one agent has into another.
func introduce(t testing.TB, to, of *xfer.Agent) {
	t.Helper()
	blob, err := of.Metadata()
	if err != nil {
		t.Fatal(err)
	}
	if id, err := to.LoadMetadata(blob); err != nil || id != of.ID() {
		t.Fatalf("load: %s, %v, want %s", id, err, of.ID())
	}
}
