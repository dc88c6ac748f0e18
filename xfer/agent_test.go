package xfer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

var errInjected = errors.New("injected")

// remoteScript has the Remote role, notifierScript the Notifier role.
type (
	remoteScript   struct{ *script }
	notifierScript struct{ *script }
	networkScript  struct {
		remoteScript
		notifier
	}
	notifier struct{}
)

func (remoteScript) Bind(xfer.PeerID) error                              { return nil }
func (remoteScript) ConnInfo() ([]byte, error)                           { return []byte("here"), nil }
func (remoteScript) LoadConnInfo(xfer.PeerID, []byte) error              { return nil }
func (remoteScript) ForgetPeer(xfer.PeerID)                              {}
func (remoteScript) RegionInfo(xfer.Region) ([]byte, error)              { return nil, nil }
func (remoteScript) UnloadRegion(xfer.Region)                            {}
func (remoteScript) Connect(context.Context, xfer.PeerID) error          { return nil }
func (remoteScript) Disconnect(xfer.PeerID)                              {}
func (notifier) Notify(context.Context, xfer.PeerID, []byte) error       { return nil }
func (notifier) Notifications() <-chan xfer.Notification                 { return nil }
func (notifierScript) Notify(context.Context, xfer.PeerID, []byte) error { return nil }
func (notifierScript) Notifications() <-chan xfer.Notification           { return nil }
func (remoteScript) LoadRegion(xfer.PeerID, xfer.MemType, xfer.Desc, []byte) (xfer.Region, error) {
	return nil, nil
}

func TestAddBackendComparesCapsWithRoles(t *testing.T) {
	with := func(edit func(c *xfer.Caps)) *script {
		s := newScript("b")
		edit(&s.caps)
		return s
	}
	network := with(func(c *xfer.Caps) { c.Remote, c.Notify = true, true })
	for name, c := range map[string]struct {
		b    xfer.Backend
		want string // part of the error; empty when adopted
	}{
		"local":               {with(func(c *xfer.Caps) {}), ""},
		"nil":                 {nil, "nil"},
		"no name":             {newScript(""), "name"},
		"no pairs":            {with(func(c *xfer.Caps) { c.Pairs = nil }), "Pairs"},
		"unknown memory":      {with(func(c *xfer.Caps) { c.Pairs[0].Remote = 77 }), "MemType(77)"},
		"align 0":             {with(func(c *xfer.Caps) { c.Align = 0 }), "Align"},
		"neither side":        {with(func(c *xfer.Caps) { c.Local = false }), "neither"},
		"remote without role": {network, "Remote role"},
		"notify without role": {with(func(c *xfer.Caps) { c.Notify = true }), "Notifier role"},
		"remote alone":        {remoteScript{with(func(c *xfer.Caps) { c.Remote = true })}, "without Caps.Notify"},
		"remote, no notifier": {remoteScript{network}, "Notifier role"},
		"notifier":            {notifierScript{with(func(c *xfer.Caps) { c.Notify = true })}, ""},
		"network":             {networkScript{remoteScript: remoteScript{network}}, ""},
	} {
		a := newAgent(t, nil)
		err := a.AddBackend(c.b)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "create") {
			t.Errorf("%s: %v, want ErrInvalid that says %q", name, err, c.want)
		}
	}
	a := newAgent(t, nil, newScript("b"))
	if err := a.AddBackend(newScript("b")); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("a second backend of one name: %v", err)
	}
	if _, err := xfer.NewAgent("", nil); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("an agent without a name: %v", err)
	}
	if _, err := xfer.NewAgent("a", &xfer.AgentOptions{MaxInFlight: -1}); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("a negative limit: %v", err)
	}
}

func TestRegisterIsAllOrNothingPerBackend(t *testing.T) {
	var steps []string
	good, bad := newScript("good"), newScript("bad")
	good.steps, bad.steps = &steps, &steps
	bad.register = func(d xfer.Desc) error {
		if d.Addr == 3000 {
			return errInjected
		}
		return nil
	}
	a := newAgent(t, nil, bad, good)
	l := list(xfer.Desc{Addr: 1000, Len: 10}, xfer.Desc{Addr: 2000, Len: 10}, xfer.Desc{Addr: 3000, Len: 10})
	if err := a.Register(t.Context(), l, nil); err != nil {
		t.Fatalf("one backend accepts, but: %v", err)
	}
	want := []string{
		"bad register 1000", "bad register 2000", "bad register 3000", "bad deregister 2000", "bad deregister 1000",
		"good register 1000", "good register 2000", "good register 3000",
	}
	if !slices.Equal(steps, want) {
		t.Errorf("steps\n%q, want\n%q", steps, want)
	}
	if name, err := a.Choose(l, l); name != "good" || err != nil {
		t.Errorf("Choose: %q, %v", name, err)
	}
	if s := a.Stats(); s.Backends[0].Regions != 0 || s.Backends[1].Regions != 3 || s.Backends[1].RegisteredBytes != 30 {
		t.Errorf("stats: %+v", s)
	}

	err := a.Register(t.Context(), l, &xfer.RegisterOptions{Backends: []string{"bad"}})
	wantError(t, "refused by the only backend", err, errInjected, xfer.Error{Layer: xfer.LayerRegister, Backend: "bad", Index: 2})

	good.register = func(xfer.Desc) error { return xfer.ErrUnavailable }
	bad.deregister = func(xfer.Desc) error { return xfer.ErrDisconnected }
	err = a.Register(t.Context(), l, nil)
	for _, cause := range []error{errInjected, xfer.ErrUnavailable, xfer.ErrDisconnected} {
		if !errors.Is(err, cause) {
			t.Errorf("refused by all: %v, want also %v", err, cause)
		}
	}
}

func TestRegisterRefusesBadInput(t *testing.T) {
	a := newAgent(t, nil, newScript("copy"), newScript("disk", xfer.Pair{Local: xfer.DRAM, Remote: xfer.FILE}))
	one := list(xfer.Desc{Addr: 1, Len: 1})
	for name, c := range map[string]struct {
		l     xfer.DescList
		o     *xfer.RegisterOptions
		want  error
		index int
	}{
		"no descriptors":    {list(), nil, xfer.ErrInvalid, -1},
		"memory type":       {xfer.DescList{Type: 9, Descs: one.Descs}, nil, xfer.ErrInvalid, -1},
		"length 0":          {list(xfer.Desc{Addr: 1, Len: 1}, xfer.Desc{Addr: 5}), nil, xfer.ErrInvalid, 1},
		"wraps around":      {list(xfer.Desc{Addr: ^uint64(0), Len: 1}), nil, xfer.ErrInvalid, 0},
		"unknown backend":   {one, &xfer.RegisterOptions{Backends: []string{"disk", "tape"}}, xfer.ErrNotFound, -1},
		"nobody serves it":  {xfer.DescList{Type: xfer.VRAM, Descs: one.Descs}, nil, xfer.ErrNoBackend, -1},
		"not the named one": {xfer.DescList{Type: xfer.FILE, Descs: one.Descs}, &xfer.RegisterOptions{Backends: []string{"copy"}}, xfer.ErrNoBackend, -1},
	} {
		err := a.Register(t.Context(), c.l, c.o)
		wantError(t, name, err, c.want, xfer.Error{Layer: xfer.LayerRegister, Index: c.index})
	}
	if err := a.Register(t.Context(), xfer.DescList{Type: xfer.FILE, Descs: []xfer.Desc{{Dev: 1, Meta: "f"}}}, nil); err != nil {
		t.Errorf("a file without a length: %v", err)
	}
}

func TestDeregister(t *testing.T) {
	a := newAgent(t, nil, newScript("one"), newScript("two"))
	x, y := xfer.Desc{Addr: 1000, Len: 100}, xfer.Desc{Addr: 2000, Len: 100}
	for _, c := range []struct {
		l       xfer.DescList
		backend string
	}{{list(x, y), "one"}, {list(x), "two"}, {list(x), "two"}} {
		if err := a.Register(t.Context(), c.l, &xfer.RegisterOptions{Backends: []string{c.backend}}); err != nil {
			t.Fatal(err)
		}
	}
	regions := func() [2]int {
		s := a.Stats()
		return [2]int{s.Backends[0].Regions, s.Backends[1].Regions}
	}

	// Not exactly what was registered, or not as often: nothing happens.
	for name, l := range map[string]xfer.DescList{
		"shorter":         list(xfer.Desc{Addr: 1000, Len: 99}),
		"one is unknown":  list(x, xfer.Desc{Addr: 3000, Len: 100}),
		"another type":    {Type: xfer.VRAM, Descs: []xfer.Desc{x}},
		"once too often":  list(y, y),
		"another device":  list(xfer.Desc{Addr: 1000, Len: 100, Dev: 1}),
		"with other meta": list(xfer.Desc{Addr: 1000, Len: 100, Meta: "m"}),
	} {
		if err := a.Deregister(t.Context(), l); !errors.Is(err, xfer.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := regions(); got != [2]int{2, 2} {
		t.Fatalf("registrations after refused calls: %v", got)
	}

	// A request on one of two registrations of the same piece: the other can go.
	r := newRequest(t, a, xfer.Read, list(xfer.Desc{Addr: 1000, Len: 10}), list(xfer.Desc{Addr: 1050, Len: 10}), &xfer.RequestOptions{Backend: "two"})
	p, err := a.Prepare(list(xfer.Desc{Addr: 2000, Len: 10}))
	if err != nil {
		t.Fatal(err)
	}
	err = a.Deregister(t.Context(), list(x, y))
	wantError(t, "with a prepared list", err, xfer.ErrActive, xfer.Error{Layer: xfer.LayerRegister, Backend: "one", Index: 1})
	p.Release()
	p.Release()
	if err := a.Deregister(t.Context(), list(x, y)); err != nil {
		t.Errorf("deregister: %v", err)
	}
	if got := regions(); got != [2]int{0, 1} {
		t.Fatalf("registrations: %v", got)
	}
	err = a.Deregister(t.Context(), list(x))
	wantError(t, "with a request", err, xfer.ErrActive, xfer.Error{Layer: xfer.LayerRegister, Backend: "two", Index: 0})
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	if err := a.Deregister(t.Context(), list(x)); err != nil {
		t.Error(err)
	}
}

func TestChooseFollowsConfiguredOrder(t *testing.T) {
	first := newScript("first", xfer.Pair{Local: xfer.DRAM, Remote: xfer.FILE})
	second, third := newScript("second"), newScript("third")
	a := newAgent(t, nil, first, second, third)
	x, y := list(xfer.Desc{Addr: 1000, Len: 100}), list(xfer.Desc{Addr: 5000, Len: 100})
	in := func(l xfer.DescList, backends ...string) {
		t.Helper()
		if err := a.Register(t.Context(), l, &xfer.RegisterOptions{Backends: backends}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := a.Choose(x, y)
	wantError(t, "nothing registered", err, xfer.ErrNoBackend, xfer.Error{Layer: xfer.LayerPrepare, Index: -1})
	in(x, "second", "third")
	_, err = a.Choose(x, y)
	if !errors.Is(err, xfer.ErrNoBackend) || !errors.Is(err, xfer.ErrNotFound) || !strings.Contains(err.Error(), "remote DRAM") {
		t.Errorf("one side registered: %v", err)
	}
	in(y, "third")
	if name, err := a.Choose(x, y); name != "third" || err != nil {
		t.Errorf("both sides only in the third: %q, %v", name, err)
	}
	in(y, "second")
	for range 10 {
		if name, err := a.Choose(x, y); name != "second" || err != nil {
			t.Fatalf("both sides in two: %q, %v", name, err)
		}
	}
	r := newRequest(t, a, xfer.Write, x, y, &xfer.RequestOptions{Backend: "third"})
	if r.Backend() != "third" {
		t.Errorf("the named backend is third, chosen was %q", r.Backend())
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	_, err = a.NewRequest(xfer.Write, x, y, &xfer.RequestOptions{Backend: "first"})
	wantError(t, "a named backend without the pair", err, xfer.ErrNoBackend, xfer.Error{Layer: xfer.LayerPrepare, Backend: "first", Index: -1})
	var names []string
	for _, b := range a.Backends() {
		names = append(names, b.Name)
	}
	if !slices.Equal(names, []string{"first", "second", "third"}) {
		t.Errorf("Backends: %q", names)
	}
}

func TestCloseInReverseOrder(t *testing.T) {
	var steps []string
	one, two := newScript("one"), newScript("two")
	one.steps, two.steps = &steps, &steps
	a := newAgent(t, nil, one, two)
	if err := a.Register(t.Context(), list(xfer.Desc{Addr: 1000, Len: 10}), nil); err != nil {
		t.Fatal(err)
	}
	newRequest(t, a, xfer.Read, list(xfer.Desc{Addr: 1000, Len: 5}), list(xfer.Desc{Addr: 1005, Len: 5}), nil) // left to Close
	steps = nil
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if want := []string{"two deregister 1000", "two close", "one deregister 1000", "one close"}; !slices.Equal(steps, want) {
		t.Errorf("steps %q, want %q", steps, want)
	}
	for name, err := range map[string]error{
		"AddBackend": a.AddBackend(newScript("late")),
		"Register":   a.Register(t.Context(), list(xfer.Desc{Addr: 1, Len: 1}), nil),
		"Deregister": a.Deregister(t.Context(), list(xfer.Desc{Addr: 1, Len: 1})),
		"Choose":     func() error { _, err := a.Choose(list(xfer.Desc{Len: 1}), list(xfer.Desc{Len: 1})); return err }(),
		"Prepare":    func() error { _, err := a.Prepare(list(xfer.Desc{Len: 1})); return err }(),
		"Query":      func() error { _, err := a.Query(t.Context(), "one", list()); return err }(),
	} {
		if !errors.Is(err, xfer.ErrClosed) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
}

// querier answers with what it is told.
type querier struct {
	*script
	answer []xfer.QueryResult
	err    error
}

func (q querier) Query(context.Context, xfer.MemType, []xfer.Desc) ([]xfer.QueryResult, error) {
	return q.answer, q.err
}

func TestQuery(t *testing.T) {
	answer := []xfer.QueryResult{{Exists: true, Bytes: 5}}
	a := newAgent(t, nil, newScript("plain"), querier{script: newScript("knows"), answer: answer},
		querier{script: newScript("fails"), err: errInjected})
	one := list(xfer.Desc{Len: 1})
	if got, err := a.Query(t.Context(), "knows", one); err != nil || !slices.Equal(got, answer) {
		t.Errorf("Query: %v, %v", got, err)
	}
	for name, c := range map[string]struct {
		backend string
		l       xfer.DescList
		want    error
	}{
		"unknown":      {"nobody", one, xfer.ErrNotFound},
		"no role":      {"plain", one, xfer.ErrNotSupported},
		"not served":   {"knows", xfer.DescList{Type: xfer.OBJ}, xfer.ErrInvalid},
		"answer short": {"knows", list(xfer.Desc{Len: 1}, xfer.Desc{Len: 2}), xfer.ErrShort},
		"fails":        {"fails", one, errInjected},
	} {
		if _, err := a.Query(t.Context(), c.backend, c.l); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
