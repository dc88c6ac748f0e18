package frame_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/xfer/frame"
)

// pattern is what a stream's bytes are: each eight tell the stream and the place, so
// that no two frames are alike.
func pattern(stream, n int) []byte {
	b := make([]byte, 0, n+8)
	for i := 0; len(b) < n; i++ {
		b = binary.LittleEndian.AppendUint64(b, uint64(stream)<<40|uint64(i))
	}
	return b[:n]
}

// lands checks that frames of many streams arrive whole and in order, and that
// each message is right behind its data.
type lands struct {
	want     [][]byte          // by stream
	memory   map[uint64][]byte // by stream
	got      map[uint64]uint64 // bytes landed, in order
	before   frame.Header      // the last frame
	messages int
	all      int
	done     chan struct{}
}

func (l *lands) Land(h *frame.Header) []byte {
	l.before = *h
	if h.Offset != l.got[h.Token] {
		return nil // its message will miss it
	}
	return l.memory[h.Token][h.Offset:][:h.Length]
}

func (l *lands) Landed(h *frame.Header, p []byte, err error) error {
	l.got[h.Token] += uint64(len(p))
	return err
}

func (l *lands) Frame(h *frame.Header, p []byte) error {
	stream, size := h.ID, int(h.Offset)
	want := l.want[stream][:size]
	switch {
	case h.Type != frame.Message:
		return fmt.Errorf("type %d", h.Type)
	case !bytes.Equal(l.memory[stream][:l.got[stream]], want):
		return fmt.Errorf("stream %d: %d bytes landed, or not the right ones; want %d", stream, l.got[stream], size)
	case l.before.Type != frame.Data || l.before.Token != stream:
		return fmt.Errorf("message of stream %d is behind a frame of type %d, stream %d", stream, l.before.Type, l.before.Token)
	case !bytes.Equal(p, want[:len(p)]):
		return fmt.Errorf("message of stream %d: wrong payload of %d bytes", stream, len(p))
	}
	l.before = *h
	l.got[stream] = 0
	clear(l.memory[stream][:size])
	if l.messages++; l.messages == l.all {
		close(l.done)
	}
	return nil
}

// TestExchange sends frames of random sizes from many goroutines, both ways at once.
func TestExchange(t *testing.T) {
	const streams, rounds, most = 8, 5, 3*frame.MaxData + 1000
	over(t, func(t *testing.T, near, far net.Conn) {
		var all [][]byte
		for i := range streams {
			all = append(all, pattern(i, most))
		}
		var wg sync.WaitGroup
		for _, c := range []net.Conn{near, far} {
			l := &lands{want: all, memory: map[uint64][]byte{}, got: map[uint64]uint64{}, all: streams * rounds, done: make(chan struct{})}
			for i := range streams {
				l.memory[uint64(i)] = make([]byte, most)
			}
			conn, served := serve(t, c, nil, l)
			for i := range streams {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(1, uint64(i)))
					for range rounds {
						frames := randomFrames(r, i, all[i])
						if err := conn.Send(t.Context(), frames...); err != nil {
							t.Errorf("send: %v", err)
						}
					}
				})
			}
			wg.Go(func() {
				select {
				case <-l.done:
				case err := <-served:
					t.Errorf("serve: %v", err)
				}
			})
		}
		wg.Wait()
	})
}

// randomFrames cuts a random number of a stream's bytes into data frames, and ends
// with a message that says how many.
func randomFrames(r *rand.Rand, stream int, all []byte) (frames []frame.Frame) {
	sizes := []int{1, 40, 600, 5000, 70_000, frame.MaxData, len(all)}
	size := 0
	for range 1 + r.IntN(6) {
		n := min(1+r.IntN(sizes[r.IntN(len(sizes))]), len(all)-size)
		if n == 0 {
			break
		}
		frames = append(frames, frame.Frame{
			Header:  frame.Header{Type: frame.Data, Token: uint64(stream), Offset: uint64(size)},
			Payload: all[size:][:n],
		})
		size += n
	}
	return append(frames, frame.Frame{
		Header:  frame.Header{Type: frame.Message, ID: uint64(stream), Offset: uint64(size)},
		Payload: all[:r.IntN(min(size, sizes[r.IntN(len(sizes))])+1)],
	})
}

// TestOrder shows what goes into one write: the groups of a send, with a message
// behind the last data frame, whatever its size.
func TestOrder(t *testing.T) {
	near, far := pair(t, "tcp")
	conn, _ := serve(t, near, nil, calls{})
	data := pattern(1, 2*frame.MaxData+10)
	many := make([]frame.Frame, 0, 102)
	many = append(many, frame.Frame{Header: frame.Header{Type: frame.Data, Offset: 5}, Payload: data})
	for i := range 100 {
		many = append(many, frame.Frame{Header: frame.Header{Type: 99, Flags: 3, Status: 4, ID: uint64(i), Token: 6}, Payload: data[:i*7]})
	}
	many = append(many, frame.Frame{Header: frame.Header{Type: frame.Message}, Payload: data[:frame.MaxData]})
	sent := make(chan error, 1)
	go func() { sent <- conn.Send(t.Context(), many...) }()
	for _, n := range []int{frame.MaxData, frame.MaxData, 10} {
		h, p := next(t, far)
		at := h.Offset - 5
		want := frame.Header{Length: uint32(n), Type: frame.Data, Offset: h.Offset}
		if h != want || p != string(data[at:][:n]) {
			t.Fatalf("data frame %+v", h)
		}
	}
	for i := range 100 {
		h, p := next(t, far)
		want := frame.Header{Length: uint32(i * 7), Type: 99, Flags: 3, Status: 4, ID: uint64(i), Token: 6}
		if h != want || p != string(data[:i*7]) {
			t.Fatalf("frame %+v, want %+v", h, want)
		}
	}
	if h, p := next(t, far); h.Type != frame.Message || p != string(data[:frame.MaxData]) {
		t.Fatalf("frame %+v", h)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	got := conn.Stats()
	if want := (frame.Stats{FramesOut: 104, BytesOut: int64(len(data)) + 7*99*100/2 + frame.MaxData}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
	if many[0].Offset != 5 || len(many[0].Payload) != len(data) {
		t.Error("Send changed the caller's frame")
	}
}

func TestSendRefuses(t *testing.T) {
	near, _ := pair(t, "tcp")
	conn, _ := serve(t, near, nil, calls{})
	for _, f := range []frame.Frame{
		{},
		{Header: frame.Header{Type: frame.Message}, Payload: make([]byte, frame.MaxMessage+1)},
	} {
		err := conn.Send(t.Context(), frame.Frame{Header: frame.Header{Type: frame.Message}}, f)
		if !errors.Is(err, frame.ErrFrame) {
			t.Errorf("type %d with %d bytes: %v", f.Type, len(f.Payload), err)
		}
	}
	if err := conn.Err(); err != nil || conn.Stats() != (frame.Stats{}) {
		t.Errorf("%v, %+v", err, conn.Stats())
	}
}
