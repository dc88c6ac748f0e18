package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// TestMessageSizeAgreed shows that both ends keep to the smaller of their sizes, that
// fewer keys go with smaller messages, and that a size which cannot be is refused.
func TestMessageSizeAgreed(t *testing.T) {
	for _, tt := range []struct {
		server        int
		client        uint32
		message, keys uint32
	}{
		{0, 1 << 20, 1 << 20, 8192},
		{0, 16 << 20, 1 << 20, 8192},
		{0, 65536, 65536, 429},
		{100_000, 1 << 20, 100_000, 757},
		{1, 1 << 20, 65536, 429},
		{1 << 30, 200_000, 200_000, 1710},
	} {
		r := newRig(t, nil, &session.ServerOptions{Message: tt.server})
		c := dial(t, "tcp", r.tcp)
		if err := c.hello(session.HelloMessage{Message: tt.client}); err != nil {
			t.Fatal(err)
		}
		if w := c.welcome; w.Message != tt.message || w.Keys != tt.keys || w.Grants > w.Keys {
			t.Errorf("server %d and client %d agreed on %d bytes, %d keys, %d places, want %d and %d",
				tt.server, tt.client, w.Message, w.Keys, w.Grants, tt.message, tt.keys)
		}
	}
	r := newRig(t, nil, nil)
	older := (&session.HelloMessage{MinVersion: 1, MaxVersion: 1}).Append(nil)
	c := dial(t, "tcp", r.tcp)
	c.write(packed(frame.Header{Type: frame.Hello}, older[:len(older)-4]))
	if err := c.welcomed(); err != nil || c.welcome.Message != 1<<20 {
		t.Errorf("a client that says no size: error %v, welcome %+v", err, c.welcome)
	}
	for _, n := range []uint32{0, 1, 65535, 16<<20 + 1, 1<<32 - 1} {
		c := dial(t, "tcp", r.tcp)
		m := session.HelloMessage{MinVersion: 1, MaxVersion: 1, Message: n}
		c.write(packed(frame.Header{Type: frame.Hello}, m.Append(nil)))
		if err := c.welcomed(); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), fmt.Sprintf("message: %d bytes", n)) {
			t.Errorf("messages of %d bytes: error %v", n, err)
		}
		c.ended()
	}
}

// TestMessageTooLong shows that a message beyond the size is refused by itself, and that
// what follows it is served.
func TestMessageTooLong(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{Message: 65536})
	c := r.client()
	c.store(r.keys("a"), []byte("hello"))
	for _, n := range []int{65537, 1<<20 + 1, 16 << 20} {
		c.last++
		p := make([]byte, n)
		c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeMatch), ID: c.last}, p))
		if err := c.answer(c.last, 0, nil); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), fmt.Sprintf("message: %d bytes, at most 65536", n)) {
			t.Errorf("%d bytes: error %v", n, err)
		}
		c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeCancel), ID: 77}, p)) // means nothing
		if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || !bytes.Equal(got[0], []byte("hello")) {
			t.Errorf("after %d bytes: %q, error %v", n, got, err)
		}
	}
	open := session.OpenMessage{Fields: []block.Field{{Name: "name", Value: "llama"}}}
	for len(open.Append(nil)) <= 65536 {
		open.Fields = append(open.Fields, block.Field{Name: strings.Repeat("x", 4096), Value: "x"})
	}
	if err := c.answer(c.send(session.CodeOpen, &open), 0, nil); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "message") {
		t.Errorf("a long descriptor: error %v", err)
	}
}

// TestKeysBeyond shows that of a message with more keys than a session may name the
// first are served, and the others busy, each by itself.
func TestKeysBeyond(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 1 << 20}, &session.ServerOptions{Keys: 2})
	c := r.client()
	if c.welcome.Keys != 2 || c.welcome.Grants != 2 {
		t.Fatalf("welcome %+v", c.welcome)
	}
	for _, k := range "abc" {
		c.store(r.keys(string(k)), []byte{byte(k)})
	}
	const ok, busy = session.StatusOK, session.StatusBusy
	ask := func(c *client, code session.Code, m message, want session.Code, into message) {
		t.Helper()
		if err := c.answer(c.send(code, m), want, into); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("match", func(t *testing.T) {
		for _, tt := range []struct {
			names  string
			flags  uint16
			states []block.State
		}{
			{"abc", 0, []block.State{block.Resident, block.Resident, session.BusyKey}},
			{"abca", 0, []block.State{block.Resident, block.Resident, session.BusyKey}},
			{"axcb", 0, []block.State{block.Resident, block.Absent}},
			{"axcb", session.FlagAll, []block.State{block.Resident, block.Absent, session.BusyKey, session.BusyKey}},
		} {
			var m session.MatchedMessage
			ask(c, session.CodeMatch, &session.MatchMessage{Keys: r.keys(tt.names), Flags: tt.flags, LeaseMS: 60000}, session.CodeMatched, &m)
			var states []block.State
			resident := 0
			for _, b := range m.Blocks {
				states = append(states, b.State)
				if b.State == block.Resident {
					resident++
				}
			}
			if fmt.Sprint(states) != fmt.Sprint(tt.states) || int(m.Leased) != resident || m.Prefix > 2 {
				t.Errorf("%s: %+v, want states %v", tt.names, m, tt.states)
			}
			var rel session.ReleasedMessage
			ask(c, session.CodeRenew, &session.RenewMessage{LeaseMS: 1, Leases: []uint64{1, 2, m.Lease}}, session.CodeRenewed, &session.RenewedMessage{})
			ask(c, session.CodeRelease, &session.ReleaseMessage{Leases: []uint64{m.Lease, 1, 2}, Grants: []uint64{1, 2, 3, 4}}, session.CodeReleased, &rel)
			if want := fmt.Sprint([]session.Status{ok, session.StatusLeaseExpired, busy, session.StatusLeaseExpired, session.StatusLeaseExpired, busy, busy}); fmt.Sprint(rel.Results) != want {
				t.Errorf("released %v, want %v", rel.Results, want)
			}
		}
	})
	statuses := func(got []session.GotBlock) (all []session.Status) {
		for i := range got {
			all = append(all, got[i].Status)
		}
		return all
	}
	t.Run("get", func(t *testing.T) {
		for _, flags := range []uint16{0, session.FlagVerify} {
			blocks, got, err := c.blocks(&session.GetMessage{Keys: r.keys("abca"), Flags: flags})
			if err != nil || fmt.Sprint(statuses(got.Blocks)) != fmt.Sprint([]session.Status{ok, ok, busy, busy}) || string(blocks[0])+string(blocks[1]) != "ab" || blocks[2] != nil {
				t.Errorf("%q %+v, error %v", blocks, got, err)
			}
		}
		shared := dial(t, "unix", r.unix)
		if err := shared.hello(session.HelloMessage{Features: session.FeatureShared}); err != nil {
			t.Fatal(err)
		}
		for _, flags := range []uint16{session.FlagInPlace, session.FlagInPlace | session.FlagVerify} {
			var got session.GotMessage
			ask(shared, session.CodeGet, &session.GetMessage{Keys: r.keys("abca"), Flags: flags}, session.CodeGot, &got)
			if fmt.Sprint(statuses(got.Blocks)) != fmt.Sprint([]session.Status{ok, ok, busy, busy}) || got.Blocks[1].Len != 1 {
				t.Errorf("in place: %+v", got)
			}
		}
	})
	t.Run("put", func(t *testing.T) {
		for _, durable := range []block.TierID{block.G2, block.G3} {
			places := c.places(r.ns, 1, 2)
			if len(places) != 2 {
				t.Fatalf("%d places", len(places))
			}
			var items []session.PutItem
			for _, g := range []uint64{places[0].Grant, 12345, places[1].Grant, 12346} {
				c.fill(g, []byte("d"))
				items = append(items, item(g, []byte("d")))
			}
			var done session.PutDoneMessage
			ask(c, session.CodePut, &session.PutMessage{Keys: r.keys("defg"), Items: items, Durable: durable}, session.CodePutDone, &done)
			var all []session.Status
			for _, res := range done.Results {
				all = append(all, res.Status)
			}
			first := ok
			if durable == block.G3 {
				first = session.StatusUnavailable // this store has no NVMe
			}
			if fmt.Sprint(all) != fmt.Sprint([]session.Status{first, session.StatusLeaseExpired, busy, busy}) {
				t.Errorf("durable %v: %v", durable, all)
			}
			// The place of a busy one is as it was.
			if res := c.put(r.keys("f"), 0, items[2]).Results[0]; res.Status != ok {
				t.Errorf("again: %+v", res)
			}
		}
	})
	t.Run("others", func(t *testing.T) {
		var l session.LocatedMessage
		ask(c, session.CodeLocate, &session.LocateMessage{Keys: r.keys("axbc")}, session.CodeLocated, &l)
		if len(l.Places) != 2 || l.Busy != 2 || len(l.Places[0]) == 0 || len(l.Places[1]) != 0 {
			t.Errorf("located %+v", l)
		}
		var p session.PrefetchedMessage
		ask(c, session.CodePrefetch, &session.PrefetchMessage{Keys: r.keys("abc")}, session.CodePrefetched, &p)
		if len(p.Results) != 3 || p.Results[0].Reason != block.Hit || p.Results[2].Reason != session.BusyKey {
			t.Errorf("prefetched %+v", p)
		}
		var pin session.PinnedMessage
		ask(c, session.CodePin, &session.PinMessage{Keys: r.keys("axbc")}, session.CodePinned, &pin)
		if fmt.Sprint(pin.Results) != fmt.Sprint([]session.Status{ok, session.StatusNotFound, busy, busy}) {
			t.Errorf("pinned %v", pin.Results)
		}
	})
	t.Run("regions", func(t *testing.T) {
		file, mem := unsealed(t, 1<<20)
		c := dial(t, "unix", r.unix)
		if err := c.withRegions([]int{int(file.Fd())}, session.HelloRegion{Length: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		one := []session.Segment{segment(0, 1, 0)}
		segs := segments(one, []session.Segment{segment(0, 1, 1)}, one, one)
		var got session.GotMessage
		ask(c, session.CodeRegionGet, &session.RegionGetMessage{Keys: r.keys("abca"), Segments: segs}, session.CodeGot, &got)
		if fmt.Sprint(statuses(got.Blocks)) != fmt.Sprint([]session.Status{ok, ok, busy, busy}) || string(mem[:2]) != "ab" {
			t.Errorf("got %+v, %q", got, mem[:2])
		}
		var done session.PutDoneMessage
		ask(c, session.CodeRegionPut, &session.RegionPutMessage{Keys: r.keys("hijk"), HasParent: make([]bool, 4), Segments: segs}, session.CodePutDone, &done)
		if len(done.Results) != 4 || done.Results[1].Status != ok || done.Results[2].Status != busy || done.Results[3].Status != busy {
			t.Errorf("put %+v", done)
		}
	})
	if n := r.server.Stats().Busy; n < 20 {
		t.Errorf("%d keys were counted as busy", n)
	}
}

// TestKeysMany shows the same of messages that are as full of keys as they can be: the
// first keys are served, and the call does not fail as a whole.
func TestKeysMany(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	c.store(r.keys("a"), []byte("hello"))
	served := int(c.welcome.Keys)
	full := func(head, each int) (n int, k session.Keys) {
		n = (int(c.welcome.Message) - head) / each
		k = r.keys("a")
		first := k.Hashes
		k.Hashes = make([]byte, 8*n)
		copy(k.Hashes, first)
		return n, k
	}
	ask := func(code session.Code, m message, want session.Code, into message) {
		t.Helper()
		if size := len(m.Append(nil)); size > int(c.welcome.Message) || size < int(c.welcome.Message)-100 {
			t.Fatalf("a message of %d bytes, want about %d", size, c.welcome.Message)
		}
		if err := c.answer(c.send(code, m), want, into); err != nil {
			t.Fatalf("code %d: %v", code, err)
		}
	}
	const busy = session.StatusBusy
	n, k := full(28, 8)
	var matched session.MatchedMessage
	ask(session.CodeMatch, &session.MatchMessage{Keys: k, Flags: session.FlagAll}, session.CodeMatched, &matched)
	if len(matched.Blocks) != n || matched.Prefix != 1 || matched.Blocks[served-1].State != block.Absent || matched.Blocks[served].State != session.BusyKey || matched.Blocks[n-1].State != session.BusyKey {
		t.Errorf("match: %d of %d keys, prefix %d", len(matched.Blocks), n, matched.Prefix)
	}
	blocks, got, err := c.blocks(&session.GetMessage{Keys: k})
	if err != nil || len(got.Blocks) != 2*served || string(blocks[0]) != "hello" || got.Blocks[served-1].Reason != block.MissAbsent ||
		got.Blocks[served].Status != busy || got.Blocks[2*served-1].Status != busy {
		t.Errorf("get: %d keys, error %v", len(got.Blocks), err)
	}
	var located session.LocatedMessage
	ask(session.CodeLocate, &session.LocateMessage{Keys: k}, session.CodeLocated, &located)
	if len(located.Places) != served || len(located.Places[0]) != 1 || located.Busy != served {
		t.Errorf("located %d keys, %d busy", len(located.Places), located.Busy)
	}
	id, told := c.send(session.CodePrefetch, &session.PrefetchMessage{Keys: k}), []session.PrefetchResult{}
	for len(told) < n {
		var p session.PrefetchedMessage
		if err := c.answer(id, session.CodePrefetched, &p); err != nil || int(p.First) != len(told) || len(p.Results) == 0 {
			t.Fatalf("prefetched %d keys from %d on behind %d, error %v", len(p.Results), p.First, len(told), err)
		}
		told = append(told, p.Results...)
	}
	if len(told) != n || told[0].Reason != block.Hit || told[served].Reason != session.BusyKey || told[n-1].Reason != session.BusyKey {
		t.Errorf("prefetched %d of %d keys", len(told), n)
	}
	var pinned session.PinnedMessage
	ask(session.CodePin, &session.PinMessage{Keys: k}, session.CodePinned, &pinned)
	if len(pinned.Results) != n || pinned.Results[0] != session.StatusOK || pinned.Results[served] != busy || pinned.Results[n-1] != busy {
		t.Errorf("pinned %d of %d keys", len(pinned.Results), n)
	}
	ids := make([]uint64, n)
	var renewed session.RenewedMessage
	ask(session.CodeRenew, &session.RenewMessage{LeaseMS: 1, Leases: ids}, session.CodeRenewed, &renewed)
	if len(renewed.Results) != n || renewed.Results[0] != session.StatusLeaseExpired || renewed.Results[n-1] != busy {
		t.Errorf("renewed %d of %d leases", len(renewed.Results), n)
	}
	for _, m := range []*session.ReleaseMessage{{Leases: ids}, {Grants: ids}, {Leases: ids[:n/2], Grants: ids[n/2:]}} {
		var rel session.ReleasedMessage
		ask(session.CodeRelease, m, session.CodeReleased, &rel)
		if len(rel.Results) != n || rel.Results[0] != session.StatusLeaseExpired || rel.Results[n-1] != busy {
			t.Errorf("released %d of %d", len(rel.Results), n)
		}
	}
	items, k := full(40, 37)
	var done session.PutDoneMessage
	ask(session.CodePut, &session.PutMessage{Keys: k, Items: make([]session.PutItem, items)}, session.CodePutDone, &done)
	if len(done.Results) != items || done.Results[0].Status != session.StatusLeaseExpired || done.Results[served].Status != busy || done.Results[items-1].Status != busy {
		t.Errorf("put %d of %d blocks", len(done.Results), items)
	}
	// Each was counted, and the session goes on.
	want := 6*(n-served) + 2*(n-served) + (n - 2*served) + (items - served)
	if have := r.server.Stats().Busy; int(have) != want {
		t.Errorf("%d keys were counted as busy, want %d", have, want)
	}
	if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("a")}); err != nil || string(got[0]) != "hello" {
		t.Errorf("afterwards: %q, error %v", got, err)
	}
}

// TestClientMessageSize shows that the client cuts its calls to what a message has room
// for.
func TestClientMessageSize(t *testing.T) {
	for _, size := range []struct{ server, client int }{{65536, 0}, {0, 65536}, {0, 0}} {
		r := newRig(t, nil, &session.ServerOptions{Message: size.server})
		c := r.open("tcp", &session.ClientOptions{Message: size.client})
		want := uint32(65536)
		if size.server+size.client == 0 {
			want = 1 << 20
		}
		if n := c.Welcome().Message; n != want {
			t.Fatalf("messages of %d bytes, want %d", n, want)
		}
		ns := r.handle()
		const n = 9000
		hashes := make([]byte, 8*n)
		var items []session.GetItem
		var blocks []session.PutBlock
		for i := range n {
			h := block.Hash{byte(i), byte(i >> 8), 1}
			copy(hashes[8*i:], h[:8])
			items = append(items, session.GetItem{Hash: h, Into: make([]byte, 4)})
			blocks = append(blocks, session.PutBlock{Hash: h, Bytes: []byte{byte(i), byte(i >> 8), 2, 3}})
		}
		if _, err := c.Put(t.Context(), ns, blocks, session.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		got, err := c.Get(t.Context(), ns, items, block.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i].Err != nil || got[i].Reason != block.Hit || !bytes.Equal(items[i].Into, blocks[i].Bytes) {
				t.Fatalf("key %d: %+v, %x", i, got[i], items[i].Into)
			}
		}
		var m block.MatchResult
		if err := c.Match(t.Context(), ns, hashes, block.MatchOptions{All: true}, &m); err != nil || m.Prefix != n || len(m.Blocks) != n {
			t.Errorf("match: prefix %d of %d, error %v", m.Prefix, len(m.Blocks), err)
		}
		if places, err := c.Locate(t.Context(), ns, hashes); err != nil || len(places) != n {
			t.Errorf("located %d, error %v", len(places), err)
		}
	}
	r := newRig(t, nil, nil)
	for _, n := range []int{-1, 1, 65535, 1<<20 + 1} {
		if _, err := session.Dial(t.Context(), "tcp", r.tcp, &session.ClientOptions{Message: n}); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), fmt.Sprintf("message: %d bytes", n)) {
			t.Errorf("messages of %d bytes: error %v", n, err)
		}
	}
}

// TestClientLongReply shows that a reply beyond the size fails its own call, and that the
// session goes on. A server that tells no size has messages of 1 MiB.
func TestClientLongReply(t *testing.T) {
	w := welcome()
	older := w.Append(nil)
	c := playedBy(t, older[:len(older)-4], nil, &session.ClientOptions{NoShared: true, Message: 65536}, func(s *server) {
		for range 2 {
			id, ok := s.want(session.CodeLocate)
			if !ok {
				return
			}
			s.send(frame.Header{Type: frame.Message, Flags: uint8(session.CodeLocated), ID: 1 << 40}, make([]byte, 1<<20)) // of no call
			s.send(frame.Header{Type: frame.Message, Flags: uint8(session.CodeRevoke)}, make([]byte, 1<<20))
			s.send(frame.Header{Type: frame.Message, Flags: uint8(session.CodeLocated), ID: id}, make([]byte, 65537))
			if id, ok = s.want(session.CodeLocate); ok {
				s.reply(session.CodeLocated, id, &session.LocatedMessage{Places: make([][]block.Located, 1)})
			}
		}
	})
	if n := c.Welcome().Message; n != 65536 {
		t.Errorf("messages of %d bytes", n)
	}
	for range 2 {
		h := hashOf(1)
		if _, err := c.Locate(t.Context(), oneNS, h[:8]); !errors.Is(err, session.ErrMessage) || !strings.Contains(err.Error(), "reply of 65537 bytes") {
			t.Errorf("a long reply: %v", err)
		}
		if _, err := c.Locate(t.Context(), oneNS, h[:8]); err != nil {
			t.Errorf("behind it: %v", err)
		}
	}
}
