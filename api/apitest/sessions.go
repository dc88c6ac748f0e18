package apitest

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
)

// overSession is a store whose blocks a client moves over a session, by TCP or by a
// unix socket and, where the store has it, shared memory.
func overSession(t testing.TB, s api.Store, network string) *remote {
	t.Helper()
	store, ok := s.(session.Store)
	if !ok {
		t.Skip("the store serves no sessions")
	}
	want := api.WayTCP
	if network == "unix" {
		want = api.WayUnix
		if store.Memory() != nil {
			want = api.WayShared
		}
	}
	// The cases count what is reserved, so nothing is kept for later.
	r := newRemote(t, ServeSessions(t, s, store, network == "unix", &api.ClientOptions{NoGrants: true}))
	t.Cleanup(func() {
		if i := r.c.SessionInfo(); i.Way != want && i.Why != neverAsked {
			t.Errorf("blocks moved by %+v, want %s", i, want)
		}
	})
	return r
}

// neverAsked is why a client has no session that has moved no block.
const neverAsked = "no call has asked for one yet"

// ServeSessions serves a store over gRPC and sessions until the test ends, and returns
// a function that opens a connection to it. socket names the unix socket to the clients
// instead of the port.
func ServeSessions(t testing.TB, s api.Store, store session.Store, socket bool, o *api.ClientOptions) (dial func() *api.Client) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listen := func(network, addr string) net.Listener {
		var lc net.ListenConfig
		lis, err := lc.Listen(context.Background(), network, addr)
		if err != nil {
			t.Fatal(err)
		}
		return lis
	}
	control, port, local := listen("tcp", "127.0.0.1:0"), listen("tcp", "127.0.0.1:0"), listen("unix", path)
	places := &api.SessionPlaces{Address: port.Addr().String()}
	if socket {
		places = &api.SessionPlaces{Socket: path}
	}
	srv := api.NewServer(s, &api.ServerOptions{Sessions: places})
	srv.SetReady(true)
	sessions := session.NewServer(store, nil)
	served := make(chan error, 3)
	go func() { served <- srv.Serve(control) }()
	go func() { served <- sessions.Serve(port) }()
	go func() { served <- sessions.Serve(local) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := srv.Drain(ctx); err != nil {
			t.Error(err)
		}
		if err := sessions.Drain(ctx); err != nil {
			t.Error(err)
		}
		for range 3 {
			if err := <-served; err != nil {
				t.Error(err)
			}
		}
	})
	return func() *api.Client {
		t.Helper()
		c, err := api.Dial(context.Background(), control.Addr().String(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		return c
	}
}
