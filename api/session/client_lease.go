package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// joined are the leases of matches that took several messages, one of each: the first
// one's id stands for all.
type joined struct {
	mu struct {
		sync.Mutex
		by map[uint64]joinedLease
	}
}

type joinedLease struct {
	all   []uint64
	until time.Time // when they have run out, if nobody renews them
}

// add makes one lease of several. What ran out by itself is forgotten here.
func (j *joined) add(all []uint64, d time.Duration) {
	now := time.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	for id, l := range j.mu.by {
		if now.After(l.until) {
			delete(j.mu.by, id)
		}
	}
	if j.mu.by == nil {
		j.mu.by = make(map[uint64]joinedLease)
	}
	j.mu.by[all[0]] = joinedLease{all: all, until: now.Add(d)}
}

// of is what a lease consists of, itself as a rule.
func (j *joined) of(id uint64) []uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	if l, ok := j.mu.by[id]; ok {
		return l.all
	}
	return []uint64{id}
}

func (j *joined) renewed(id uint64, d time.Duration) {
	until := time.Now().Add(d)
	j.mu.Lock()
	defer j.mu.Unlock()
	if l, ok := j.mu.by[id]; ok {
		l.until = until
		j.mu.by[id] = l
	}
}

func (j *joined) drop(id uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.mu.by, id)
}

// Renew lets a lease of this session run for d from now. ErrLeaseExpired.
func (c *Client) Renew(ctx context.Context, lease uint64, d time.Duration) error {
	verb := fmt.Sprintf("renew lease %d", lease)
	k, err := c.begin(ctx, 0)
	if err != nil {
		return c.fail(verb, err)
	}
	defer c.release(k)
	all := c.joined.of(lease)
	err = c.renewAll(ctx, k, verb, all, d)
	switch {
	case err == nil:
		c.joined.renewed(lease, d)
		return nil
	case len(all) > 1 && errors.Is(err, block.ErrLeaseExpired): // a part of it: then it is none
		c.joined.drop(lease)
		c.giveBackLeases(all)
	}
	return c.fail(verb, err)
}

// renewAll renews the parts of a lease, as many with one message as it has room for.
func (c *Client) renewAll(ctx context.Context, k *pending, verb string, all []uint64, d time.Duration) error {
	for part := range slices.Chunk(all, int(c.welcome.Keys)) {
		var r RenewedMessage
		if err := c.trip(ctx, k, CodeRenew, &RenewMessage{LeaseMS: roundMillis(d), Leases: part}, CodeRenewed, &r); err != nil {
			return err
		}
		if err := c.outcome(verb, len(part), r.Results); err != nil {
			return err
		}
	}
	return nil
}

// Release ends a lease of this session. ErrLeaseExpired when it has ended already.
func (c *Client) Release(ctx context.Context, lease uint64) error {
	verb := fmt.Sprintf("release lease %d", lease)
	k, err := c.begin(ctx, 0)
	if err != nil {
		return c.fail(verb, err)
	}
	defer c.release(k)
	all := c.joined.of(lease)
	c.joined.drop(lease)
	var ended error // of the first part that had
	for len(all) > 0 {
		part := all[:min(len(all), int(c.welcome.Keys))]
		var r ReleasedMessage
		if err := c.trip(ctx, k, CodeRelease, &ReleaseMessage{Leases: part}, CodeReleased, &r); err != nil {
			c.giveBackLeases(all)
			return c.fail(verb, err)
		}
		if err := c.outcome(verb, len(part), r.Results); err != nil && ended == nil {
			ended = c.fail(verb, err)
		}
		all = all[len(part):]
	}
	return ended
}

// outcome is the first failure of those of a message's leases.
func (c *Client) outcome(verb string, leases int, results []Status) error {
	if len(results) != leases {
		return c.giveUp("server answered %d leases of %d", len(results), leases)
	}
	for _, r := range results {
		if r != StatusOK {
			return r.Err(verb + ": " + r.String())
		}
	}
	return nil
}

// giveBackLeases releases leases without waiting for it.
func (c *Client) giveBackLeases(all []uint64) {
	for _, id := range all {
		c.later.lease(id)
	}
}
