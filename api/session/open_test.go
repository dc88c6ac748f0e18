package session_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// fields makes the fields of a descriptor of names and values in turn.
func fields(pairs ...string) (all []block.Field) {
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, block.Field{Name: pairs[i], Value: pairs[i+1]})
	}
	return all
}

// TestOpenRefused shows that what cannot be opened is refused with the field that is at
// fault, that nothing is made, and that the session goes on.
func TestOpenRefused(t *testing.T) {
	r := newRig(t, nil, nil) // which has llama: 16 tokens, up to 4194304 bytes
	c := r.client()
	const create = session.FlagCreate
	for _, tt := range []struct {
		name  string
		flags uint16
		ttl   uint64
		all   []block.Field
		want  error
		text  string
	}{
		{"unknown field", create, 0, fields("name", "n", "block_bytes", "10", "colour", "red"), block.ErrInvalid, `"colour"`},
		{"field of Go", create, 0, fields("name", "n", "BlockBytes", "10"), block.ErrInvalid, `"BlockBytes"`},
		{"field twice", create, 0, fields("name", "n", "block_bytes", "10", "name", "n"), block.ErrInvalid, "name is there twice"},
		{"number", create, 0, fields("name", "n", "block_bytes", "2MiB"), block.ErrInvalid, `block_bytes: "2MiB"`},
		{"empty number", create, 0, fields("name", "n", "max_block_bytes", ""), block.ErrInvalid, `max_block_bytes: ""`},
		{"negative", create, 0, fields("name", "n", "block_bytes", "-1"), block.ErrInvalid, `block_bytes: "-1"`},
		{"too large a number", create, 0, fields("name", "n", "block_bytes", "9223372036854775808"), block.ErrInvalid, `block_bytes: "9223372036854775808", want a number from 0 to 9223372036854775807`},
		{"too many tokens", create, 0, fields("name", "n", "block_bytes", "10", "tokens_per_block", "4294967296"), block.ErrInvalid, `tokens_per_block: "4294967296"`},
		{"too large a block", create, 0, fields("name", "n", "block_bytes", "8388609"), block.ErrInvalid, "block_bytes 8388609"},
		{"no block bytes", create, 0, fields("name", "n"), block.ErrInvalid, "block_bytes 0"},
		{"two block bytes", create, 0, fields("name", "n", "block_bytes", "1", "max_block_bytes", "2"), block.ErrInvalid, "exclude each other"},
		{"too long a name", create, 0, fields("name", strings.Repeat("n", 256), "block_bytes", "10"), block.ErrInvalid, "length 256, want 1 to 255"},
		{"too long a text", create, 0, fields("name", "n", "block_bytes", "10", "model", strings.Repeat("m", 1025)), block.ErrInvalid, "model is 1025 bytes"},
		{"no name", create, 0, fields("block_bytes", "10"), block.ErrInvalid, `name ""`},
		{"name of other bytes", create, 0, fields("name", "n\xff", "block_bytes", "10"), block.ErrInvalid, `name "n\xff" is not UTF-8`},
		{"model of other bytes", create, 0, fields("name", "n", "model", "\xff", "block_bytes", "10"), block.ErrInvalid, `model "\xff" is not UTF-8`},
		{"name with a slash", create, 0, fields("name", "a/b", "block_bytes", "10"), block.ErrInvalid, `'/'`},
		{"unknown flag", create | 2, 0, fields("name", "n", "block_bytes", "10"), block.ErrInvalid, "flags: 0x3"},
		{"time to live", create, math.MaxUint64, fields("name", "n", "block_bytes", "10"), block.ErrInvalid, "ttl_ms: 18446744073709551615"},
		{"mismatch", create, 0, fields("name", "llama", "max_block_bytes", "4194304", "tokens_per_block", "32"), block.ErrMismatch, `tokens_per_block is "16", not "32"`},
		{"mismatch of a text", create, 0, fields("name", "llama", "max_block_bytes", "4194304", "tokens_per_block", "16", "dtype", "fp8"), block.ErrMismatch, `dtype is "", not "fp8"`},
		{"no such name", 0, 0, fields("name", "nobody"), block.ErrNotFound, `"nobody"`},
		{"no name to find", 0, 0, nil, block.ErrInvalid, "name: absent"},
		{"less than all to find", 0, 0, fields("name", "llama", "dtype", "fp8"), block.ErrInvalid, "block_bytes 0"},
		{"mismatch of what is found", 0, 0, fields("name", "llama", "max_block_bytes", "4194304", "tokens_per_block", "32"), block.ErrMismatch, `tokens_per_block is "16", not "32"`},
		{"nothing made", 0, 0, fields("name", "nobody", "block_bytes", "10"), block.ErrNotFound, `"nobody"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := c.send(session.CodeOpen, &session.OpenMessage{Flags: tt.flags, TTLMS: tt.ttl, Fields: tt.all})
			if err := c.answer(id, 0, nil); !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
	if n := len(r.store.Namespaces()); n != 1 {
		t.Errorf("%d namespaces, want 1", n)
	}
	var got session.OpenedMessage
	id := c.send(session.CodeOpen, &session.OpenMessage{Fields: fields("name", "llama")})
	if err := c.answer(id, session.CodeOpened, &got); err != nil || got.NS != r.ns.NS || got.Tag != r.ns.Tag {
		t.Errorf("afterwards: %+v, error %v", got, err)
	}
	_ = c.c.Close()
	r.quiet()
}

// TestOpen shows that a namespace that one session makes is the same for all, and what
// is told of it.
func TestOpen(t *testing.T) {
	r := newRig(t, nil, nil)
	d := block.Descriptor{
		Name: "qwen", Model: "m", Revision: "r", DType: "bf16", Layout: "l", TokensPerBlock: 16, BlockBytes: 5,
		HashAlgorithm: "a", HashSeed: "0", RankLayout: "tp2", KVGroup: "g", Tenant: "t",
	}
	a, b := r.open("tcp", nil), r.open("unix", nil)
	ns, err := a.OpenNamespace(t.Context(), d, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if ns.Tag != d.Tag() || ns.HashLen != 0 || ns.TTL != time.Minute || ns.BlockBytes != 5 || ns.MaxBlockBytes != 0 {
		t.Errorf("opened %+v", ns)
	}
	have, err := r.store.Namespace("qwen")
	if err != nil || have.Desc != d || have.TTL != time.Minute || have.ID != ns.ID {
		t.Errorf("the store has %+v, error %v", have, err)
	}
	use := ns.Namespace
	use.HashLen = 16
	putBlocks(t, a, use, map[int]int{1: 5})
	for _, open := range []func() (session.Opened, error){
		func() (session.Opened, error) { return b.OpenNamespace(t.Context(), d, 0) },
		func() (session.Opened, error) { return b.Namespace(t.Context(), "qwen") },
	} {
		again, err := open()
		want := ns
		want.HashLen = 16
		if err != nil || again != want {
			t.Errorf("opened again: %+v, want %+v, error %v", again, want, err)
		}
	}
	other := d
	other.HashSeed = "1"
	if _, err := b.OpenNamespace(t.Context(), other, 0); !errors.Is(err, block.ErrMismatch) || !strings.Contains(err.Error(), `hash_seed is "0", not "1"`) {
		t.Errorf("another seed: error %v", err)
	}
	if _, err := b.OpenNamespace(t.Context(), block.Descriptor{Name: "x"}, 0); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("no length: error %v", err)
	}
	if _, err := b.OpenNamespace(t.Context(), d, -1); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("negative time to live: error %v", err)
	}
	if _, err := b.Namespace(t.Context(), "nobody"); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("nobody: error %v", err)
	}
}

// slowStore takes its time for what is written to a medium.
type slowStore struct {
	*memstore.Store
	gate chan struct{}
}

func (s *slowStore) wait(ctx context.Context) error {
	select {
	case <-s.gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *slowStore) OpenNamespace(ctx context.Context, d block.Descriptor, ttl time.Duration) (block.Namespace, error) {
	if d.Name != "llama" { // the rig's
		if err := s.wait(ctx); err != nil {
			return block.Namespace{}, err
		}
	}
	return s.Store.OpenNamespace(ctx, d, ttl)
}

func (s *slowStore) Pin(ctx context.Context, ns block.NamespaceID, hashLen int, hashes []byte) ([]error, error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	return s.Store.Pin(ctx, ns, hashLen, hashes)
}

// TestOpenWaits shows that calls behind one that waits for a medium are answered
// before it, that its deadline and Cancel end it, and that it counts as in flight.
func TestOpenWaits(t *testing.T) {
	st := memstore.New(nil)
	slow := &slowStore{Store: st, gate: make(chan struct{})}
	r := serve(t, st, slow, &session.ServerOptions{Calls: 2})
	c := r.client()
	request := &session.OpenMessage{Flags: session.FlagCreate, Fields: fields("name", "n", "block_bytes", "5")}
	opening := c.send(session.CodeOpen, request)
	pinning := c.send(session.CodePin, &session.PinMessage{Keys: r.keys("a"), Deadline: 20})
	if err := c.answer(c.send(session.CodeMatch, &session.MatchMessage{Keys: r.keys("a")}), session.CodeMatched, &session.MatchedMessage{}); err != nil {
		t.Error(err)
	}
	if err := c.answer(c.send(session.CodeOpen, &session.OpenMessage{Fields: fields("name", "llama")}), session.CodeOpened, &session.OpenedMessage{}); err != nil {
		t.Error(err)
	}
	if err := c.answer(pinning, 0, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("pin beyond its deadline: error %v", err)
	}
	second := c.send(session.CodeOpen, request)
	if err := c.answer(c.send(session.CodeOpen, request), 0, nil); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a call too many: error %v", err)
	}
	c.cancel(second)
	if err := c.answer(second, 0, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: error %v", err)
	}
	close(slow.gate)
	var got session.OpenedMessage
	if err := c.answer(opening, session.CodeOpened, &got); err != nil || got.BlockBytes != 5 {
		t.Errorf("opened %+v, error %v", got, err)
	}
	_ = c.c.Close()
	r.quiet()
}

// TestPin shows pins over a session: each key has its status, and the namespace's
// length of hashes counts.
func TestPin(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.client()
	c.store(r.keys("a"), []byte("hello"))
	c.store(r.keys("b"), []byte("world"))
	pin := func(k session.Keys, flags uint16) ([]session.Status, error) {
		var done session.PinnedMessage
		err := c.answer(c.send(session.CodePin, &session.PinMessage{Keys: k, Flags: flags}), session.CodePinned, &done)
		return done.Results, err
	}
	for _, tt := range []struct {
		names  string
		flags  uint16
		want   []session.Status
		pinned int64 // then
	}{
		{"aXb", 0, []session.Status{session.StatusOK, session.StatusNotFound, session.StatusOK}, 2},
		{"a", 0, []session.Status{session.StatusOK}, 2},
		{"aX", session.FlagUnpin, []session.Status{session.StatusOK, session.StatusOK}, 1},
		{"b", session.FlagUnpin, []session.Status{session.StatusOK}, 0},
	} {
		got, err := pin(r.keys(tt.names), tt.flags)
		if err != nil || len(got) != len(tt.want) {
			t.Fatalf("pin %s flags %#x: %v, error %v", tt.names, tt.flags, got, err)
		}
		for i := range got {
			if got[i] != tt.want[i] {
				t.Errorf("pin %s flags %#x, key %d: %v, want %v", tt.names, tt.flags, i, got[i], tt.want[i])
			}
		}
		if n := r.store.Stats().Pinned; n != tt.pinned {
			t.Errorf("%d pinned after %s, want %d", n, tt.names, tt.pinned)
		}
	}
	long := r.ns
	long.HashLen, long.Hashes = 16, make([]byte, 16)
	seven := r.ns
	seven.HashLen, seven.Hashes = 7, make([]byte, 7)
	nobody := r.keys("a")
	nobody.NS, nobody.Tag = 99, 0
	for _, tt := range []struct {
		name  string
		k     session.Keys
		flags uint16
		want  error
		text  string
	}{
		{"another hash length", long, 0, block.ErrInvalid, "16"},
		{"another hash length to unpin", long, session.FlagUnpin, block.ErrInvalid, "16"},
		{"hash length", seven, 0, block.ErrInvalid, "hash_len: 7"},
		{"namespace", nobody, 0, block.ErrNotFound, "99"},
		{"flags", r.keys("a"), session.FlagQuiet, block.ErrInvalid, "flags"},
		{"no keys", r.ns, 0, block.ErrInvalid, "keys: 0"},
	} {
		if _, err := pin(tt.k, tt.flags); !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: error %v, want %v with %q", tt.name, err, tt.want, tt.text)
		}
	}
	_ = c.c.Close()
	r.quiet()
}

// TestClientPin shows the client's side, with more keys than one message takes.
func TestClientPin(t *testing.T) {
	r := newRig(t, nil, nil)
	c := r.open("tcp", nil)
	ns := r.handle()
	putBlocks(t, c, ns, map[int]int{0: 100, 9000: 100})
	errs, err := c.Pin(t.Context(), ns, packedFrom(0, 9001))
	if err != nil || len(errs) != 9001 {
		t.Fatalf("%d errors, error %v", len(errs), err)
	}
	for i, err := range errs {
		if there := i == 0 || i == 9000; there != (err == nil) || !there && !errors.Is(err, block.ErrNotFound) {
			t.Fatalf("key %d: error %v", i, err)
		}
	}
	if n := r.store.Stats().Pinned; n != 2 {
		t.Errorf("%d pinned, want 2", n)
	}
	if err := c.Unpin(t.Context(), ns, packedFrom(0, 9001)); err != nil {
		t.Error(err)
	}
	if n := r.store.Stats().Pinned; n != 0 {
		t.Errorf("%d pinned, want none", n)
	}
	if _, err := c.Pin(t.Context(), ns, make([]byte, 9)); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("torn hashes: error %v", err)
	}
	if err := c.Unpin(t.Context(), session.Namespace{ID: ns.ID, HashLen: 7}, make([]byte, 7)); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("hash length: error %v", err)
	}
}
