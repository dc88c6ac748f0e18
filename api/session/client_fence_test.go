package session_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// server is the server's side of one session, played by a test.
type server struct {
	t    *testing.T
	conn net.Conn
}

// played opens a session with a server that a test plays: it has answered the hello,
// and what follows is run's.
func played(t *testing.T, w session.WelcomeMessage, run func(s *server)) *session.Client {
	t.Helper()
	return playedWith(t, w, nil, &session.ClientOptions{NoShared: true}, run)
}

func welcome() session.WelcomeMessage {
	return session.WelcomeMessage{Version: session.Version, Session: 1, Incarnation: 2, Calls: 4, Bytes: 1 << 20, Keys: 100, Grants: 4, GrantBytes: 1 << 20, Message: 1 << 20}
}

// hangUp waits until the client has closed the connection.
func (s *server) hangUp() {
	var b [4096]byte
	for {
		if _, err := s.conn.Read(b[:]); err != nil {
			return
		}
	}
}

// recv reads the next frame, false when there is none.
func (s *server) recv() (frame.Header, []byte, bool) {
	var b [frame.HeaderBytes]byte
	if _, err := readFull(s.conn, b[:]); err != nil {
		return frame.Header{}, nil, false
	}
	h, err := frame.ParseHeader(b[:])
	if err != nil {
		s.t.Error(err)
		return h, nil, false
	}
	p := make([]byte, h.Length)
	_, err = readFull(s.conn, p)
	return h, p, err == nil
}

// want reads frames until one is a message of the code.
func (s *server) want(code session.Code) (id uint64, ok bool) {
	for {
		h, _, ok := s.recv()
		if !ok {
			return 0, false
		}
		if h.Type == frame.Message && session.Code(h.Flags) == code {
			return h.ID, true
		}
	}
}

func readFull(c net.Conn, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var m int
		m, err = c.Read(b[n:])
		n += m
	}
	if n == len(b) {
		err = nil
	}
	return n, err
}

// send writes bytes as they are. The client may have hung up.
func (s *server) send(h frame.Header, p []byte) {
	h.Length = uint32(len(p))
	_, _ = s.conn.Write(append(h.Append(nil), p...))
}

func (s *server) reply(code session.Code, id uint64, m interface{ Append([]byte) []byte }) {
	s.send(frame.Header{Type: frame.Message, Flags: uint8(code), ID: id}, m.Append(nil))
}

func (s *server) data(id, token, offset uint64, p []byte) {
	s.send(frame.Header{Type: frame.Data, ID: id, Token: token, Offset: offset}, p)
}

var oneNS = session.Namespace{ID: 1, HashLen: 8}

func hit(i, n int) session.GotBlock {
	return session.GotBlock{Tier: block.G2, Len: uint32(n), Total: uint32(n), Chunk: session.NoChunk, Sum: sumOfBlock(bytesOf(i, n))}
}

// A call past its deadline returns, and what the server sends for it later is not
// written anywhere; the session goes on.
func TestClientCancelledGetIsFenced(t *testing.T) {
	const n = 1000
	asked, late := make(chan struct{}), make(chan struct{}) // the get is under way, is over
	c := played(t, welcome(), func(s *server) {
		id, ok := s.want(session.CodeGet)
		if !ok {
			return
		}
		close(asked)
		<-late
		s.data(id, 0, 0, bytesOf(1, n))
		s.reply(session.CodeGot, id, &session.GotMessage{Blocks: []session.GotBlock{hit(1, n)}})
		if id, ok = s.want(session.CodeGet); ok {
			s.data(id, 0, 0, bytesOf(2, n))
			s.reply(session.CodeGot, id, &session.GotMessage{Blocks: []session.GotBlock{hit(2, n)}})
		}
	})
	ctx, expire := expiring(t)
	go func() {
		<-asked
		expire()
	}()
	mem := bytes.Repeat([]byte{0x5a}, n)
	if _, err := c.Get(ctx, oneNS, []session.GetItem{{Hash: hashOf(1), Into: mem}}, block.GetOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	close(late)
	other := make([]byte, n)
	res, err := c.Get(t.Context(), oneNS, []session.GetItem{{Hash: hashOf(2), Into: other}}, block.GetOptions{})
	if err != nil || res[0].Err != nil || res[0].Reason != block.Hit || !bytes.Equal(other, bytesOf(2, n)) {
		t.Fatalf("%+v, %v", res, err)
	}
	if !bytes.Equal(mem, bytes.Repeat([]byte{0x5a}, n)) {
		t.Error("the memory of a call that was over was written to")
	}
}

// expiring is a context that is past its deadline when the test says so, however slow
// the machine is.
func expiring(t *testing.T) (ctx context.Context, expire func()) {
	x := &expirable{Context: t.Context(), over: make(chan struct{})}
	return x, sync.OnceFunc(func() { close(x.over) })
}

type expirable struct {
	context.Context
	over chan struct{}
}

func (x *expirable) Deadline() (time.Time, bool) { return time.Now().Add(patience), true }

func (x *expirable) Done() <-chan struct{} { return x.over }

func (x *expirable) Err() error {
	select {
	case <-x.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// A frame that is being read when its call ends hangs: the connection is given up, and
// the memory is quiet when the call returns.
func TestClientHangingFrame(t *testing.T) {
	const n = 1000
	rest := make(chan struct{})
	c := played(t, welcome(), func(s *server) {
		id, ok := s.want(session.CodeGet)
		if !ok {
			return
		}
		h := frame.Header{Type: frame.Data, ID: id, Length: n}
		_, _ = s.conn.Write(append(h.Append(nil), bytesOf(1, n)[:n/2]...))
		<-rest
		_, _ = s.conn.Write(bytesOf(1, n)[n/2:])
	})
	ctx, cancel := context.WithCancel(t.Context())
	mem := bytes.Repeat([]byte{0x5a}, n)
	done := make(chan error, 1)
	go func() {
		_, err := c.Get(ctx, oneNS, []session.GetItem{{Hash: hashOf(1), Into: mem}}, block.GetOptions{})
		done <- err
	}()
	// The half of the frame has landed when the client has counted it as coming.
	await(t, "half a frame", func() bool { return c.Stats().Conn.BytesIn >= n })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	seen := bytes.Clone(mem)
	close(rest)
	if err := c.Match(t.Context(), oneNS, packedFrom(0, 1), block.MatchOptions{}, new(block.MatchResult)); !errors.Is(err, block.ErrDisconnected) {
		t.Errorf("the session goes on: %v", err)
	}
	if !bytes.Equal(mem, seen) {
		t.Error("the memory of a call that was over was written to")
	}
}

// Nothing that a server answers to a get makes the client fail otherwise than by an
// error: not of one key where the answer is about one, else of the session.
func TestClientBadAnswersToGet(t *testing.T) {
	const n = 600
	good := hit(1, n)
	bad := func(change func(g *session.GotBlock)) session.GotBlock {
		g := good
		change(&g)
		return g
	}
	got := func(blocks ...session.GotBlock) *session.GotMessage { return &session.GotMessage{Blocks: blocks} }
	for _, tc := range []struct {
		name  string
		speak func(s *server, id uint64)
		miss  block.MissReason // when the session lives
		dies  bool
	}{
		{"another sum", func(s *server, id uint64) {
			s.data(id, 0, 0, bytesOf(2, n))
			s.reply(session.CodeGot, id, got(good))
		}, block.MissCorrupt, false},
		{"pieces out of order", func(s *server, id uint64) {
			s.data(id, 0, 300, bytesOf(1, n)[300:])
			s.data(id, 0, 0, bytesOf(1, n)[:300])
			s.reply(session.CodeGot, id, got(good))
		}, block.Hit, false},
		{"data for nobody", func(s *server, id uint64) {
			s.data(id+100, 0, 0, bytesOf(2, n))
			s.data(id, 7, 0, bytesOf(2, n))
			s.data(id, 1<<63, 0, bytesOf(2, n))
			s.data(id, 0, 1<<63, bytesOf(2, n))
			s.data(id, 0, n-1, bytesOf(2, n))
			s.reply(session.CodeGot, id+100, got(bad(func(g *session.GotBlock) {}), good))
			s.reply(session.CodeMatched, id+100, &session.MatchedMessage{})
			s.reply(session.CodeGranted, id+100, &session.GrantedMessage{})
			s.reply(session.CodePutDone, id+100, &session.PutDoneMessage{})
			s.data(id, 0, 0, bytesOf(1, n))
			s.reply(session.CodeGot, id, got(good))
		}, block.Hit, false},
		{"a frame of a type to come", func(s *server, id uint64) {
			s.send(frame.Header{Type: 200, ID: id}, []byte("?"))
			s.data(id, 0, 0, bytesOf(1, n))
			s.reply(session.CodeGot, id, got(good))
		}, block.Hit, false},
		{"no data", func(s *server, id uint64) { s.reply(session.CodeGot, id, got(good)) }, 0, true},
		{"the data twice", func(s *server, id uint64) {
			s.data(id, 0, 0, bytesOf(1, n))
			s.data(id, 0, 0, bytesOf(1, n))
			s.reply(session.CodeGot, id, got(good))
		}, 0, true},
		{"no keys", func(s *server, id uint64) { s.reply(session.CodeGot, id, got()) }, 0, true},
		{"two keys", func(s *server, id uint64) {
			s.data(id, 0, 0, bytesOf(1, n))
			s.reply(session.CodeGot, id, got(good, good))
		}, 0, true},
		{"a huge length", func(s *server, id uint64) {
			s.reply(session.CodeGot, id, got(bad(func(g *session.GotBlock) { g.Len, g.Total = 1<<32-1, 1<<32-1 })))
		}, 0, true},
		{"more than the block has", func(s *server, id uint64) {
			s.data(id, 0, 0, bytesOf(1, n))
			s.reply(session.CodeGot, id, got(bad(func(g *session.GotBlock) { g.Total = n - 1 })))
		}, 0, true},
		{"lent without memory", func(s *server, id uint64) {
			s.reply(session.CodeGot, id, got(bad(func(g *session.GotBlock) { g.Chunk, g.Offset = 3, 1<<63 })))
		}, 0, true},
		{"garbage", func(s *server, id uint64) {
			s.send(frame.Header{Type: frame.Message, Flags: uint8(session.CodeGot), ID: id}, []byte("garbage"))
		}, 0, true},
		{"a reply to something else", func(s *server, id uint64) { s.reply(session.CodePutDone, id, &session.PutDoneMessage{}) }, 0, true},
		{"a failure that is none", func(s *server, id uint64) { s.reply(session.CodeFailed, id, &session.FailedMessage{}) }, 0, true},
		{"garbage for nobody", func(s *server, id uint64) {
			s.send(frame.Header{Type: frame.Message, Flags: uint8(session.CodeGranted), ID: id + 9}, []byte("garbage"))
		}, 0, true},
		{"no frame", func(s *server, _ uint64) { _, _ = s.conn.Write(bytes.Repeat([]byte{0xff}, 64)) }, 0, true},
		{"half a frame", func(s *server, id uint64) {
			h := frame.Header{Type: frame.Data, ID: id, Length: n}
			_, _ = s.conn.Write(append(h.Append(nil), bytesOf(1, n/2)...))
			_ = s.conn.Close()
		}, 0, true},
		{"revoked nonsense", func(s *server, id uint64) {
			s.reply(session.CodeRevoke, 0, &session.RevokeMessage{Grants: []uint64{1, 2, 3}})
			s.data(id, 0, 0, bytesOf(1, n))
			s.reply(session.CodeGot, id, got(good))
		}, block.Hit, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := played(t, welcome(), func(s *server) {
				if id, ok := s.want(session.CodeGet); ok {
					tc.speak(s, id)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			mem := bytes.Repeat([]byte{0x5a}, n+100)
			res, err := c.Get(ctx, oneNS, []session.GetItem{{Hash: hashOf(1), Into: mem[:n:n]}}, block.GetOptions{})
			switch {
			case tc.dies && (!errors.Is(err, block.ErrDisconnected) || errors.Is(err, context.DeadlineExceeded)):
				t.Errorf("%+v, %v", res, err)
			case !tc.dies && (err != nil || res[0].Err != nil || res[0].Reason != tc.miss):
				t.Errorf("%+v, %v", res, err)
			case !tc.dies && tc.miss == block.Hit && !bytes.Equal(mem[:n], bytesOf(1, n)):
				t.Error("other bytes")
			}
			if !bytes.Equal(mem[n:], bytes.Repeat([]byte{0x5a}, 100)) {
				t.Error("written behind the end of a place")
			}
		})
	}
}

// The same for a put.
func TestClientBadAnswersToPut(t *testing.T) {
	const n = 600
	grant := func(change func(m *session.GrantedMessage)) *session.GrantedMessage {
		m := &session.GrantedMessage{TTLMS: 60_000, Places: []session.GrantedPlace{{Grant: 7, Size: n, Chunk: session.NoChunk}}}
		if change != nil {
			change(m)
		}
		return m
	}
	stored := &session.PutDoneMessage{Results: []session.PutResult{{}}}
	for _, tc := range []struct {
		name    string
		granted *session.GrantedMessage
		done    *session.PutDoneMessage
		is      error // of the block, nil when the session dies
	}{
		{"no place", grant(func(m *session.GrantedMessage) { m.Places = nil }), stored, block.ErrNoSpace},
		{"two places", grant(func(m *session.GrantedMessage) { m.Places = append(m.Places, m.Places...) }), stored, nil},
		{"a small place", grant(func(m *session.GrantedMessage) { m.Places[0].Size = n - 1 }), stored, nil},
		{"an empty place", grant(func(m *session.GrantedMessage) { m.Places[0].Size = 0 }), stored, nil},
		{"a huge place", grant(func(m *session.GrantedMessage) { m.Places[0].Size = 1<<32 - 1 }), stored, nil},
		{"a place in no memory", grant(func(m *session.GrantedMessage) { m.Places[0].Chunk = 0 }), stored, nil},
		{"no result", grant(nil), &session.PutDoneMessage{}, nil},
		{"two results", grant(nil), &session.PutDoneMessage{Results: make([]session.PutResult, 2)}, nil},
		{"new places in no memory", grant(nil), &session.PutDoneMessage{Results: stored.Results, Grants: *grant(func(m *session.GrantedMessage) { m.Places[0].Chunk = 9 })}, nil},
		{"a status to come", grant(nil), &session.PutDoneMessage{Results: []session.PutResult{{Status: 999}}}, errAny},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := played(t, welcome(), func(s *server) {
				for {
					h, _, ok := s.recv()
					if !ok {
						return
					}
					if h.Type != frame.Message {
						continue
					}
					switch session.Code(h.Flags) {
					case session.CodeGrant:
						s.reply(session.CodeGranted, h.ID, tc.granted)
					case session.CodePut:
						s.reply(session.CodePutDone, h.ID, tc.done)
					case session.CodeRelease:
						s.reply(session.CodeReleased, h.ID, &session.ReleasedMessage{})
					}
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			res, err := c.Put(ctx, oneNS, []session.PutBlock{{Hash: hashOf(1), Bytes: bytesOf(1, n)}}, session.PutOptions{})
			switch {
			case tc.is == nil:
				if !errors.Is(err, block.ErrDisconnected) || !errors.Is(res[0].Err, block.ErrDisconnected) {
					t.Errorf("%+v, %v", res, err)
				}
			case err != nil || res[0].Err == nil || tc.is != errAny && !errors.Is(res[0].Err, tc.is):
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
}

var errAny = errors.New("any")

// A place that has run out is answered so, and the block put again into a new one.
func TestClientGrantRunsOut(t *testing.T) {
	puts := 0
	c := played(t, welcome(), func(s *server) {
		grant := uint64(10)
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
				s.reply(session.CodeGranted, h.ID, &session.GrantedMessage{TTLMS: 60_000, Places: []session.GrantedPlace{{Grant: grant, Size: 100, Chunk: session.NoChunk}}})
			case session.CodePut:
				var m session.PutMessage
				if err := m.Decode(p); err != nil {
					s.t.Error(err)
				}
				puts++
				r := session.PutResult{}
				if puts == 1 {
					r.Status = session.StatusLeaseExpired
				} else if m.Items[0].Grant != 12 {
					s.t.Errorf("put into %d", m.Items[0].Grant)
				}
				s.reply(session.CodePutDone, h.ID, &session.PutDoneMessage{Results: []session.PutResult{r}})
			case session.CodeRelease:
				s.reply(session.CodeReleased, h.ID, &session.ReleasedMessage{})
			}
		}
	})
	res, err := c.Put(t.Context(), oneNS, []session.PutBlock{{Hash: hashOf(1), Bytes: bytesOf(1, 100)}}, session.PutOptions{})
	if err != nil || res[0].Err != nil {
		t.Errorf("%+v, %v", res, err)
	}
}

// Memory that could be cut short under the client, or is not as long as it was said, is
// not mapped; the session goes on without it.
func TestClientUnsafeMemory(t *testing.T) {
	for name, make := range map[string]func(t *testing.T) (fd int, announced uint64){
		"not sealed": func(t *testing.T) (int, uint64) { return memFile(t, 4096, false), 4096 },
		"too short":  func(t *testing.T) (int, uint64) { return memFile(t, 4096, true), 8192 },
		"huge":       func(t *testing.T) (int, uint64) { return memFile(t, 4096, true), 1 << 63 },
		"empty":      func(t *testing.T) (int, uint64) { return memFile(t, 4096, true), 0 },
	} {
		t.Run(name, func(t *testing.T) {
			fd, announced := make(t)
			w := welcome()
			w.Features, w.Chunks = session.FeatureShared, []uint64{announced}
			c := playedWith(t, w, []int{fd}, nil, nil)
			if c.Shared() {
				t.Error("mapped")
			}
		})
	}
	w := welcome()
	w.Features, w.Chunks = session.FeatureShared, []uint64{4096, 4096}
	if c := playedWith(t, w, []int{memFile(t, 4096, true)}, nil, nil); c.Shared() {
		t.Error("mapped with a file too few")
	}
	w.Chunks = w.Chunks[:1]
	if c := playedWith(t, w, []int{memFile(t, 4096, true)}, nil, nil); !c.Shared() {
		t.Error("not mapped although all is as it should be")
	}
}

// A server whose hello cannot be worked with is refused.
func TestClientBadWelcome(t *testing.T) {
	for name, change := range map[string]func(w *session.WelcomeMessage){
		"version":  func(w *session.WelcomeMessage) { w.Version = 99 },
		"features": func(w *session.WelcomeMessage) { w.Features = 1 << 40 },
		"no calls": func(w *session.WelcomeMessage) { w.Calls = 0 },
		"no keys":  func(w *session.WelcomeMessage) { w.Keys = 0 },
		"no size":  func(w *session.WelcomeMessage) { w.Message = 0 },
		"small":    func(w *session.WelcomeMessage) { w.Message = 65535 },
		"absurd":   func(w *session.WelcomeMessage) { w.Message = 16<<20 + 1 },
	} {
		t.Run(name, func(t *testing.T) {
			w := welcome()
			change(&w)
			if err := dialAnswered(t, func(c net.Conn) error { return frame.SendHello(c, w.Append(nil), nil) }); !errors.Is(err, block.ErrInvalid) {
				t.Error(err)
			}
		})
	}
	err := dialAnswered(t, func(c net.Conn) error {
		w := session.WelcomeMessage{Status: session.StatusDenied, Text: "no entry"}
		return frame.SendHello(c, w.Append(nil), nil)
	})
	if !errors.Is(err, block.ErrDenied) {
		t.Error(err)
	}
	err = dialAnswered(t, func(c net.Conn) error {
		_, err := fmt.Fprint(c, "HTTP/1.1 400 Bad Request\r\nConnection: close and more than a header\r\n")
		return err
	})
	if !errors.Is(err, block.ErrInvalid) {
		t.Error(err)
	}
	err = dialAnswered(t, func(c net.Conn) error {
		var b [frame.HeaderBytes]byte
		binary.LittleEndian.PutUint32(b[:], 5)
		b[4] = byte(frame.Hello)
		_, err := c.Write(append(b[:], "KVTS?"...))
		return err
	})
	if !errors.Is(err, block.ErrInvalid) {
		t.Error(err)
	}
}
