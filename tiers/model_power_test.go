package tiers_test

import (
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// crashableDir is a file system in memory that knows what was synced, and has a
// directory.
func crashableDir(t testing.TB, dir string) *vfs.MemFS {
	t.Helper()
	fs := vfs.NewCrashableMem()
	if err := fs.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for at := dir; ; at = filepath.Dir(at) {
		d, err := fs.OpenDir(at)
		if err == nil {
			err = d.Sync()
		}
		if err == nil {
			err = d.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		if at == filepath.Dir(at) {
			return fs
		}
	}
}

// losePower takes what the media have not kept, while calls are under way. The
// slabs go first: what the catalog then still records was flushed before.
func (m *model) losePower(r *rand.Rand) {
	for i := range m.keys {
		k := &m.keys[i]
		// What is acknowledged from here on is not asked for afterwards.
		k.snap.durable = k.durable.Load()
		k.snap.version = k.version.Load()
	}
	m.crashed.Store(true)
	kept, lost, err := m.volatile.PowerLoss(r)
	if err != nil {
		m.Error(err)
	}
	m.sectors[0] += kept
	m.sectors[1] += lost
	m.fs = m.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 50, 100}[r.IntN(3)], RNG: r})
}

// keeps says which keys have to be there after the store has stopped as it is
// now: those that were acknowledged as durable by some moment, were not deleted
// since, and have not begun to leave.
func (m *model) keeps(durable func(k *modelKey) int64) (is []int) {
	for i := range m.keys {
		k := &m.keys[i]
		v := durable(k) - 1
		if v < 0 || mortal(i) || !k.sure(v) {
			continue
		}
		if e := tiers.EntryOf(m.s, keyOf(m.space(i), i)); e.State[index.TierIndex(block.G3)] == index.SlotResident {
			is = append(is, i)
		}
	}
	return is
}

// afterPowerLoss opens the store on what the media have kept and judges it.
func (m *model) afterPowerLoss() {
	must := m.keeps(func(k *modelKey) int64 { return k.snap.durable })
	m.life.end()
	<-m.watched
	m.crashed.Store(false)
	m.open()
	for i := range m.keys {
		m.recall(i)
	}
	m.keep(must, "the power was lost")
	m.look()
	m.close()
}

// recall finds out which version of a key has survived. What was deleted when the
// store ended may be there or not, what was deleted before may not.
func (m *model) recall(i int) {
	k := &m.keys[i]
	places := placesOf(m.TB, m.s, m.space(i), i)
	k.acked, k.pinned = false, false
	k.until.Store(0)
	k.tried.Store(0)
	if len(places) == 0 {
		k.durable.Store(0)
		return
	}
	version := int64(places[0].Len) - int64(m.len(i, 0))
	if version < k.snap.version || version > k.version.Load() {
		m.Errorf("key %d: version %d is there, want %d to %d: what was deleted has come back", i, version, k.snap.version, k.version.Load())
	}
	k.version.Store(version)
}

// keep wants blocks to have survived.
func (m *model) keep(is []int, what string) {
	for _, i := range is {
		if len(placesOf(m.TB, m.s, m.space(i), i)) == 0 {
			m.Errorf("key %d was durable, and is gone since %s", i, what)
		}
	}
}

// amid closes a store while it works, and judges what it opens with again.
func (m *model) amid() {
	before := leftG3(m.s)
	must := m.keeps(func(k *modelKey) int64 { return k.durable.Load() })
	m.close()
	if leftG3(m.s) != before {
		must = nil // some have left while it was closed
	}
	m.open()
	m.keep(must, "the store was closed")
	m.look()
	m.close()
}

// loseCatalog closes a store while it works, in order or not, has its catalog made
// anew from the slabs, and judges what it opens with.
func (m *model) loseCatalog() {
	before := leftG3(m.s)
	must := m.keeps(func(k *modelKey) int64 { return k.durable.Load() })
	for i := range m.keys {
		m.keys[i].snap.version = m.keys[i].version.Load()
	}
	if m.rand.IntN(2) == 0 {
		tiers.CloseUnclean(m.TB, m.s) // no sweep comes within a phase
	}
	m.close()
	if leftG3(m.s) != before || m.conf.spoils {
		must = nil // some have left while it was closed, or are damaged
	}
	loseCatalog(m.TB, m.conf.opts.Dir, "lost")
	if _, err := tiers.Repair(m.Context(), m.conf.opts.Dir, nil); err != nil {
		m.Fatal(err)
	}
	m.open()
	for i := range m.keys {
		m.recall(i)
	}
	m.keep(must, "the catalog was made anew")
	m.look()
	m.close()
}

// leftG3 counts what has left G3 by itself: evicted, or found damaged.
func leftG3(s *tiers.Store) int64 {
	st := s.Stats()
	n := st.Corrupt
	for _, tr := range st.Tiers {
		if tr.Tier == block.G3 {
			n += tr.Evictions
		}
	}
	return n
}

// TestModelNotices breaks the order of writing on purpose: the model has to
// notice within a few seeds, or its losses of power are none.
func TestModelNotices(t *testing.T) {
	for _, c := range []struct {
		name   string
		noSync bool // the store acknowledges what it has not synced
		deaf   bool // slabs are never flushed, though the store believes it
		whole  bool // nothing is broken, and nothing may be noticed
	}{
		{name: "Whole", whole: true},
		{name: "NoSync", noSync: true},
		{name: "NoFlush", deaf: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for seed := uint64(1); seed <= 8; seed++ {
				conf := drawConf(seed)
				conf.inMemory, conf.kinds, conf.spoils = true, nil, false
				conf.slabs, conf.ends = []int64{96 << 20}, [modelPhases]string{endPower, endPower, endPower}
				conf.opts.NoSync = c.noSync
				heard := &listener{TB: t}
				m := newModel(heard, seed, conf)
				m.deaf = c.deaf
				heard.run(m)
				if heard.Failed() {
					if c.whole {
						t.Errorf("seed %d fails, and nothing was broken", seed)
					}
					return
				}
			}
			if !c.whole {
				t.Error("8 seeds, and the model has noticed nothing")
			}
		})
	}
}

// listener is a test that is meant to fail.
type listener struct {
	testing.TB
	failed atomic.Bool
}

func (l *listener) Failed() bool { return l.failed.Load() }

func (l *listener) Error(args ...any) { l.failed.Store(true) }

func (l *listener) Errorf(format string, args ...any) { l.failed.Store(true) }

func (l *listener) Fatal(args ...any) {
	l.failed.Store(true)
	runtime.Goexit()
}

func (l *listener) Fatalf(format string, args ...any) { l.Fatal() }

// run runs a model to its end or to where it gives up.
func (l *listener) run(m *model) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { m.life.end() }()
		m.run()
	}()
	<-done
}
