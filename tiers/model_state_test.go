package tiers_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// What the model knows of blocks, and how it compares that with the store.

// modelCopy is one version of a key in one tier.
type modelCopy struct {
	hash block.Hash
	len  uint32
	tier block.TierID
}

// told is what a store's events have told.
type told struct {
	sync.Mutex
	there  map[modelCopy]int
	stored map[modelCopy]bool // at least once, in no tier in particular
	seq    uint64
	lost   bool
}

func (d *told) begin() {
	d.Lock()
	defer d.Unlock()
	d.there, d.stored, d.seq, d.lost = map[modelCopy]int{}, map[modelCopy]bool{}, 0, false
}

// from says behind which event those that are told begin.
func (d *told) from(seq uint64) {
	d.Lock()
	defer d.Unlock()
	d.seq = seq
}

func (d *told) present(k modelCopy) {
	d.Lock()
	defer d.Unlock()
	d.there[k]++
	k.tier = block.NoTier
	d.stored[k] = true
}

func (d *told) event(m *model, ev *block.Event) {
	k := modelCopy{ev.Hash, ev.Len, ev.Tier}
	if ev.Kind == block.EventStored {
		d.present(k)
	}
	d.Lock()
	defer d.Unlock()
	d.seq = ev.Seq
	switch ev.Kind {
	case block.EventRemoved:
		d.there[k]--
	case block.EventLost:
		d.lost = true
	}
	if n := d.there[k]; (n < 0 || n > 1) && !m.mayExpire(ev.Hash) {
		m.errorf("event %d: %s of %d bytes %v in %v: it is there %d times", ev.Seq, ev.Hash.Hex(hashLen), ev.Len, ev.Kind, ev.Tier, n)
	}
}

// space is the namespace of a key.
func (m *model) space(i int) block.Namespace {
	if i < modelKeys {
		return m.ns[0]
	}
	return m.ns[1]
}

func (m *model) len(i int, version int64) int {
	return m.conf.sizes[i%len(m.conf.sizes)] + int(version)
}

func (m *model) data(i int, version int64) []byte {
	return payload(i<<8|int(version), m.len(i, version))
}

// calls bounds the calls of one operation, generously: nothing may hang.
func (m *model) calls() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 30*time.Second)
}

// asked is a key that somebody asks for, and what was known when it began.
type asked struct {
	i      int
	oldest int64 // version
	until  int64 // from when on it is past its time
	began  int64 // seconds
	want   block.Wanted
}

func (m *model) ask(i int) asked {
	k := &m.keys[i]
	return asked{i: i, oldest: k.version.Load(), until: k.until.Load(), began: time.Now().Unix(), want: block.Wanted{Hash: hashOf(i)}}
}

// check compares what was read with the versions that a key may have had since it
// was asked for.
func (m *model) check(a asked, p block.Payload) {
	m.Helper()
	switch {
	case p.Reason == block.Hit:
		m.checkHit(a, p)
	case p.Reason == block.MissAbsent, p.Reason == block.MissPending, p.Reason == block.MissNoRoom:
	case p.Reason == block.MissExpired && mortal(a.i):
	case p.Reason == block.MissUnavailable && m.conf.rough():
	case p.Reason == block.MissCorrupt && m.conf.spoils:
	default:
		m.errorf("key %d: %v", a.i, p.Reason)
	}
}

func (m *model) checkHit(a asked, p block.Payload) {
	m.Helper()
	k := &m.keys[a.i]
	version := int64(p.Total) - int64(m.len(a.i, 0))
	if newest := k.version.Load(); version < a.oldest || version > newest {
		m.errorf("key %d: version %d, want %d to %d: what was deleted has come back", a.i, version, a.oldest, newest)
		return
	}
	if a.until != 0 && a.began >= a.until && k.until.Load() == a.until {
		m.errorf("key %d: a hit, %d seconds past its time", a.i, a.began-a.until)
	}
	want := m.data(a.i, version)[a.want.Offset:]
	if a.want.Length > 0 {
		want = want[:a.want.Length]
	}
	if !bytes.Equal(p.Bytes, want) {
		m.errorf("key %d: wrong bytes of version %d from %v", a.i, version, p.Tier)
	}
}

// read gets one key and checks it.
func (m *model) read(i int, o block.GetOptions) block.MissReason {
	m.Helper()
	ctx, cancel := m.calls()
	defer cancel()
	a := m.ask(i)
	reason := block.MissAbsent
	err := m.c.Get(ctx, m.space(i).ID, hashLen, []block.Wanted{a.want}, o, func(_ int, p block.Payload) error {
		reason = p.Reason
		m.served(reason)
		m.check(a, p)
		return nil
	})
	if err != nil {
		m.errorf("get %d: %v", i, err)
	}
	return reason
}

// served counts what a get has said of a key.
func (m *model) served(r block.MissReason) { m.gets[r].Add(1) }

// countGets wants the store to have counted what gets have said since it was opened, to
// other calls maybe more.
func (m *model) countGets(st *block.Stats) {
	var hits int64
	for _, t := range st.Tiers {
		hits += t.Hits
	}
	by := map[string]int64{}
	for _, ns := range st.ByNamespace {
		for reason, n := range ns.Misses {
			by[reason] += n
		}
	}
	for i := range m.gets {
		seen, r := m.gets[i].Load(), block.MissReason(i)
		switch n := st.Misses[r.String()]; {
		case r == block.Hit && hits < seen:
			m.errorf("%d hits are counted, gets had %d", hits, seen)
		case r != block.Hit && n < seen:
			m.errorf("%d misses are counted as %v, gets had %d", n, r, seen)
		case r != block.Hit && r != block.MissAbsent && by[r.String()] < seen:
			m.errorf("%d misses of namespaces are counted as %v, gets had %d", by[r.String()], r, seen)
		}
	}
}

// must reads a key that the store may not lose now.
func (m *model) must(i int, why string) {
	m.Helper()
	switch reason := m.read(i, block.GetOptions{}); {
	case reason == block.Hit, m.conf.rough() && reason == block.MissUnavailable, m.conf.spoils:
	default:
		m.errorf("key %d is %s: %v", i, why, reason)
	}
}

// drain runs while nothing else does.
func (m *model) drain() {
	res, err := m.s.Drain(m.Context(), nil)
	if err != nil && !m.conf.rough() {
		m.Errorf("drain: %v", err)
	}
	if err != nil || res.Left > 0 || !m.conf.durable() {
		return
	}
	for i := range m.keys {
		if where := tiersOf(m.TB, m.s, m.space(i), i); where == "g2" && !mortal(i) {
			m.Errorf("key %d is only in G2 after a drain that left nothing", i)
		}
	}
}

// rest waits until the store does nothing more, and holds what the events said
// against where the blocks are, which it returns.
func (m *model) rest() (there map[modelCopy]bool) {
	last, since, looks := int64(-1), time.Now(), 0
	eventually(m.TB, "the store is at rest", func() bool {
		work, seq := tiers.Activity(m.s)
		m.told.Lock()
		heard := m.told.seq == seq
		m.told.Unlock()
		// A copy that waits for a busy disk is silent, and no rest.
		if work != last || !heard || tiers.Flights(m.s) > 0 || !tiers.CatalogCaughtUp(m.s) {
			last, since, looks = work, time.Now(), 0
		}
		looks++
		return time.Since(since) > 120*time.Millisecond && looks >= restLooks // the evictor looks by itself more often
	})
	there = map[modelCopy]bool{}
	for i := range m.keys {
		for _, l := range placesOf(m.TB, m.s, m.space(i), i) {
			there[modelCopy{hashOf(i), l.Len, l.Tier}] = true
		}
	}
	m.told.Lock()
	defer m.told.Unlock()
	if m.told.lost {
		m.Log("events were lost")
		return there
	}
	for c, n := range m.told.there {
		// A block past its time shows only when its departure is told.
		if wrong := n != 0 && n != 1 || n == 1 != there[c]; wrong && !m.mayExpire(c.hash) {
			m.Errorf("%s of %d bytes in %v: events count it %d times, there: %v", c.hash.Hex(hashLen), c.len, c.tier, n, there[c])
		}
	}
	for c := range there {
		if m.told.there[c] != 1 && !m.mayExpire(c.hash) {
			m.Errorf("%s of %d bytes in %v is there, and events do not say so", c.hash.Hex(hashLen), c.len, c.tier)
		}
	}
	m.acknowledged()
	m.count()
	return there
}

// mayExpire says whether a block may be past its time before its departure is told.
func (m *model) mayExpire(h block.Hash) bool { return mortal(keyOfHash(h)) }

// acknowledged wants an event of the coming of each block that was acknowledged.
// Whether it may have left since, the other events say.
func (m *model) acknowledged() {
	for i := range m.keys {
		k := &m.keys[i]
		c := modelCopy{hash: hashOf(i), len: uint32(m.len(i, k.version.Load()))}
		if k.acked && !m.told.stored[c] {
			m.Errorf("key %d was acknowledged, and no event told that it came", i)
		}
	}
}

// count compares the counters with what is in the table.
func (m *model) count() {
	var wrong string
	for range 500 {
		if wrong = m.miscounted(); wrong == "" {
			return
		}
		// What is past its time leaves by itself, and slots that could not be erased come
		// back by a sweep.
		time.Sleep(20 * time.Millisecond)
	}
	m.Error(wrong)
}

func (m *model) miscounted() string {
	blocks, slots, payload := map[block.TierID]int64{}, map[block.TierID]int64{}, map[block.TierID]int64{}
	for i := range m.keys {
		e := tiers.EntryOf(m.s, keyOf(m.space(i), i))
		for _, tier := range []block.TierID{block.G2, block.G3} {
			if e.State[index.TierIndex(tier)] == index.SlotResident {
				size, _ := tiers.SlotBytes(int64(e.Len))
				blocks[tier]++
				payload[tier] += int64(e.Len)
				slots[tier] += size
			}
		}
	}
	for _, tr := range m.s.Stats().Tiers {
		// A slot may be of a larger class than its block needs.
		if tr.Blocks != blocks[tr.Tier] || tr.Payload != payload[tr.Tier] || tr.Used < slots[tr.Tier] || blocks[tr.Tier] == 0 && tr.Used != 0 {
			return fmt.Sprintf("%v counts %d blocks, %d bytes, %d in slots; there are %d, %d, %d", tr.Tier, tr.Blocks, tr.Payload, tr.Used,
				blocks[tr.Tier], payload[tr.Tier], slots[tr.Tier])
		}
	}
	return ""
}

// look reads everything, and what is listed first of all.
func (m *model) look() {
	for n, ns := range m.ns {
		entries, _, err := m.s.List(m.Context(), ns.ID, "", len(m.keys)+1)
		if err != nil {
			m.Errorf("list: %v", err)
		}
		for _, e := range entries {
			i := keyOfHash(e.Hash)
			if i < 0 || i >= len(m.keys) || m.space(i) != m.ns[n] {
				m.Errorf("%s is listed, and nobody put it", e.Hash.Hex(hashLen))
			} else if r := m.read(i, block.GetOptions{NoPromote: true}); r != block.Hit && !mortal(i) && !m.conf.spoils {
				m.Errorf("key %d is listed and cannot be read: %v", i, r)
			}
		}
	}
	for i := range m.keys {
		m.read(i, block.GetOptions{NoPromote: true})
	}
}

// keyOfHash is the number that hashOf was given.
func keyOfHash(h block.Hash) int {
	n := 0
	for i := 3; i >= 0; i-- {
		n = n<<8 | int(h[i])
	}
	if hashOf(n) != h {
		return -1
	}
	return n
}

// survived compares what a store opened with to what it had in G3 before.
func (m *model) survived(before map[modelCopy]bool) {
	m.told.Lock()
	for c := range before {
		if c.tier == block.G3 && m.told.there[c] != 1 && !m.mayExpire(c.hash) {
			m.Errorf("%s of %d bytes was in G3 and is not any more", c.hash.Hex(hashLen), c.len)
		}
	}
	for c := range m.told.there {
		if !before[c] && !m.mayExpire(c.hash) {
			m.Errorf("%s of %d bytes was not in G3 and is now", c.hash.Hex(hashLen), c.len)
		}
	}
	m.told.Unlock()
	m.look()
}
