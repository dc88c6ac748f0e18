package shm

import (
	"errors"
	"net"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// pair is two backends of which the first knows the second and a region of it.
type duo struct {
	near, far *Backend
	region    xfer.Region // at the far one
	remote    *remoteRegion
	mem       []byte
}

var (
	nearID = xfer.PeerID{Name: "near", Incarnation: 1}
	farID  = xfer.PeerID{Name: "far", Incarnation: 2}
)

func newDuo(t *testing.T) *duo {
	t.Helper()
	a, err := arena.New(1, &arena.Options{Memfd: true, NoHugePages: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	d := &duo{mem: a.Chunks()[0], near: bound(t, nearID, &Options{}), far: bound(t, farID, &Options{FileOf: a.FileOf})}
	info, err := d.far.ConnInfo()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.near.LoadConnInfo(farID, info); err != nil {
		t.Fatal(err)
	}
	d.region, d.remote = d.register(t)
	return d
}

// bound makes a backend that is closed with the test.
func bound(t *testing.T, id xfer.PeerID, o *Options) *Backend {
	t.Helper()
	o.Socket = filepath.Join(t.TempDir(), "s")
	b, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := b.Bind(id); err != nil {
		t.Fatal(err)
	}
	return b
}

// register registers all memory of the far side once more.
func (d *duo) register(t *testing.T) (xfer.Region, *remoteRegion) {
	t.Helper()
	desc := xfer.Desc{Addr: arena.Addr(d.mem), Len: uint64(len(d.mem))}
	r, err := d.far.Register(t.Context(), xfer.DRAM, desc)
	if err != nil {
		t.Fatal(err)
	}
	info, err := d.far.RegionInfo(r)
	if err != nil {
		t.Fatal(err)
	}
	remote, err := d.near.LoadRegion(farID, xfer.DRAM, desc, info)
	if err != nil {
		t.Fatal(err)
	}
	return r, remote.(*remoteRegion)
}

// inside enters the gate of a region, as a transfer does for a piece.
func (d *duo) inside(t *testing.T) (*link, *grant) {
	t.Helper()
	l, err := d.near.link(t.Context(), d.near.peer(farID), false)
	if err != nil {
		t.Fatal(err)
	}
	g, err := l.grant(t.Context(), d.remote)
	if err != nil {
		t.Fatal(err)
	}
	if !l.gate.enter(g.word) {
		t.Fatal("the gate is shut")
	}
	return l, g
}

// waitFor waits for what another goroutine does.
func waitFor(t *testing.T, what string, is func() bool) {
	t.Helper()
	for began := time.Now(); !is(); runtime.Gosched() {
		if time.Since(began) > 30*time.Second {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

// TestDeregisterWaits: for who is inside, and lets nobody else in.
func TestDeregisterWaits(t *testing.T) {
	d := newDuo(t)
	l, g := d.inside(t)
	ended := make(chan error, 1)
	go func() { ended <- d.far.Deregister(d.region) }()
	waitFor(t, "shut", func() bool { return l.gate.isShut(g.word) })
	if l.gate.enter(g.word) {
		t.Error("somebody enters a gate that is shut")
	}
	select {
	case err := <-ended:
		t.Errorf("Deregister returns while a peer is inside: %v", err)
	default:
	}
	d.mem[0] = 1
	l.gate.leave(g.word)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	waitFor(t, "the grant is forgotten", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.mu.grants) == 0
	})
	l.mu.Lock()
	if len(l.mu.files) != 1 {
		t.Errorf("the file of a grant in use: %d are mapped, want 1", len(l.mu.files))
	}
	l.mu.Unlock()
	l.unref(g)
	l.mu.Lock()
	if len(l.mu.files) != 0 {
		t.Error("the file stays mapped when no region of it is left")
	}
	l.mu.Unlock()
	l.release()
}

// TestDeregisterWaitsBehindACut: a connection that has ended does not make the memory
// safe; its socket that is closed does, even if the peer died inside.
func TestDeregisterWaitsBehindACut(t *testing.T) {
	d := newDuo(t)
	l, g := d.inside(t)
	d.far.Disconnect(nearID)
	ended := make(chan error, 1)
	go func() { ended <- d.far.Deregister(d.region) }()
	waitFor(t, "the peer hears of it", func() bool { return l.broken.Load() })
	select {
	case err := <-ended:
		t.Errorf("Deregister returns while a peer is inside: %v", err)
	default:
	}
	l.unref(g)
	l.release() // without leaving, as one that dies
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestGateFull: a connection that has used all words is made anew.
func TestGateFull(t *testing.T) {
	d := newDuo(t)
	l, g := d.inside(t)
	l.gate.leave(g.word)
	l.unref(g)
	l.release()
	d.far.mu.Lock()
	for s := range d.far.mu.served {
		s.words = gateWords
	}
	d.far.mu.Unlock()
	_, r := d.register(t)
	if g, err := l.grant(t.Context(), r); !errors.Is(err, xfer.ErrDisconnected) {
		t.Fatalf("%v, %v, want ErrDisconnected", g, err)
	}
	d.remote = r
	again, g := d.inside(t)
	if again == l || g.word != 1 {
		t.Errorf("the same connection, word %d", g.word)
	}
	again.gate.leave(g.word)
	again.unref(g)
	again.release()
}

// TestPeerGone: a process that has ended is seen by its pidfd, whatever its number
// means by now, and by its socket.
func TestPeerGone(t *testing.T) {
	d := newDuo(t)
	l, g := d.inside(t)
	defer l.release()
	l.gate.leave(g.word)
	l.unref(g)
	if err := l.alive(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	own := l.pidfd
	l.pidfd = pidfd
	if err := l.alive(); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("with the pidfd of a process that has ended: %v, want ErrDisconnected", err)
	}
	l.pidfd = own
	if err := unix.Close(pidfd); err != nil {
		t.Error(err)
	}

	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	sock := l.sock
	l.sock = ends[0]
	if err := l.alive(); err != nil {
		t.Error(err)
	}
	if err := unix.Close(ends[1]); err != nil {
		t.Error(err)
	}
	if err := l.alive(); !errors.Is(err, xfer.ErrDisconnected) {
		t.Errorf("with a socket that was closed there: %v, want ErrDisconnected", err)
	}
	l.sock = sock
	if err := unix.Close(ends[0]); err != nil {
		t.Error(err)
	}
}

// TestProcessVMRefused: what the kernel says becomes what there is to do.
func TestProcessVMRefused(t *testing.T) {
	l := &link{p: &peer{id: farID}, pid: 1}
	for _, tt := range []struct {
		errno unix.Errno
		want  error
	}{
		{unix.EPERM, xfer.ErrUnavailable},
		{unix.ENOSYS, xfer.ErrUnavailable},
		{unix.ESRCH, xfer.ErrDisconnected},
		{unix.ENOMEM, xfer.ErrShort},
	} {
		if err := l.vmError(tt.errno); !errors.Is(err, tt.want) || !errors.Is(err, tt.errno) && tt.errno != unix.ESRCH {
			t.Errorf("%v: %v, want %v", tt.errno, err, tt.want)
		}
	}
	r := run{link: &link{p: l.p}}
	if err := r.copyVM(&piece{}, &grant{}, &vectors{}); !errors.Is(err, xfer.ErrUnavailable) {
		t.Errorf("of a process that cannot be seen: %v, want ErrUnavailable", err)
	}
}

// TestLine: no deadline outlasts Close, and Close tells the initiator only.
func TestLine(t *testing.T) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.DialUnix("unix", nil, ln.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	s, err := ln.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	initiator, owner := &line{UnixConn: c}, &line{UnixConn: s, owner: true}
	defer initiator.finish()
	defer owner.finish()
	if err := initiator.Close(); err != nil {
		t.Error(err)
	}
	for _, set := range []func(time.Time) error{initiator.SetReadDeadline, initiator.SetWriteDeadline} {
		if err := set(time.Time{}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a deadline behind Close: %v", err)
		}
	}
	var b [1]byte
	if err := s.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(b[:]); err == nil || err.Error() == "EOF" {
		t.Errorf("the owner reads %v while the initiator holds the socket", err)
	}
	if err := owner.Close(); err != nil {
		t.Error(err)
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(b[:]); err == nil || err.Error() != "EOF" {
		t.Errorf("the initiator reads %v when the owner has closed", err)
	}
}
