package tiers

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// TestSlotsScripts runs testdata/slots/*.txt. A script is a sequence of
// commands with what they print: the command, a line of four dashes, the output,
// an empty line. Numbers are in units of 512 bytes, except counts and owners.
//
//	new CAPACITY EXTENT   a fresh allocator
//	alloc SIZE [COUNT]    offsets that Alloc gave, "full" when it gave none
//	free OFFSET...        the sizes that came free
//	take OFFSET SIZE      "ok" or the error
//	vacate EXTENT on|off
//	emptiest SIZE         the extent to vacate for slots of that size
//	owners EXTENT         slots are owned by 1, 2, ... in the order of being taken
//	show                  classes, then each extent with its slots, x is taken
//
// KVTIER_REWRITE=slots writes the outputs anew.
func TestSlotsScripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/slots/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			script, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			got := runSlotsScript(t, script)
			if os.Getenv("KVTIER_REWRITE") == "slots" {
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

// runSlotsScript returns the script with the outputs of this run.
func runSlotsScript(t *testing.T, script []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	r := &slotsScript{t: t}
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
			fmt.Fprintf(&out, "%s\n----\n%s", line, r.run(strings.Fields(line)))
		}
	}
	return out.Bytes()
}

type slotsScript struct {
	t     *testing.T
	s     *Slots
	owner block.Handle
}

func (r *slotsScript) number(s string) int64 {
	r.t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}

func (r *slotsScript) run(f []string) string {
	r.t.Helper()
	var out strings.Builder
	var n []int64
	for _, s := range f[1:] {
		if s != "on" && s != "off" {
			n = append(n, r.number(s))
		}
	}
	switch f[0] {
	case "new":
		r.s, r.owner = NewSlots(n[0]*slotUnit, n[1]*slotUnit), 0
	case "alloc":
		for range append(n, 1)[1] {
			r.owner++
			off, ok := r.s.Alloc(0, n[0]*slotUnit, r.owner)
			if !ok {
				fmt.Fprintln(&out, "full")
				break
			}
			fmt.Fprintf(&out, "%d (%d)\n", off/slotUnit, r.s.Class(off)/slotUnit)
		}
	case "free":
		for _, off := range n {
			fmt.Fprintln(&out, r.s.Free(off*slotUnit)/slotUnit)
		}
	case "take":
		r.owner++
		if err := r.s.Take(n[0]*slotUnit, n[1]*slotUnit, r.owner); err != nil {
			fmt.Fprintln(&out, err)
		} else {
			fmt.Fprintln(&out, "ok")
		}
	case "vacate":
		r.s.Vacate(int(n[0]), f[2] == "on", 0)
	case "emptiest":
		e, used, ok := r.s.Emptiest(0, n[0]*slotUnit, nil)
		fmt.Fprintln(&out, e, used/slotUnit, ok)
	case "owners":
		fmt.Fprintln(&out, r.s.Owners(int(n[0]), nil))
	case "show":
		r.show(&out)
	default:
		r.t.Fatalf("unknown command %q", f[0])
	}
	return out.String()
}

func (r *slotsScript) show(out *strings.Builder) {
	total, empty := r.s.count()
	fmt.Fprintf(out, "used %d of %d, extents %d, empty %d\n", r.s.Used()/slotUnit, r.s.Capacity()/slotUnit, total, empty)
	for _, c := range r.s.byClass() {
		fmt.Fprintf(out, "class %d: extents %d, taken %d, free %d\n", c.SlotBytes/slotUnit, c.Extents, c.Taken, c.Free)
	}
	for e := range r.s.extents {
		x := &r.s.extents[e]
		fmt.Fprintf(out, "%d: ", e)
		if x.class == 0 {
			fmt.Fprintln(out, "empty")
			continue
		}
		fmt.Fprintf(out, "%d ", x.class/slotUnit)
		for i := range int(x.slots) {
			if x.taken(i) {
				out.WriteByte('x')
			} else {
				out.WriteByte('.')
			}
		}
		fmt.Fprintln(out)
	}
}

// slotsModel is an allocator that is slow and plainly right: a list of what is
// taken.
type slotsModel struct {
	capacity, extent int64
	taken            map[int64]slotsModelSlot
}

type slotsModelSlot struct {
	size  int64
	owner block.Handle
}

func (m *slotsModel) extents() int { return int((m.capacity + m.extent - 1) / m.extent) }
func (m *slotsModel) length(e int) int64 {
	return min(m.extent, m.capacity-int64(e)*m.extent)
}

// classOf is the slot size of an extent, 0 for an empty one.
func (m *slotsModel) classOf(e int) int64 {
	for off, s := range m.taken {
		if int(off/m.extent) == e {
			return s.size
		}
	}
	return 0
}

func (m *slotsModel) countOf(e int) (n int64) {
	for off := range m.taken {
		if int(off/m.extent) == e {
			n++
		}
	}
	return n
}

// hasFree reports whether an extent of that class has a free slot.
func (m *slotsModel) hasFree(size int64) bool {
	for e := range m.extents() {
		if m.classOf(e) == size && m.countOf(e) < m.length(e)/size {
			return true
		}
	}
	return false
}

// want is the class that Alloc of size must use, 0 for none, and whether it
// has to be in an empty extent.
func (m *slotsModel) want(size int64, sizes []int64) (class int64, fresh bool) {
	if m.hasFree(size) {
		return size, false
	}
	for e := range m.extents() {
		if m.classOf(e) == 0 && m.length(e) >= size {
			return size, true
		}
	}
	var used int64
	for _, s := range m.taken {
		used += s.size
	}
	roomy := used < m.capacity-m.capacity/4
	for _, c := range sizes {
		if c > size && (roomy || (c-size)*4 <= c) && m.hasFree(c) {
			return c, false
		}
	}
	return 0, false
}

// TestSlotsModel compares random runs with the model, after each step.
func TestSlotsModel(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { runSlotsModel(t, seed) })
	}
}

func runSlotsModel(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	sizes := []int64{512, 1024, 1536, 2048, 2560, 4608, 5120, 9216}
	rng.Shuffle(len(sizes), func(i, j int) { sizes[i], sizes[j] = sizes[j], sizes[i] })
	sizes = sizes[:2+rng.IntN(4)]
	slices.Sort(sizes)
	m := &slotsModel{
		extent: 9216 + 512*rng.Int64N(140),
		taken:  make(map[int64]slotsModelSlot),
	}
	m.capacity = m.extent*(1+rng.Int64N(5)) + 512*rng.Int64N(m.extent/512)
	s := NewSlots(m.capacity, m.extent)
	var live []int64
	var used int64
	add := func(off, size int64, owner block.Handle) {
		e := off / m.extent
		rel := off % m.extent
		if rel%size != 0 || rel+size > m.length(int(e)) {
			t.Fatalf("slot %d+%d is misplaced in extents of %d", off, size, m.extent)
		}
		if c := m.classOf(int(e)); c != 0 && c != size {
			t.Fatalf("slot %d+%d in an extent of class %d", off, size, c)
		}
		if _, twice := m.taken[off]; twice {
			t.Fatalf("slot %d given twice", off)
		}
		m.taken[off] = slotsModelSlot{size, owner}
		live = append(live, off)
		used += size
	}
	for step := range 1500 {
		owner := block.Handle(step + 1)
		// The share of frees swings, so that the store fills and empties.
		freeing := rng.IntN(1000) < 300+(step/250%2)*400
		switch size := sizes[rng.IntN(len(sizes))]; {
		case freeing && len(live) > 0:
			i := rng.IntN(len(live))
			off := live[i]
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
			want := m.taken[off]
			if got := s.owner(off); got != want.owner {
				t.Fatalf("step %d: owner of %d is %d, want %d", step, off, got, want.owner)
			}
			if got := s.Free(off); got != want.size {
				t.Fatalf("step %d: free %d gave %d, want %d", step, off, got, want.size)
			}
			delete(m.taken, off)
			used -= want.size
		case rng.IntN(8) == 0:
			off := 512 * rng.Int64N(m.capacity/512)
			e := int(off / m.extent)
			off -= off % m.extent % size
			_, taken := m.taken[off]
			c := m.classOf(e)
			want := (c == 0 || c == size) && !taken && off%m.extent+size <= m.length(e)
			if err := s.Take(off, size, owner); (err == nil) != want {
				t.Fatalf("step %d: take %d+%d: %v, want success %v", step, off, size, err, want)
			} else if want {
				add(off, size, owner)
			}
		default:
			class, fresh := m.want(size, sizes)
			if got := s.CanAlloc(0, size); got != (class != 0) {
				t.Fatalf("step %d: can alloc %d: %v, want class %d", step, size, got, class)
			}
			off, ok := s.Alloc(0, size, owner)
			if ok != (class != 0) {
				t.Fatalf("step %d: alloc %d: %v, want class %d", step, size, ok, class)
			}
			if !ok {
				continue
			}
			if got := m.classOf(int(off / m.extent)); (got == 0) != fresh {
				t.Fatalf("step %d: alloc %d came from extent of class %d, want a fresh one: %v", step, size, got, fresh)
			}
			if got := s.Class(off); got != class {
				t.Fatalf("step %d: alloc %d gave class %d, want %d", step, size, got, class)
			}
			add(off, class, owner)
		}
		if s.Used() != used {
			t.Fatalf("step %d: used %d, want %d", step, s.Used(), used)
		}
		if step%50 == 0 {
			m.compare(t, s)
		}
	}
	for _, off := range live {
		s.Free(off)
	}
	if total, empty := s.count(); s.Used() != 0 || total != empty || len(s.byClass()) != 0 {
		t.Errorf("after freeing all: used %d, extents %d, empty %d, classes %v", s.Used(), total, empty, s.byClass())
	}
}

// compare checks the snapshots against the model.
func (m *slotsModel) compare(t *testing.T, s *Slots) {
	t.Helper()
	want := make(map[int64]classUse)
	empty := 0
	for e := range m.extents() {
		var owners []block.Handle
		for off := int64(e) * m.extent; off < int64(e)*m.extent+m.length(e); off += slotUnit {
			if x, ok := m.taken[off]; ok {
				owners = append(owners, x.owner)
			}
		}
		if got := s.Owners(e, nil); !slices.Equal(got, owners) {
			t.Fatalf("owners of extent %d: %v, want %v", e, got, owners)
		}
		c := m.classOf(e)
		if c == 0 {
			empty++
			continue
		}
		u := want[c]
		u.SlotBytes = c
		u.Extents++
		u.Taken += m.countOf(e)
		u.Free += m.length(e)/c - m.countOf(e)
		want[c] = u
	}
	if total, got := s.count(); total != m.extents() || got != empty {
		t.Fatalf("extents %d, empty %d, want %d and %d", total, got, m.extents(), empty)
	}
	got := s.byClass()
	if len(got) != len(want) {
		t.Fatalf("classes %v, want %v", got, want)
	}
	for _, u := range got {
		if u != want[u.SlotBytes] {
			t.Fatalf("class %+v, want %+v", u, want[u.SlotBytes])
		}
	}
	for _, size := range []int64{512, 2048, 9216} {
		m.compareEmptiest(t, s, size)
	}
}

func (m *slotsModel) compareEmptiest(t *testing.T, s *Slots, size int64) {
	t.Helper()
	extent, used, found := 0, int64(0), false
	for e := range m.extents() {
		if c := m.classOf(e); c != 0 && c != size && m.length(e) >= size {
			if u := m.countOf(e) * c; !found || u < used {
				extent, used, found = e, u, true
			}
		}
	}
	if e, u, ok := s.Emptiest(0, size, nil); e != extent || u != used || ok != found {
		t.Fatalf("emptiest for %d: extent %d with %d (%v), want %d with %d (%v)", size, e, u, ok, extent, used, found)
	}
}

// TestSlotsManyPerExtent checks the order of allocation where an extent has many
// words of bits, against a sorted list of what is free.
func TestSlotsManyPerExtent(t *testing.T) {
	const slots = 20_000
	s := NewSlots(slots*512, slots*512)
	for i := range int64(slots) {
		if off, ok := s.Alloc(0, 512, block.Handle(i+1)); !ok || off != i*512 {
			t.Fatalf("slot %d is at %d, %v", i, off, ok)
		}
	}
	if s.CanAlloc(0, 512) {
		t.Fatal("there is room in a full store")
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		var free []int64
		for _, i := range rng.Perm(slots)[:1+rng.IntN(500)] {
			off := int64(i) * 512
			s.Free(off)
			free = append(free, off)
		}
		slices.Sort(free)
		for i, want := range free {
			if off, ok := s.Alloc(0, 512, 1); !ok || off != want {
				t.Fatalf("slot %d of %d is at %d, %v, want %d", i, len(free), off, ok, want)
			}
		}
	}
	s.SetOwner(512, 77)
	if got := s.owner(512); got != 77 {
		t.Errorf("owner %d, want 77", got)
	}
}

// TestSlotsPanics checks that a caller that lost count is stopped.
func TestSlotsPanics(t *testing.T) {
	calls := map[string]func(s *Slots, off int64){
		"free twice":          func(s *Slots, off int64) { s.Free(off); s.Free(off) },
		"free inside a slot":  func(s *Slots, off int64) { s.Free(off + 512) },
		"free outside":        func(s *Slots, _ int64) { s.Free(s.Capacity()) },
		"free negative":       func(s *Slots, _ int64) { s.Free(-512) },
		"owner of a free one": func(s *Slots, off int64) { s.owner(off + 1024) },
		"odd size":            func(s *Slots, _ int64) { s.Alloc(0, 1000, 1) },
		"no size":             func(s *Slots, _ int64) { s.Alloc(0, 0, 1) },
		"free in leftover":    func(s *Slots, _ int64) { s.Free(15 * 1024) },
		"no capacity":         func(*Slots, int64) { NewSlots(0, 512) },
		"odd extent":          func(*Slots, int64) { NewSlots(4096, 1000) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			s := NewSlots(1<<20, 15*1024+512)
			off, ok := s.Alloc(0, 1024, 1)
			if !ok {
				t.Fatal("no slot")
			}
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			call(s, off)
		})
	}
}

func TestSlotsTooLarge(t *testing.T) {
	for _, c := range []struct{ capacity, extent, max int64 }{
		{1 << 20, 64 << 10, 64 << 10},
		{48 << 10, 64 << 10, 48 << 10},
		{48<<10 + 100, 64 << 10, 48 << 10},
	} {
		s := NewSlots(c.capacity, c.extent)
		if got := s.MaxSlot(); got != c.max {
			t.Errorf("capacity %d: largest slot %d, want %d", c.capacity, got, c.max)
		}
		if s.CanAlloc(0, c.max+512) {
			t.Errorf("capacity %d: can alloc %d", c.capacity, c.max+512)
		}
		if _, ok := s.Alloc(0, c.max+512, 1); ok {
			t.Errorf("capacity %d: a slot of %d", c.capacity, c.max+512)
		}
		if _, ok := s.Alloc(0, c.max, 1); !ok {
			t.Errorf("capacity %d: no slot of %d", c.capacity, c.max)
		}
	}
}

// BenchmarkSlotsSteady frees a random slot and takes one, in a full store of
// 4,608-byte slots.
func BenchmarkSlotsSteady(b *testing.B) {
	s := NewSlots(16<<30, 64<<20)
	var live []int64
	for {
		off, ok := s.Alloc(0, 4608, 1)
		if !ok {
			break
		}
		live = append(live, off)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	b.ReportMetric(float64(len(live)), "slots")
	b.ReportAllocs()
	for b.Loop() {
		i := rng.IntN(len(live))
		s.Free(live[i])
		live[i], _ = s.Alloc(0, 4608, 1)
	}
}

// BenchmarkSlotsHalf does the same with half of the slots free.
func BenchmarkSlotsHalf(b *testing.B) {
	s := NewSlots(16<<30, 64<<20)
	var live []int64
	for off, ok := s.Alloc(0, 4608, 1); ok; off, ok = s.Alloc(0, 4608, 1) {
		live = append(live, off)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	rng.Shuffle(len(live), func(i, j int) { live[i], live[j] = live[j], live[i] })
	for _, off := range live[len(live)/2:] {
		s.Free(off)
	}
	live = live[:len(live)/2]
	b.ReportAllocs()
	for b.Loop() {
		i := rng.IntN(len(live))
		s.Free(live[i])
		live[i], _ = s.Alloc(0, 4608, 1)
	}
}

// owner is who has the slot at off. It panics when no taken slot begins there.
func (s *Slots) owner(off int64) block.Handle {
	e, i := s.locate(off)
	return s.extents[e].owners[i]
}

// count is the number of extents, and how many of them belong to no class.
func (s *Slots) count() (total, empty int) { return len(s.extents), s.emptyCount }

// classUse is what the slots of one size take.
type classUse struct {
	SlotBytes int64
	Extents   int
	Taken     int64 // slots
	Free      int64 // slots in extents of the class
}

// byClass lists the classes that have extents, smallest slots first.
func (s *Slots) byClass() []classUse {
	all := make([]classUse, len(s.kinds))
	for i, k := range s.kinds {
		c := s.classes[k]
		all[i] = classUse{SlotBytes: k.size, Extents: c.extents, Taken: c.taken, Free: -c.taken}
	}
	for e := range s.extents {
		if x := &s.extents[e]; x.class != 0 {
			i, _ := slices.BinarySearchFunc(s.kinds, x.kind(), compareKinds)
			all[i].Free += int64(x.slots)
		}
	}
	return all
}
