package session_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// Puts of many blocks at once want more places than there are. None holds some while it
// waits for others.
func TestClientPutsShareFewPlaces(t *testing.T) {
	const places, callers, rounds, n = 8, 6, 30, 1000
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Capacity: 64 << 20, Shared: 64 << 20}, &session.ServerOptions{Grants: places})
			c := r.open(way.network, &way.o)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var wg sync.WaitGroup
			for g := range callers {
				wg.Go(func() {
					for round := range rounds {
						var blocks []session.PutBlock
						for i := range 3 + (g+round)%6 {
							key := (g*rounds+round)*100 + i
							blocks = append(blocks, session.PutBlock{Hash: hashOf(key), Bytes: bytesOf(key, n*(1+i%2*7))})
						}
						res, err := c.Put(ctx, r.handle(), blocks, session.PutOptions{})
						if err != nil {
							t.Error(err)
							return
						}
						for i := range res {
							if res[i].Err != nil || res[i].Status != block.Stored {
								t.Errorf("caller %d round %d block %d: %v, %v", g, round, i, res[i].Status, res[i].Err)
							}
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// A call that fails before it is sent does not lose what was to go with it.
func TestClientGivesBackInAnyCase(t *testing.T) {
	r := newRig(t, &memstore.Options{Shared: 64 << 20}, nil)
	c := r.open("unix", nil)
	putBlocks(t, c, r.handle(), map[int]int{1: 1000})
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 {
		items := []session.GetItem{{Hash: hashOf(1), Into: make([]byte, 1000)}}
		if res, err := c.Get(t.Context(), r.handle(), items, block.GetOptions{}); err != nil || res[0].Reason != block.Hit {
			t.Fatal(res, err)
		}
		// The lease of the get waits for a call to go with.
		if err := c.Match(over, r.handle(), packedFrom(0, 1), block.MatchOptions{}, new(block.MatchResult)); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	r.await("leases given back", func() bool { return r.store.Stats().Leases == 0 })
}

// A place that a put did not use up is given back: the server holds it until then.
func TestClientGivesUnusedPlacesBack(t *testing.T) {
	for _, status := range []session.Status{session.StatusBusy, session.StatusLeaseExpired} {
		t.Run(status.String(), func(t *testing.T) {
			released := make(chan uint64, 10)
			c := played(t, welcome(), func(s *server) {
				grant := uint64(6)
				for {
					h, p, ok := s.recv()
					if !ok {
						return
					}
					if h.Type != frame.Message {
						continue
					}
					switch session.Code(h.Flags) {
					case session.CodeGrant:
						grant++
						s.reply(session.CodeGranted, h.ID, &session.GrantedMessage{TTLMS: 60_000, Places: []session.GrantedPlace{{Grant: grant, Size: 1000, Chunk: session.NoChunk}}})
					case session.CodePut:
						m := session.PutDoneMessage{Results: []session.PutResult{{Status: status}}}
						if grant > 7 {
							m.Results[0].Status = session.StatusOK
						}
						s.reply(session.CodePutDone, h.ID, &m)
					case session.CodeRelease:
						var m session.ReleaseMessage
						if err := m.Decode(p); err != nil {
							t.Error(err)
						}
						for _, id := range m.Grants {
							released <- id
						}
						s.reply(session.CodeReleased, h.ID, &session.ReleasedMessage{Results: make([]session.Status, len(m.Grants))})
					}
				}
			})
			res, err := c.Put(t.Context(), oneNS, []session.PutBlock{{Hash: hashOf(1), Bytes: bytesOf(1, 1000)}}, session.PutOptions{})
			if err != nil || status == session.StatusBusy && !errors.Is(res[0].Err, session.ErrBusy) {
				t.Fatal(res, err)
			}
			select {
			case id := <-released:
				if id != 7 {
					t.Errorf("place %d is given back, want 7", id)
				}
			case <-time.After(patience):
				t.Error("the place is not given back")
			}
		})
	}
}

// The longest time that there is is long.
func TestClientLongestTimes(t *testing.T) {
	deadlines := make(chan session.PutMessage, 1)
	c := played(t, welcome(), func(s *server) {
		for {
			h, p, ok := s.recv()
			if !ok {
				return
			}
			if h.Type != frame.Message {
				continue
			}
			switch session.Code(h.Flags) {
			case session.CodeGrant:
				s.reply(session.CodeGranted, h.ID, &session.GrantedMessage{TTLMS: 60_000, Places: []session.GrantedPlace{{Grant: 7, Size: 1000, Chunk: session.NoChunk}}})
			case session.CodePut:
				var m session.PutMessage
				if err := m.Decode(p); err != nil {
					t.Error(err)
				}
				deadlines <- m
				s.reply(session.CodePutDone, h.ID, &session.PutDoneMessage{Results: []session.PutResult{{}}})
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), math.MaxInt64)
	defer cancel()
	blocks := []session.PutBlock{{Hash: hashOf(1), Bytes: bytesOf(1, 1000)}}
	if res, err := c.Put(ctx, oneNS, blocks, session.PutOptions{TTL: math.MaxInt64}); err != nil || res[0].Err != nil {
		t.Fatal(res, err)
	}
	m := <-deadlines
	if day := 24 * time.Hour / time.Millisecond; m.Deadline < uint32(day) || m.TTLMS != math.MaxInt64/uint64(time.Millisecond) {
		t.Errorf("deadline in %d ms, ttl of %d ms", m.Deadline, m.TTLMS)
	}
}

// Where the store's memory was passed but cannot be mapped, the bytes are sent, and a
// place that is revoked is given back as the server expects.
func TestClientPutsUnmapped(t *testing.T) {
	w := welcome()
	w.Features, w.Chunks = session.FeatureShared, []uint64{4096}
	released := make(chan uint64, 10)
	c := playedWith(t, w, []int{memFile(t, 4096, false)}, nil, func(s *server) {
		bytes := 0
		for {
			h, p, ok := s.recv()
			if !ok {
				return
			}
			switch {
			case h.Type == frame.Data:
				bytes += len(p)
			case h.Type != frame.Message:
			case session.Code(h.Flags) == session.CodeGrant:
				s.reply(session.CodeGranted, h.ID, &session.GrantedMessage{TTLMS: 60_000, Places: []session.GrantedPlace{{Grant: 7, Size: 1000}}})
			case session.Code(h.Flags) == session.CodePut:
				if bytes != 1000 {
					t.Errorf("%d bytes were sent", bytes)
				}
				s.reply(session.CodePutDone, h.ID, &session.PutDoneMessage{
					Results: []session.PutResult{{}},
					Grants:  session.GrantedMessage{TTLMS: 60_000, Places: []session.GrantedPlace{{Grant: 8, Size: 1000}}},
				})
			case session.Code(h.Flags) == session.CodeMatch:
				s.reply(session.CodeRevoke, 0, &session.RevokeMessage{Grants: []uint64{8}})
				s.reply(session.CodeMatched, h.ID, &session.MatchedMessage{})
			case session.Code(h.Flags) == session.CodeRelease:
				var m session.ReleaseMessage
				if err := m.Decode(p); err != nil {
					t.Error(err)
				}
				for _, id := range m.Grants {
					released <- id
				}
			}
		}
	})
	res, err := c.Put(t.Context(), oneNS, []session.PutBlock{{Hash: hashOf(1), Bytes: bytesOf(1, 1000)}}, session.PutOptions{})
	if err != nil || res[0].Err != nil {
		t.Fatal(res, err)
	}
	if err := c.Match(t.Context(), oneNS, packedFrom(0, 1), block.MatchOptions{}, new(block.MatchResult)); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-released:
		if id != 8 {
			t.Errorf("place %d is given back, want 8", id)
		}
	case <-time.After(patience):
		t.Error("the place is not given back")
	}
}

// Calls that end at any moment, and places that run out meanwhile, leave nothing held
// while the session goes on.
func TestClientHoldsNothing(t *testing.T) {
	const callers, rounds, n = 6, 40, 40_000
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, &memstore.Options{Capacity: 256 << 20, Shared: 256 << 20}, &session.ServerOptions{Grants: 16, GrantTTL: 20 * time.Millisecond})
			c := r.open(way.network, &way.o)
			var wg sync.WaitGroup
			for g := range callers {
				wg.Go(func() {
					for round := range rounds {
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(round*g%7)*time.Millisecond)
						// It may fail, by its deadline as a rule.
						if err := putAndGet(ctx, c, r.handle(), (g*rounds+round)*10, 1+round%5, n); errors.Is(err, session.ErrMessage) {
							t.Error(err)
						}
						cancel()
					}
				})
			}
			wg.Wait()
			if err := c.Err(); err != nil {
				t.Skip("a call's end took the connection with it:", err)
			}
			r.await("all that was held", func() bool {
				st, have := r.server.Stats(), r.store.Stats()
				return st.Grants == 0 && st.Revoked == 0 && have.Reservations == 0 && have.Leases == 0
			})
		})
	}
}
