package tiers_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// The operations of the model. Each draws what it needs from its own seed.

const (
	opPut = iota
	opBatch
	opGet
	opDelete
	opLease
	opHold
	opPrefetch
	opConflict
	opAbandon
	opList
	opPin
	opClear
	opDrain
	opLend
	modelOps
)

var modelNames = [modelOps]string{
	"put", "batch", "get", "delete", "lease", "hold", "prefetch", "conflict", "abandon", "list", "pin", "clear", "drain", "lend",
}

// modelWeights says how often an operation comes, of 100.
var modelWeights = [modelOps]int{22, 8, 20, 7, 6, 5, 7, 4, 4, 3, 5, 2, 1, 6}

var modelDo = [modelOps]func(w *modelWorker, r *rand.Rand){
	(*modelWorker).put, (*modelWorker).batch, (*modelWorker).get, (*modelWorker).delete, (*modelWorker).lease, (*modelWorker).hold,
	(*modelWorker).prefetch, (*modelWorker).conflict, (*modelWorker).abandon, (*modelWorker).list, (*modelWorker).pin,
	(*modelWorker).clear, (*modelWorker).drainAmid, (*modelWorker).lend,
}

type modelOp struct {
	kind int
	seed uint64
}

// drawOps draws what a worker will do. Only the first clears and drains.
func drawOps(r *rand.Rand, worker int) []modelOp {
	ops := make([]modelOp, modelSteps)
	for i := range ops {
		p := r.IntN(100)
		kind := 0
		for ; p >= modelWeights[kind]; kind++ {
			p -= modelWeights[kind]
		}
		if worker > 0 && (kind == opClear || kind == opDrain) {
			kind = opGet
		}
		ops[i] = modelOp{kind, r.Uint64()}
	}
	return ops
}

type modelWorker struct {
	*model
	id int
}

func (w *modelWorker) session() uint64 { return uint64(w.id + 1) }

// mine draws one of the keys that the worker owns: those of the first namespace
// that are its number modulo the workers, and for the first worker all of the
// second.
func (w *modelWorker) mine(r *rand.Rand) int {
	if w.id == 0 && r.IntN(4) == 0 {
		return modelKeys + r.IntN(modelCleared)
	}
	return r.IntN(modelKeys/modelWorkers)*modelWorkers + w.id
}

// ours draws some different keys that the worker owns in the first namespace.
func (w *modelWorker) ours(r *rand.Rand, n int) (is []int) {
	for _, k := range r.Perm(modelKeys / modelWorkers)[:n] {
		is = append(is, k*modelWorkers+w.id)
	}
	return is
}

func (w *modelWorker) putOptions(i int, r *rand.Rand) block.PutOptions {
	o := block.PutOptions{Durable: block.G2}
	if w.conf.durable() && r.IntN(2) == 0 {
		o.Durable = block.G3
	}
	if i < modelKeys && i > 0 && r.IntN(3) > 0 {
		o.Parent, o.HasParent = hashOf(r.IntN(i)), true
	}
	if mortal(i) {
		o.TTL = time.Second
		w.keys[i].until.Store(0)
	}
	return o
}

func (w *modelWorker) put(r *rand.Rand) { w.putKey(w.mine(r), r) }

// putKey puts the version that a key is at, if there is room.
func (w *modelWorker) putKey(i int, r *rand.Rand) {
	data := w.data(i, w.keys[i].version.Load())
	o := w.putOptions(i, r)
	began := time.Now()
	fresh := false
	if r.IntN(3) == 0 {
		res, ok := w.putGranted(i, data, o, r)
		if fresh = ok && res.Status == block.Stored; !ok || !w.committed(i, o, res.Err) {
			return
		}
	} else {
		id, ok := w.fill(i, data, o)
		if !ok {
			return
		}
		if fresh = id != 0; fresh {
			ctx, cancel := w.calls()
			defer cancel()
			if !w.committed(i, o, w.c.Commit(ctx, []uint64{id})[0].Err) {
				return
			}
		}
	}
	if grace := w.conf.opts.Grace; grace > 0 && fresh && !mortal(i) && !w.conf.rough() {
		if reason := w.read(i, block.GetOptions{}); reason != block.Hit && time.Since(began) < grace {
			w.errorf("key %d was put less than %v ago: %v", i, grace, reason)
		}
	}
}

// putGranted puts a block by one of some grants, which may be larger than it, and
// gives the others back; ok is false when there is none.
func (w *modelWorker) putGranted(i int, data []byte, o block.PutOptions, r *rand.Rand) (res block.CommitResult, ok bool) {
	ctx, cancel := w.calls()
	defer cancel()
	gs, err := w.s.Grant(ctx, w.space(i).ID, int64(len(data)+r.IntN(2)*r.IntN(2*len(data)+100_000)), 1+r.IntN(3))
	if err != nil {
		if !errors.Is(err, block.ErrNoSpace) {
			w.errorf("grant: %v", err)
		}
		return res, false
	}
	for _, g := range gs[1:] {
		w.s.AbortGrants([]uint64{g.ID, g.ID})
	}
	copy(gs[0].Mem, data)
	p := granted(w.space(i), gs[0], i, data, o)
	both := w.s.PutGranted(ctx, []block.GrantPut{p, p})
	if !errors.Is(both[1].Err, block.ErrLeaseExpired) {
		w.errorf("put %d by a grant that is used up: %v", i, both[1].Err)
	}
	return both[0], true
}

// fill reserves and fills room for a block; id is 0 when it is there already, and
// ok false when there is no room.
func (w *modelWorker) fill(i int, data []byte, o block.PutOptions) (id uint64, ok bool) {
	ctx, cancel := w.calls()
	defer cancel()
	res, _, err := w.c.Reserve(ctx, w.space(i).ID, hashLen, hashOf(i), int64(len(data)), o)
	switch {
	case errors.Is(err, block.ErrNoSpace), w.conf.shaky && errors.Is(err, block.ErrUnavailable):
		return 0, false // of the first one of a namespace the catalog notes the length of its hash
	case err != nil:
		w.errorf("reserve %d: %v", i, err)
		return 0, false
	case res.Status == block.Exists:
		return 0, true
	}
	for off := 0; off < len(data); {
		n := min(100_000, len(data)-off)
		if err := w.c.Fill(ctx, res.ID, int64(off), data[off:off+n]); err != nil {
			w.errorf("fill %d: %v", i, err)
			return 0, false
		}
		off += n
	}
	return res.ID, true
}

// committed notes how the commit of a key ended, and says whether it is there.
func (w *modelWorker) committed(i int, o block.PutOptions, err error) bool {
	k := &w.keys[i]
	switch {
	case errors.Is(err, block.ErrNoSpace):
	case mortal(i) && errors.Is(err, block.ErrNotFound): // its time has passed on the way to G3
	case w.conf.rough() && (errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrNotFound)):
	case err != nil:
		w.errorf("put %d: %v", i, err)
	default:
		k.acked = true
		if o.Durable == block.G3 {
			k.tried.Store(0)
			k.durable.Store(k.version.Load() + 1)
		}
		if mortal(i) {
			k.until.Store(time.Now().Unix() + 3)
		}
		return true
	}
	return false
}

// batch commits several keys at once: one of them twice, one not filled to its
// end, and with one of them another one's bytes.
func (w *modelWorker) batch(r *rand.Rand) {
	is := w.ours(r, 2+r.IntN(4))
	is = append(is, is[r.IntN(len(is))])
	o := w.putOptions(is[0], r)
	o.HasParent, o.Parent = false, block.Hash{}
	var ids []uint64
	var of []int
	for _, i := range is {
		o.TTL = 0
		if mortal(i) {
			o.TTL = time.Second
			w.keys[i].until.Store(0)
		}
		if id, ok := w.fill(i, w.data(i, w.keys[i].version.Load()), o); ok && id != 0 {
			ids, of = append(ids, id), append(of, i)
		}
	}
	ctx, cancel := w.calls()
	defer cancel()
	const broken = -1
	if res, _, err := w.c.Reserve(ctx, w.ns[0].ID, hashLen, hashOf(2000+w.id), 5000, block.PutOptions{}); err == nil {
		if err := w.c.Fill(ctx, res.ID, 0, make([]byte, 100)); err != nil {
			w.errorf("fill: %v", err)
		}
		ids, of = append(ids, res.ID), append(of, broken)
	}
	if len(ids) == 0 {
		return
	}
	seen := map[int]bool{}
	for j, res := range w.c.Commit(ctx, ids) {
		switch i := of[j]; {
		case i == broken:
			if !errors.Is(res.Err, block.ErrInvalid) {
				w.errorf("commit of a block that is not full: %v", res.Err)
			}
		case w.committed(i, o, res.Err) && res.Status == block.Stored && seen[i] && !mortal(i) && w.conf.durable() && !w.conf.rough():
			w.errorf("key %d was stored twice in one batch", i)
		default:
			seen[i] = true
		}
	}
}

func (w *modelWorker) delete(r *rand.Rand) { w.deleteKey(w.mine(r)) }

func (w *modelWorker) deleteKey(i int) {
	ctx, cancel := w.calls()
	defer cancel()
	k := &w.keys[i]
	k.tried.Store(k.version.Load() + 1)
	k.pinned = false
	if _, err := w.c.Delete(ctx, w.space(i).ID, hashLen, pack(hashOf(i))); err != nil {
		if !w.conf.rough() {
			w.errorf("delete %d: %v", i, err)
		}
		return // it may come back
	}
	w.deleted(i)
}

// deleted notes that a version is dead.
func (w *modelWorker) deleted(i int) {
	k := &w.keys[i]
	k.acked = false
	k.until.Store(0)
	k.version.Add(1)
}

// conflict puts other bytes under a key: when it is there, and beside its first put.
func (w *modelWorker) conflict(r *rand.Rand) {
	i := w.mine(r)
	ctx, cancel := w.calls()
	defer cancel()
	err := w.s.CompareExisting(ctx, w.space(i).ID, hashOf(i), 1234, block.Sum{}, block.PutOptions{})
	if !errors.Is(err, block.ErrConflict) && !errors.Is(err, block.ErrNoSpace) {
		w.errorf("put of other bytes as %d: %v", i, err)
	}
	if !w.conf.durable() || w.conf.rough() || mortal(i) {
		return // the first may have left before the second comes
	}
	data := w.data(i, w.keys[i].version.Load())
	other := bytes.Clone(data)
	other[0] ^= 1
	first, ok := w.fill(i, data, block.PutOptions{})
	if !ok || first == 0 {
		return
	}
	second, ok := w.fill(i, other, block.PutOptions{})
	if !ok || second == 0 {
		w.c.Abort([]uint64{first})
		return
	}
	before := w.s.Stats().Conflicts
	res := w.c.Commit(ctx, []uint64{first, second})
	if !w.committed(i, block.PutOptions{}, res[0].Err) || !errors.Is(res[1].Err, block.ErrConflict) {
		w.errorf("put of %d with other bytes: %v and %v", i, res[0].Err, res[1].Err)
	}
	if w.s.Stats().Conflicts == before {
		w.errorf("the conflict of %d was not counted", i)
	}
	w.read(i, block.GetOptions{})
}

// abandon begins a put and does not end it.
func (w *modelWorker) abandon(r *rand.Rand) {
	i := 1000 + w.id
	ctx, cancel := w.calls()
	defer cancel()
	res, _, err := w.c.Reserve(ctx, w.ns[0].ID, hashLen, hashOf(i), 40_000, block.PutOptions{Session: w.session()})
	if err != nil {
		if !errors.Is(err, block.ErrNoSpace) && !(w.conf.shaky && errors.Is(err, block.ErrUnavailable)) {
			w.errorf("reserve: %v", err)
		}
		return
	}
	if r.IntN(2) == 0 {
		if err := w.c.Fill(ctx, res.ID, 0, make([]byte, 40_000)); err != nil {
			w.errorf("fill: %v", err)
		}
	}
	var m block.MatchResult
	if err := w.c.Match(ctx, w.ns[0].ID, hashLen, pack(hashOf(i)), block.MatchOptions{}, &m); err != nil || m.Blocks[0].State != block.Pending {
		w.errorf("match of what is being put: %+v, %v", m.Blocks, err)
	}
	if r.IntN(2) == 0 {
		w.c.Abort([]uint64{res.ID, res.ID})
	} else {
		w.c.EndSession(w.session())
	}
}

// clear empties the second namespace, which is the first worker's.
func (w *modelWorker) clear(*rand.Rand) {
	ctx, cancel := w.calls()
	defer cancel()
	for i := modelKeys; i < len(w.keys); i++ {
		w.keys[i].tried.Store(w.keys[i].version.Load() + 1)
		w.keys[i].pinned = false
	}
	if _, err := w.c.Clear(ctx, w.ns[1].ID); err != nil {
		if !w.conf.rough() {
			w.errorf("clear: %v", err)
		}
		return
	}
	for i := modelKeys; i < len(w.keys); i++ {
		w.deleted(i)
	}
}

func (w *modelWorker) drainAmid(*rand.Rand) {
	ctx, cancel := w.calls()
	defer cancel()
	if _, err := w.s.Drain(ctx, nil); err != nil && !w.conf.rough() {
		w.errorf("drain: %v", err)
	}
}
