package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/zeebo/xxh3"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/api/access"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// A stream of puts is two halves. The handler receives: it reserves room and
// copies bytes into it, block after block. The settler commits what is complete,
// all of it at once, while the next blocks come in: puts that come one at a time
// are committed at once, and a burst of durable ones shares its syncs.
const (
	// maxUnsettled is how many blocks may wait for the settler.
	maxUnsettled = 512
	// maxUnsettledBytes is how much payload of one stream may be received and not
	// settled. It lets several of the largest blocks share a commit.
	maxUnsettledBytes = 64 << 20
	// maxCompares is how many existing blocks of one batch are compared at once:
	// with durable puts each may wait for a sync, which they share.
	maxCompares = 16
)

// putItem is one block of a stream, on its way to its result.
type putItem struct {
	n       uint32 // number in the stream
	hash    block.Hash
	opts    block.PutOptions
	length  int64  // announced
	got     int64  // received
	id      uint64 // reservation to commit or, with filling, to fill
	exists  bool   // the key is there: compare instead of storing
	filling bool   // into the client's own reservation
	offset  int64  // with filling
	weight  int64  // held of the stream's budget
	err     error
	hash128 *xxh3.Hasher128 // with exists
}

// putter is one stream of puts.
type putter struct {
	s      *service
	stream grpc.BidiStreamingServer[pb.PutRequest, pb.PutResponse]
	ns     block.NamespaceID
	opts   block.PutOptions // of all blocks

	n      uint32   // blocks begun
	cur    *putItem // begun and not ended
	budget *semaphore.Weighted
	queue  chan *putItem
}

// Put stores the blocks of a stream.
func (s *service) Put(stream grpc.BidiStreamingServer[pb.PutRequest, pb.PutResponse]) error {
	sess, err := enter(stream.Context())
	if err != nil {
		return err
	}
	defer sess.leave()
	var f putFrame
	defer f.release()
	if err := stream.RecvMsg(&f); err != nil {
		return endOfStream(err)
	}
	p := &putter{
		s: s, stream: stream,
		budget: semaphore.NewWeighted(maxUnsettledBytes),
		queue:  make(chan *putItem, maxUnsettled),
	}
	if err := p.open(f.open, sess.id); err != nil {
		return err
	}
	f.open = nil

	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	var settler sync.WaitGroup
	var settleErr error
	settler.Go(func() {
		settleErr = p.settle(ctx)
		if settleErr != nil {
			cancel() // results cannot be told: no use in receiving more
		}
	})
	err = p.receive(ctx, &f)
	if p.cur != nil {
		p.abandon(p.cur)
	}
	close(p.queue)
	settler.Wait()
	if settleErr != nil {
		return settleErr
	}
	return err
}

// endOfStream is nil for the client's half-close.
func endOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (p *putter) open(o *pb.PutOpen, session uint64) error {
	if o == nil {
		return invalid("open: absent in the first message of a put")
	}
	ns, err := p.s.namespace(p.stream.Context(), o.GetNamespace(), o.GetNamespaceTag(), access.Write)
	if err != nil {
		return err
	}
	durable, err := durableField(o.GetDurable())
	if err != nil {
		return err
	}
	ttl, err := durationField("ttl_ms", o.GetTtlMs())
	if err != nil {
		return err
	}
	p.ns = ns
	p.opts = block.PutOptions{Durable: durable, TTL: ttl, Session: session}
	return nil
}

// receive takes the messages of the stream, the first of which is in f.
func (p *putter) receive(ctx context.Context, f *putFrame) error {
	for {
		if err := p.message(ctx, f); err != nil {
			return err
		}
		if err := p.stream.RecvMsg(f); err != nil {
			if !errors.Is(err, io.EOF) {
				return err
			}
			return p.end(ctx)
		}
	}
}

func (p *putter) message(ctx context.Context, f *putFrame) error {
	if f.open != nil {
		return invalid("open: only the first message of a put may have it")
	}
	if f.bytes > MaxDataBytes {
		return invalid("data: %d bytes, at most %d in one message", f.bytes, MaxDataBytes)
	}
	if f.block != nil {
		if err := p.end(ctx); err != nil {
			return err
		}
		if err := p.begin(ctx, f.block); err != nil {
			return err
		}
	}
	if f.bytes > 0 {
		if p.cur == nil {
			return invalid("data: %d bytes that belong to no block: %d begun, all ended", f.bytes, p.n)
		}
		p.data(ctx, f)
	}
	if f.end {
		return p.end(ctx)
	}
	return nil
}

// begin takes room for a block before its bytes are read. A block that is
// refused stays current with its error, and its bytes are skipped. The error
// returned is the stream's.
func (p *putter) begin(ctx context.Context, b *pb.PutBlock) error {
	it := &putItem{n: p.n, opts: p.opts, length: int64(b.GetLength()), offset: b.GetOffset(), id: b.GetReservation(), filling: b.GetReservation() != 0}
	p.n++
	p.cur = it
	if it.err = checkLength(b.GetLength()); it.err != nil {
		return nil
	}
	if err := p.budget.Acquire(ctx, it.length); err != nil {
		return err
	}
	it.weight = it.length
	if it.filling {
		if it.offset < 0 || it.offset > block.MaxBlockBytes {
			it.err = invalid("offset: %d, want 0 to %d", it.offset, block.MaxBlockBytes)
		}
		return nil
	}
	if b.GetOffset() != 0 {
		it.err = invalid("offset: %d without a reservation, want 0", b.GetOffset())
		return nil
	}
	if it.hash, it.err = hashField("hash", b.GetHash()); it.err != nil {
		return nil
	}
	if it.opts.Parent, it.opts.HasParent, it.err = parentField(b.GetParent(), len(b.GetHash())); it.err != nil {
		return nil
	}
	ctx, cancel := p.s.bounded(ctx)
	defer cancel()
	r, _, err := p.s.store.Reserve(ctx, p.ns, len(b.GetHash()), it.hash, it.length, it.opts)
	switch {
	case err != nil:
		it.err = err
	case r.Status == block.Exists:
		it.exists, it.hash128 = true, xxh3.New128()
	default:
		it.id = r.ID
	}
	return nil
}

// data takes the next bytes of the current block, piece by piece as they lie in
// the buffers of the connection.
func (p *putter) data(ctx context.Context, f *putFrame) {
	it := p.cur
	at := it.got
	it.got += int64(f.bytes)
	if it.err == nil && it.got > it.length {
		it.err = invalid("length: announced %d bytes, received at least %d", it.length, it.got)
	}
	for _, piece := range f.pieces {
		switch {
		case it.err != nil:
			return
		case it.exists:
			_, _ = it.hash128.Write(piece) // a hash does not fail
		default:
			it.err = p.s.store.Fill(ctx, it.id, it.offset+at, piece)
		}
		at += int64(len(piece))
	}
}

// end hands the current block, if there is one, to the settler.
func (p *putter) end(ctx context.Context) error {
	it := p.cur
	if it == nil {
		return nil
	}
	if it.err == nil && it.got != it.length {
		it.err = invalid("length: announced %d bytes, received %d", it.length, it.got)
	}
	select {
	case p.queue <- it:
		p.cur = nil
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// abandon gives back what an item holds and will not be committed.
func (p *putter) abandon(it *putItem) {
	if it.id != 0 && !it.filling {
		p.s.store.Abort([]uint64{it.id})
	}
	p.budget.Release(it.weight)
}

// settle commits blocks and tells their results, in order, until the queue is
// closed. After an error it only gives back what is in the queue.
func (p *putter) settle(ctx context.Context) error {
	var batch []*putItem
	var failed error
	for first := range p.queue {
		batch = append(batch[:0], first)
		for more := true; more && len(batch) < maxUnsettled; {
			select {
			case it, ok := <-p.queue:
				if more = ok; ok {
					batch = append(batch, it)
				}
			default:
				more = false
			}
		}
		if failed != nil || ctx.Err() != nil {
			for _, it := range batch {
				p.abandon(it)
			}
			if failed == nil {
				failed = ctx.Err()
			}
			continue
		}
		res := p.commit(ctx, batch)
		for _, it := range batch {
			p.budget.Release(it.weight)
		}
		if err := p.stream.Send(&pb.PutResponse{First: batch[0].n, Results: res}); err != nil {
			failed = fmt.Errorf("tell results of a put: %w", err)
		}
	}
	return failed
}

// commit settles a batch: one commit for all that were received, and one
// comparison for each that was there already.
func (p *putter) commit(ctx context.Context, batch []*putItem) []*pb.PutResult {
	ctx, cancel := p.s.bounded(ctx)
	defer cancel()
	var ids, refused []uint64
	for _, it := range batch {
		switch {
		case it.id == 0 || it.filling:
		case it.err != nil:
			refused = append(refused, it.id)
		default:
			ids = append(ids, it.id)
		}
	}
	if len(refused) > 0 {
		p.s.store.Abort(refused)
	}
	var committed []block.CommitResult
	if len(ids) > 0 {
		committed = p.s.store.Commit(ctx, ids)
	}
	p.compare(ctx, batch)

	out := make([]*pb.PutResult, len(batch))
	for i, it := range batch {
		switch {
		case it.err != nil:
			out[i] = putResult(block.CommitResult{Err: it.err})
		case it.filling:
			out[i] = &pb.PutResult{Status: pb.PutStatus_PUT_STATUS_FILLED}
		case it.exists:
			out[i] = putResult(block.CommitResult{Status: block.Exists})
		default:
			out[i] = putResult(committed[0])
			committed = committed[1:]
		}
	}
	return out
}

// compare settles the blocks of a batch that were there already, leaving what
// differs in their err.
func (p *putter) compare(ctx context.Context, batch []*putItem) {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxCompares)
	for _, it := range batch {
		if !it.exists || it.err != nil {
			continue
		}
		check := func() {
			it.err = p.s.store.CompareExisting(ctx, p.ns, it.hash, it.got, it.hash128.Sum128().Bytes(), it.opts)
		}
		if it.opts.Durable == block.G2 { // it waits for nothing
			check()
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			check()
		})
	}
}
