package tiers_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
	"github.com/kvtier/kvtier/xfer"
)

// TestScripts runs testdata/store/*.txt. A script is a sequence of commands with
// what they print: the command, a line of four dashes, the output, an empty line.
// Blocks are numbers, and a block's bytes follow from its number and its length.
//
//	open dram=MIB [slab=MIB]... [grace]   a fresh store with a namespace
//	reopen                                close it without draining, open it again
//	crash                                 copy what is on disk, close it, open the copy
//	put BLOCK BYTES [g3] [parent=BLOCK] [bytes-of=BLOCK]
//	fill FIRST COUNT BYTES [g3] [parents] puts; only what is left afterwards is shown
//	get [nopromote] BLOCK...              also says whether the bytes are right
//	match BLOCK...                        prefix and states: - absent, p pending, R resident
//	reserve BLOCK BYTES / abort BLOCK
//	lease NAME BLOCK... / unlease NAME
//	evict g2|g3 BLOCK                     as the evictor does
//	delete BLOCK...  / clear / drain
//	pin BLOCK... / unpin BLOCK...
//	damage g2|g3 BLOCK                    flips a byte
//	hold / release                        the catalog is not written in between
//	& COMMAND / wait                      runs it beside the next ones, waits for it
//	show                                  where blocks are, what is counted
//	account                               whether each block put is there or was evicted
//
// The output begins with what happened on the devices, in order: each transfer
// and each flush, and behind a flush or write what the catalog has at this time;
// then whether the catalog was synced by the time of the answer. Then come the
// events, then the result, marked with =.
//
// KVTIER_REWRITE=store writes the outputs anew.
func TestScripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/store/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			t.Parallel()
			script, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, script)
			if os.Getenv("KVTIER_REWRITE") == "store" {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if !bytes.Equal(got, script) {
				t.Errorf("output differs; got:\n%s\nwant:\n%s", got, script)
			}
		})
	}
}

// runScript returns the script with the outputs of this run.
func runScript(t *testing.T, script []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	r := &storeScript{T: t, leases: map[string]uint64{}, reserved: map[int]uint64{}, grants: map[string]block.Grant{}, sizes: map[int]int{}}
	skip := false
	for in := bufio.NewScanner(bytes.NewReader(script)); in.Scan(); {
		line := in.Text()
		switch {
		case line == "":
			skip = false
			fmt.Fprintln(&out)
		case skip:
		case line == "----":
			skip = true
		case strings.HasPrefix(line, "#"):
			fmt.Fprintln(&out, line)
		default:
			fmt.Fprintf(&out, "%s\n----\n%s", line, r.command(strings.Fields(line)))
		}
	}
	r.close()
	return out.Bytes()
}

type storeScript struct {
	*testing.T
	s        *tiers.Store
	ns       block.Namespace
	opts     tiers.Options
	leases   map[string]uint64
	reserved map[int]uint64
	grants   map[string]block.Grant
	sizes    map[int]int
	release  func()
	beside   []chan string // of the commands that run beside, first one first
	watched  chan struct{} // closed when the store's watcher has ended

	mu struct {
		sync.Mutex
		trace  []string
		events []string
		seq    uint64
		mute   bool
	}
}

// command runs one command and returns trace, events and result.
func (r *storeScript) command(f []string) string {
	r.Helper()
	mute := f[0] == "fill" || f[0] == "drain"
	r.mu.Lock()
	r.mu.trace, r.mu.events, r.mu.mute = nil, nil, mute
	r.mu.Unlock()
	store, syncs := r.s, r.syncs()
	var result string
	switch {
	case f[0] == "&":
		beside := make(chan string, 1)
		r.beside = append(r.beside, beside)
		go func() { beside <- r.run(f[1:]) }()
		result = "begun"
	case f[0] == "wait":
		result = <-r.beside[0]
		r.beside = r.beside[1:]
	default:
		result = r.run(f)
	}
	r.quiet(f[0])
	if r.s == store && r.syncs() > syncs {
		r.note("the catalog was synced")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if f[0] == "clear" || f[0] == "get" {
		slices.Sort(r.mu.events) // blocks come in no order
	}
	if !slices.ContainsFunc(r.mu.trace, func(l string) bool { return !strings.HasPrefix(l, "read slab") }) {
		slices.Sort(r.mu.trace) // devices read side by side
	}
	var out strings.Builder
	for _, l := range append(r.mu.trace, r.mu.events...) {
		fmt.Fprintln(&out, l)
	}
	fmt.Fprintln(&out, "=", strings.ReplaceAll(result, "\n", "\n  "))
	return out.String()
}

// syncs is how often the catalog's log was synced.
func (r *storeScript) syncs() int64 {
	if r.s == nil {
		return 0
	}
	return r.s.CatalogMetrics().WALSyncs
}

// restLooks is how often nothing must have happened for a store to be at rest, however
// long that takes.
const restLooks = 8

// quiet waits until nothing happens any more and all events are told.
func (r *storeScript) quiet(command string) {
	long := 20 * time.Millisecond
	if command == "fill" || command == "unlease" || command == "&" || command == "drain" {
		long = 250 * time.Millisecond // for the evictor, and for what runs beside
	}
	last, since, looks := int64(-1), time.Now(), 0
	awaited := r.release != nil // while the catalog is held there is nothing to wait for
	eventually(r, "the store is at rest", func() bool {
		work, seq := tiers.Activity(r.s)
		r.mu.Lock()
		told := r.mu.seq >= seq
		r.mu.Unlock()
		if work != last || !told {
			last, since, looks = work, time.Now(), 0
		}
		// Where this one is given a processor as rarely as that the others are, too.
		if looks++; time.Since(since) <= long || looks < restLooks {
			return false
		}
		if !awaited {
			// A flush may take longer than that, and what follows from it comes then.
			tiers.AwaitCommits(r.s)
			awaited, since, looks = true, time.Now(), 0
			return false
		}
		return true
	})
}

func (r *storeScript) note(format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.mu.mute {
		r.mu.trace = append(r.mu.trace, fmt.Sprintf(format, a...))
	}
}

// records lists the blocks that the catalog has.
func (r *storeScript) records() string {
	var is []int
	err := tiers.Catalog(r.s).Scan(func(rec *index.Record) error {
		is = append(is, numberOf(rec.Key.Hash))
		return nil
	})
	if err != nil {
		return err.Error()
	}
	slices.Sort(is)
	return fmt.Sprint(is)
}

// pinned lists the blocks that the catalog has as pinned.
func (r *storeScript) pinned() string {
	var is []int
	err := tiers.Catalog(r.s).Scan(func(rec *index.Record) error {
		if rec.Pinned {
			is = append(is, numberOf(rec.Key.Hash))
		}
		return nil
	})
	if err != nil {
		return err.Error()
	}
	slices.Sort(is)
	return fmt.Sprint(is)
}

func numberOf(h block.Hash) int { return int(h[0]) | int(h[1])<<8 | int(h[2])<<16 }

func (r *storeScript) number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err) // a mistake in the script
	}
	return n
}

func (r *storeScript) numbers(f []string) (is []int, hs []byte) {
	for _, s := range f {
		is = append(is, r.number(s))
		hs = append(hs, pack(hashOf(is[len(is)-1]))...)
	}
	return is, hs
}

// open opens the store and begins to watch it.
func (r *storeScript) open() {
	r.opts.Agent = agentWith(r, func(b xfer.Backend) xfer.Backend {
		return spy{b, func(op xfer.Op, _, remote []xfer.Bound) {
			var bytes uint64
			for _, d := range remote {
				bytes += d.Len
			}
			at := fmt.Sprintf("%v slab %d at %d, %d bytes", op, remote[0].Dev, remote[0].Addr-slabDataAt, bytes)
			if op == xfer.Write {
				at += ", catalog " + r.records()
			}
			r.note("%s", at)
		}}
	})
	r.s = openStore(r, r.opts)
	r.ns = space(r, r.s, "s", 8<<20)
	tiers.WrapFlush(r.s, func(device int, _ string, flush func() error) error {
		r.note("flush slab %d, catalog %s", device, r.records())
		return flush()
	})
	_, r.mu.seq = tiers.Activity(r.s)
	ready, watched := make(chan struct{}), make(chan struct{})
	r.watched = watched
	watch := func(ev block.Event) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.mu.seq = ev.Seq
		if r.mu.mute {
			return nil
		}
		l := fmt.Sprintf("event: %v", ev.Kind)
		switch ev.Kind {
		case block.EventStored:
			l += fmt.Sprintf(" %d in %v", numberOf(ev.Hash), ev.Tier)
			if ev.HasPar {
				l += fmt.Sprintf(", parent %d", numberOf(ev.Parent))
			}
		case block.EventRemoved:
			l += fmt.Sprintf(" %d from %v, %v", numberOf(ev.Hash), ev.Tier, ev.Reason)
			if ev.Last {
				l += ", last"
			}
		case block.EventCleared:
			l += fmt.Sprintf(" %d blocks", ev.Count)
		}
		r.mu.events = append(r.mu.events, l)
		return nil
	}
	s := r.s
	go func() {
		defer close(watched)
		if err := s.Watch(context.Background(), block.WatchOptions{Ready: func(block.WatchStart) { close(ready) }}, watch); !errors.Is(err, block.ErrClosed) {
			r.Errorf("watch: %v", err)
		}
	}()
	<-ready
}

func (r *storeScript) close() {
	if err := r.s.Close(); err != nil {
		r.Fatal(err)
	}
	<-r.watched
}

// run runs one command and returns its result.
func (r *storeScript) run(f []string) string {
	switch f[0] {
	case "open":
		return r.openFresh(f[1:])
	case "reopen":
		r.close()
		r.open()
		return r.show()
	case "crash":
		r.crash()
		return r.show()
	case "put":
		return r.put(f[1:])
	case "fill":
		return r.fill(f[1:])
	case "get":
		return r.get(f[1:])
	case "match":
		_, hs := r.numbers(f[1:])
		return r.match(hs, 0, nil)
	case "reserve":
		i, n := r.number(f[1]), r.number(f[2])
		res, _, err := r.s.Reserve(r.Context(), r.ns.ID, hashLen, hashOf(i), int64(n), block.PutOptions{})
		r.reserved[i] = res.ID
		return outcome(err, "slot at %d", res.Place.Offset())
	case "grant":
		gs, err := r.s.Grant(r.Context(), r.ns.ID, int64(r.number(f[2])), 1)
		if err == nil {
			r.grants[f[1]] = gs[0]
		}
		return outcome(err, "payload at %d", r.grants[f[1]].Offset)
	case "redeem":
		return r.redeem(f[1:])
	case "revoke":
		g := r.grants[f[1]]
		r.s.AbortGrants([]uint64{g.ID})
		r.grants[f[1]] = block.Grant{ID: g.ID}
		return "ok"
	case "lend":
		return r.lend(f[1], f[2:])
	case "abort":
		r.s.Abort([]uint64{r.reserved[r.number(f[1])]})
		return "ok"
	case "lease":
		_, hs := r.numbers(f[2:])
		var l block.Lease
		out := r.match(hs, time.Hour, &l)
		r.leases[f[1]] = l.ID
		return out
	case "unlease":
		return outcome(r.s.ReleaseLease(r.leases[f[1]]), "ok")
	case "evict":
		t, err := block.ParseTier(f[1])
		if err != nil {
			r.Fatal(err)
		}
		h := tiers.HandleOf(r.s, block.Key{NS: r.ns.ID, Hash: hashOf(r.number(f[2]))})
		return fmt.Sprintf("%d bytes came free", tiers.Evict(r.s, t, h))
	case "delete":
		_, hs := r.numbers(f[1:])
		n, err := r.s.Delete(r.Context(), r.ns.ID, hashLen, hs)
		return outcome(err, "%d were there, catalog %s", n, r.records())
	case "clear":
		n, err := r.s.Clear(r.Context(), r.ns.ID)
		return outcome(err, "%d were there, catalog %s", n, r.records())
	case "drain":
		res, err := r.s.Drain(r.Context(), nil)
		return outcome(err, "kept %d, left %d; catalog %s", res.Kept, res.Left, r.records())
	case "pin":
		is, hs := r.numbers(f[1:])
		errs, err := r.s.Pin(r.Context(), r.ns.ID, hashLen, hs)
		var out []string
		for i, err := range errs {
			out = append(out, outcome(err, "%d: pinned", is[i]))
		}
		return outcome(err, "%s; catalog %s, pinned %s", strings.Join(out, ", "), r.records(), r.pinned())
	case "unpin":
		_, hs := r.numbers(f[1:])
		n, err := r.s.Unpin(r.Context(), r.ns.ID, hashLen, hs)
		return outcome(err, "%d were pinned; catalog %s, pinned %s", n, r.records(), r.pinned())
	case "damage":
		return r.damage(f[1], r.number(f[2]))
	case "hold":
		r.release = tiers.HoldCommits(r.s)
		return "ok"
	case "release":
		r.release()
		r.release = nil
		return "ok"
	case "show":
		return r.show()
	case "account":
		st := r.s.Stats()
		return fmt.Sprintf("%d put, %d missing", len(r.sizes), int64(len(r.sizes))-st.Blocks-st.Removed["evicted"])
	}
	panic("unknown command " + f[0])
}

// outcome is a result, or which kind of error there is instead.
func outcome(err error, format string, a ...any) string {
	for _, kind := range []error{
		block.ErrConflict, block.ErrNoSpace, block.ErrNotFound, block.ErrCorrupt,
		block.ErrLeaseExpired, block.ErrUnavailable, block.ErrInvalid,
	} {
		if errors.Is(err, kind) {
			return "error: " + kind.Error()
		}
	}
	if err != nil {
		return "error: " + err.Error()
	}
	return fmt.Sprintf(format, a...)
}

func (r *storeScript) openFresh(f []string) string {
	if r.s != nil {
		r.close()
	}
	dir := r.TempDir()
	r.opts = tiers.Options{Dir: filepath.Join(dir, "data")}
	clear(r.sizes)
	for _, s := range f {
		k, v, _ := strings.Cut(s, "=")
		switch k {
		case "dram":
			r.opts.DRAM = int64(r.number(v)) << 20
		case "slab":
			path := filepath.Join(dir, fmt.Sprintf("slab%d", len(r.opts.Slabs)))
			r.opts.Slabs = append(r.opts.Slabs, tiers.SlabSpec{Path: path, Bytes: int64(r.number(v)) << 20})
		case "grace":
			r.opts.Grace = time.Hour
		}
	}
	r.open()
	return "ok"
}

// crash opens a copy of what is on disk now: nothing that Close does is in it.
func (r *storeScript) crash() {
	dir := r.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "data"), os.DirFS(r.opts.Dir)); err != nil && !errors.Is(err, fs.ErrExist) {
		r.Fatal(err)
	}
	old := r.opts
	r.opts.Dir, r.opts.Slabs = filepath.Join(dir, "data"), nil
	for i, s := range old.Slabs {
		b, err := os.ReadFile(s.Path)
		if err != nil {
			r.Fatal(err)
		}
		s.Path = filepath.Join(dir, fmt.Sprintf("slab%d", i))
		if err := os.WriteFile(s.Path, b, 0o600); err != nil {
			r.Fatal(err)
		}
		r.opts.Slabs = append(r.opts.Slabs, s)
	}
	if r.release != nil { // the copy was made, the old one may go on to its end
		r.release()
		r.release = nil
	}
	r.close()
	r.open()
}

// redeem puts a chain of blocks by grants, each given as GRANT=BLOCK:BYTES.
func (r *storeScript) redeem(f []string) string {
	var puts []block.GrantPut
	o := block.PutOptions{}
	for _, s := range f {
		name, v, ok := strings.Cut(s, "=")
		if !ok {
			o.Durable = block.G3
			continue
		}
		number, size, _ := strings.Cut(v, ":")
		i, g := r.number(number), r.grants[name]
		data := payload(i, r.number(size))
		copy(g.Mem, data)
		r.grants[name] = block.Grant{ID: g.ID} // its memory is another's now
		puts = append(puts, granted(r.ns, g, i, data, o))
		o.Parent, o.HasParent = hashOf(i), true
	}
	var out []string
	for j, res := range r.s.PutGranted(r.Context(), puts) {
		i := numberOf(puts[j].Key.Hash)
		if res.Err == nil {
			r.sizes[i] = int(puts[j].Len)
		}
		out = append(out, outcome(res.Err, "%d: %v, in %s", i, map[block.PutStatus]string{block.Stored: "stored", block.Exists: "exists"}[res.Status], tiersOf(r, r.s, r.ns, i)))
	}
	return strings.Join(out, "\n") + ", catalog " + r.records()
}

// lend lends blocks under a name for the lease.
func (r *storeScript) lend(name string, f []string) string {
	is, hs := r.numbers(f)
	loans, l, err := r.s.Lend(r.Context(), r.ns.ID, hashLen, hs, block.GetOptions{}, time.Hour, 1)
	r.leases[name] = l.ID
	var out []string
	for j, v := range loans {
		if v.Reason != block.Hit {
			out = append(out, fmt.Sprintf("%d: %v", is[j], v.Reason))
			continue
		}
		wantLoan(r, v, is[j], r.sizes[is[j]])
		out = append(out, fmt.Sprintf("%d: from %v, payload at %d", is[j], v.Tier, v.Offset))
	}
	return outcome(err, "%s", strings.Join(out, "\n"))
}

func (r *storeScript) put(f []string) string {
	i, n := r.number(f[0]), r.number(f[1])
	o, data := block.PutOptions{}, payload(i, n)
	for _, s := range f[2:] {
		k, v, _ := strings.Cut(s, "=")
		switch k {
		case "g3":
			o.Durable = block.G3
		case "parent":
			o.Parent, o.HasParent = hashOf(r.number(v)), true
		case "bytes-of":
			data = payload(r.number(v), n)
		}
	}
	res, ex, err := r.s.Reserve(r.Context(), r.ns.ID, hashLen, hashOf(i), int64(n), o)
	if err == nil && res.Status == block.Exists {
		sum := ex.Sum
		if !bytes.Equal(data, payload(i, r.sizes[i])) {
			sum[0] ^= 1
		}
		return outcome(r.s.CompareExisting(r.Context(), r.ns.ID, hashOf(i), int64(n), sum, o), "exists")
	}
	if err == nil {
		err = r.s.Fill(r.Context(), res.ID, 0, data)
	}
	if err == nil {
		err = r.s.Commit(r.Context(), []uint64{res.ID})[0].Err
	}
	if err == nil {
		r.sizes[i] = n
	}
	return outcome(err, "stored, in %s, catalog %s", tiersOf(r, r.s, r.ns, i), r.records())
}

func (r *storeScript) fill(f []string) string {
	first, count, n := r.number(f[0]), r.number(f[1]), r.number(f[2])
	var o block.PutOptions
	if slices.Contains(f, "g3") {
		o.Durable = block.G3
	}
	var refused int
	for i := first; i < first+count; i++ {
		if slices.Contains(f, "parents") && i > first {
			o.Parent, o.HasParent = hashOf(i-1), true
		}
		res, _, err := r.s.Reserve(r.Context(), r.ns.ID, hashLen, hashOf(i), int64(n), o)
		if err == nil {
			err = r.s.Fill(r.Context(), res.ID, 0, payload(i, n))
		}
		if err == nil {
			err = r.s.Commit(r.Context(), []uint64{res.ID})[0].Err
		}
		if errors.Is(err, block.ErrNoSpace) {
			refused++
		} else if err != nil {
			return err.Error()
		}
		r.sizes[i] = n
	}
	return fmt.Sprintf("%d refused", refused)
}

func (r *storeScript) get(f []string) string {
	var o block.GetOptions
	if f[0] == "nopromote" {
		o.NoPromote, f = true, f[1:]
	}
	o.Verify = true
	is, _ := r.numbers(f)
	var want []block.Wanted
	for _, i := range is {
		want = append(want, block.Wanted{Hash: hashOf(i)})
	}
	var out []string
	err := r.s.Get(r.Context(), r.ns.ID, hashLen, want, o, func(j int, p block.Payload) error {
		switch {
		case p.Reason != block.Hit:
			out = append(out, fmt.Sprintf("%d: %v", is[j], p.Reason))
		case !bytes.Equal(p.Bytes, payload(is[j], r.sizes[is[j]])):
			out = append(out, fmt.Sprintf("%d: WRONG BYTES from %v", is[j], p.Tier))
		default:
			out = append(out, fmt.Sprintf("%d: right, from %v", is[j], p.Tier))
		}
		return nil
	})
	return outcome(err, "%s", strings.Join(out, "\n"))
}

func (r *storeScript) match(hs []byte, d time.Duration, l *block.Lease) string {
	var res block.MatchResult
	err := r.s.Match(r.Context(), r.ns.ID, hashLen, hs, block.MatchOptions{All: true, Lease: d}, &res)
	if l != nil {
		*l = res.Lease
	}
	out := fmt.Sprintf("%d ", res.Prefix)
	for _, b := range res.Blocks {
		out += string("-pR"[b.State])
	}
	return outcome(err, "%s", out)
}

func (r *storeScript) damage(where string, i int) string {
	if where == "g2" {
		damageG2(r, r.s, r.ns, i)
		return "ok"
	}
	place := placeIn(r, r.s, r.ns, i, block.G3)
	_, header := tiers.SlotBytes(int64(r.sizes[i]))
	inFile(r, r.opts.Slabs[place.Device()].Path, place.Offset()+header, 1, func(b []byte) { b[0] ^= 1 })
	return "ok"
}

// show says where each block is, by the tiers' slots, and what is counted.
func (r *storeScript) show() string {
	var out strings.Builder
	where := map[string][]int{}
	for i := range r.sizes {
		if at := tiersOf(r, r.s, r.ns, i); at != "" {
			where[at] = append(where[at], i)
		}
	}
	for _, at := range []string{"g2", "g2g3", "g3"} {
		if is := where[at]; is != nil {
			slices.Sort(is)
			fmt.Fprintf(&out, "%s %s, ", at, ranges(is))
		}
	}
	st := r.s.Stats()
	fmt.Fprintf(&out, "blocks %d", st.Blocks)
	if st.Pinned > 0 {
		fmt.Fprintf(&out, ", pinned %d of %d bytes in %d", st.Pinned, st.PinnedBytes, tiers.PinnedSlots(r.s))
	}
	for _, tr := range st.Tiers {
		fmt.Fprintf(&out, ", %v used %d", tr.Tier, tr.Used)
	}
	for _, m := range []struct {
		name string
		of   map[string]int64
	}{{"removed", st.Removed}, {"missed", st.Misses}} {
		var parts []string
		for k, n := range m.of {
			if n > 0 {
				parts = append(parts, fmt.Sprintf("%s %d", k, n))
			}
		}
		if len(parts) > 0 {
			slices.Sort(parts)
			fmt.Fprintf(&out, "\n%s: %s", m.name, strings.Join(parts, ", "))
		}
	}
	if st.Corrupt+st.Conflicts > 0 {
		fmt.Fprintf(&out, "\ncorrupt %d, conflicts %d", st.Corrupt, st.Conflicts)
	}
	return out.String()
}

// ranges writes sorted numbers short.
func ranges(is []int) string {
	var parts []string
	for k := 0; k < len(is); {
		end := k
		for end+1 < len(is) && is[end+1] == is[end]+1 {
			end++
		}
		if end == k {
			parts = append(parts, fmt.Sprint(is[k]))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", is[k], is[end]))
		}
		k = end + 1
	}
	return strings.Join(parts, " ")
}
