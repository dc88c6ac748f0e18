package xfer_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/kvtier/kvtier/xfer"
)

// at is the options of a request whose remote side is a peer's.
func at(peer string) *xfer.RequestOptions { return &xfer.RequestOptions{Peer: peer} }

// request makes a request that is released at the end of the test.
func request(t *testing.T, a *xfer.Agent, op xfer.Op, local, remote xfer.DescList, o *xfer.RequestOptions) *xfer.Request {
	t.Helper()
	r, err := a.NewRequest(op, local, remote, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func wantFailure(t *testing.T, err, want error, parts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
		return
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", err, p)
		}
	}
}

// Two agents that point at each other read and write each other's memory.
func TestPeersReadAndWrite(t *testing.T) {
	ctx := context.Background()
	d, bytes := pages(t, 4)
	net := newNetwork(t)
	a, _ := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	register(t, a, d[:2]...)
	register(t, b, d[2:]...)
	introduce(t, a, b)
	introduce(t, b, a)

	copy(bytes[0], "from a")
	w := request(t, a, xfer.Write, dram(d[0]), dram(d[2]), &xfer.RequestOptions{Peer: "b", Notify: []byte("put")})
	if err := w.Run(ctx); err != nil {
		t.Fatal(err)
	}
	n := <-b.Notifications()
	if n.Peer != a.ID() || string(n.Msg) != "put" {
		t.Errorf("notification %s %q", n.Peer, n.Msg)
	}
	if got := string(bytes[2][:6]); got != "from a" {
		t.Errorf("b has %q", got)
	}

	copy(bytes[1][100:], "more")
	part := xfer.Desc{Addr: d[1].Addr + 100, Len: 4}
	r := request(t, b, xfer.Read, dram(xfer.Desc{Addr: d[3].Addr + 7, Len: 4}), dram(part), at("a"))
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if got := string(bytes[3][7:11]); got != "more" {
		t.Errorf("b read %q", got)
	}

	s := a.Stats()
	if s.Peers != 1 || s.Backends[0].Peers != 1 || s.Backends[0].PeerRegions != 2 || s.Backends[0].Notified != 1 {
		t.Errorf("stats %+v", s)
	}
	if s := b.Stats(); s.Backends[0].Notifications != 1 || s.Waiting != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestPeerRequestErrors(t *testing.T) {
	d, _ := pages(t, 4)
	net := newNetwork(t)
	a, _ := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	register(t, a, d[0], d[1])
	whole := xfer.Desc{Addr: d[2].Addr, Len: 4096}
	next := xfer.Desc{Addr: whole.End(), Len: 4096}
	register(t, b, whole, next)
	introduce(t, a, b)

	two := xfer.Desc{Addr: whole.Addr + 1, Len: 4096}
	for name, c := range map[string]struct {
		local, remote xfer.DescList
		o             *xfer.RequestOptions
		want          error
		says          string
	}{
		"unknown peer":        {dram(d[0]), dram(d[2]), at("nobody"), xfer.ErrNotFound, `"nobody"`},
		"not registered":      {dram(d[0]), dram(d[1]), at("b"), xfer.ErrNotFound, "remote DRAM"},
		"local not ours":      {dram(d[2]), dram(d[2]), at("b"), xfer.ErrNotFound, "local DRAM"},
		"two registrations":   {dram(d[0]), dram(two), at("b"), xfer.ErrNotFound, "remote DRAM"},
		"counts":              {dram(d[0], d[1]), dram(d[2]), at("b"), xfer.ErrInvalid, "2 local and 1 remote"},
		"lengths":             {dram(d[0]), dram(xfer.Desc{Addr: d[2].Addr, Len: 5}), at("b"), xfer.ErrInvalid, "local length 4096"},
		"types":               {dram(d[0]), xfer.DescList{Type: xfer.FILE, Descs: d[2:3]}, at("b"), xfer.ErrNoBackend, "DRAM to FILE of a peer"},
		"backend":             {dram(d[0]), dram(d[2]), &xfer.RequestOptions{Peer: "b", Backend: "tcp"}, xfer.ErrNotFound, `"tcp"`},
		"within the agent":    {dram(d[0]), dram(d[1]), nil, xfer.ErrNoBackend, "DRAM to DRAM"},
		"notify without peer": {dram(d[0]), dram(d[1]), &xfer.RequestOptions{Notify: []byte{}}, xfer.ErrInvalid, "Peer"},
		"long notification":   {dram(d[0]), dram(d[2]), &xfer.RequestOptions{Peer: "b", Notify: make([]byte, xfer.MaxNotification+1)}, xfer.ErrInvalid, "65537"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := a.NewRequest(xfer.Write, c.local, c.remote, c.o)
			wantFailure(t, err, c.want, c.says)
			if r != nil {
				t.Error("a request was made")
			}
		})
	}
}

// Another incarnation makes everything of the old one stale, and it is gone from the
// backend though requests and prepared lists are not released.
func TestAnotherLifeMakesRequestsStale(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 3)
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	old, _ := net.agent("b", &xfer.AgentOptions{Incarnation: 1})
	life, _ := net.agent("b", &xfer.AgentOptions{Incarnation: 2})
	register(t, a, d[0])
	register(t, old, d[1])
	register(t, life, d[1], d[2])
	introduce(t, a, old)

	local, err := a.Prepare(dram(d[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer local.Release()
	remote, err := a.PrepareRemote("b", dram(d[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer remote.Release()
	selected, err := a.Select(xfer.Write, local, nil, remote, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer selected.Release()
	r := request(t, a, xfer.Write, dram(d[0]), dram(d[1]), at("b"))
	for _, r := range []*xfer.Request{r, selected} {
		if err := r.Run(ctx); err != nil {
			t.Fatal(err)
		}
	}

	introduce(t, a, life)
	for _, r := range []*xfer.Request{r, selected} {
		wantFailure(t, r.Run(ctx), xfer.ErrDisconnected, old.ID().String(), "replaced by "+life.ID().String())
		wantFailure(t, r.Post(ctx), xfer.ErrDisconnected)
	}
	_, err = a.Select(xfer.Write, local, nil, remote, nil, nil)
	wantFailure(t, err, xfer.ErrDisconnected, old.ID().String())
	if peers, regions := node.counts(); peers != 1 || regions != 2 {
		t.Errorf("backend knows %d peers, %d regions; want those of the new life", peers, regions)
	}
	want := xfer.PeerInfo{PeerID: life.ID(), Generation: 2, Backends: []string{"net"}, Regions: 2}
	if got := a.Peers(); len(got) != 1 || got[0].PeerID != want.PeerID || got[0].Generation != 2 || got[0].Regions != 2 || !slices.Equal(got[0].Backends, want.Backends) {
		t.Errorf("peers %+v, want %+v", got, want)
	}
	if err := request(t, a, xfer.Write, dram(d[0]), dram(d[2]), at("b")).Run(ctx); err != nil {
		t.Error(err)
	}
}

// The end of a life interrupts what is in flight, whichever way it ends, and each
// post ends as disconnected, not as cancelled.
func TestEndOfLifeInterrupts(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, a, life *xfer.Agent){
		"invalidate": func(t *testing.T, a, _ *xfer.Agent) {
			if err := a.Invalidate("b"); err != nil {
				t.Error(err)
			}
			if len(a.Peers()) != 0 {
				t.Errorf("peers %v", a.Peers())
			}
			_, err := a.NewRequest(xfer.Write, dram(xfer.Desc{Len: 1}), dram(xfer.Desc{Len: 1}), at("b"))
			wantFailure(t, err, xfer.ErrNotFound)
			wantFailure(t, a.Invalidate("b"), xfer.ErrNotFound)
		},
		"another life": func(t *testing.T, a, life *xfer.Agent) { introduce(t, a, life) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := context.Background()
				d, _ := pages(t, 3)
				net := newNetwork(t)
				a, node := net.agent("a", nil)
				old, _ := net.agent("b", nil)
				life, _ := net.agent("b", nil)
				register(t, a, d[0])
				register(t, old, d[1], d[2])
				introduce(t, a, old)

				node.transfer = func(ctx context.Context) error {
					<-ctx.Done()
					return xfer.ErrCanceled
				}
				var requests []*xfer.Request
				for range 3 {
					r := request(t, a, xfer.Write, dram(d[0], d[0]), dram(d[1], d[2]), at("b"))
					if err := r.Post(ctx); err != nil {
						t.Fatal(err)
					}
					requests = append(requests, r)
				}
				notified := make(chan error)
				go func() {
					for {
						if err := a.Notify(ctx, "b", []byte("x"), nil); err != nil {
							notified <- err // the queue was full until the end
							return
						}
					}
				}()
				synctest.Wait() // the transfers are under way, and the queue is full
				end(t, a, life)
				for _, r := range requests {
					err := r.Wait(ctx)
					wantFailure(t, err, xfer.ErrDisconnected)
					wantFailure(t, r.DescErr(1), xfer.ErrDisconnected)
					if errors.Is(err, xfer.ErrCanceled) || errors.Is(err, context.Canceled) || r.Status() != xfer.Failed {
						t.Errorf("status %s, %v", r.Status(), err)
					}
				}
				wantFailure(t, <-notified, xfer.ErrDisconnected, old.ID().String())
				if _, regions := node.counts(); regions != 0 {
					t.Errorf("%d regions are loaded", regions)
				}
			})
		})
	}
}

// The end of a life waits for an estimate that looks at a prepared transfer, and then
// there are none of it.
func TestEndOfLifeWaitsForEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _ := pages(t, 2)
		net := newNetwork(t)
		a, node := net.agent("a", nil)
		b, _ := net.agent("b", nil)
		register(t, a, d[0])
		register(t, b, d[1])
		introduce(t, a, b)
		r := request(t, a, xfer.Write, dram(d[0]), dram(d[1]), at("b"))
		goOn, estimated, ended := make(chan struct{}), make(chan error, 1), make(chan error, 1)
		node.estimate = func() { <-goOn }
		go func() {
			_, err := a.Estimate(r)
			estimated <- err
		}()
		synctest.Wait()
		go func() { ended <- a.Invalidate("b") }()
		synctest.Wait()
		if len(ended) > 0 {
			t.Error("the peer was forgotten during an estimate")
		}
		_, err := a.NewRequest(xfer.Write, dram(d[0]), dram(d[1]), at("b"))
		wantFailure(t, err, xfer.ErrDisconnected)
		close(goOn)
		if err := errors.Join(<-estimated, <-ended); err != nil {
			t.Error(err)
		}
		_, err = a.Estimate(r)
		wantFailure(t, err, xfer.ErrDisconnected)
	})
}

// A request that is being made when the life ends is not made, and holds the end off
// while the backend prepares it.
func TestEndOfLifeWhileRequestIsMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _ := pages(t, 2)
		net := newNetwork(t)
		a, node := net.agent("a", nil)
		b, _ := net.agent("b", nil)
		register(t, a, d[0])
		register(t, b, d[1])
		introduce(t, a, b)
		goOn, made, ended := make(chan struct{}), make(chan error, 1), make(chan error, 1)
		node.prepare = func() { <-goOn }
		go func() {
			_, err := a.NewRequest(xfer.Write, dram(d[0]), dram(d[1]), at("b"))
			made <- err
		}()
		synctest.Wait()
		go func() { ended <- a.Invalidate("b") }()
		synctest.Wait()
		if len(ended) > 0 {
			t.Error("the peer was forgotten while a request was prepared")
		}
		close(goOn)
		wantFailure(t, <-made, xfer.ErrDisconnected, "prepare net", "was invalidated")
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if n := a.Stats().Requests; n != 0 {
			t.Errorf("%d requests are left", n)
		}
	})
}

// Loads, ends of lives, requests and prepared lists at once: each request ends in a way
// that fits, and the backend sees what it was promised.
func TestPeersComeAndGo(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 5)
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	register(t, a, d[0])
	var blobs [][]byte
	for life := range uint64(2) {
		b, _ := net.agent("b", &xfer.AgentOptions{Incarnation: 1 + life})
		register(t, b, d[1], d[2])
		all, err := b.Metadata()
		if err != nil {
			t.Fatal(err)
		}
		part, err := b.PartialMetadata(dram(d[2]))
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Deregister(ctx, dram(d[2])); err != nil { // its regions go and come
			t.Fatal(err)
		}
		less, err := b.Metadata()
		if err != nil {
			t.Fatal(err)
		}
		blobs = append(blobs, all, part, less)
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			for range b.Notifications() {
			}
		}()
		t.Cleanup(func() { _ = b.Close(); <-drained })
	}
	node.transfer = func(context.Context) error { runtime.Gosched(); return nil }
	fits := func(what string, err error) {
		for _, want := range []error{nil, xfer.ErrDisconnected, xfer.ErrNotFound, xfer.ErrInvalid} {
			if errors.Is(err, want) {
				return
			}
		}
		t.Errorf("%s: %v", what, err)
	}
	var wg sync.WaitGroup
	const rounds = 300
	for i := range 3 {
		wg.Go(func() {
			for n := range rounds {
				_, err := a.LoadMetadata(blobs[(n*(i+1)+i)%len(blobs)])
				if err != nil {
					t.Error(err)
				}
				if n%7 == 0 {
					fits("invalidate", a.Invalidate("b"))
				}
			}
		})
		wg.Go(func() {
			for n := range rounds {
				r, err := a.NewRequest(xfer.Write, dram(d[0]), dram(d[1+n%2]), &xfer.RequestOptions{Peer: "b", Notify: []byte{1}})
				fits("new request", err)
				if err != nil {
					continue
				}
				if n%3 == 0 {
					if err := r.Post(ctx); err != nil {
						fits("post", err)
					} else {
						fits("wait", r.Wait(ctx))
					}
				} else {
					fits("run", r.Run(ctx))
				}
				if err := r.Release(); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			local, err := a.Prepare(dram(d[0]))
			if err != nil {
				t.Error(err)
				return
			}
			defer local.Release()
			for range rounds {
				remote, err := a.PrepareRemote("b", dram(d[1]))
				fits("prepare", err)
				if err != nil {
					continue
				}
				r, err := a.Select(xfer.Read, local, nil, remote, nil, nil)
				fits("select", err)
				remote.Release()
				if err == nil {
					fits("run", r.Run(ctx))
					if err := r.Release(); err != nil {
						t.Error(err)
					}
				}
				fits("notify", a.Notify(ctx, "b", nil, nil))
				fits("connect", a.Connect(ctx, "b"))
				a.Peers()
				a.Stats()
			}
		})
	}
	wg.Wait()
}

// Among several backends the first that both sides have and have registered is used,
// and each one's reason is told otherwise.
func TestChoiceOfBackendForPeer(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 4)
	net := newNetwork(t)
	agent := func(name string, backends ...string) *xfer.Agent {
		a := newAgent(t, nil)
		a, err := xfer.NewAgent(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = a.Close() })
		for _, b := range backends {
			if err := a.AddBackend(net.node(b, 4)); err != nil {
				t.Fatal(err)
			}
		}
		return a
	}
	a := agent("a", "fast", "far", "slow")
	b := agent("b", "slow", "other", "fast")
	only := func(a *xfer.Agent, d xfer.Desc, backend string) {
		t.Helper()
		if err := a.Register(ctx, dram(d), &xfer.RegisterOptions{Backends: []string{backend}}); err != nil {
			t.Fatal(err)
		}
	}
	register(t, a, d[0])
	only(a, d[1], "far")
	register(t, b, d[2])
	only(b, d[3], "slow")
	introduce(t, a, b)

	if got := a.Peers()[0].Backends; !slices.Equal(got, []string{"fast", "slow"}) {
		t.Errorf("common backends %q", got)
	}
	for remote, want := range map[xfer.Desc]string{d[2]: "fast", d[3]: "slow"} {
		if got := request(t, a, xfer.Write, dram(d[0]), dram(remote), at("b")).Backend(); got != want {
			t.Errorf("backend %s, want %s", got, want)
		}
	}
	slow := request(t, a, xfer.Write, dram(d[0]), dram(d[2]), &xfer.RequestOptions{Peer: "b", Backend: "slow"})
	if slow.Backend() != "slow" {
		t.Errorf("backend %s, want slow", slow.Backend())
	}
	_, err := a.NewRequest(xfer.Write, dram(d[1]), dram(d[2]), at("b"))
	wantFailure(t, err, xfer.ErrNoBackend, "prepare fast", "prepare far: not found: peer b#", "no such backend", "prepare slow")
	if err := a.Notify(ctx, "b", nil, &xfer.NotifyOptions{Backend: "far"}); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("notify by a backend that is not shared: %v", err)
	}
	if err := a.Notify(ctx, "b", nil, &xfer.NotifyOptions{Backend: "slow"}); err != nil {
		t.Error(err)
	}
	if n := <-b.Notifications(); n.Peer != a.ID() || len(n.Msg) != 0 || b.Stats().Backends[0].Notifications != 1 {
		t.Errorf("notification %v", n)
	}
}

func TestConnectAndDisconnect(t *testing.T) {
	ctx := context.Background()
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	wantFailure(t, a.Connect(ctx, "b"), xfer.ErrNotFound, "connect", `"b"`)
	wantFailure(t, a.Disconnect("b"), xfer.ErrNotFound)
	introduce(t, a, b)
	if err := a.Connect(ctx, "b"); err != nil {
		t.Error(err)
	}
	if node.mu.connects != 1 {
		t.Errorf("%d connections", node.mu.connects)
	}
	if err := a.Disconnect("b"); err != nil {
		t.Error(err)
	}
	if node.mu.connects != 0 || len(a.Peers()) != 1 {
		t.Errorf("%d connections, peers %v", node.mu.connects, a.Peers())
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	wantFailure(t, a.Connect(ctx, "b"), xfer.ErrDisconnected, "connect net")
	if len(a.Peers()) != 1 {
		t.Error("a failed connection evicted the peer")
	}
}

// unbound fails at one of the calls that make a backend reachable.
type unbound struct {
	*node
	bind, region error
	conn         []byte
}

func (u unbound) Bind(xfer.PeerID) error                 { return u.bind }
func (u unbound) ConnInfo() ([]byte, error)              { return u.conn, nil }
func (u unbound) RegionInfo(xfer.Region) ([]byte, error) { return nil, u.region }

func TestBackendThatIsNotReachable(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 1)
	net := newNetwork(t)
	a := newAgent(t, nil)
	wantFailure(t, a.AddBackend(unbound{node: net.node("x", 0), bind: errInjected}), errInjected, "create x", a.ID().String())
	wantFailure(t, a.AddBackend(unbound{node: net.node("x", 0)}), xfer.ErrInvalid, "connection info is empty")
	if n := len(a.Backends()); n != 0 {
		t.Errorf("%d backends were adopted", n)
	}
	b := net.node("x", 0)
	if err := a.AddBackend(unbound{node: b, conn: []byte("x"), region: errInjected}); err != nil {
		t.Fatal(err)
	}
	wantFailure(t, a.Register(ctx, dram(d[0]), nil), errInjected, "register x", "region info")
	if n := len(b.mu.regions); n != 0 {
		t.Errorf("%d regions stayed registered", n)
	}
	_, err := xfer.NewAgent("a", &xfer.AgentOptions{MaxNotifications: -1})
	wantFailure(t, err, xfer.ErrInvalid, "MaxNotifications -1")
}

func TestIncarnationsDiffer(t *testing.T) {
	a, b := newAgent(t, nil), newAgent(t, nil)
	if a.ID().Incarnation == 0 || a.ID() == b.ID() {
		t.Errorf("two lives of one name are %s and %s", a.ID(), b.ID())
	}
}

func TestSelectForPeers(t *testing.T) {
	d, _ := pages(t, 4)
	net := newNetwork(t)
	a, _ := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	register(t, a, d[0], d[1])
	register(t, b, d[2], d[3])
	introduce(t, a, b)
	local, err := a.Prepare(dram(d[0], d[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer local.Release()
	remote, err := a.PrepareRemote("b", dram(d[2], d[3]))
	if err != nil {
		t.Fatal(err)
	}
	defer remote.Release()

	r, err := a.Select(xfer.Write, local, []int{1}, remote, []int{0}, &xfer.RequestOptions{Peer: "b", Notify: []byte("1 to 0")})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	if err := r.Run(context.Background()); err != nil {
		t.Error(err)
	}
	if n := <-b.Notifications(); string(n.Msg) != "1 to 0" {
		t.Errorf("notification %q", n.Msg)
	}
	for name, c := range map[string]struct {
		local, remote *xfer.PreparedList
		o             *xfer.RequestOptions
		want          error
		says          string
	}{
		"peer's memory as local side": {remote, remote, nil, xfer.ErrInvalid, "local prepared list is of peer b#"},
		"another peer":                {local, remote, at("c"), xfer.ErrInvalid, `"c"`},
		"own memory, but a peer":      {local, local, at("b"), xfer.ErrInvalid, `"b"`},
		"own memory, but a message":   {local, local, &xfer.RequestOptions{Notify: []byte{}}, xfer.ErrInvalid, "Peer"},
		"own memory":                  {local, local, nil, xfer.ErrNoBackend, "DRAM to DRAM"},
	} {
		_, err := a.Select(xfer.Write, c.local, nil, c.remote, nil, c.o)
		wantFailure(t, err, c.want, c.says)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	_, err = a.PrepareRemote("", dram(d[2]))
	wantFailure(t, err, xfer.ErrInvalid, "peer name is empty")
	_, err = a.PrepareRemote("c", dram(d[2]))
	wantFailure(t, err, xfer.ErrNotFound, `"c"`)
	_, err = a.PrepareRemote("b", dram(d[0]))
	wantFailure(t, err, xfer.ErrNoBackend, "no registration covers")
	_, err = a.PrepareRemote("b", xfer.DescList{Type: xfer.VRAM, Descs: d[:1]})
	wantFailure(t, err, xfer.ErrNoBackend, "none serves VRAM")
}
