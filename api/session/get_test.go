package session_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// TestGetEnds shows that a get that is cancelled, or past its deadline, while the
// client takes nothing sends no more than it has begun and answers so, also when all
// that is left is one block.
func TestGetEnds(t *testing.T) {
	const size = 4 << 20
	r := newRig(t, &memstore.Options{Capacity: 32 << 20}, nil)
	put := r.client()
	put.store(r.keys("a"), pattern(1000, 1))
	put.store(r.keys("b"), pattern(size, 2))
	for _, tt := range []struct {
		name   string
		keys   string
		cancel bool
		want   error
	}{
		{"deadline", "b", false, context.DeadlineExceeded},
		{"deadline behind a small block", "ab", false, context.DeadlineExceeded},
		{"cancelled", "b", true, context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := dial(t, "unix", r.unix) // whose buffers hold less than the block
			if err := c.hello(session.HelloMessage{}); err != nil {
				t.Fatal(err)
			}
			m := &session.GetMessage{Keys: r.keys(tt.keys)}
			if !tt.cancel {
				m.Deadline = 50
			}
			calls := func(code session.Code) int64 { return r.server.Stats().Calls[code] }
			gets, marks := calls(session.CodeGet), calls(session.CodeFailed)
			id := c.send(session.CodeGet, m)
			r.await("the get", func() bool { return calls(session.CodeGet) > gets })
			if tt.cancel {
				if h, _ := c.recv(id); h.Type != frame.Data {
					t.Fatalf("frame %+v, want data", h)
				}
				c.cancel(id)
				// What comes behind it is counted when the cancel has been read.
				c.write(packed(frame.Header{Type: frame.Message, Flags: uint8(session.CodeFailed)}, nil))
				r.await("the cancel", func() bool { return calls(session.CodeFailed) > marks })
			} else {
				time.Sleep(500 * time.Millisecond) // the client takes nothing until it is over
			}
			came := 0
			for {
				h, p := c.recv(id)
				if h.Type == frame.Data {
					came += len(p)
					continue
				}
				var f session.FailedMessage
				if session.Code(h.Flags) != session.CodeFailed || f.Decode(p) != nil || !errors.Is(f.Status.Err(f.Text), tt.want) {
					t.Errorf("answer with code %d, %+v, after %d bytes, want that it failed with %v", h.Flags, f, came, tt.want)
				}
				break
			}
			if came > size*3/4 {
				t.Errorf("%d bytes of %d came of a call that was over", came, size)
			}
			// The session goes on.
			if got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("ab")}); err != nil || !bytes.Equal(got[0], pattern(1000, 1)) || !bytes.Equal(got[1], pattern(size, 2)) {
				t.Errorf("the next get: error %v", err)
			}
		})
	}
}

// TestGetFails shows that what a get has collected when it fails is not sent, neither
// by it nor by the next one.
func TestGetFails(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	for _, name := range []string{"a", "b", "c"} {
		c.store(r.keys(name), pattern(1000, name[0]))
	}
	for _, size := range []struct{ first, second uint32 }{{10, 10}, {0, 0}} {
		m := &session.GetMessage{Keys: r.keys("abc"), Flags: session.FlagRanges, Ranges: []session.Range{{Length: size.first}, {Length: size.second}, {Offset: 900, Length: 200}}}
		id := c.send(session.CodeGet, m)
		if err := c.answer(id, 0, nil); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("a range past the end: error %v", err)
		}
		got, _, err := c.blocks(&session.GetMessage{Keys: r.keys("cab")})
		if err != nil || !bytes.Equal(got[0], pattern(1000, 'c')) || !bytes.Equal(got[1], pattern(1000, 'a')) || !bytes.Equal(got[2], pattern(1000, 'b')) {
			t.Errorf("the next get: error %v", err)
		}
	}
}
