package shm

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// impostor answers each connection to a socket with what answer does.
func impostor(t *testing.T, answer func(c *net.UnixConn, h *hello)) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := ln.AcceptUnix()
			if err != nil {
				return
			}
			var h hello
			if p, _, err := frame.RecvHello(c); err == nil {
				_ = h.decode(p) // answers look at it
			}
			answer(c, &h)
			_ = c.Close() // likewise
		}
	}()
	t.Cleanup(func() {
		if err := ln.Close(); err != nil {
			t.Error(err)
		}
		<-ended
	})
	return socket
}

// memFile makes a memory file with seals.
func memFile(t *testing.T, n int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Ftruncate(fd, n); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestImpostors: whatever answers at a peer's socket, Connect fails with
// ErrDisconnected and leaves nothing.
func TestImpostors(t *testing.T) {
	good := memFile(t, gateBytes, unix.F_SEAL_SHRINK)
	say := func(w welcome, fds ...int) func(*net.UnixConn, *hello) {
		return func(c *net.UnixConn, _ *hello) { _ = frame.SendHello(c, w.encode(), fds) }
	}
	raw := func(b string) func(*net.UnixConn, *hello) {
		return func(c *net.UnixConn, _ *hello) { _, _ = c.Write([]byte(b)) }
	}
	right := welcome{self: farID, bytes: gateBytes}
	for name, tt := range map[string]struct {
		answer func(*net.UnixConn, *hello)
		text   string
	}{
		"closes":                  {func(*net.UnixConn, *hello) {}, "EOF"},
		"garbage":                 {raw(strings.Repeat("garbage ", 100)), ""},
		"another incarnation":     {say(welcome{self: xfer.PeerID{Name: "far", Incarnation: 3}, bytes: gateBytes}, good), "far#0000000000000003"},
		"refuses":                 {say(welcome{self: farID, reason: "not today"}), "not today"},
		"no file":                 {say(right), "one file"},
		"two files":               {say(right, good, good), "one file"},
		"gate of another size":    {say(welcome{self: farID, bytes: 4096}, good), "4096"},
		"gate not sealed":         {say(right, memFile(t, gateBytes, unix.F_SEAL_GROW)), "F_SEAL_SHRINK"},
		"gate too short":          {say(right, memFile(t, gateBytes-4096, unix.F_SEAL_SHRINK)), "map"},
		"gate may not be written": {say(right, memFile(t, gateBytes, unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE)), "not be written"},
		"gate is a pipe":          {say(right, 1<<30), ""}, // no such descriptor: the hello fails
		"version": {func(c *net.UnixConn, _ *hello) {
			b := right.encode()
			b[0] = 9
			_ = frame.SendHello(c, b, []int{good})
		}, "version 9"},
	} {
		t.Run(name, func(t *testing.T) {
			before := openFiles(t)
			b := bound(t, nearID, &Options{})
			p := &peer{id: farID, socket: impostor(t, tt.answer), dialing: make(chan struct{}, 1)}
			b.mu.peers[farID] = p
			bound := openFiles(t)
			if err := b.Connect(t.Context(), farID); !errors.Is(err, xfer.ErrDisconnected) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%v, want ErrDisconnected with %q", err, tt.text)
			}
			waitFor(t, "its connection is closed", func() bool { return openFiles(t) <= bound })
			if before >= bound {
				t.Errorf("%d open files before, %d with a backend", before, bound)
			}
		})
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestFileOfAnotherSize: a memory file that is shorter than its owner says is not
// mapped.
func TestFileOfAnotherSize(t *testing.T) {
	short := memFile(t, 4096, unix.F_SEAL_SHRINK)
	loose := memFile(t, 8192, unix.F_SEAL_GROW)
	for fd, want := range map[int]string{short: "8192", loose: "F_SEAL_SHRINK"} {
		socket := impostor(t, func(c *net.UnixConn, h *hello) {
			if h.purpose != forFile || h.token != 7 || h.self != nearID || h.want != farID {
				t.Errorf("%+v", h)
			}
			w := welcome{self: farID, file: 1, bytes: 8192}
			_ = frame.SendHello(c, w.encode(), []int{fd})
		})
		b := bound(t, nearID, &Options{})
		p := &peer{id: farID, socket: socket}
		if m, err := b.fetch(t.Context(), p, 7, 1, 8192); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, %v, want an error with %q", m, err, want)
		}
		if m, err := b.fetch(t.Context(), p, 7, 2, 8192); !errors.Is(err, errProtocol) {
			t.Errorf("another file: %v, %v", m, err)
		}
	}
}

// TestStrangers: whatever connects to a socket, it is refused and harms nobody.
func TestStrangers(t *testing.T) {
	d := newDuo(t)
	fd := memFile(t, 4096, unix.F_SEAL_SHRINK)
	right := hello{purpose: forLink, self: nearID, want: farID}
	other := func(change func(h *hello)) []byte {
		h := right
		change(&h)
		return h.encode()
	}
	many := make([]int, 200)
	for i := range many {
		many[i] = fd
	}
	hi := func(payload []byte, fds ...int) func(net.Conn) {
		return func(c net.Conn) { _ = frame.SendHello(c, payload, fds) }
	}
	then := func(fs ...frame.Frame) func(net.Conn) {
		return func(c net.Conn) {
			_ = frame.SendHello(c, right.encode(), nil)
			_, files, _ := frame.RecvHello(c)
			closeAll(files)
			for _, f := range fs {
				f.Length = uint32(len(f.Payload))
				_, _ = c.Write(append(f.Append(nil), f.Payload...))
			}
		}
	}
	// header says one behind the hello and nothing else, torn so many bytes and ends.
	header := func(h frame.Header) func(net.Conn) {
		return func(c net.Conn) { then()(c); _, _ = c.Write(h.Append(nil)) }
	}
	torn := func(n int) func(net.Conn) {
		h := frame.Header{Type: frame.Note, Length: 100}
		b := append(h.Append(nil), make([]byte, 100)...)[:n]
		return func(c net.Conn) { then()(c); _, _ = c.Write(b); _ = c.(*net.UnixConn).CloseWrite() }
	}
	note := frame.Frame{Header: frame.Header{Type: frame.Note}, Payload: make([]byte, xfer.MaxNotification+1)}
	before := openFiles(t)
	for name, say := range map[string]func(net.Conn){
		"nothing":         func(c net.Conn) { _ = c.(*net.UnixConn).CloseWrite() },
		"garbage":         func(c net.Conn) { _, _ = c.Write([]byte(strings.Repeat("GET / HTTP/1.1\r\n", 9))) },
		"a torn hello":    func(c net.Conn) { _, _ = c.Write(make([]byte, 7)); _ = c.(*net.UnixConn).CloseWrite() },
		"an empty hello":  hi(nil),
		"a short hello":   hi(right.encode()[:9]),
		"a long hello":    hi(append(right.encode(), 0)),
		"a version":       hi(append([]byte{2}, right.encode()[1:]...)),
		"a purpose":       hi(other(func(h *hello) { h.purpose = 9 })),
		"another peer":    hi(other(func(h *hello) { h.want.Incarnation++ })),
		"no file":         hi(other(func(h *hello) { h.purpose, h.token = forFile, 99 })),
		"a file":          hi(right.encode(), fd),
		"many files":      hi(right.encode(), many...),
		"a code":          then(frame.Frame{Header: frame.Header{Type: frame.Message, Flags: 99}}),
		"a type":          then(frame.Frame{Header: frame.Header{Type: frame.Read}}),
		"an answer":       then(frame.Frame{Header: frame.Header{Type: frame.Done, ID: 5}}),
		"too long a note": then(note),

		"an oversize frame":    header(frame.Header{Type: frame.Note, Length: frame.MaxMessage + 1}),
		"an oversize message":  header(frame.Header{Type: frame.Message, Length: frame.MaxSkipped + 1}),
		"oversize data":        header(frame.Header{Type: frame.Data, Length: frame.MaxData + 1}),
		"the longest length":   header(frame.Header{Type: frame.Done, Length: 1<<32 - 1}),
		"a second hello":       header(frame.Header{Type: frame.Hello}),
		"type 0":               header(frame.Header{}),
		"a torn header":        torn(7),
		"a frame without body": torn(frame.HeaderBytes),
		"a torn frame":         torn(frame.HeaderBytes + 99),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("unix", d.far.mu.socket)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			say(c)
			if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
				t.Fatal(err)
			}
			for b := make([]byte, 4096); ; {
				if _, err := c.Read(b); err != nil {
					if errors.Is(err, os.ErrDeadlineExceeded) {
						t.Error("the connection stays open")
					}
					break
				}
			}
		})
	}
	waitFor(t, "their connections are closed", func() bool { return openFiles(t) <= before })
	if err := d.near.Connect(t.Context(), farID); err != nil {
		t.Errorf("a peer afterwards: %v", err)
	}
}

// TestFlood: a peer that sends more notifications than it may loses its connection,
// not this process its memory.
func TestFlood(t *testing.T) {
	d := newDuo(t)
	c, err := net.Dial("unix", d.far.mu.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	h := hello{purpose: forLink, self: nearID, want: farID}
	if err := frame.SendHello(c, h.encode(), nil); err != nil {
		t.Fatal(err)
	}
	_, files, err := frame.RecvHello(c)
	closeAll(files)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // it answers, which the flood does not read
		b := make([]byte, 4096)
		for {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	}()
	for i := 0; err == nil && i < 100_000; i++ {
		f := frame.Header{Type: frame.Note, ID: uint64(i)}
		_, err = c.Write(f.Append(nil))
	}
	if err == nil {
		t.Error("100000 notifications were taken")
	}
	if n := len(d.far.notes); n > notesQueued {
		t.Errorf("%d wait", n)
	}
}

// TestSilence: a peer that does not answer costs no more than the context allows.
func TestSilence(t *testing.T) {
	release := make(chan struct{})
	b := bound(t, nearID, &Options{})
	b.mu.peers[farID] = &peer{id: farID, dialing: make(chan struct{}, 1), socket: impostor(t, func(*net.UnixConn, *hello) { <-release })}
	defer close(release)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := b.Connect(ctx, farID); !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want ErrCanceled for the deadline", err)
	}
}

// TestOtherUser: another user's process is not served, even where it can reach
// the socket.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		servers.Missing(t, "root", "it takes that to be another user")
	}
	d := newDuo(t)
	socket := d.far.mu.socket
	st, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	if m := st.Mode().Perm(); m != 0o600 {
		t.Errorf("the socket has mode %#o", m)
	}
	for dir := filepath.Dir(socket); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	connect := func() (fd int, err error) {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			runtime.LockOSThread() // and it ends with the goroutine: the user is the thread's
			if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return
			}
			const nobody = 65534
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
				err = errno
				return
			}
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		}()
		<-ended
		return fd, err
	}
	fd, err := connect()
	if !errors.Is(err, unix.EACCES) {
		t.Errorf("connect to a socket of mode 0600: %v, want EACCES", err)
	}
	_ = unix.Close(fd) // it was to be tried
	if err := os.Chmod(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	if fd, err = connect(); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var b [1]byte
	if n, err := unix.Read(fd, b[:]); n != 0 || err != nil {
		t.Errorf("it is told %d bytes, %v", n, err)
	}
}

// TestConnectOften: connections come and go, and nothing stays.
func TestConnectOften(t *testing.T) {
	n := 1000
	switch {
	case os.Getenv("KVTIER_SOAK") != "":
		n = 10_000
	case testing.Short():
		n = 100
	}
	d := newDuo(t)
	state := func() (files, maps, goroutines int) {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return openFiles(t), strings.Count(string(b), "memfd:"), runtime.NumGoroutine()
	}
	var files, maps, goroutines int
	for i := range n {
		l, err := d.near.link(t.Context(), d.near.peer(farID), true)
		if err != nil {
			t.Fatal(err)
		}
		g, err := l.grant(t.Context(), d.remote)
		if err != nil {
			t.Fatal(err)
		}
		l.unref(g)
		l.release()
		[]func(){func() { d.near.Disconnect(farID) }, func() { d.far.Disconnect(nearID) }}[i%2]()
		// The next connects anew while this one ends.
		if i == 0 || i == n-1 {
			waitFor(t, "the connection has ended", func() bool {
				d.near.mu.Lock()
				d.far.mu.Lock()
				defer d.near.mu.Unlock()
				defer d.far.mu.Unlock()
				return len(d.near.mu.links)+len(d.far.mu.served)+len(d.far.mu.greeting) == 0
			})
		}
		if i == 0 {
			files, maps, goroutines = state()
		}
	}
	waitFor(t, "all is as before", func() bool {
		f, m, g := state()
		return f <= files && m <= maps && g <= goroutines
	})
	if len(d.far.mu.regions) != 1 || len(d.remote.peer.dialing) != 0 {
		t.Error("something stays")
	}
	for _, r := range d.far.mu.regions {
		if len(r.holders) != 0 {
			t.Errorf("%d that have gone hold the region", len(r.holders))
		}
	}
}

// FuzzMessages: what is read is what was written, and stays within bounds.
func FuzzMessages(f *testing.F) {
	h := hello{purpose: forLink, token: 1, self: nearID, want: farID}
	w := welcome{self: farID, file: 1, bytes: 2, reason: "no"}
	g := grantInfo{word: 1, file: 1, bytes: arena.HugeBytes, off: 4096, addr: 1 << 40, len: 4096}
	f.Add(h.encode())
	f.Add(w.encode())
	f.Add(g.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		var h hello
		if h.decode(b) == nil && string(h.encode()) != string(b) {
			t.Errorf("hello %x is encoded as %x", b, h.encode())
		}
		var w welcome
		if w.decode(b) == nil && string(w.encode()) != string(b) {
			t.Errorf("welcome %x is encoded as %x", b, w.encode())
		}
		var g grantInfo
		if g.decode(b) == nil {
			if string(g.encode()) != string(b) {
				t.Errorf("grant %x is encoded as %x", b, g.encode())
			}
			if g.file != 0 && g.off+g.len > g.bytes {
				t.Errorf("grant outside of its file: %+v", g)
			}
		}
	})
}
