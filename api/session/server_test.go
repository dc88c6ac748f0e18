package session_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

func TestPutGet(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	for i, n := range []int{1, 100, frame.MaxData, frame.MaxData + 1, 3*frame.MaxData + 17} {
		k := r.keys(string(rune('a' + i)))
		p := pattern(n, byte(i))
		c.store(k, p)
		got, msg, err := c.blocks(&session.GetMessage{Keys: k})
		if err != nil || !bytes.Equal(got[0], p) {
			t.Fatalf("%d bytes: got %d, error %v", n, len(got[0]), err)
		}
		want := session.GotBlock{Tier: block.G2, Len: uint32(n), Total: uint32(n), Chunk: session.NoChunk, Sum: item(0, p).Sum}
		if msg.Blocks[0] != want {
			t.Errorf("answer %+v, want %+v", msg.Blocks[0], want)
		}
	}
	var m session.MatchedMessage
	if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("abXc"), Flags: session.FlagAll}), session.CodeMatched, &m); err != nil {
		t.Fatal(err)
	}
	if want := "[{2 g2 1} {2 g2 100} {0 none 0} {2 g2 262144}]"; fmt.Sprint(m.Blocks) != want || m.Prefix != 2 {
		t.Errorf("matched %v prefix %d, want %s prefix 2", m.Blocks, m.Prefix, want)
	}
	if err := r.drain(); err != nil {
		t.Error(err)
	}
	if bye := c.ended(); bye != "the server is closing" {
		t.Errorf("last words %q", bye)
	}
	r.quiet()
}

// TestTLS shows a session over a listener that makes TLS connections.
func TestTLS(t *testing.T) {
	r := newRig(t, nil, nil)
	certs := httptest.NewTLSServer(http.NotFoundHandler()) // it has a certificate
	defer certs.Close()
	lis, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: certs.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- r.server.Serve(lis) }()
	roots := x509.NewCertPool()
	roots.AddCert(certs.Certificate())
	conn, err := tls.Dial("tcp", lis.Addr().String(), &tls.Config{RootCAs: roots})
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, c: conn}
	if err := c.hello(session.HelloMessage{}); err != nil {
		t.Fatal(err)
	}
	p := pattern(1<<20, 1)
	c.store(r.keys("a"), p)
	if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || !bytes.Equal(got[0], p) {
		t.Errorf("get: error %v", err)
	}
	_ = conn.Close()
	dial(t, "tcp", lis.Addr().String()).write(hello(session.HelloMessage{MinVersion: 1, MaxVersion: 1})) // no TLS
	if err := r.drain(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	r.quiet()
}

func TestGetMany(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	c.store(r.keys("a"), pattern(70000, 1))
	c.store(r.keys("b"), pattern(300000, 2))
	got, msg, err := c.blocks(&session.GetMessage{Keys: r.keys("aXbY")})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[0], pattern(70000, 1)) || !bytes.Equal(got[2], pattern(300000, 2)) || got[1] != nil || got[3] != nil {
		t.Error("wrong bytes")
	}
	if msg.Blocks[1].Reason != block.MissAbsent || msg.Blocks[3].Reason != block.MissAbsent {
		t.Errorf("misses are %v", msg.Blocks)
	}
	got, msg, err = c.blocks(&session.GetMessage{
		Keys: r.keys("ab"), Flags: session.FlagRanges, Ranges: []session.Range{{Offset: 10, Length: 20}, {Offset: 299999}},
	})
	if err != nil || !bytes.Equal(got[0], pattern(70000, 1)[10:30]) || !bytes.Equal(got[1], pattern(300000, 2)[299999:]) {
		t.Errorf("ranges: error %v", err)
	}
	if msg.Blocks[0].Len != 20 || msg.Blocks[0].Total != 70000 {
		t.Errorf("ranges: %+v", msg.Blocks[0])
	}
	if _, _, err = c.blocks(&session.GetMessage{Keys: r.keys("a"), Flags: session.FlagRanges, Ranges: []session.Range{{Offset: 70001}}}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("range past the end: error %v", err)
	}
	if _, _, err := c.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil {
		t.Errorf("after a call that failed: %v", err)
	}
}

func TestRegrant(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Grants: 2})
	c := r.client()
	g := c.places(r.ns, 1000, 5)
	if len(g) != 2 {
		t.Fatalf("%d places, want the 2 that a session may have", len(g))
	}
	var none session.GrantedMessage
	if err := c.answer(c.send(session.CodeGrant, &session.GrantMessage{NS: r.ns.NS, Size: 1, Count: 1}), session.CodeGranted, &none); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a place too many: error %v", err)
	}
	for i := range 5 {
		names := string([]byte{byte('a' + 2*i), byte('b' + 2*i)})
		a, b := pattern(1000, byte(i)), pattern(500, byte(i+100))
		c.fill(g[0].Grant, a)
		c.fill(g[1].Grant, b)
		done := c.put(r.keys(names), session.FlagRegrant, item(g[0].Grant, a), item(g[1].Grant, b))
		if done.Results[0].Status != session.StatusOK || done.Results[1].Status != session.StatusOK {
			t.Fatalf("put %d: %+v", i, done.Results)
		}
		if g = done.Grants.Places; len(g) != 2 || g[0].Size != 1000 {
			t.Fatalf("put %d: new places %+v, want 2 of 1000 bytes", i, g)
		}
		got, _, err := c.blocks(&session.GetMessage{Keys: r.keys(names)})
		if err != nil || !bytes.Equal(got[0], a) || !bytes.Equal(got[1], b) {
			t.Fatalf("put %d: wrong bytes, error %v", i, err)
		}
	}
	_ = c.c.Close()
	r.quiet()
}

func TestPutExists(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	p := pattern(100, 1)
	c.store(r.keys("a"), p)
	g := c.places(r.ns, 100, 2)
	c.fill(g[0].Grant, p)
	other := pattern(100, 2)
	c.fill(g[1].Grant, other)
	done := c.put(r.keys("aa"), 0, item(g[0].Grant, p), item(g[1].Grant, other))
	if a, b := done.Results[0], done.Results[1]; a.Status != session.StatusOK || a.Put != block.Exists || b.Status != session.StatusConflict {
		t.Errorf("results %+v, want exists and a conflict", done.Results)
	}
}

func TestDurable(t *testing.T) {
	r := newRig(t, &memstore.Options{Durable: true}, nil)
	c := r.client()
	p := pattern(100, 1)
	g := c.places(r.ns, 100, 1)[0].Grant
	c.fill(g, p)
	m := &session.PutMessage{Keys: r.keys("a"), Durable: block.G3, Flags: session.FlagParents | session.FlagRegrant, Items: []session.PutItem{item(g, p)}}
	m.Items[0].HasParent, m.Parents = true, r.keys("P").Hashes
	var done session.PutDoneMessage
	if err := c.answer(c.send(session.CodePut, m), session.CodePutDone, &done); err != nil {
		t.Fatal(err)
	}
	if done.Results[0].Status != session.StatusOK || len(done.Grants.Places) != 1 {
		t.Errorf("put: %+v", done)
	}
	l, _, err := r.store.List(t.Context(), r.ns.NS, "", 10)
	if err != nil || len(l) != 1 || !l[0].HasPar || l[0].Parent != hash("PPPPPPPP") || len(l[0].Tiers) != 2 {
		t.Errorf("listed %+v, error %v", l, err)
	}
	var at session.LocatedMessage
	if err := c.answer(c.send(session.CodeLocate, &session.LocateMessage{Keys: r.keys("aX")}), session.CodeLocated, &at); err != nil {
		t.Fatal(err)
	}
	if len(at.Places) != 2 || len(at.Places[0]) != 2 || at.Places[0][1].Tier != block.G3 || len(at.Places[1]) != 0 {
		t.Errorf("located %v", at.Places)
	}
}
