package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// matchKeys is how many keys one lookup has.
const matchKeys = 256

// lookupStore is a store of many tiny blocks, in which keys are looked up.
type lookupStore struct {
	*benchStore
	blocks int
	rand   *rand.Rand
}

// lookupStore gives the store of match and grpc, made when it is first asked for.
func (b *bench) lookupStore(ctx context.Context) (*lookupStore, error) {
	if b.table != nil {
		return b.table, nil
	}
	const payload = 64
	s, err := b.openStore(ctx, "table", roomFor(b.tableBlocks, payload), 0, payload, false)
	if err != nil {
		return nil, err
	}
	b.closers.add(s.close)
	t := &lookupStore{benchStore: s, blocks: b.tableBlocks, rand: rand.New(rand.NewPCG(3, 4))}
	show := newProgress(b.out)
	defer show.done()
	var data [payload]byte
	var ids []uint64
	for i := range t.blocks {
		h := benchHash(uint64(i))
		r, _, err := s.Reserve(ctx, s.ns, benchHashBytes, h, payload, block.PutOptions{})
		if err == nil {
			err = s.Fill(ctx, r.ID, 0, data[:])
		}
		if err != nil {
			return nil, err
		}
		if ids = append(ids, r.ID); len(ids) < batchRecords && i+1 < t.blocks {
			continue
		}
		for _, res := range s.Commit(ctx, ids) {
			if res.Err != nil {
				return nil, res.Err
			}
		}
		ids = ids[:0]
		show.update(func() string { return fmt.Sprintf("put %d of %d blocks", i+1, t.blocks) })
	}
	b.table = t
	return t, nil
}

// draw gives the packed keys of n lookups, drawn uniformly.
func (t *lookupStore) draw(n int) [][]byte {
	out := make([][]byte, n)
	for i := range out {
		for range matchKeys {
			h := benchHash(uint64(t.rand.IntN(t.blocks)))
			out[i] = append(out[i], h[:benchHashBytes]...)
		}
	}
	return out
}

// benchMatch measures lookups as a caller in the same process makes them.
func benchMatch(ctx context.Context, b *bench) error {
	t, err := b.lookupStore(ctx)
	if err != nil {
		return err
	}
	var res block.MatchResult
	return b.compare(ctx, "match.inproc.256", "ns", b.pairs, func(ctx context.Context) (float64, error) {
		keys := t.draw(b.lookups)
		begin := time.Now()
		for _, k := range keys {
			if err := t.Match(ctx, t.ns, benchHashBytes, k, block.MatchOptions{}, &res); err != nil {
				return 0, err
			}
			if res.Prefix != matchKeys {
				return 0, fmt.Errorf("found %d of %d keys", res.Prefix, matchKeys)
			}
		}
		return float64(time.Since(begin).Nanoseconds()) / float64(len(keys)*matchKeys), nil
	}, nil)
}

// benchGRPC measures a match through server and client, call by call in turns
// with an empty call over the same connection and with bare lookups.
func benchGRPC(ctx context.Context, b *bench) (err error) {
	t, err := b.lookupStore(ctx)
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	servers := newServers(t.Store, &servePlan{}, nil, nil, b.log)
	failed := servers.start([]net.Listener{l})
	defer func() {
		err = errors.Join(err, servers.close())
		select {
		case e := <-failed:
			err = errors.Join(err, e)
		default:
		}
	}()
	client, err := api.Dial(ctx, l.Addr().String(), &api.ClientOptions{Inline: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	ns, err := client.Namespace(ctx, "bench")
	if err != nil {
		return err
	}
	g := &grpcBench{bench: b, store: t, client: client, ns: ns}
	return b.compare(ctx, "grpc.match.256", "us", b.pairs, g.value, g.limit)
}

// grpcBench takes value and limit call by call: the state of the machine changes
// faster than passes do.
type grpcBench struct {
	*bench
	store  *lookupStore
	client *api.Client
	ns     block.Namespace

	taken                bool // the round's figures are there and one was handed out
	match, empty, lookup float64
}

func (g *grpcBench) value(ctx context.Context) (float64, error) {
	err := g.round(ctx)
	return g.match, err
}

func (g *grpcBench) limit(ctx context.Context) (float64, error) {
	err := g.round(ctx)
	return g.empty + g.lookup, err
}

// round measures every other time it is called.
func (g *grpcBench) round(ctx context.Context) error {
	if g.taken = !g.taken; !g.taken {
		return nil
	}
	match, empty, lookup := make([]float64, 0, g.calls), make([]float64, 0, g.calls), make([]float64, 0, g.calls)
	table := g.store.Table()
	var res block.MatchResult
	for range g.calls {
		keys := g.store.draw(2)
		begin := time.Now()
		if err := g.client.MatchPacked(ctx, g.ns, keys[0], block.MatchOptions{}, &res); err != nil {
			return err
		}
		matched := time.Now()
		info, err := g.client.Ping(ctx)
		answered := time.Now()
		found := 0
		table.LookupAll(g.store.ns, benchHashBytes, keys[1], func(_ int, _ block.Handle, e *index.Entry) bool {
			if e != nil {
				found++
			}
			return true
		})
		looked := time.Now()
		switch {
		case err != nil:
			return err
		case !info.Ready:
			return errors.New("the server says that it does not serve")
		case res.Prefix != matchKeys || found != matchKeys:
			return fmt.Errorf("found %d and %d of %d keys", res.Prefix, found, matchKeys)
		}
		match = append(match, micros(matched.Sub(begin)))
		empty = append(empty, micros(answered.Sub(matched)))
		lookup = append(lookup, micros(looked.Sub(answered)))
	}
	g.match, g.empty, g.lookup = median(match), median(empty), median(lookup)
	return nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
