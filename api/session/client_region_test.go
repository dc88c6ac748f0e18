package session_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// hooked is a store whose gets and grants a test changes.
type hooked struct {
	*memstore.Store
	mu    sync.Mutex
	get   func(ctx context.Context, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error
	grant func()
}

// hook changes what it does from now on.
func (h *hooked) hook(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

func (h *hooked) Get(ctx context.Context, ns block.NamespaceID, hashLen int, want []block.Wanted, o block.GetOptions, use func(i int, p block.Payload) error) error {
	h.mu.Lock()
	get := h.get
	h.mu.Unlock()
	if get != nil {
		return get(ctx, want, o, use)
	}
	return h.Store.Get(ctx, ns, hashLen, want, o, use)
}

func (h *hooked) Grant(ctx context.Context, ns block.NamespaceID, n int64, count int) ([]block.Grant, error) {
	h.mu.Lock()
	grant := h.grant
	h.mu.Unlock()
	if grant != nil {
		grant()
	}
	return h.Store.Grant(ctx, ns, n, count)
}

// attach opens a session with one region, and maps that.
func (r *rig) attach(n int64) (*session.Client, *os.File, []byte) {
	r.t.Helper()
	f, mem := unsealed(r.t, n)
	c, err := session.Dial(r.t.Context(), "unix", r.unix, &session.ClientOptions{NoShared: true, Regions: []session.Region{{Fd: int(f.Fd()), Length: n}}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			r.t.Error(err)
		}
	})
	return c, f, mem
}

// rows are keys of n bytes each, that lie behind each other.
func rows(from, count, n int) (items []session.RegionItem, blocks []session.RegionBlock) {
	for i := range count {
		s := []session.Segment{segment(0, n/2, i*n), segment(0, n-n/2, i*n+n/2)}
		items = append(items, session.RegionItem{Hash: hashOf(from + i), Segments: s})
		blocks = append(blocks, session.RegionBlock{Hash: hashOf(from + i), Parent: hashOf(from + i - 1), HasParent: i > 0, Segments: s})
	}
	return items, blocks
}

// TestClientRegion puts and gets more than one message can name.
func TestClientRegion(t *testing.T) {
	r := newRig(t, &memstore.Options{Capacity: 64 << 20}, &session.ServerOptions{Bytes: 1 << 20})
	const n, count = 300_000, 20
	c, _, mem := r.attach(n * count)
	want := bytesOf(3, len(mem))
	copy(mem, want)
	items, blocks := rows(0, count, n)
	put, err := c.RegionPut(t.Context(), r.handle(), blocks, session.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range put {
		if put[i] != (block.CommitResult{}) {
			t.Errorf("put %d: %+v", i, put[i])
		}
	}
	clear(mem)
	got, err := c.RegionGet(t.Context(), r.handle(), append(items, session.RegionItem{Hash: hashOf(99), Segments: items[0].Segments}), block.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range count {
		if w := (session.GetResult{Tier: block.G2, Len: n, Total: n, Sum: sumOfBlock(want[i*n:][:n])}); got[i] != w {
			t.Errorf("get %d: %+v, want %+v", i, got[i], w)
		}
	}
	if got[count].Reason != block.MissAbsent || !bytes.Equal(mem, want) {
		t.Errorf("absent key: %+v; bytes are right: %t", got[count], bytes.Equal(mem, want))
	}
	short, err := c.RegionGet(t.Context(), r.handle(), []session.RegionItem{{Hash: hashOf(0), Segments: []session.Segment{segment(0, 5, 0)}}}, block.GetOptions{})
	if err != nil || !errors.Is(short[0].Err, block.ErrInvalid) || short[0].Total != n || !strings.Contains(short[0].Err.Error(), "5 bytes for a block of 300000") {
		t.Errorf("too short: %+v, error %v", short, err)
	}
	if _, err := c.RegionGet(t.Context(), r.handle(), []session.RegionItem{{Hash: hashOf(0)}}, block.GetOptions{}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("no segments: error %v", err)
	}
	if res, err := c.RegionPut(t.Context(), r.handle(), []session.RegionBlock{{Hash: hashOf(0)}}, session.PutOptions{}); !errors.Is(err, block.ErrInvalid) || res[0].Err == nil {
		t.Errorf("no segments: %v, error %v", res, err)
	}
	if st := c.Stats(); st.Conn.BytesIn > 1<<14 || st.Conn.BytesOut > 1<<14 || st.BytesIn != n*count || st.BytesOut != n*count {
		t.Errorf("%+v", st)
	}
}

// TestClientRegionDial shows what a client is told that gets no regions.
func TestClientRegionDial(t *testing.T) {
	r := newRig(t, nil, nil)
	f, _ := unsealed(t, 4096)
	ok := session.Region{Fd: int(f.Fd()), Length: 4096}
	for _, tt := range []struct {
		name, network, addr string
		regions             []session.Region
		want                error
		text                string
	}{
		{"over TCP", "tcp", r.tcp, []session.Region{ok}, block.ErrInvalid, "unix socket"},
		{"no length", "unix", r.unix, []session.Region{ok, {Fd: ok.Fd}}, block.ErrInvalid, "region 1: length 0"},
		{"too long", "unix", r.unix, []session.Region{ok, {Fd: ok.Fd, Length: 4097}}, block.ErrInvalid, "region 1: invalid: 4097 bytes of a file of 4096"},
		{"too many", "unix", r.unix, make([]session.Region, 65), block.ErrInvalid, "65 of them"},
		{"no file", "unix", r.unix, []session.Region{{Path: "/dev/shm/kvtier-test-nobody", Length: 1}}, block.ErrDenied, "region 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := session.Dial(t.Context(), tt.network, tt.addr, &session.ClientOptions{Regions: tt.regions})
			if err == nil {
				_ = c.Close()
			}
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}

// inPieces hands a block out in pieces, and calls between before each.
func inPieces(p []byte, use func(i int, p block.Payload) error, between func(at int)) error {
	for at := 0; at < len(p); {
		between(at)
		n := min(64<<10, len(p)-at)
		err := use(0, block.Payload{Tier: block.G3, Total: uint32(len(p)), Sum: sumOfBlock(p), Bytes: p[at:][:n:n], At: int64(at), More: at+n < len(p)})
		if err != nil {
			return err
		}
		at += n
	}
	return nil
}

// TestRegionCancel cancels a get in the middle of a block: it returns when the server
// has stopped, and no byte of the region changes after that.
func TestRegionCancel(t *testing.T) {
	for _, tt := range []struct {
		name string
		want error
		ctx  func(parent context.Context) (context.Context, context.CancelFunc)
	}{
		{"canceled", context.Canceled, context.WithCancel},
		// A machine that does other things needs a moment until the server copies.
		{"deadline", context.DeadlineExceeded, func(parent context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(parent, time.Second)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) { testRegionCancel(t, tt.want, tt.ctx) })
	}
}

func testRegionCancel(t *testing.T, want error, call func(context.Context) (context.Context, context.CancelFunc)) {
	st := memstore.New(nil)
	h := &hooked{Store: st}
	data := bytesOf(1, 1<<20)
	reached, told, goOn := make(chan struct{}), make(chan struct{}), make(chan struct{})
	h.get = func(ctx context.Context, _ []block.Wanted, _ block.GetOptions, use func(int, block.Payload) error) error {
		return inPieces(data, use, func(at int) {
			if at == 512<<10 {
				close(reached)
				<-ctx.Done()
				close(told)
				<-goOn
			}
		})
	}
	r := serve(t, st, h, nil)
	c, _, mem := r.attach(1 << 20)
	items, _ := rows(1, 1, 1<<20)
	ctx, cancel := call(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := c.RegionGet(ctx, r.handle(), items, block.GetOptions{})
		done <- err
	}()
	<-reached
	if errors.Is(want, context.Canceled) {
		cancel()
	}
	<-told
	<-ctx.Done()
	select {
	case err := <-done:
		t.Fatalf("it returned while the server copies: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(goOn)
	if err := <-done; !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
	quiet(t, mem)
	if !bytes.Equal(mem[:512<<10], data[:512<<10]) {
		t.Error("the first half is not there")
	}
	if n := bytes.Count(mem[512<<10+64<<10:], []byte{0}); n != 512<<10-64<<10 {
		t.Error("it went on copying")
	}
	h.hook(func() { h.get = nil })
	putOne(t, c, r.handle(), 7, bytesOf(7, 100)) // the session goes on
}

// quiet checks that nobody writes to mem.
func quiet(t *testing.T, mem []byte) {
	t.Helper()
	before := bytes.Clone(mem)
	time.Sleep(20 * time.Millisecond)
	if !bytes.Equal(before, mem) {
		t.Error("memory is written to")
	}
}

// TestRegionEnd ends sessions in the middle of a copy. The connection ends when the
// server has stopped, and not before; so does Close.
func TestRegionEnd(t *testing.T) {
	st := memstore.New(nil)
	h := &hooked{Store: st}
	data := bytesOf(1, 1<<20)
	r := serve(t, st, h, nil)
	for _, way := range []string{"half close", "Close"} {
		t.Run(way, func(t *testing.T) {
			reached, told, goOn := make(chan struct{}), make(chan struct{}), make(chan struct{})
			h.hook(func() {
				h.get = func(ctx context.Context, _ []block.Wanted, _ block.GetOptions, use func(int, block.Payload) error) error {
					return inPieces(data, use, func(at int) {
						if at == 512<<10 {
							close(reached)
							<-ctx.Done()
							close(told)
							<-goOn
						}
					})
				}
			})
			f, mem := unsealed(t, 1<<20)
			var end func()
			items, _ := rows(1, 1, 1<<20)
			if way == "Close" {
				c, err := session.Dial(t.Context(), "unix", r.unix, &session.ClientOptions{NoShared: true, Regions: []session.Region{{Fd: int(f.Fd()), Length: 1 << 20}}})
				if err != nil {
					t.Fatal(err)
				}
				go func() { _, _ = c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{}) }() // it fails with the session
				end = func() {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}
			} else {
				c := dial(t, "unix", r.unix)
				if err := c.withRegions([]int{int(f.Fd())}, session.HelloRegion{Length: 1 << 20}); err != nil {
					t.Fatal(err)
				}
				k := r.keys("")
				k.Hashes = items[0].Hash[:8]
				c.send(session.CodeRegionGet, &session.RegionGetMessage{Keys: k, Segments: segments(items[0].Segments)})
				end = func() {
					if err := c.c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
						t.Error(err)
					}
					c.ended()
				}
			}
			<-reached
			ended := make(chan struct{})
			go func() { end(); close(ended) }()
			<-told
			select {
			case <-ended:
				t.Fatal("the session is over while the server copies")
			case <-time.After(50 * time.Millisecond):
			}
			close(goOn)
			select {
			case <-ended:
			case <-time.After(patience):
				t.Fatal("the session does not end")
			}
			quiet(t, mem)
			if n := bytes.Count(mem[512<<10+64<<10:], []byte{0}); n != 512<<10-64<<10 {
				t.Error("it went on copying")
			}
		})
	}
	r.quiet()
	if st := r.server.Stats(); st.Regions != 0 || len(mapped(t)) != 0 {
		t.Errorf("%d regions are left, and mappings\n%s", st.Regions, strings.Join(mapped(t), ""))
	}
}

// TestRegionCorrupt shows that bytes with another checksum are no hit, and that the
// store is told to look at the block.
func TestRegionCorrupt(t *testing.T) {
	st := memstore.New(nil)
	h := &hooked{Store: st}
	right, wrong := bytesOf(1, 1<<20), bytesOf(2, 1<<20)
	for _, tt := range []struct {
		name  string
		again block.Payload
		want  block.MissReason
	}{
		{"damaged", block.Payload{Reason: block.MissCorrupt}, block.MissCorrupt},
		{"well again", block.Payload{Tier: block.G2, Total: 1 << 20, Sum: sumOfBlock(right), Bytes: right}, block.Hit},
		{"still wrong", block.Payload{Tier: block.G2, Total: 1 << 20, Sum: sumOfBlock(right), Bytes: wrong}, block.MissCorrupt},
	} {
		for _, pieces := range []bool{false, true} {
			t.Run(tt.name, func(t *testing.T) {
				looked := 0
				h.hook(func() {
					h.get = func(_ context.Context, want []block.Wanted, o block.GetOptions, use func(int, block.Payload) error) error {
						switch {
						case o.Verify:
							looked++
							if len(want) != 1 || want[0].Hash != hashOf(2) || !o.Quiet || o.Pieces {
								t.Errorf("looked at %v with %+v", want, o)
							}
							return use(0, tt.again)
						case len(want) != 2 || !o.Pieces:
							t.Errorf("get of %v with %+v", want, o)
						}
						if err := use(0, block.Payload{Reason: block.MissAbsent}); err != nil {
							return err
						}
						p := block.Payload{Tier: block.G2, Total: 1 << 20, Sum: sumOfBlock(right), Bytes: wrong}
						if pieces {
							p.Bytes, p.More = wrong[:1000], true
							if err := use(1, p); err != nil {
								return err
							}
							p.Bytes, p.At, p.More = wrong[1000:], 1000, false
						}
						return use(1, p)
					}
				})
				r := serve(t, st, h, nil)
				c, _, mem := r.attach(2 << 20)
				items, _ := rows(1, 2, 1<<20)
				res, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{})
				if err != nil || looked != 1 || res[0].Reason != block.MissAbsent || res[1].Reason != tt.want || res[1].Err != nil {
					t.Errorf("%+v, looked %d times, error %v", res, looked, err)
				}
				if tt.want == block.Hit && !bytes.Equal(mem[1<<20:], right) {
					t.Error("a hit with other bytes")
				}
			})
		}
	}
}

// TestRegionBusy shows the limits of a session's calls on regions.
func TestRegionBusy(t *testing.T) {
	st := memstore.New(&memstore.Options{Capacity: 2<<20 + 1<<19})
	h := &hooked{Store: st}
	r := serve(t, st, h, &session.ServerOptions{Calls: 1, Bytes: 3 << 19})
	f, mem := unsealed(t, 4<<20)
	c := dial(t, "unix", r.unix)
	if err := c.withRegions([]int{int(f.Fd())}, session.HelloRegion{Length: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	copy(mem, bytesOf(1, 4<<20))
	at := func(i int) []session.Segment { return []session.Segment{segment(0, 1<<20, i<<20)} }
	put, err := c.regionPut(r.keys("ab"), at(0), at(1))
	if err != nil || put.Results[0].Status != session.StatusOK || put.Results[1] != (session.PutResult{Status: session.StatusBusy}) {
		t.Errorf("put of too many bytes: %+v, error %v", put, err)
	}
	if put, err = c.regionPut(r.keys("b"), at(1)); err != nil || put.Results[0].Status != session.StatusOK {
		t.Errorf("put: %+v, error %v", put, err)
	}
	got, err := c.regionGet(r.keys("ab"), at(2), at(3))
	if err != nil || got.Blocks[0].Status != session.StatusOK || got.Blocks[1] != (session.GotBlock{Status: session.StatusBusy, Chunk: session.NoChunk}) {
		t.Errorf("get of too many bytes: %+v, error %v", got, err)
	}
	// No room for a third one: it is waited for until the deadline.
	var m session.PutDoneMessage
	p := &session.RegionPutMessage{Keys: r.keys("cd"), Deadline: 50, HasParent: make([]bool, 2), Segments: segments(at(2), []session.Segment{segment(0, 1000, 0)})}
	for ; p.Deadline < 10_000; p.Deadline *= 2 {
		if err := c.answer(c.send(session.CodeRegionPut, p), session.CodePutDone, &m); err != nil {
			t.Fatal(err)
		}
		if m.Results[0].Status != session.StatusDeadline { // else it was over before the first block's turn
			break
		}
	}
	if m.Results[0].Status != session.StatusNoSpace || m.Results[1].Status != session.StatusDeadline {
		t.Errorf("put without room: %+v", m)
	}
	// A call beside another one.
	reached, goOn := make(chan struct{}), make(chan struct{})
	h.hook(func() {
		h.grant = func() {
			close(reached)
			<-goOn
		}
	})
	first := c.send(session.CodeRegionPut, &session.RegionPutMessage{Keys: r.keys("e"), HasParent: []bool{false}, Segments: segments([]session.Segment{segment(0, 1000, 0)})})
	<-reached
	if put, err = c.regionPut(r.keys("b"), at(1)); err != nil || put.Results[0].Status != session.StatusBusy {
		t.Errorf("put beside another: %+v, error %v", put, err)
	}
	if got, err = c.regionGet(r.keys("b"), at(1)); err != nil || got.Blocks[0].Status != session.StatusBusy {
		t.Errorf("get beside another: %+v, error %v", got, err)
	}
	close(goOn)
	if err := c.answer(first, session.CodePutDone, &m); err != nil || m.Results[0].Status != session.StatusOK {
		t.Errorf("put: %+v, error %v", m, err)
	}
	_ = c.c.Close()
	r.quiet()
}

// TestRegionTwoSessions shows that a block that one session puts from its region is
// got into another's, many at once, while the memory stays flat.
func TestRegionTwoSessions(t *testing.T) {
	r := newRig(t, &memstore.Options{Capacity: 256 << 20, Evict: true}, nil)
	const n, count = 96 << 10, 16
	a, _, amem := r.attach(n * count)
	b, _, bmem := r.attach(n * count)
	for round := range 30 {
		copy(amem, bytesOf(round, n*count))
		items, blocks := rows(round*count, count, n)
		var wg sync.WaitGroup
		for i := range count {
			wg.Go(func() {
				blocks[i].HasParent = false
				if res, err := a.RegionPut(t.Context(), r.handle(), blocks[i:i+1], session.PutOptions{}); err != nil || res[0].Err != nil {
					t.Errorf("put: %+v, error %v", res, err)
				}
				if res, err := b.RegionGet(t.Context(), r.handle(), items[i:i+1], block.GetOptions{}); err != nil || res[0].Err != nil || res[0].Reason != block.Hit {
					t.Errorf("get: %+v, error %v", res, err)
				}
			})
		}
		wg.Wait()
		if !bytes.Equal(amem, bmem) {
			t.Fatal("other bytes")
		}
	}
	runtime.KeepAlive(a)
}
