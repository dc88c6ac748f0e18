package memstore

import (
	"context"
	"slices"

	"github.com/kvtier/kvtier/index/block"
)

// events are the last that happened, for watchers to read at their own pace.
type events struct {
	seq      uint64        // of the last event
	kept     []block.Event // the last of them, oldest first
	next     chan struct{} // closed and replaced with each event
	watchers int64
}

// after lists what happened behind event seq, and how many of those events are
// not kept any more.
func (l *events) after(seq uint64) (behind []block.Event, lost uint64) {
	first := l.seq - uint64(len(l.kept)) // the event before those that are kept
	if seq < first {
		lost, seq = first-seq, first
	}
	return slices.Clone(l.kept[seq-first:]), lost
}

func (s *Store) tell(e block.Event) {
	l := &s.mu.events
	l.seq++
	e.Seq = l.seq
	if l.kept = append(l.kept, e); len(l.kept) == 2*s.opts.Events {
		l.kept = slices.Clone(l.kept[s.opts.Events:])
	}
	close(l.next)
	l.next = make(chan struct{})
}

func (s *Store) tellStored(n *space, e *entry, t block.TierID) {
	ev := n.event(block.EventStored, e)
	ev.Tier = t
	s.tell(ev)
}

// Watch implements api.Store.
func (s *Store) Watch(ctx context.Context, o block.WatchOptions, fn func(block.Event) error) error {
	name, start, first, err := s.beginWatch(o)
	if err != nil {
		return err
	}
	defer s.endWatch()
	if o.Ready != nil {
		o.Ready(start)
	}
	for _, e := range first {
		if err := fn(e); err != nil {
			return err
		}
	}
	for at := start.Seq; ; {
		behind, next := s.readEvents(name, at)
		for _, e := range behind {
			if err := ctx.Err(); err != nil {
				return err
			}
			at = e.Seq
			if e.NS != name && name != "" {
				continue
			}
			if err := fn(e); err != nil {
				return err
			}
		}
		select {
		case <-next:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// beginWatch says where a watch begins, and what it tells before the events.
func (s *Store) beginWatch(o block.WatchOptions) (name string, start block.WatchStart, first []block.Event, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.NS != 0 {
		n, err := s.space(o.NS)
		if err != nil {
			return "", start, nil, err
		}
		name = n.Desc.Name
	}
	l := &s.mu.events
	l.watchers++
	start = block.WatchStart{Incarnation: s.incarnation, Seq: l.seq}
	known := o.Incarnation == s.incarnation && o.After <= l.seq
	var lost uint64
	if known {
		_, lost = l.after(o.After)
	}
	switch {
	case known && lost == 0:
		start.Seq, start.Resumed = o.After, true
	case o.Snapshot:
		first = s.present(o.NS)
	case o.Incarnation != 0:
		lost := block.Event{Seq: l.seq, Kind: block.EventLost, NS: name}
		if known {
			lost.Count = int64(l.seq - o.After)
			s.mu.stats.EventsLost += lost.Count
		}
		first = []block.Event{lost}
	}
	return name, start, first, nil
}

func (s *Store) endWatch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.events.watchers--
}

// readEvents lists what happened behind event at, after a word of what was
// missed, and returns what is closed with the next event.
func (s *Store) readEvents(name string, at uint64) ([]block.Event, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	behind, lost := s.mu.events.after(at)
	if lost > 0 {
		s.mu.stats.EventsLost += int64(lost)
		behind = slices.Insert(behind, 0, block.Event{Seq: at + lost, Kind: block.EventLost, NS: name, Count: int64(lost)})
	}
	return behind, s.mu.events.next
}

// present is the snapshot of a namespace, 0 for all.
func (s *Store) present(ns block.NamespaceID) []block.Event {
	var out []block.Event
	for _, n := range s.mu.byID {
		if ns != 0 && n.ID != ns {
			continue
		}
		for _, e := range n.blocks {
			for _, t := range e.tiers() {
				ev := n.event(block.EventPresent, e)
				ev.Tier = t
				out = append(out, ev)
			}
		}
	}
	end := block.Event{Seq: s.mu.events.seq, Kind: block.EventSnapshot, Count: int64(len(out))}
	if n := s.mu.byID[ns]; n != nil {
		end.NS = n.Desc.Name
	}
	return append(out, end)
}
