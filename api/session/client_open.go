package session

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Opened is a namespace as the server answered it.
type Opened struct {
	Namespace                   // its HashLen is 0 until the first put fixes it; the caller's own is to be set there then
	Epoch         uint32        // raised by Clear
	TTL           time.Duration // default time to live of its blocks; 0 is without end
	BlockBytes    int64         // of every block; 0: they differ
	MaxBlockBytes int64         // most of a block, where they differ
}

// OpenNamespace opens the namespace that d describes, or makes it. A known name with
// another descriptor is a block.ErrMismatch whose text names the field that differs.
// ttl counts when the namespace is made.
func (c *Client) OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (Opened, error) {
	verb := fmt.Sprintf("open namespace %q", d.Name)
	if err := d.Validate(); err != nil {
		return Opened{}, err
	}
	if ttl < 0 {
		return Opened{}, fmt.Errorf("%s: %w", verb, invalid("ttl: %v, want 0 or more", ttl))
	}
	m := OpenMessage{Flags: FlagCreate, TTLMS: uint64(ceilMillis(ttl)), Deadline: millisLeft(ctx)}
	for _, f := range d.Fields() {
		if f.Value != "" {
			m.Fields = append(m.Fields, f)
		}
	}
	return c.opened(ctx, verb, &m)
}

// Namespace finds a namespace by its name, and makes none. ErrNotFound.
func (c *Client) Namespace(ctx context.Context, name string) (Opened, error) {
	m := OpenMessage{Deadline: millisLeft(ctx), Fields: []block.Field{{Name: "name", Value: name}}}
	return c.opened(ctx, fmt.Sprintf("find namespace %q", name), &m)
}

func (c *Client) opened(ctx context.Context, verb string, m *OpenMessage) (Opened, error) {
	var r OpenedMessage
	if err := c.once(ctx, CodeOpen, m, CodeOpened, &r); err != nil {
		return Opened{}, c.fail(verb, err)
	}
	if r.HashLen != 0 && !block.ValidHashLen(int(r.HashLen)) || r.NS == 0 || r.TTLMS > maxTTLMS {
		return Opened{}, c.fail(verb, c.giveUp("server answered namespace %d with hashes of %d bytes and a time to live of %d ms", r.NS, r.HashLen, r.TTLMS))
	}
	return Opened{
		Namespace: Namespace{ID: r.NS, Tag: r.Tag, HashLen: int(r.HashLen)}, Epoch: r.Epoch,
		TTL: time.Duration(r.TTLMS) * time.Millisecond, BlockBytes: c64(r.BlockBytes), MaxBlockBytes: c64(r.MaxBlockBytes),
	}, nil
}

// Pin keeps blocks in the store: they move between tiers but are not evicted. One
// error for each key. hashes are packed.
func (c *Client) Pin(ctx context.Context, ns Namespace, hashes []byte) ([]error, error) {
	return c.pin(ctx, "pin", ns, hashes, 0)
}

// Unpin lets blocks go again, pinned or not. hashes are packed.
func (c *Client) Unpin(ctx context.Context, ns Namespace, hashes []byte) error {
	_, err := c.pin(ctx, "unpin", ns, hashes, FlagUnpin)
	return err
}

func (c *Client) pin(ctx context.Context, verb string, ns Namespace, hashes []byte, flags uint16) ([]error, error) {
	if err := ns.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	if len(hashes)%ns.HashLen != 0 {
		return nil, fmt.Errorf("%s: %w", verb, invalid("hashes: %d bytes are not a multiple of %d", len(hashes), ns.HashLen))
	}
	errs := make([]error, 0, len(hashes)/ns.HashLen)
	most := int(c.welcome.Keys) * ns.HashLen
	for len(hashes) > 0 {
		part := hashes[:min(len(hashes), most)]
		m := PinMessage{Keys: ns.keys(part), Flags: flags, Deadline: millisLeft(ctx)}
		var r PinnedMessage
		if err := c.once(ctx, CodePin, &m, CodePinned, &r); err != nil {
			return nil, c.fail(verb, err)
		}
		if len(r.Results) != m.Len() {
			return nil, c.fail(verb, c.giveUp("server answered %d keys of a %s of %d", len(r.Results), verb, m.Len()))
		}
		for _, s := range r.Results {
			errs = append(errs, s.Err(verb+": "+s.String()))
		}
		hashes = hashes[len(part):]
	}
	return errs, nil
}
