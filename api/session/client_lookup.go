package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Match looks keys up, root first. hashes are packed, ns.HashLen bytes each. It fills
// res, reusing its slice. More keys than one message takes are looked up in several, up to
// the first that has a gap, unless o wants all. What it leases, as one, belongs to this
// session and ends with it. A plan is of as many keys as one message takes, at most.
// Without Hints a conversation counts for nothing.
func (c *Client) Match(ctx context.Context, ns Namespace, hashes []byte, o block.MatchOptions, res *block.MatchResult) error {
	*res = block.MatchResult{Blocks: res.Blocks[:0]}
	if err := ns.check(); err != nil {
		return fmt.Errorf("match: %w", err)
	}
	if len(hashes)%ns.HashLen != 0 {
		return fmt.Errorf("match: %w", invalid("hashes: %d bytes are not a multiple of %d", len(hashes), ns.HashLen))
	}
	if n := len(hashes) / ns.HashLen; o.Plan != nil && n > int(c.welcome.Keys) {
		return fmt.Errorf("match: %w", invalid("plan of %d keys, at most %d", n, c.welcome.Keys))
	}
	k, err := c.begin(ctx, 0)
	if err != nil {
		return c.fail("match", err)
	}
	defer c.release(k)
	if err := block.CheckConversation(o.Conversation); err != nil {
		return fmt.Errorf("match: %w", err)
	}
	if !c.Hints() {
		o.Conversation = ""
	}
	leases, err := c.matchAll(ctx, k, &ns, hashes, &o, res)
	if err == nil && len(leases) > 1 {
		// The first ones have run for a while: now all have as long as is wanted.
		if err = c.renewAll(ctx, k, "match", leases, o.Lease); err == nil {
			res.Lease.Left = o.Lease
			c.joined.add(leases, o.Lease)
		}
	}
	if err != nil {
		res.Lease = block.Lease{}
		c.giveBackLeases(leases)
		return c.fail("match", err)
	}
	return nil
}

// matchAll looks one part of the keys up after another, and returns what was leased of
// each. Of a conversation's request, which is one for all parts, o is made to say then how
// long it is leased.
func (c *Client) matchAll(ctx context.Context, k *pending, ns *Namespace, hashes []byte, o *block.MatchOptions, res *block.MatchResult) (leases []uint64, err error) {
	most := int(c.welcome.Keys) * ns.HashLen
	for unbroken := true; len(hashes) > 0; {
		part := hashes[:min(len(hashes), most)]
		if err := c.matchPart(ctx, k, ns, part, o); err != nil {
			return leases, err
		}
		m := &k.matched
		if m.Lease != 0 {
			leases = append(leases, m.Lease)
			res.Lease.ID, res.Lease.Left = leases[0], time.Duration(m.LeaseMS)*time.Millisecond
			res.Lease.Count += int(m.Leased)
			if o.Conversation != "" {
				o.Lease = max(res.Lease.Left, time.Millisecond) // 0 would be none
			}
		}
		o.Conversation = ""
		if n := len(part) / ns.HashLen; len(m.Blocks) > n || o.All && len(m.Blocks) < n || int(m.Prefix) > n {
			return leases, c.giveUp("server answered %d of %d keys, a prefix of %d", len(m.Blocks), n, m.Prefix)
		}
		if o.Plan != nil && m.Plan == nil {
			return leases, c.giveUp("server answered a match without the plan")
		}
		res.Plan = m.Plan
		res.Blocks = append(res.Blocks, m.Blocks...)
		if unbroken {
			res.Prefix += int(m.Prefix)
			unbroken = int(m.Prefix) == len(part)/ns.HashLen
		}
		if !unbroken && !o.All {
			break
		}
		hashes = hashes[len(part):]
	}
	return leases, nil
}

func (c *Client) matchPart(ctx context.Context, k *pending, ns *Namespace, part []byte, o *block.MatchOptions) error {
	m := MatchMessage{Keys: ns.keys(part), Class: o.Class, Deadline: millisLeft(ctx)}
	if o.All {
		m.Flags |= FlagAll
	}
	if o.Quiet {
		m.Flags |= FlagQuiet
	}
	if o.Lease > 0 {
		m.LeaseMS = roundMillis(o.Lease)
	}
	if o.Plan != nil {
		if err := o.Plan.Prefill.Check(); err != nil {
			return err
		}
		m.Flags |= FlagPlan
		m.Plan = *o.Plan
		if m.Plan.Deadline < 0 {
			return invalid("deadline %v", m.Plan.Deadline)
		}
		if m.Plan.Deadline > 0 {
			m.Plan.Deadline = max(m.Plan.Deadline, time.Millisecond) // 0 would be any
		}
	}
	if o.Conversation != "" {
		m.Flags |= FlagConversation
		m.Conversation = o.Conversation
	}
	return c.trip(ctx, k, CodeMatch, &m, CodeMatched, &k.matched)
}

// Locate lists for each key every place where it lies, nearest first. hashes are
// packed.
func (c *Client) Locate(ctx context.Context, ns Namespace, hashes []byte) ([][]block.Located, error) {
	if err := ns.check(); err != nil {
		return nil, fmt.Errorf("locate: %w", err)
	}
	var out [][]block.Located
	most := int(c.welcome.Keys) * ns.HashLen
	for len(hashes) > 0 {
		part := hashes[:min(len(hashes), most)]
		m := LocateMessage{Keys: ns.keys(part), Deadline: millisLeft(ctx)}
		var r LocatedMessage
		if err := c.once(ctx, CodeLocate, &m, CodeLocated, &r); err != nil {
			return nil, c.fail("locate", err)
		}
		if len(r.Places) != m.Len() {
			return nil, c.fail("locate", c.giveUp("server answered %d keys of a locate of %d", len(r.Places), m.Len()))
		}
		out = append(out, r.Places...)
		hashes = hashes[len(part):]
	}
	return out, nil
}

// once is a call that needs no record of its caller's.
func (c *Client) once(ctx context.Context, code Code, m message, want Code, reply message) error {
	k, err := c.begin(ctx, 0)
	if err != nil {
		return err
	}
	defer c.release(k)
	return c.trip(ctx, k, code, m, want, reply)
}

// Prefetch brings blocks up to G2, root first, and calls progress (nil: not wanted)
// for each key in order. It returns when all are settled, when ctx ends, or when
// progress fails (with its error). hashes are packed. o.ID does not count; without Hints
// o counts for nothing.
func (c *Client) Prefetch(ctx context.Context, ns Namespace, hashes []byte, o block.PrefetchOptions, progress func(block.Progress) error) error {
	if err := errors.Join(ns.check(), o.Check()); err != nil {
		return fmt.Errorf("prefetch: %w", err)
	}
	var until time.Time
	if o.Within > 0 {
		until = time.Now().Add(o.Within)
	}
	most := int(c.welcome.Keys) * ns.HashLen
	for first := 0; len(hashes) > 0; {
		part := hashes[:min(len(hashes), most)]
		if o.Within > 0 {
			o.Within = max(time.Until(until), time.Millisecond) // 0 would be always
		}
		if err := c.prefetchPart(ctx, &ns, part, o, first, progress); err != nil {
			return err
		}
		first += len(part) / ns.HashLen
		hashes = hashes[len(part):]
	}
	return nil
}

func (c *Client) prefetchPart(ctx context.Context, ns *Namespace, part []byte, o block.PrefetchOptions, first int, progress func(block.Progress) error) error {
	m := PrefetchMessage{Keys: ns.keys(part), Deadline: millisLeft(ctx)}
	if c.Hints() && (o.Priority > 0 || o.Within > 0) {
		m.Flags, m.Priority = FlagUrgency, o.Priority
		if o.Within > 0 {
			m.WithinMS = roundMillis(o.Within)
		}
	}
	total := m.Len()
	q := newQueue[PrefetchResult](total)
	err := c.follow(ctx, CodePrefetch, &m, CodePrefetched, func(p []byte) (bool, error) {
		var r PrefetchedMessage
		if err := r.Decode(p); err != nil {
			return false, err
		}
		had := q.put(r.Results)
		if int(r.First) != had || had+len(r.Results) > total {
			return false, fmt.Errorf("%w: prefetch of %d keys: %d from %d on, after %d", ErrMessage, total, len(r.Results), r.First, had)
		}
		return had+len(r.Results) < total, nil
	}, q.some, func() error {
		results, _, _ := q.take()
		for _, r := range results {
			if progress == nil {
				continue
			}
			if err := progress(block.Progress{Index: first, Reason: r.Reason, Tier: r.Tier}); err != nil {
				return &callback{err}
			}
			first++
		}
		return nil
	})
	return c.followed("prefetch", err)
}

// Watch calls fn for each event of a namespace (ID 0: of all) as o says, until ctx
// ends, fn fails (with its error), or the server shuts down (ErrClosed). o.Ready is
// called once, when the server listens. A watcher that is too slow loses events and is
// told so with EventLost. o.NS does not count.
func (c *Client) Watch(ctx context.Context, ns Namespace, o block.WatchOptions, fn func(block.Event) error) error {
	m := WatchMessage{NS: ns.ID, Tag: ns.Tag, Incarnation: o.Incarnation, After: o.After, Snapshot: o.Snapshot}
	q := newQueue[block.Event](watchQueue)
	start := make(chan block.WatchStart, 1)
	ready := false
	err := c.follow(ctx, CodeWatch, &m, CodeEvents, func(p []byte) (bool, error) {
		var r EventsMessage
		if err := r.Decode(p); err != nil {
			return false, err
		}
		if r.Start != nil {
			select {
			case start <- *r.Start:
			default:
			}
		}
		q.put(r.Events)
		return true, nil
	}, q.some, func() error {
		if !ready {
			select {
			case s := <-start:
				ready = true
				if o.Ready != nil {
					o.Ready(s)
				}
			default:
			}
		}
		events, lost, last := q.take()
		for i := range events {
			if err := fn(events[i]); err != nil {
				return &callback{err}
			}
		}
		if lost > 0 {
			if err := fn(block.Event{Seq: last.Seq, Kind: block.EventLost, Count: lost}); err != nil {
				return &callback{err}
			}
		}
		return nil
	})
	return c.followed("watch", err)
}

// callback is an error of a function of the caller's.
type callback struct{ err error }

func (e *callback) Error() string { return e.err.Error() }

// followed is what a caller is told of the end of a call with several replies.
func (c *Client) followed(verb string, err error) error {
	var own *callback
	switch {
	case err == nil:
		return nil
	case errors.As(err, &own):
		return own.err
	}
	return c.fail(verb, err)
}
