package tiers

import (
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// check verifies a slot as its pieces arrive in order: the header against the
// entry, the payload against its checksum.
type check struct {
	e       *index.Entry
	header  []byte
	seal    Seal
	payload []byte // exactly the block's
	have    int64  // bytes of the slot
	ns      *namespace
	hash    *xxh3.Hasher
}

// begin takes the memory that header block and payload arrive in.
func (c *check) begin(s *Store, e *index.Entry, header, payload []byte) {
	ns, _ := s.names.byID(e.NS)
	p := e.Place[ixG3]
	*c = check{e: e, header: header, seal: s.g3.devs[p.Device()].slab.Seal(p.Offset()), payload: payload[:e.Len], ns: ns}
}

// piece takes the next n bytes of the slot. The last one gives the verdict.
func (c *check) piece(n uint64) error {
	from, to := c.have, c.have+int64(n)
	c.have = to
	head, end := int64(len(c.header)), int64(len(c.payload))
	if from < head && to >= head {
		if err := c.checkHeader(c.header); err != nil {
			return err
		}
	}
	from, to = max(from-head, 0), min(to-head, end)
	switch {
	case to <= from:
		return nil
	case from == 0 && to == end:
		return c.verdict(xxh3.Hash128(c.payload).Bytes())
	}
	if c.hash == nil {
		c.hash = xxh3.New()
	}
	c.hash.Write(c.payload[from:to])
	if to == end {
		return c.verdict(c.hash.Sum128().Bytes())
	}
	return nil
}

func (c *check) verdict(sum [16]byte) error {
	if sum != c.e.Sum {
		return fmt.Errorf("block %s in g3: %w: checksum %s, want %s", c.e.Hash.Hex(int(c.e.HashLen)), block.ErrCorrupt, block.Sum(sum), c.e.Sum)
	}
	return nil
}

// checkHeader says whether a slot header is the entry's.
func (c *check) checkHeader(b []byte) error {
	hd, err := DecodeHeader(b, c.seal)
	switch {
	case err != nil:
	case c.ns == nil:
		err = fmt.Errorf("%w: the namespace is gone", block.ErrCorrupt)
	default:
		err = hd.differs(&SlotHeader{Digest: c.ns.digest, Hash: c.e.Hash, HashLen: c.e.HashLen, Gen: c.e.Gen, Len: c.e.Len, Sum: c.e.Sum})
	}
	if err != nil {
		return fmt.Errorf("slot header of block %s in g3: %w", c.e.Hash.Hex(int(c.e.HashLen)), err)
	}
	return nil
}
