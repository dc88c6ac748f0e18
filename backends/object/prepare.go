package object

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// job is one request with payload: a get, a put, or a part of an upload.
type job struct {
	kind   Kind
	key    string
	off    int64
	v      Vector
	size   int64
	whole  bool    // it is believed to be all of the object
	spans  []span  // the pairs that it has bytes of, in the order of their bytes
	upload *upload // of a part
	number int     // of a part, from 1
}

// span is the bytes of one pair in a job: n from at on.
type span struct {
	pair  int
	at, n int64
}

// upload is an object of many parts, as it is prepared.
type upload struct {
	key   string
	index int // in prepared.uploads
	parts int
	size  int64
	pairs []int
}

// prepared is a transfer, resolved.
type prepared struct {
	op      xfer.Op
	remote  []xfer.Bound
	jobs    []job
	uploads []upload
	parts   []int // jobs that have bytes of each pair
}

// Prepare joins and cuts the pairs into requests. Errors: xfer.ErrInvalid for writes that
// would not make an object whole.
func (b *Backend) Prepare(op xfer.Op, local, remote []xfer.Bound) (xfer.Prepared, error) {
	p := &prepared{op: op, remote: remote, parts: make([]int, len(remote))}
	order := make([]int, len(remote))
	place := map[*thing]int{} // the first pair of each object
	for i := range remote {
		th, okO := remote[i].Region.(*thing)
		_, okM := local[i].Region.(memory)
		if !okO || !okM {
			return nil, fmt.Errorf("%s prepare %s: %w: pair %d has regions of type %T and %T", b.Name(), op, xfer.ErrInvalid, i, local[i].Region, remote[i].Region)
		}
		if remote[i].End() > 1<<63-1 {
			return nil, fmt.Errorf("%s prepare %s: descriptor %d %v: %w: no object is that long", b.Name(), op, i, remote[i].Desc, xfer.ErrInvalid)
		}
		if _, ok := place[th]; !ok {
			place[th] = i
		}
		order[i] = i
	}
	slices.SortStableFunc(order, func(x, y int) int {
		return cmp.Or(
			cmp.Compare(place[remote[x].Region.(*thing)], place[remote[y].Region.(*thing)]),
			cmp.Compare(remote[x].Addr, remote[y].Addr))
	})
	keys := map[string]bool{} // that are written
	for len(order) > 0 {
		n := 1
		for n < len(order) && adjacent(&remote[order[n-1]], &remote[order[n]]) {
			n++
		}
		r := gather(local, remote, order[:n])
		if op == xfer.Read {
			b.addReads(p, r)
		} else if err := b.addWrite(p, r, keys); err != nil {
			return nil, fmt.Errorf("%s prepare %s: descriptor %d %v: %w", b.Name(), op, order[0], remote[order[0]].Desc, err)
		}
		order = order[n:]
	}
	for i := range p.jobs {
		for _, s := range p.jobs[i].spans {
			p.parts[s.pair]++
		}
	}
	return p, nil
}

// adjacent says whether y goes on where x ends, in the same object.
func adjacent(x, y *xfer.Bound) bool { return x.Region == y.Region && x.Addr+x.Len == y.Addr }

// run is pairs that are adjacent in an object.
type run struct {
	*thing
	off   int64
	v     Vector
	size  int64
	spans []span
}

// gather makes a run of the pairs, which are in order. Memory that goes on where the last
// piece ended makes that longer.
func gather(local, remote []xfer.Bound, pairs []int) run {
	first := &remote[pairs[0]]
	r := run{thing: first.Region.(*thing), off: int64(first.Addr)}
	var addr, n uint64
	flush := func() {
		if n > 0 {
			r.v = append(r.v, arena.View(addr, int(n)))
		}
	}
	for _, i := range pairs {
		l := &local[i]
		if n == 0 || l.Addr != addr+n {
			flush()
			addr, n = l.Addr, 0
		}
		n += l.Len
		r.spans = append(r.spans, span{i, r.size, int64(l.Len)})
		r.size += int64(l.Len)
	}
	flush()
	return r
}

// cut gives the spans of n bytes from at on.
func (r *run) cut(at, n int64) []span {
	var spans []span
	for _, s := range r.spans {
		from, to := max(s.at, at), min(s.at+s.n, at+n)
		if from < to {
			spans = append(spans, span{s.pair, from - at, to - from})
		}
	}
	return spans
}

// addReads adds the ranges of a run. Each begins with a pair where it can, so that few
// pairs wait for two requests.
func (b *Backend) addReads(p *prepared, r run) {
	whole := r.off == 0 && r.size == r.len
	for at := int64(0); at < r.size; {
		n := min(r.size-at, b.opt.PartBytes)
		if at+n < r.size {
			for _, s := range slices.Backward(r.spans) {
				if s.at > at && s.at <= at+n {
					n = s.at - at
					break
				}
			}
		}
		p.jobs = append(p.jobs, job{
			kind: KindGet, key: r.key, off: r.off + at, v: r.v.Slice(at, n), size: n,
			whole: whole && n == r.size, spans: r.cut(at, n),
		})
		at += n
	}
}

// addWrite adds the put of a run, or its parts.
func (b *Backend) addWrite(p *prepared, r run, keys map[string]bool) error {
	switch {
	case keys[r.key]:
		return fmt.Errorf("%w: other descriptors of this transfer write the object too, and do not go on here: a write makes an object whole", xfer.ErrInvalid)
	case r.off != 0:
		return fmt.Errorf("%w: a write makes an object whole, from its first byte on", xfer.ErrInvalid)
	case r.len != 0 && r.size != r.len:
		return fmt.Errorf("%w: a write of %d bytes to an object that is registered with %d: a write makes an object whole", xfer.ErrInvalid, r.size, r.len)
	}
	keys[r.key] = true
	if r.size <= b.opt.MultipartBytes {
		p.jobs = append(p.jobs, job{kind: KindPut, key: r.key, v: r.v, size: r.size, spans: r.spans})
		return nil
	}
	part := b.partBytes(r.size)
	if part > b.limits.PartBytes {
		return fmt.Errorf("%w: an object of %d bytes is more than the service takes in %d parts", xfer.ErrInvalid, r.size, b.limits.Parts)
	}
	u := upload{key: r.key, index: len(p.uploads), size: r.size}
	for _, s := range r.spans {
		u.pairs = append(u.pairs, s.pair)
	}
	for at := int64(0); at < r.size; at += part {
		n := min(part, r.size-at)
		u.parts++
		p.jobs = append(p.jobs, job{kind: KindPart, key: r.key, off: at, v: r.v.Slice(at, n), size: n, spans: r.cut(at, n), number: u.parts})
	}
	p.uploads = append(p.uploads, u)
	up := u
	for i := len(p.jobs) - u.parts; i < len(p.jobs); i++ {
		p.jobs[i].upload = &up
	}
	return nil
}

// partBytes is how long the parts of an object are: more than asked for where there would
// be too many of them.
func (b *Backend) partBytes(size int64) int64 {
	part := b.opt.PartBytes
	if most := int64(b.limits.Parts); size > part*most {
		part = (size + most - 1) / most
	}
	return part
}

// Release forgets a transfer.
func (b *Backend) Release(xfer.Prepared) {}
