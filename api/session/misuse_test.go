package session_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// TestHelloRefused shows what a client is told that gets no session.
func TestHelloRefused(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Token: "secret", MaxSessions: 1})
	for _, tt := range []struct {
		name  string
		hello []byte // a whole frame
		want  error
		text  string
	}{
		{"no token", hello(session.HelloMessage{MinVersion: 1, MaxVersion: 1}), block.ErrDenied, "token"},
		{"wrong token", hello(session.HelloMessage{MinVersion: 1, MaxVersion: 1, Token: "secreT"}), block.ErrDenied, "token"},
		{"too new", hello(session.HelloMessage{MinVersion: 2, MaxVersion: 9, Token: "secret"}), block.ErrUnavailable, "versions 2 to 9: this server speaks 1 to 1"},
		{"version 0", hello(session.HelloMessage{Token: "secret"}), block.ErrUnavailable, "versions 0 to 0"},
		{"versions upside down", hello(session.HelloMessage{MinVersion: 1, MaxVersion: 0, Token: "secret"}), block.ErrUnavailable, "versions 1 to 0"},
		{"other protocol", packed(frame.Header{Type: frame.Hello}, []byte("GET / HTTP/1.1\r\n\r\n")), block.ErrInvalid, "magic"},
		{"cut hello", packed(frame.Header{Type: frame.Hello}, []byte("KVTS\x01")), block.ErrInvalid, "min_version"},
		{"message before hello", packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeMatch), ID: 1}, []byte("x")), block.ErrInvalid, "hello"},
		{"type 0", make([]byte, frame.HeaderBytes), block.ErrInvalid, "hello"},
		{"text", []byte(strings.Repeat("GET / HTTP/1.1\r\n", 4)), block.ErrInvalid, "hello"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := dial(t, "tcp", r.tcp)
			c.write(tt.hello)
			err := c.welcomed()
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
			if c.welcome.Version != session.Version || c.welcome.Session != 0 {
				t.Errorf("welcome %+v", c.welcome)
			}
			c.ended()
		})
	}
	c := dial(t, "tcp", r.tcp)
	if err := c.hello(session.HelloMessage{Token: "secret", Calls: 3, Bytes: 1 << 20, MinVersion: 1, MaxVersion: 7}); err != nil {
		t.Fatal(err)
	}
	if w := c.welcome; w.Version != 1 || w.Calls != 3 || w.Bytes != 1<<20 || w.Keys != session.MaxKeys || w.Session == 0 || w.Incarnation == 0 {
		t.Errorf("welcome %+v", w)
	}
	c2 := dial(t, "tcp", r.tcp)
	if err := c2.hello(session.HelloMessage{Token: "secret"}); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a session too many: error %v", err)
	}
	_ = c.c.Close()
	r.quiet()
	if st := r.server.Stats(); st.Accepted != 1 || st.Refused < 10 {
		t.Errorf("accepted %d, refused %d", st.Accepted, st.Refused)
	}
}

func hello(m session.HelloMessage) []byte {
	if m.Message == 0 {
		m.Message = frame.MaxMessage
	}
	return packed(frame.Header{Type: frame.Hello}, m.Append(nil))
}

// TestSilent shows that a connection that says nothing is closed, and that there
// may not be many.
func TestSilent(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{MaxPending: 2, HelloTimeout: 300 * time.Millisecond})
	a, b := dial(t, "tcp", r.tcp), dial(t, "tcp", r.tcp)
	b.write(hello(session.HelloMessage{})[:20])
	a.ended()
	b.ended()
	r.quiet()
	r2 := newRig(t, nil, &session.ServerOptions{MaxPending: 2})
	dial(t, "tcp", r2.tcp)
	dial(t, "tcp", r2.tcp)
	r2.await("two pending", func() bool { return r2.server.Stats().Pending == 2 })
	dial(t, "tcp", r2.tcp).ended()
	if n := r2.server.Stats().Refused; n != 1 {
		t.Errorf("%d refused, want 1", n)
	}
}

// TestBadRequests shows that a request that cannot be is answered so, and that the
// session, and those beside it, go on.
func TestBadRequests(t *testing.T) {
	r := newRig(t, nil, nil)
	other := r.client()
	other.store(r.keys("a"), []byte("hello"))
	c := r.client()
	k := r.keys("a")
	seven := k
	seven.HashLen, seven.Hashes = 7, make([]byte, 7)
	nobody := k
	nobody.NS, nobody.Tag = 99, 0
	stale := k
	stale.Tag++
	zero := k
	zero.NS = 0
	cut := rawMessage((&session.MatchMessage{Keys: k}).Append(nil)[:30])
	long := rawMessage(append((&session.MatchMessage{Keys: k}).Append(nil), 1))
	for _, tt := range []struct {
		name string
		code session.Code
		m    interface{ Append([]byte) []byte }
		want error
		text string
	}{
		{"hash length", session.CodeMatch, &session.MatchMessage{Keys: seven}, block.ErrInvalid, "hash_len: 7"},
		{"hash length of a get", session.CodeGet, &session.GetMessage{Keys: seven}, block.ErrInvalid, "hash_len: 7"},
		{"no keys", session.CodeMatch, &session.MatchMessage{Keys: session.Keys{NS: k.NS, HashLen: 8}}, block.ErrInvalid, "keys: 0"},
		{"namespace", session.CodeMatch, &session.MatchMessage{Keys: nobody}, block.ErrNotFound, "99"},
		{"namespace of a get", session.CodeGet, &session.GetMessage{Keys: nobody}, block.ErrNotFound, "99"},
		{"namespace of another store", session.CodeMatch, &session.MatchMessage{Keys: stale}, block.ErrNotFound, "another store"},
		{"namespace of a watch", session.CodeWatch, &session.WatchMessage{NS: 99}, block.ErrNotFound, "99"},
		{"no namespace", session.CodeLocate, &session.LocateMessage{Keys: zero}, block.ErrInvalid, "namespace: 0"},
		{"other hash length", session.CodePrefetch, &session.PrefetchMessage{Keys: session.Keys{NS: k.NS, HashLen: 16, Hashes: make([]byte, 16)}}, block.ErrInvalid, "16"},
		{"flags of another", session.CodeMatch, &session.MatchMessage{Keys: k, Flags: session.FlagRegrant}, block.ErrInvalid, "flags"},
		{"unknown flags", session.CodeGet, &session.GetMessage{Keys: k, Flags: 1 << 15}, block.ErrInvalid, "flags"},
		{"in place without", session.CodeGet, &session.GetMessage{Keys: k, Flags: session.FlagInPlace}, block.ErrInvalid, "share"},
		{"range past the end", session.CodeGet, &session.GetMessage{Keys: k, Flags: session.FlagRanges, Ranges: []session.Range{{Offset: 3, Length: 3}}}, block.ErrInvalid, "range"},
		{"cut off", session.CodeMatch, cut, block.ErrInvalid, "cut off"},
		{"too long", session.CodeMatch, long, block.ErrInvalid, "too many"},
		{"unknown code", session.Code(99), rawMessage("x"), block.ErrInvalid, "code: 99"},
		{"a reply", session.CodeGot, &session.GotMessage{}, block.ErrInvalid, "code: 4"},
		{"place of no bytes", session.CodeGrant, &session.GrantMessage{NS: k.NS, Count: 1}, block.ErrInvalid, "size: 0"},
		{"place of too many bytes", session.CodeGrant, &session.GrantMessage{NS: k.NS, Size: 9 << 20, Count: 1}, block.ErrInvalid, "size: 9437184"},
		{"no places", session.CodeGrant, &session.GrantMessage{NS: k.NS, Size: 1}, block.ErrInvalid, "count: 0"},
		{"places of nobody", session.CodeGrant, &session.GrantMessage{NS: 99, Size: 1, Count: 1}, block.ErrNotFound, "99"},
		{"durable", session.CodePut, &session.PutMessage{Keys: k, Items: make([]session.PutItem, 1), Durable: block.G4}, block.ErrInvalid, "durable"},
		{"time to live", session.CodePut, &session.PutMessage{Keys: k, Items: make([]session.PutItem, 1), TTLMS: 1 << 63}, block.ErrInvalid, "ttl_ms"},
		{"lease of no time", session.CodeRenew, &session.RenewMessage{Leases: []uint64{1}}, block.ErrInvalid, "lease_ms"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := c.answer(c.send(tt.code, tt.m), 0, nil)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
	for _, c := range []*client{c, other} {
		if got, _, err := c.blocks(&session.GetMessage{Keys: k}); err != nil || !bytes.Equal(got[0], []byte("hello")) {
			t.Errorf("afterwards: %q, error %v", got, err)
		}
		_ = c.c.Close()
	}
	r.quiet()
}

type rawMessage []byte

func (m rawMessage) Append(b []byte) []byte { return append(b, m...) }

// TestBadFrames shows what ends a session, and that nothing of it is left and
// others are unharmed.
func TestBadFrames(t *testing.T) {
	r := newRig(t, nil, nil)
	other := r.client()
	other.store(r.keys("a"), []byte("hello"))
	get := packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeWatch), ID: 5}, (&session.WatchMessage{NS: r.ns.NS}).Append(nil))
	large := frame.Header{Type: frame.Message, Length: frame.MaxSkipped + 1}
	data := frame.Header{Type: frame.Data, Length: frame.MaxData + 1}
	for _, tt := range []struct {
		name string
		b    []byte
		want string
	}{
		{"oversize message", large.Append(nil), "not a frame"},
		{"oversize data", data.Append(nil), "not a frame"},
		{"type 0", make([]byte, frame.HeaderBytes), "not a frame"},
		{"second hello", hello(session.HelloMessage{MinVersion: 1, MaxVersion: 1}), "second hello"},
		{"a call twice", append(get, get...), "id of a call under way"},
		{"torn header", get[:20], ""},
		{"torn message", get[:len(get)-1], ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := r.client()
			g := c.places(r.ns, 100, 2)
			c.fill(g[0].Grant, make([]byte, 50))
			if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a"), LeaseMS: 60000}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
				t.Fatal(err)
			}
			c.write(tt.b)
			if tt.want == "" {
				if err := c.c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			if bye := c.ended(); !strings.Contains(bye, tt.want) {
				t.Errorf("last words %q, want %q", bye, tt.want)
			}
			r.await("one session", func() bool { return r.server.Stats().Sessions == 1 })
			if st := r.store.Stats(); st.Leases != 0 || st.Reservations != 0 {
				t.Errorf("%d leases and %d grants are left", st.Leases, st.Reservations)
			}
			if got, _, err := other.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || !bytes.Equal(got[0], []byte("hello")) {
				t.Errorf("another session: %q, error %v", got, err)
			}
		})
	}
}

// TestSkipped shows that frames nobody knows, and data for nothing, are skipped.
func TestSkipped(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	c.write(packed(frame.Header{Type: 77, ID: 1}, make([]byte, 1000)))
	c.write(packed(frame.Header{Type: frame.Note, ID: 1}, []byte("x")))
	c.write(packed(frame.Header{Type: frame.Data, Token: 12345}, make([]byte, 1000)))
	c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeCancel), ID: 77}, nil))
	c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeFailed), ID: 78}, nil))
	c.store(r.keys("a"), []byte("hello"))
	if n := r.server.Stats().Skipped; n != 1000 {
		t.Errorf("%d bytes skipped, want 1000", n)
	}
}

// TestBadPuts shows that a put is refused whose bytes are not there in its own
// session's place, and that its places come back.
func TestBadPuts(t *testing.T) {
	r := newRig(t, nil, nil)
	other := r.client()
	theirs := other.places(r.ns, 100, 1)[0].Grant
	other.fill(theirs, pattern(100, 9))
	d := block.Descriptor{Name: "mistral", TokensPerBlock: 16, BlockBytes: 100}
	ns, err := r.store.OpenNamespace(t.Context(), d, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := pattern(100, 1)
	c := r.client()
	for _, tt := range []struct {
		name string
		do   func(c *client, g uint64) session.PutItem
		want session.Status
		text string
	}{
		{"no grant", func(*client, uint64) session.PutItem { return item(12345, p) }, session.StatusLeaseExpired, "no such place"},
		{"grant of another session", func(c *client, _ uint64) session.PutItem {
			c.fill(theirs, p)
			return item(theirs, p)
		}, session.StatusLeaseExpired, "no such place"},
		{"no data", func(_ *client, g uint64) session.PutItem { return item(g, p) }, session.StatusInvalid, "of which 0 have come"},
		{"half", func(c *client, g uint64) session.PutItem { c.fill(g, p[:50]); return item(g, p) }, session.StatusInvalid, "of which 50 have come"},
		{"a gap", func(c *client, g uint64) session.PutItem {
			c.fill(g, p[:50])
			c.write(packed(frame.Header{Type: frame.Data, Token: g, Offset: 60}, p[60:]))
			return item(g, p)
		}, session.StatusInvalid, "of which 50 have come"},
		{"past the end", func(c *client, g uint64) session.PutItem {
			c.write(packed(frame.Header{Type: frame.Data, Token: g}, pattern(101, 1)))
			return item(g, p)
		}, session.StatusInvalid, "of which 0 have come"},
		{"far past the end", func(c *client, g uint64) session.PutItem {
			c.fill(g, p)
			c.write(packed(frame.Header{Type: frame.Data, Token: g, Offset: 1<<64 - 1}, p))
			return item(g, pattern(101, 1))
		}, session.StatusInvalid, "101 bytes in a place of 100"},
		{"no bytes", func(_ *client, g uint64) session.PutItem { return session.PutItem{Grant: g} }, session.StatusInvalid, "length: 0"},
		{"other sum", func(c *client, g uint64) session.PutItem {
			c.fill(g, p)
			it := item(g, p)
			it.Sum[3] ^= 1
			return it
		}, session.StatusCorrupt, "sum"},
		{"released", func(c *client, g uint64) session.PutItem {
			c.fill(g, p)
			var m session.ReleasedMessage
			if err := c.answer(c.send(session.CodeRelease, &session.ReleaseMessage{Grants: []uint64{g, g, theirs}}), session.CodeReleased, &m); err != nil {
				t.Fatal(err)
			}
			if len(m.Results) != 3 || m.Results[0] != session.StatusOK || m.Results[1] != session.StatusLeaseExpired || m.Results[2] != session.StatusLeaseExpired {
				t.Errorf("released %v", m.Results)
			}
			return item(g, p)
		}, session.StatusLeaseExpired, "no such place"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := c.places(r.ns, 100, 1)[0].Grant
			res := c.put(r.keys("x"), 0, tt.do(c, g)).Results[0]
			if res.Status != tt.want || !strings.Contains(res.Text, tt.text) {
				t.Errorf("result %+v, want %v with %q", res, tt.want, tt.text)
			}
			_ = c.answer(c.send(session.CodeRelease, &session.ReleaseMessage{Grants: []uint64{g}}), session.CodeReleased, &session.ReleasedMessage{})
			if n := r.store.Stats().Reservations; n != 1 { // the other session's
				t.Errorf("%d grants are open, want 1", n)
			}
		})
	}
	t.Run("other namespace", func(t *testing.T) {
		g := c.places(r.ns, 100, 1)[0].Grant
		c.fill(g, p)
		k := r.keys("x")
		k.NS, k.Tag = ns.ID, 0
		if res := c.put(k, 0, item(g, p)).Results[0]; res.Status != session.StatusInvalid {
			t.Errorf("result %+v, want invalid", res)
		}
	})
	t.Run("twice", func(t *testing.T) {
		g := c.places(r.ns, 100, 1)[0].Grant
		c.fill(g, p)
		res := c.put(r.keys("yz"), 0, item(g, p), item(g, p)).Results
		if res[0].Status != session.StatusOK || res[1].Status != session.StatusLeaseExpired {
			t.Errorf("in one put: %+v", res)
		}
		if res := c.put(r.keys("y"), 0, item(g, p)).Results[0]; res.Status != session.StatusLeaseExpired {
			t.Errorf("in another put: %+v", res)
		}
		c.fill(g, pattern(100, 7)) // skipped
		if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("y")}); err != nil || !bytes.Equal(got[0], p) {
			t.Errorf("the block is not what was put: error %v", err)
		}
	})
	t.Run("again from the start", func(t *testing.T) {
		g := c.places(r.ns, 100, 1)[0].Grant
		c.fill(g, pattern(70, 3))
		c.fill(g, pattern(60, 4))
		c.fill(g, p)
		if res := c.put(r.keys("w"), 0, item(g, p)).Results[0]; res.Status != session.StatusOK {
			t.Errorf("result %+v", res)
		}
	})
	if res := other.put(r.keys("o"), 0, item(theirs, pattern(100, 9))).Results[0]; res.Status != session.StatusOK {
		t.Errorf("the other session's put: %+v", res)
	}
	if _, _, err := c.blocks(&session.GetMessage{Keys: r.keys("x")}); err != nil {
		t.Error(err)
	}
	_, _ = c.c.Close(), other.c.Close()
	r.quiet()
}

// TestLeases shows that a lease is its session's own, and ends with it.
func TestLeases(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Leases: 2})
	c, other := r.client(), r.client()
	c.store(r.keys("a"), []byte("hello"))
	match := func() (session.MatchedMessage, error) {
		var m session.MatchedMessage
		err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a"), LeaseMS: 60000}), session.CodeMatched, &m)
		return m, err
	}
	m, err := match()
	if err != nil || m.Lease == 0 || m.Leased != 1 || m.LeaseMS == 0 {
		t.Fatalf("matched %+v, error %v", m, err)
	}
	statuses := func(c *client, code session.Code, req interface{ Append([]byte) []byte }) []session.Status {
		var res session.ReleasedMessage // a RenewedMessage is the same
		if err := c.answer(c.send(code, req), code+1, &res); err != nil {
			t.Fatal(err)
		}
		return res.Results
	}
	renew := &session.RenewMessage{LeaseMS: 1000, Leases: []uint64{m.Lease}}
	release := &session.ReleaseMessage{Leases: []uint64{m.Lease}}
	for _, tt := range []struct {
		name string
		got  session.Status
		want session.Status
	}{
		{"renew another's", statuses(other, session.CodeRenew, renew)[0], session.StatusLeaseExpired},
		{"release another's", statuses(other, session.CodeRelease, release)[0], session.StatusLeaseExpired},
		{"renew", statuses(c, session.CodeRenew, renew)[0], session.StatusOK},
		{"release", statuses(c, session.CodeRelease, release)[0], session.StatusOK},
		{"release twice", statuses(c, session.CodeRelease, release)[0], session.StatusLeaseExpired},
		{"renew what is released", statuses(c, session.CodeRenew, renew)[0], session.StatusLeaseExpired},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, tt.got, tt.want)
		}
	}
	for i := range 3 {
		if _, err := match(); (i == 2) != errors.Is(err, session.ErrBusy) {
			t.Errorf("lease %d of at most 2: error %v", i, err)
		}
	}
	if n := r.store.Stats().Leases; n != 2 {
		t.Errorf("%d leases, want 2", n)
	}
	_, _ = c.c.Close(), other.c.Close()
	r.quiet()
}

// TestCanceled shows that a call ends when it is told to, and when its time is up.
func TestCanceled(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	w := c.send(session.CodeWatch, &session.WatchMessage{NS: r.ns.NS, Tag: r.ns.Tag})
	var e session.EventsMessage
	if err := c.answer(w, session.CodeEvents, &e); err != nil || e.Start == nil {
		t.Fatalf("events %+v, error %v", e, err)
	}
	c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeCancel), ID: w}, nil))
	if err := c.answer(w, session.CodeEvents, &e); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: error %v", err)
	}
	// Places for more than there is room for: the call waits for some.
	all := c.places(r.ns, 4<<20, 16)
	if len(all) != 16 {
		t.Fatalf("%d places", len(all))
	}
	other := r.client()
	if err := other.answer(other.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 4 << 20, Count: 1, Deadline: 1}), 0, nil); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("no room by the deadline: error %v", err)
	}
	g := other.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 4 << 20, Count: 1})
	if err := other.answer(other.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a")}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
		t.Errorf("a match beside a call that waits: error %v", err)
	}
	other.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeCancel), ID: g}, nil))
	if err := other.answer(g, 0, nil); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("canceled: error %v", err)
	}
	_, _ = c.c.Close(), other.c.Close()
	r.quiet()
}

// FuzzServer: whatever comes behind a hello, the session ends and leaves nothing.
func FuzzServer(f *testing.F) {
	r := newRig(f, nil, nil)
	r.client().store(r.keys("a"), []byte("hello"))
	grant := packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeGrant), ID: 99}, (&session.GrantMessage{NS: r.ns.NS, Size: 5, Count: 2}).Append(nil))
	var all []byte
	for _, e := range examples() {
		if b := e.frame(); e.header.Type != frame.Hello && e.header.Type != frame.Bye {
			f.Add(b)
			all = append(all, b...)
		}
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, b []byte) {
		c := dial(t, "tcp", r.tcp)
		if err := c.hello(session.HelloMessage{}); err != nil {
			t.Fatal(err)
		}
		c.write(grant)
		_, _ = c.c.Write(b) // the server may have ended the session
		_ = c.c.Close()
		await(t, "the session's end", func() bool { return r.server.Stats().Sessions == 1 })
		if st := r.store.Stats(); st.Leases != 0 || st.Reservations != 0 {
			t.Errorf("%d leases and %d grants are left", st.Leases, st.Reservations)
		}
	})
}

// TestPlaceAborted shows that the call that gives reservations back, which any client
// of the daemon may make with any number, takes no place from under a session.
func TestPlaceAborted(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	g := c.places(r.ns, 5, 1)[0].Grant
	r.store.Abort([]uint64{g})
	c.fill(g, []byte("hello"))
	if done := c.put(r.keys("a"), 0, item(g, []byte("hello"))).Results[0]; done.Status != session.StatusOK {
		t.Errorf("put: %+v", done)
	}
}
