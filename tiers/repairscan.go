package tiers

import (
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/index/block"
)

// scanWindow is how much of a slab is in memory at a time: several blocks of the
// largest size.
const scanWindow = 32 << 20

// scan looks for blocks on a slab, from its beginning to its end. A header can
// begin at any multiple of 512: extents change their slots' sizes, and which
// sizes they had only the catalog knew. One that is found is believed only where
// it was written, so the bytes of a payload cannot pass for one; see Seal.
func (r *repairer) scan(at int) error {
	slab := r.slabs[at].slab
	buf := make([]byte, min(scanWindow, slab.DataBytes()))
	for base := int64(0); base < slab.DataBytes(); {
		if err := r.ctx.Err(); err != nil {
			return err
		}
		w := buf[:min(int64(len(buf)), slab.DataBytes()-base)]
		r.read(slab, w, base)
		n, err := r.scanWindow(at, w, base, base+int64(len(w)) == slab.DataBytes())
		if err != nil {
			return fmt.Errorf("slab %s: %w", slab.Path(), err)
		}
		base += n
		r.done += n
		if r.o.Progress != nil {
			r.o.Progress(r.done, r.total)
		}
	}
	return nil
}

// read fills w from an offset of a slab's data. What cannot be read counts as
// zeros.
func (r *repairer) read(slab *Slab, w []byte, base int64) {
	if _, err := slab.f.ReadAt(w, slab.DataOffset()+base); err == nil {
		return
	}
	bad := 0
	var last error
	for off := 0; off < len(w); off += largeHeaderBytes {
		piece := w[off:min(off+largeHeaderBytes, len(w))]
		if _, err := slab.f.ReadAt(piece, slab.DataOffset()+base+int64(off)); err != nil {
			clear(piece)
			bad += len(piece)
			last = err
		}
	}
	if bad > 0 {
		r.problem(fmt.Sprintf("slab %s: %d bytes from %d on cannot be read: %v", slab.Path(), bad, base, last))
	}
}

// scanWindow looks for blocks in a piece of a slab that begins at base, and
// returns how much of it is dealt with: the next piece begins there, with a block
// that goes past the end of this one.
func (r *repairer) scanWindow(at int, w []byte, base int64, last bool) (n int64, err error) {
	slab := r.slabs[at].slab
	for n+headerUsed <= int64(len(w)) {
		b := w[n:]
		if string(b[:len(headerMagic)]) != headerMagic {
			n += slotUnit
			continue
		}
		hd, err := DecodeHeader(b, slab.Seal(base+n))
		// On a slab of version 1 a payload can look like that, and no header does.
		if errors.Is(err, ErrVersion) && slab.super.version > 1 {
			return n, fmt.Errorf("slot at %d: %w", base+n, err)
		}
		if err != nil {
			n += slotUnit
			continue
		}
		size, header := SlotBytes(int64(hd.Len))
		if size > int64(len(b)) && !last && n > 0 {
			return n, nil
		}
		if hd.Len > block.MaxBlockBytes || size > int64(hd.Slot) || size > int64(len(b)) || block.Sum(xxh3.Hash128(b[header:][:hd.Len]).Bytes()) != hd.Sum {
			r.damaged(&hd)
			n += slotUnit
			continue
		}
		r.found(at, base+n, &hd)
		n += size
	}
	return int64(len(w)), nil
}
