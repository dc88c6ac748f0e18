package session

import (
	"math"
	"slices"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// openNamespace answers CodeOpen. Finding one waits for nothing; making one
// waits for the medium.
func (s *session) openNamespace(id uint64, p []byte) error {
	var m OpenMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	d, err := m.descriptor()
	if err != nil {
		return s.fail(id, err)
	}
	right := access.Read | access.Write
	if m.Flags&FlagCreate != 0 {
		right = access.Write
	}
	if err := s.identity.Check(right, d.Name); err != nil {
		return s.fail(id, err)
	}
	if m.Flags&FlagCreate == 0 {
		n, err := s.srv.store.Namespace(d.Name)
		if err != nil {
			return s.fail(id, err)
		}
		if len(m.Fields) > 1 {
			if differs := n.Desc.Differs(d); differs != nil {
				return s.fail(id, differs)
			}
		}
		return s.reply(id, CodeOpened, opened(n))
	}
	c, err := s.open(id, m.Deadline)
	return s.spawn(id, c, err, func(c *call) error {
		n, err := s.srv.store.OpenNamespace(c.ctx, d, time.Duration(m.TTLMS)*time.Millisecond)
		if err != nil {
			return err
		}
		c.end()
		return s.send(s.ctx, id, CodeOpened, opened(n).Append(nil))
	})
}

// descriptor checks the message, and reads the fields that came.
func (m *OpenMessage) descriptor() (d block.Descriptor, err error) {
	switch {
	case m.Flags&^FlagCreate != 0:
		return d, invalid("flags: %#x, want none but %#x here", m.Flags, FlagCreate)
	case m.TTLMS > maxTTLMS:
		return d, invalid("ttl_ms: %d, want 0 to %d", m.TTLMS, maxTTLMS)
	}
	for i, f := range m.Fields {
		if slices.ContainsFunc(m.Fields[:i], func(g block.Field) bool { return g.Name == f.Name }) {
			return d, invalid("descriptor: %s is there twice", f.Name)
		}
		if err := d.Set(f); err != nil {
			return d, err
		}
	}
	switch {
	case m.Flags&FlagCreate != 0 || len(m.Fields) > 1:
		err = d.Validate()
	case d.Name == "":
		err = invalid("descriptor: name: absent, or empty")
	}
	return d, err
}

// maxTTLMS is the longest time to live that a duration can say.
const maxTTLMS = uint64(math.MaxInt64 / time.Millisecond)

func opened(n block.Namespace) *OpenedMessage {
	return &OpenedMessage{
		NS: n.ID, Tag: n.Desc.Tag(), HashLen: uint8(n.HashLen), Epoch: n.Epoch, TTLMS: uint64(ceilMillis(n.TTL)),
		BlockBytes: uint64(n.Desc.BlockBytes), MaxBlockBytes: uint64(n.Desc.MaxBlockBytes),
	}
}

// pin answers CodePin, which waits for the medium.
func (s *session) pin(id uint64, p []byte) error {
	var m PinMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	_, beyond, err := s.keyed(&m.Keys, m.Flags, FlagUnpin, access.Write)
	if err != nil {
		return s.fail(id, err)
	}
	m.Hashes = slices.Clone(m.Hashes) // the next message is read over them
	c, err := s.open(id, m.Deadline)
	return s.spawn(id, c, err, func(c *call) error {
		done := PinnedMessage{Results: make([]Status, m.Len())}
		if m.Flags&FlagUnpin != 0 {
			// What was not pinned is as it is wanted.
			if _, err := s.srv.store.Unpin(c.ctx, m.NS, int(m.HashLen), m.Hashes); err != nil {
				return err
			}
		} else {
			errs, err := s.srv.store.Pin(c.ctx, m.NS, int(m.HashLen), m.Hashes)
			if err != nil {
				return err
			}
			for i, err := range errs {
				done.Results[i] = StatusOf(err)
			}
		}
		done.Results = appendBusy(done.Results, beyond)
		c.end()
		return s.send(s.ctx, id, CodePinned, done.Append(nil))
	})
}
