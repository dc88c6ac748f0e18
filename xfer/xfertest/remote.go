package xfertest

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/xfer"
)

// Side says which of two agents something is for.
type Side uint8

// The sides: the agent in the test's own process, and its peer.
const (
	Near Side = iota
	Far
)

// RemoteHarness tells the suite about a backend that has the roles Remote and
// Notifier and moves bytes between DRAM of two agents.
type RemoteHarness struct {
	// New makes a fresh backend for one of two agents, which the suite closes.
	// It skips the test when what the backend needs is missing.
	New func(t testing.TB, side Side) xfer.Backend

	// Again makes a backend where one was, by its ConnInfo, as a process does that
	// was started again at the same address. Cases that need it are left out when it
	// is nil.
	Again func(t testing.TB, side Side, info []byte) xfer.Backend

	// Memory makes memory of one side; as DRAM does when nil.
	Memory func(t testing.TB, side Side, size int64) Memory

	// Direct says that an initiator touches its peer's memory itself, so that nobody
	// can take that away while it stands still in the middle of a piece: Deregister and
	// Close wait until it goes on or has died.
	Direct bool

	// MaxBytes bounds the memory that a test moves at once (8 MiB when 0).
	MaxBytes int64

	// Several says that the bytes of a large request go over several TCP connections,
	// and has the suite make sure of it.
	Several bool

	// Narrow says that another harness of the same backend has all the cases, and that
	// this one differs in how bytes move and how that breaks off: only those cases run,
	// with the peer in a process of its own. With KVTIER_SOAK=1 all do.
	Narrow bool

	process *string // the test that a process of the far side is to run
}

func (h RemoteHarness) memory(t testing.TB, side Side, size int64) Memory {
	t.Helper()
	if h.Memory != nil {
		return h.Memory(t, side, size)
	}
	return DRAM(t, size)
}

func (h RemoteHarness) maxBytes() int64 {
	if h.MaxBytes > 0 {
		return h.MaxBytes
	}
	return 8 << 20
}

// soak says that there is time.
var soak = os.Getenv("KVTIER_SOAK") != ""

// rounds is how often a case goes round: many times when there is time, and few
// with the race detector or -short.
func rounds(many, normal, few int) int {
	switch {
	case soak:
		return many
	case raceEnabled, testing.Short():
		return few
	}
	return normal
}

// RunRemote checks a backend against the contracts of the roles Remote and
// Notifier: bare, between two agents in this process, and with the peer in a
// process of its own. That process is this test again, so a test calls RunRemote
// once, with nothing before it that a second process would spoil.
func RunRemote(t *testing.T, h RemoteHarness) {
	if os.Getenv(peerEnv) == t.Name() {
		servePeer(t, h)
		t.SkipNow() // what follows is the parent's
	}
	leaks := goleak.IgnoreCurrent()
	t.Run("bare", func(t *testing.T) {
		for _, c := range []struct {
			name string
			test func(*testing.T, RemoteHarness)
		}{
			{"bind", testBind},
			{"infos", testInfos},
			{"who answers", testWhoAnswers},
			{"bounds", testBounds},
			{"every byte of a region's info", testForgedInfo},
			{"disconnect in flight", testDisconnectInFlight},
			{"close in flight", testCloseBareInFlight},
			{"cancel", testRemoteCancel},
			{"back-off", testBackOff},
			{"forget", testForget},
		} {
			t.Run(c.name, func(t *testing.T) { c.test(t, h) })
		}
	})
	if !h.narrow() {
		t.Run("one process", func(t *testing.T) { runPeers(t, h) })
	}
	t.Run("two processes", func(t *testing.T) {
		h := h
		h.process = new(string)
		*h.process = parent(t.Name())
		runPeers(t, h)
		for _, c := range processCases {
			for _, op := range ops {
				t.Run(c.name+"/"+op.String(), func(t *testing.T) { c.test(t, h, op) })
			}
		}
		if !h.narrow() {
			t.Run("killed with a full queue", func(t *testing.T) { testKilledFullQueue(t, h) })
			for _, op := range ops {
				t.Run("notification cut off/"+op.String(), func(t *testing.T) { testNotifyCut(t, h, op) })
			}
			t.Run("notifier killed", func(t *testing.T) { testNotifierKilled(t, h) })
			t.Run("flat", func(t *testing.T) { testFlat(t, h) })
		}
	})
	// A goroutine that outlives its backend's Close is a leak.
	if err := goleak.Find(leaks); err != nil {
		t.Error(err)
	}
}

// parent is the name of the test that a subtest is of.
func parent(name string) string {
	for i := len(name) - 1; i > 0; i-- {
		if name[i] == '/' {
			return name[:i]
		}
	}
	return name
}

func (h RemoteHarness) narrow() bool { return h.Narrow && !soak }

// wide says whether the wide cases run between these two agents. Where there is
// little time they do so once: in one process with the race detector, which sees both
// sides there, and else in two.
func (h RemoteHarness) wide() bool {
	switch {
	case soak:
		return true
	case h.Narrow:
		return false
	case raceEnabled:
		return h.process == nil
	}
	return h.process != nil
}

type remoteCase struct {
	name string
	test func(*testing.T, RemoteHarness, xfer.Op)
}

// processCases need a peer that can be killed or stopped.
var processCases = []remoteCase{
	{"killed", testKilled},
	{"stopped", testStopped},
	{"initiator stopped", testInitiatorStopped},
	{"cut", testCut},
}

// wideCases are the same however bytes move.
var wideCases = []remoteCase{
	{"repost", testRemoteRepost},
	{"notification with a request", testNotifyWithRequest},
	{"registered later", testRegisteredLater},
	{"deregistered", testDeregistered},
	{"peer closes in flight", testPeerCloses},
	{"new incarnation", testNewIncarnation},
	{"peer disconnects", testPeerDisconnects},
	{"misuse", testRemoteMisuse},
}

func runPeers(t *testing.T, h RemoteHarness) {
	cases := []remoteCase{
		{"lengths and offsets", testRemoteLengths},
		{"scatter lists", testRemoteScatter},
		{"many descriptors", testManyDescriptors},
		{"parallel", testParallel},
		{"notification after data", testNotifyAfterData},
		{"deregister in flight", testDeregisterInFlight},
		{"both at once", testBothAtOnce},
		{"close in flight", testRemoteCloseInFlight},
	}
	if h.wide() {
		cases = append(cases, wideCases...)
	}
	for _, c := range cases {
		for _, op := range ops {
			t.Run(c.name+"/"+op.String(), func(t *testing.T) { c.test(t, h, op) })
		}
	}
	if !h.narrow() {
		t.Run("notifications", func(t *testing.T) { testNotifications(t, h) })
		t.Run("full queue", func(t *testing.T) { testFullQueue(t, h) })
	}
}

// duo is a rig whose local side is an agent here and whose remote side belongs to
// a peer.
type duo struct {
	*rig
	h         RemoteHarness
	near      *party
	peer      *peer
	me, far   xfer.PeerID
	farInfo   []byte // how the far backend is reached
	nearStart xfer.Desc
}

const (
	nearName = "near"
	farName  = "far"
)

// newDuo makes two agents that know each other, with size bytes registered at
// each.
func newDuo(t testing.TB, h RemoteHarness, size int64) *duo {
	t.Helper()
	d := newStrangers(t, h, size, false)
	d.meet()
	return d
}

// newStrangers makes two agents that do not know each other. When bare, the far
// one has nothing registered.
func newStrangers(t testing.TB, h RemoteHarness, size int64, bare bool) *duo {
	t.Helper()
	d := &duo{h: h, near: newParty(t, h, Near)}
	a := d.near.handle(call{Verb: "open", Name: nearName, N: size})
	if err := a.err(); err != nil {
		t.Fatal(err)
	}
	d.nearStart = a.Desc
	d.rig = &rig{t: t, size: size, agent: d.near.current(), options: &xfer.RequestOptions{Peer: farName}}
	d.seed()
	d.scratch = make([]byte, size+2*guardBytes)
	d.local = side{name: "near", typ: xfer.DRAM, mem: d.near.mem, model: make([]byte, size+2*guardBytes)}
	d.remote = side{name: "far", typ: xfer.DRAM, model: make([]byte, size+2*guardBytes)}
	d.fill(&d.local)
	d.startPeer(bare)
	return d
}

func (g *rig) seed() {
	g.random = rand.NewChaCha8([32]byte{byte(g.size), byte(g.size >> 8), byte(g.size >> 16), byte(g.size >> 24)})
	g.rand = rand.New(g.random)
}

// startPeer makes a far side, in a process of its own when that is the mode.
func (d *duo) startPeer(bare bool) {
	d.t.Helper()
	d.peer = newPeer(d.t, d.h)
	a := d.peer.must(call{Verb: "open", Name: farName, N: d.size, Flag: bare})
	d.farInfo = a.Info
	d.remote.mem = Memory{Desc: a.Desc, ReaderAt: farBytes{d.peer}, WriterAt: farBytes{d.peer}}
	d.fill(&d.remote)
}

// meet has each agent load what the other one says of itself.
func (d *duo) meet() {
	d.t.Helper()
	d.far = d.learn()
	d.me = d.peer.must(call{Verb: "load", Data: d.order(call{Verb: "metadata"}).Data}).Peer
}

// learn loads the peer's metadata.
func (d *duo) learn() xfer.PeerID {
	d.t.Helper()
	return d.order(call{Verb: "load", Data: d.peer.must(call{Verb: "metadata"}).Data}).Peer
}

// order is for the near party what must is for the peer.
func (d *duo) order(c call) answer {
	d.t.Helper()
	a := d.near.handle(c)
	if err := a.err(); err != nil {
		d.t.Fatalf("%s: %v", c.Verb, err)
	}
	return a
}

// theirs is an order for the peer to move pieces between its memory and this
// side's; pieces are as this side sees them.
func (d *duo) theirs(op xfer.Op, pieces ...piece) call {
	c := call{Verb: "run", Name: nearName, Op: op, Data: fmt.Appendf(nil, "%d %d", d.nearStart.Addr, d.nearStart.Dev)}
	for _, p := range pieces {
		c.Pieces = append(c.Pieces, [3]int64{p.remote, p.local, p.n})
	}
	return c
}

// opposite is the operation that moves bytes the same way, seen from the other
// side.
func opposite(op xfer.Op) xfer.Op {
	if op == xfer.Read {
		return xfer.Write
	}
	return xfer.Read
}

// eventually repeats try until it succeeds. Only ErrDisconnected may be met
// meanwhile.
func (d *duo) eventually(what string, try func() error) {
	d.t.Helper()
	failures := 0
	for began := time.Now(); ; failures++ {
		err := try()
		if err == nil {
			return
		}
		if !errors.Is(err, xfer.ErrDisconnected) || time.Since(began) > patience {
			d.t.Fatalf("%s, after %d failures: %v", what, failures, err)
		}
		time.Sleep(time.Millisecond) // back-off is the backend's; this only keeps the loop cool
	}
}

// again moves fresh bytes through all of both registered parts, both ways, as
// soon as the peer is reached.
func (d *duo) again() {
	d.t.Helper()
	for _, op := range ops {
		r := d.request(op, []piece{{0, 0, d.size}})
		d.fill(d.source(op))
		d.eventually("transfer to a peer that is well", func() error { return r.Run(d.t.Context()) })
		d.moved(op, piece{0, 0, d.size})
		d.check()
	}
}

// poison gives all of a side's registered part contents that no transfer moves.
func (g *rig) poison(s *side) {
	g.t.Helper()
	period := make([]byte, 1024)
	for i := range period {
		period[i] = byte(i) | 0x80
	}
	g.repeat(s, guardBytes, g.size, period)
}

// pause is how long a test watches memory in which nothing may change.
const pause = 50 * time.Millisecond

// watch compares all memory with the models for a while.
func (g *rig) watch() {
	g.t.Helper()
	for began := time.Now(); ; {
		g.check()
		if time.Since(began) > pause {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// farBytes is memory of a peer, reached by orders.
type farBytes struct{ p *peer }

const farStep = 4 << 20

func (m farBytes) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		a, err := m.p.ask(call{Verb: "read", Off: off + int64(n), N: int64(min(len(p)-n, farStep))})
		if err != nil {
			return n, err
		}
		n += copy(p[n:], a.Data)
	}
	return n, nil
}

func (m farBytes) WriteAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		step := p[n:min(len(p), n+farStep)]
		if _, err := m.p.ask(call{Verb: "write", Off: off + int64(n), Data: step}); err != nil {
			return n, err
		}
		n += len(step)
	}
	return n, nil
}

// repeat fills memory with periodic contents.
func (m farBytes) repeat(off, n int64, period []byte) error {
	_, err := m.p.ask(call{Verb: "repeat", Off: off, N: n, Data: period})
	return err
}

// holds says whether the memory, all of it, is as a model, by a checksum.
func (m farBytes) holds(model []byte) bool {
	a, err := m.p.ask(call{Verb: "sum", N: int64(len(model))})
	return err == nil && a.Count == int(crc32.Checksum(model, castagnoli))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
