package xfer_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kvtier/kvtier/xfer"
)

// Nobody takes the notifications: the sender waits, none is lost, and their order
// stays.
func TestNotificationsWait(t *testing.T) { synctest.Test(t, testNotificationsWait) }

func testNotificationsWait(t *testing.T) {
	ctx := context.Background()
	net := newNetwork(t)
	a, _ := net.agent("a", nil)
	b, node := net.agent("b", &xfer.AgentOptions{MaxNotifications: 3})
	introduce(t, a, b)
	const sent = 40
	done := make(chan int, sent)
	go func() {
		for i := range sent {
			if err := a.Notify(ctx, "b", fmt.Append(nil, i), nil); err != nil {
				t.Error(err)
			}
			done <- i
		}
	}()
	synctest.Wait()
	room := 3 + 1 + cap(node.notes) // the agent's queue, the one in between, the backend's
	if n := len(done); n != room {
		t.Errorf("%d notifications were delivered, there is room for %d", n, room)
	}
	if n := b.Stats().Waiting; n != 3 {
		t.Errorf("%d notifications wait in the agent, at most 3", n)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	wantFailure(t, a.Notify(ended, "b", nil, nil), xfer.ErrCanceled)
	for i := range sent {
		if n := <-b.Notifications(); string(n.Msg) != fmt.Sprint(i) || n.Peer != a.ID() {
			t.Errorf("notification %d is %q of %s", i, n.Msg, n.Peer)
		}
	}
}

// A request whose notification fails has moved its bytes and has failed.
func TestRequestFailsWithItsNotification(t *testing.T) {
	ctx := context.Background()
	d, bytes := pages(t, 2)
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	b, _ := net.agent("b", nil)
	register(t, a, d[0])
	register(t, b, d[1])
	introduce(t, a, b)
	msg := []byte("x")
	r := request(t, a, xfer.Write, dram(d[0]), dram(d[1]), &xfer.RequestOptions{Peer: "b", Notify: msg})
	msg[0] = 'y' // the request has its own

	copy(bytes[0], "1")
	node.notify = func() error { return errInjected }
	err := r.Run(ctx)
	wantFailure(t, err, errInjected, "the bytes arrived", "post net")
	if r.Status() != xfer.Failed || r.DescErr(0) != nil || bytes[1][0] != '1' {
		t.Errorf("status %s, descriptor %v, bytes %q", r.Status(), r.DescErr(0), bytes[1][0])
	}

	short, cancel := context.WithCancel(ctx)
	node.notify = func() error { cancel(); return fmt.Errorf("%w: %w", xfer.ErrCanceled, short.Err()) }
	err = r.Run(short)
	wantFailure(t, err, xfer.ErrCanceled, "the bytes arrived")
	if r.Status() != xfer.Canceled {
		t.Errorf("status %s", r.Status())
	}

	// No notification when bytes are missing, one for each post otherwise.
	node.notify = nil
	node.transfer = func(context.Context) error { return errInjected }
	wantFailure(t, r.Run(ctx), errInjected)
	node.transfer = nil
	for range 2 {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		if n := <-b.Notifications(); string(n.Msg) != "x" {
			t.Errorf("notification %q", n.Msg)
		}
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if n, ok := <-b.Notifications(); ok {
		t.Errorf("another notification %q", n.Msg)
	}
}

// Close ends transfers, notifications that wait and peers.
func TestCloseWithPeers(t *testing.T) { synctest.Test(t, testCloseWithPeers) }

func testCloseWithPeers(t *testing.T) {
	ctx := context.Background()
	d, _ := pages(t, 2)
	net := newNetwork(t)
	a, node := net.agent("a", nil)
	b, _ := net.agent("b", &xfer.AgentOptions{MaxNotifications: 1})
	register(t, a, d[0])
	register(t, b, d[1])
	introduce(t, a, b)
	introduce(t, b, a)
	node.transfer = func(ctx context.Context) error {
		<-ctx.Done()
		return xfer.ErrCanceled
	}
	r, err := a.NewRequest(xfer.Write, dram(d[0]), dram(d[1]), at("b"))
	if err != nil {
		t.Fatal(err)
	}
	idle, err := a.NewRequest(xfer.Write, dram(d[0]), dram(d[1]), at("b"))
	if err != nil {
		t.Fatal(err)
	}
	list, err := a.PrepareRemote("b", dram(d[1]))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Post(ctx); err != nil {
		t.Fatal(err)
	}
	notified := make(chan error)
	go func() {
		for {
			if err := a.Notify(ctx, "b", nil, nil); err != nil {
				notified <- err
				return
			}
		}
	}()
	synctest.Wait() // the transfer is under way, and b's queue full
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	wantFailure(t, <-notified, xfer.ErrClosed)
	for _, r := range []*xfer.Request{r, idle} {
		wantFailure(t, r.Wait(ctx), xfer.ErrClosed)
	}
	list.Release() // its regions are unloaded already
	if _, ok := <-a.Notifications(); ok {
		t.Error("a notification after Close")
	}
	blob, err := b.Metadata()
	if err != nil {
		t.Fatal(err)
	}
	_, err = a.LoadMetadata(blob)
	wantFailure(t, err, xfer.ErrClosed)
	_, err = a.Metadata()
	wantFailure(t, err, xfer.ErrClosed)
	_, err = a.PrepareRemote("b", dram(d[1]))
	wantFailure(t, err, xfer.ErrClosed)
	for what, err := range map[string]error{
		"invalidate": a.Invalidate("b"), "connect": a.Connect(ctx, "b"),
		"disconnect": a.Disconnect("b"), "notify": a.Notify(ctx, "b", nil, nil),
	} {
		wantFailure(t, err, xfer.ErrClosed)
		if len(a.Peers()) != 0 || strings.Contains(err.Error(), "knows no peer") {
			t.Errorf("%s: %v, peers %v", what, err, a.Peers())
		}
	}
}

// The end of the peer's life while the notification of a request waits.
func TestEndOfLifeDuringNotification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		d, _ := pages(t, 2)
		net := newNetwork(t)
		a, _ := net.agent("a", nil)
		b, node := net.agent("b", &xfer.AgentOptions{MaxNotifications: 1})
		register(t, a, d[0])
		register(t, b, d[1])
		introduce(t, a, b)
		for range cap(node.notes) + 2 {
			if err := a.Notify(ctx, "b", nil, nil); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		r := request(t, a, xfer.Write, dram(d[0]), dram(d[1]), &xfer.RequestOptions{Peer: "b", Notify: []byte{1}})
		if err := r.Post(ctx); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if s := r.Status(); s != xfer.Active {
			t.Errorf("status %s before the notification is delivered", s)
		}
		if err := a.Invalidate("b"); err != nil {
			t.Error(err)
		}
		wantFailure(t, r.Wait(ctx), xfer.ErrDisconnected, "the bytes arrived", "was invalidated")
		if s := r.Status(); s != xfer.Failed {
			t.Errorf("status %s", s)
		}
	})
}
