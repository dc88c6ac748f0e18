package session_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test.
const patience = 20 * time.Second

// rig is a server over a store in memory.
type rig struct {
	t      testing.TB
	store  *memstore.Store
	server *session.Server
	tcp    string
	unix   string
	ns     session.Keys // of a namespace with blocks of up to 4 MiB: NS and Tag
}

func newRig(t testing.TB, so *memstore.Options, o *session.ServerOptions) *rig {
	t.Helper()
	st := memstore.New(so)
	return serve(t, st, st, o)
}

// serve serves s, which may be st with other behaviour.
func serve(t testing.TB, st *memstore.Store, s session.Store, o *session.ServerOptions) *rig {
	t.Helper()
	r := &rig{t: t, store: st, server: session.NewServer(s, o), unix: filepath.Join(t.TempDir(), "s")}
	d := block.Descriptor{Name: "llama", TokensPerBlock: 16, MaxBlockBytes: 4 << 20}
	ns, err := st.OpenNamespace(t.Context(), d, 0)
	if err != nil {
		t.Fatal(err)
	}
	sum := d.Digest()
	r.ns = session.Keys{NS: ns.ID, Tag: binary.LittleEndian.Uint64(sum[:8]), HashLen: 8}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.tcp = lis.Addr().String()
	ulis, err := net.Listen("unix", r.unix)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 2)
	go func() { done <- r.server.Serve(lis) }()
	go func() { done <- r.server.Serve(ulis) }()
	t.Cleanup(func() {
		if err := r.server.Close(); err != nil {
			t.Error(err)
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	return r
}

// keys names blocks by one byte each.
func (r *rig) keys(names string) session.Keys {
	k := r.ns
	for _, c := range []byte(names) {
		k.Hashes = append(k.Hashes, bytes.Repeat([]byte{c}, 8)...)
	}
	return k
}

// await waits until ok, and fails the test when that does not come.
func (r *rig) await(what string, ok func() bool) {
	r.t.Helper()
	await(r.t, what, ok)
}

func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("it does not come: %s", what)
		}
	}
}

// quiet waits until no session is left, and checks that nothing is held.
func (r *rig) quiet() {
	r.t.Helper()
	r.await("no session", func() bool { st := r.server.Stats(); return st.Sessions == 0 && st.Pending == 0 })
	if st := r.store.Stats(); st.Leases != 0 || st.Reservations != 0 {
		r.t.Errorf("%d leases and %d grants are left", st.Leases, st.Reservations)
	}
}

// client is a client by the package's codec: what it sends and receives is in order,
// and nothing runs beside it.
type client struct {
	t       testing.TB
	c       net.Conn
	welcome session.WelcomeMessage
	files   []int
	last    uint64 // call
}

func dial(t testing.TB, network, addr string) *client {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &client{t: t, c: c}
}

// hello makes a session, or returns why not.
func (c *client) hello(h session.HelloMessage) error {
	c.t.Helper()
	if h.MaxVersion == 0 {
		h.MinVersion, h.MaxVersion = 1, session.Version
	}
	if h.Message == 0 {
		h.Message = frame.MaxMessage
	}
	if err := frame.SendHello(c.c, h.Append(nil), nil); err != nil {
		c.t.Fatal(err)
	}
	return c.welcomed()
}

func (c *client) welcomed() error {
	c.t.Helper()
	p, files, err := frame.RecvHello(c.c)
	if err != nil {
		c.t.Fatal(err)
	}
	c.files = files
	if err := c.welcome.Decode(p); err != nil {
		c.t.Fatal(err)
	}
	return c.welcome.Status.Err(c.welcome.Text)
}

// client opens a session over TCP.
func (r *rig) client() *client {
	r.t.Helper()
	c := dial(r.t, "tcp", r.tcp)
	if err := c.hello(session.HelloMessage{Name: r.t.Name()}); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (c *client) write(b []byte) {
	c.t.Helper()
	if _, err := c.c.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

func packed(h frame.Header, p []byte) []byte {
	h.Length = uint32(len(p))
	return append(h.Append(nil), p...)
}

// send sends a request and returns its call.
func (c *client) send(code session.Code, m interface{ Append([]byte) []byte }) uint64 {
	c.t.Helper()
	c.last++
	c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(code), ID: c.last}, m.Append(nil)))
	return c.last
}

// cancel ends a call.
func (c *client) cancel(id uint64) {
	c.t.Helper()
	c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeCancel), ID: id}, nil))
}

func (c *client) read() (frame.Header, []byte, error) {
	b := make([]byte, frame.HeaderBytes)
	if _, err := io.ReadFull(c.c, b); err != nil {
		return frame.Header{}, nil, err
	}
	h, err := frame.ParseHeader(b)
	if err != nil {
		return h, nil, err
	}
	p := make([]byte, h.Length)
	_, err = io.ReadFull(c.c, p)
	return h, p, err
}

// recv receives the next frame of call id.
func (c *client) recv(id uint64) (frame.Header, []byte) {
	c.t.Helper()
	h, p, err := c.read()
	if err != nil {
		c.t.Fatal(err)
	}
	if h.ID != id {
		c.t.Fatalf("frame %+v %q, want one of call %d", h, p, id)
	}
	return h, p
}

// answer receives the answer of call id: into m, or why the call failed.
func (c *client) answer(id uint64, code session.Code, m message) error {
	c.t.Helper()
	h, p := c.recv(id)
	if h.Type != frame.Message {
		c.t.Fatalf("frame %+v, want a message", h)
	}
	if session.Code(h.Flags) == session.CodeFailed {
		var f session.FailedMessage
		if err := f.Decode(p); err != nil {
			c.t.Fatal(err)
		}
		return f.Status.Err(f.Text)
	}
	if session.Code(h.Flags) != code {
		c.t.Fatalf("answer with code %d, want %d", h.Flags, code)
	}
	if err := m.Decode(p); err != nil {
		c.t.Fatal(err)
	}
	return nil
}

// ended reads until the connection ends and returns the server's last words.
func (c *client) ended() string {
	c.t.Helper()
	for {
		h, p, err := c.read()
		var ne net.Error
		switch {
		case errors.As(err, &ne) && ne.Timeout():
			c.t.Fatal("the connection goes on")
		case err != nil:
			return ""
		case h.Type == frame.Bye:
			return string(p)
		}
	}
}

// places asks for count places of n bytes.
func (c *client) places(k session.Keys, n, count uint32) []session.GrantedPlace {
	c.t.Helper()
	var g session.GrantedMessage
	id := c.send(session.CodeGrant, &session.GrantMessage{NS: k.NS, Tag: k.Tag, Size: n, Count: count})
	if err := c.answer(id, session.CodeGranted, &g); err != nil {
		c.t.Fatal(err)
	}
	return g.Places
}

// fill sends the data of a put.
func (c *client) fill(grant uint64, p []byte) {
	c.t.Helper()
	for off := 0; off < len(p); off += frame.MaxData {
		step := p[off:min(len(p), off+frame.MaxData)]
		c.write(packed(frame.Header{Type: frame.Data, Token: grant, Offset: uint64(off)}, step))
	}
}

func item(grant uint64, p []byte) session.PutItem {
	return session.PutItem{Grant: grant, Len: uint32(len(p)), Sum: xxh3.Hash128(p).Bytes()}
}

// put puts blocks with a place each, and returns the answer.
func (c *client) put(k session.Keys, flags uint16, items ...session.PutItem) session.PutDoneMessage {
	c.t.Helper()
	var done session.PutDoneMessage
	id := c.send(session.CodePut, &session.PutMessage{Keys: k, Flags: flags, Items: items})
	if err := c.answer(id, session.CodePutDone, &done); err != nil {
		c.t.Fatal(err)
	}
	return done
}

// store puts one block in the common way.
func (c *client) store(k session.Keys, p []byte) {
	c.t.Helper()
	g := c.places(k, uint32(len(p)), 1)[0].Grant
	c.fill(g, p)
	if r := c.put(k, 0, item(g, p)).Results[0]; r.Status != session.StatusOK || r.Put != block.Stored {
		c.t.Fatalf("put: %+v", r)
	}
}

// blocks gets blocks; those that are no hit are nil.
func (c *client) blocks(m *session.GetMessage) ([][]byte, session.GotMessage, error) {
	c.t.Helper()
	id := c.send(session.CodeGet, m)
	got := make([][]byte, m.Len())
	for {
		h, p := c.recv(id)
		switch {
		case h.Type == frame.Data:
			if int(h.Token) >= len(got) || int(h.Offset) != len(got[h.Token]) {
				c.t.Fatalf("data %+v with %d bytes there", h, len(got[h.Token]))
			}
			got[h.Token] = append(got[h.Token], p...)
		case session.Code(h.Flags) == session.CodeFailed:
			var f session.FailedMessage
			if err := f.Decode(p); err != nil {
				c.t.Fatal(err)
			}
			return nil, session.GotMessage{}, f.Status.Err(f.Text)
		default:
			var g session.GotMessage
			if err := g.Decode(p); err != nil {
				c.t.Fatal(err)
			}
			for i, b := range g.Blocks {
				if b.Reason != block.Hit || b.Status != session.StatusOK {
					got[i] = nil
				} else if int(b.Len) != len(got[i]) {
					c.t.Fatalf("%d bytes came for %+v", len(got[i]), b)
				}
			}
			return got, g, nil
		}
	}
}

func pattern(n int, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7+i>>8) ^ seed
	}
	return p
}

// drain ends the server in order.
func (r *rig) drain() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return r.server.Drain(ctx)
}
