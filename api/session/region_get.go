package session

import (
	"errors"
	"sync"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// regionGet answers CodeRegionGet.
func (s *session) regionGet(id uint64, p []byte) error {
	w := regionGets.Get().(*regionGetWork)
	c, err := w.begin(s, id, p)
	switch {
	case errors.Is(err, ErrBusy):
		err = s.reply(id, CodeGot, &w.got) // in which every key is busy
	case err == nil || errors.Is(err, errTwice):
		return s.spawn(id, c, err, w.run)
	default:
		err = s.fail(id, err)
	}
	regionGets.Put(w)
	return err
}

// regionGetWork is what one get into regions needs, to be used again.
type regionGetWork struct {
	gotWork
	m     RegionGetMessage
	want  []block.Wanted // of the keys that are asked for
	at    []int          // of each, its place in the message
	segs  [][]Segment    // of each key of the message
	room  []int64        // bytes of them; -1: they are none
	bytes int64          // of those of want
	parts []*regionPart  // of want, the last call's; more may be kept behind them
}

var regionGets = sync.Pool{New: func() any { return new(regionGetWork) }}

// begin reads a request and opens its call. The bytes of p are not needed behind it.
func (w *regionGetWork) begin(s *session, id uint64, p []byte) (*call, error) {
	m := &w.m
	if err := m.Decode(p); err != nil {
		return nil, err
	}
	ns, beyond, err := s.keyed(&m.Keys, m.Flags, FlagQuiet|FlagNoPromote, access.Read)
	if err != nil {
		return nil, err
	}
	if err := w.expect(s, id, &m.Keys, ns, beyond); err != nil {
		return nil, err
	}
	w.segs, w.room = m.split(w.segs[:0]), sized(w.room, len(w.lens))
	for i := range w.room {
		if w.room[i], err = s.regions.check(w.segs[i], true); err != nil {
			w.room[i], w.lens[i] = -1, 0
		}
	}
	c, err := w.open(m.Deadline)
	if err != nil {
		return nil, err
	}
	w.want, w.at, w.bytes = w.want[:0], w.at[:0], 0
	hl := int(m.HashLen)
	for i := range w.admitted {
		if w.room[i] < 0 {
			w.got.Blocks[i].Status = StatusInvalid
			continue
		}
		one := block.Wanted{}
		copy(one.Hash[:], m.Hashes[i*hl:(i+1)*hl])
		w.want, w.at, w.bytes = append(w.want, one), append(w.at, i), w.bytes+w.lens[i]
	}
	return c, nil
}

// split is the segments of each key.
func (s *Segments) split(into [][]Segment) [][]Segment {
	all := s.All
	for _, n := range s.Counts {
		into, all = append(into, all[:n:n]), all[n:]
	}
	return into
}

// run serves the call on a goroutine of its own.
func (w *regionGetWork) run(c *call) error {
	defer regionGets.Put(w)
	if err := w.moveAll(); err != nil {
		return err
	}
	c.end()
	return w.s.send(w.s.ctx, w.id, CodeGot, w.answer())
}

// moveAll gets the blocks, many of them by several goroutines: the store hands the blocks
// of one get out one by one, and one core does not copy and hash as fast as memory
// could. Nobody touches the regions any more when it returns.
func (w *regionGetWork) moveAll() error {
	if len(w.want) == 0 {
		return nil
	}
	w.parts = w.cut(w.parts[:0], movers(len(w.want), w.bytes))
	var others sync.WaitGroup
	for _, part := range w.parts[1:] {
		others.Go(part.run)
	}
	w.parts[0].run()
	others.Wait()
	for _, part := range w.parts {
		if part.err != nil {
			return part.err
		}
	}
	return nil
}

// cut makes n parts, or fewer, of about as many bytes each, and each of keys that
// follow each other: the store fetches ahead what is asked for next.
func (w *regionGetWork) cut(into []*regionPart, n int) []*regionPart {
	var before int64
	begin := 0
	for i := range w.want {
		before += w.lens[w.at[i]]
		if i < len(w.want)-1 && (len(into) == n-1 || before < w.bytes/int64(n)*int64(len(into)+1)) {
			continue
		}
		var part *regionPart
		if k := len(into); k < cap(into) {
			part = into[:k+1][k]
		}
		if part == nil {
			part = newRegionPart()
		}
		part.w, part.want, part.at = w, w.want[begin:i+1], w.at[begin:i+1]
		into, begin = append(into, part), i+1
	}
	return into
}
