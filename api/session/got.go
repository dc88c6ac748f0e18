package session

import (
	"errors"

	"github.com/kvtier/kvtier/index/block"
)

// gotWork is what all gets need that bring bytes, whichever way: how many there may be
// beside what is in flight, and the answer.
type gotWork struct {
	s        *session
	id       uint64
	c        *call   // nil when the reading goroutine answers
	lens     []int64 // bytes of each key, as far as they are known
	admitted int     // of the keys, from the first on; the others are busy
	got      GotMessage
	out      []byte
}

// expect finds how many bytes each key of a request may bring. Until they are admitted
// all are busy, and so are those beyond them.
func (w *gotWork) expect(s *session, id uint64, k *Keys, ns *namespace, beyond int) error {
	w.s, w.id, w.c, w.admitted = s, id, nil, 0
	if ns.blockBytes == 0 {
		if err := s.look(k); err != nil {
			return err
		}
	}
	w.lens = sized(w.lens, k.Len())
	for i := range w.lens {
		if w.lens[i] = ns.blockBytes; w.lens[i] == 0 {
			w.lens[i] = int64(s.found.Blocks[i].Len)
		}
	}
	w.got = GotMessage{Blocks: sized(w.got.Blocks, k.Len()+min(beyond, s.keys))}
	for i := range w.got.Blocks {
		w.got.Blocks[i] = GotBlock{Status: StatusBusy, Chunk: NoChunk}
	}
	return nil
}

// open begins the call, which serves as many of the first keys as there is room for
// bytes in flight.
func (w *gotWork) open(deadline uint32) (*call, error) {
	c, err := w.s.open(w.id, deadline)
	if err == nil {
		w.c = c
		w.admit(c.admit(w.lens, w.s.bytes))
	} else if errors.Is(err, ErrBusy) {
		w.admit(0)
	}
	return c, err
}

// admit lets the first n keys be served.
func (w *gotWork) admit(n int) {
	w.admitted = n
	for i := range n {
		w.got.Blocks[i].Status = StatusOK
	}
	w.s.srv.stats.busy.Add(int64(len(w.lens) - n))
}

// answer is the reply's payload.
func (w *gotWork) answer() []byte {
	w.out = w.got.Append(w.out[:0])
	return w.out
}

// look looks the keys of a get up, for what it will cost.
func (s *session) look(k *Keys) error {
	s.found = block.MatchResult{Blocks: s.found.Blocks[:0]}
	return s.srv.store.Match(s.ctx, k.NS, int(k.HashLen), k.Hashes, block.MatchOptions{All: true, Quiet: true}, &s.found)
}
