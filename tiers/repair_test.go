package tiers_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// loseCatalog removes the catalog of a data directory, or damages it.
func loseCatalog(t testing.TB, dir string, how string) {
	t.Helper()
	catalog := filepath.Join(dir, "catalog")
	if how == "lost" {
		if err := os.RemoveAll(catalog); err != nil {
			t.Fatal(err)
		}
		return
	}
	files, err := os.ReadDir(catalog)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range files {
		if !strings.HasPrefix(f.Name(), how) && !strings.HasSuffix(f.Name(), how) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(catalog, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		for i := range b {
			b[i] ^= 0x5a
		}
		if err := os.WriteFile(filepath.Join(catalog, f.Name()), b, 0o600); err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n == 0 {
		t.Fatalf("no file %s in %s", how, catalog)
	}
}

func repair(t testing.TB, o tiers.Options, r *tiers.RepairOptions) tiers.RepairReport {
	t.Helper()
	rep, err := tiers.Repair(t.Context(), o.Dir, r)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

// TestRepair loses the catalog of a store with a history: what is there comes
// back, byte for byte, and nothing that was deleted, cleared, replaced or is past
// its time.
func TestRepair(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	sizes := []int{1, 700, 5000, 65_535, 65_536, 300_000, 1 << 20}
	for _, how := range []string{"lost", "MANIFEST-", ".sst"} {
		for _, end := range []string{"clean", "unclean"} {
			t.Run(how+"/"+end, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				o := tiers.Options{Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t), Slabs: []tiers.SlabSpec{
					{Path: filepath.Join(dir, "s0"), Bytes: 128 << 20}, {Path: filepath.Join(dir, "s1"), Bytes: 64 << 20},
				}}
				s := openStore(t, o)
				a, b, c := space(t, s, "a", 2<<20), space(t, s, "b", 2<<20), space(t, s, "c", 2<<20)
				g3 := block.PutOptions{Durable: block.G3}
				size := func(i int) int { return sizes[i%len(sizes)] }
				for i := 1; i <= 40; i++ {
					o := g3
					if i > 1 {
						o.Parent, o.HasParent = hashOf(i-1), true
					}
					mustPut(t, s, a, i, size(i), o)
					mustPut(t, s, b, i, size(i), g3)
					mustPut(t, s, c, i, size(i), g3)
				}
				var gone []int
				for i := 3; i <= 40; i += 3 {
					gone = append(gone, i)
				}
				mustDelete(t, s, a, len(gone), gone...)
				// Block 6 comes again, and goes again; block 9 comes to stay.
				mustPut(t, s, a, 6, size(6), g3)
				mustDelete(t, s, a, 1, 6)
				mustPut(t, s, a, 9, size(9), g3)
				if _, err := s.Clear(t.Context(), b.ID); err != nil {
					t.Fatal(err)
				}
				mustPut(t, s, b, 41, size(41), g3)
				putBriefly(t, s, c, 42, size(42))
				if end == "unclean" {
					tiers.CloseUnclean(t, s)
				} else if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if how == ".sst" { // what is in the log goes to tables at the next opening
					s = openStore(t, o)
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
				}
				loseCatalog(t, o.Dir, how)
				if s, err := tiers.Open(t.Context(), o); !errors.Is(err, block.ErrCorrupt) && how != ".sst" {
					if err == nil {
						s.Close()
					}
					t.Fatalf("open without the catalog: %v", err)
				}
				time.Sleep(2100 * time.Millisecond) // block 42's time
				rep := repair(t, o, nil)
				if rep.Blocks != 28+1+40 || rep.Damaged != 0 || rep.Unknown != 0 || len(rep.Problems) != 0 {
					t.Errorf("repair: %+v", rep)
				}
				if (rep.Old == "") != (how == "lost") {
					t.Errorf("the old catalog is at %q", rep.Old)
				}
				s = openStore(t, o)
				for i := 1; i <= 40; i++ {
					if i%3 == 0 && i != 9 {
						wantMiss(t, s, a, i, block.MissAbsent)
					} else {
						wantHit(t, s, a, i, size(i))
					}
					wantMiss(t, s, b, i, block.MissAbsent)
					wantHit(t, s, c, i, size(i))
				}
				wantHit(t, s, b, 41, size(41))
				wantMiss(t, s, c, 42, block.MissAbsent)
				entries, _, err := s.List(t.Context(), a.ID, "", 100)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range entries {
					if want := e.Hash != hashOf(1); e.HasPar != want && e.Hash != hashOf(9) {
						t.Errorf("block %s has a parent: %v", e.Hash, e.HasPar)
					}
				}
				mustPut(t, s, a, 3, size(3), g3)
				s = reopen(t, s, o)
				wantHit(t, s, a, 3, size(3))
				wantHit(t, s, a, 40, size(40))
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrInvalid) {
					t.Errorf("repair of a whole catalog: %v", err)
				}
				if rep := repair(t, o, &tiers.RepairOptions{Force: true}); rep.Blocks != 28+1+40+1 {
					t.Errorf("repair by force: %+v", rep)
				}
			})
		}
	}
}

// TestRepairDamage lets a repair meet damaged slots, and payloads that look like
// the headers of other blocks.
func TestRepairDamage(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	const size = 70_000
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	for i := 1; i <= 4; i++ {
		mustPut(t, s, ns, i, size, g3)
	}
	slot, header := tiers.SlotBytes(size)
	whole := make([]byte, slot)
	inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 1, block.G3).Offset(), int(slot), func(b []byte) { copy(whole, b) })
	mustDelete(t, s, ns, 1, 1)
	// A block whose payload is the slot of the deleted one, at each place where a
	// header could begin.
	forged := make([]byte, 2<<20)
	for off := 0; off+len(whole) <= len(forged); off += 512 {
		copy(forged[off:], whole[:header])
	}
	copy(forged[1<<20:], whole)
	if err := put(s, ns, 5, forged, g3); err != nil {
		t.Fatal(err)
	}
	// Its header is damaged, so that the repair goes through its payload.
	inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 5, block.G3).Offset(), 512, func(b []byte) { b[20] ^= 1 })
	inFile(t, o.Slabs[0].Path, placeIn(t, s, ns, 2, block.G3).Offset(), int(slot), func(b []byte) { b[header] ^= 1 })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	loseCatalog(t, o.Dir, "lost")
	if rep := repair(t, o, nil); rep.Blocks != 2 || rep.Damaged != 1 {
		t.Errorf("repair: %+v", rep)
	}
	s = openStore(t, o)
	for _, i := range []int{1, 2, 5} {
		wantMiss(t, s, ns, i, block.MissAbsent)
	}
	wantHit(t, s, ns, 3, size)
	wantHit(t, s, ns, 4, size)
}

// TestRepairRefuses: what a repair does not understand it leaves as it is, and
// says so.
func TestRepairRefuses(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	newStore := func(t *testing.T) (tiers.Options, string) {
		dir := t.TempDir()
		o := tiers.Options{Dir: filepath.Join(dir, "data"), DRAM: 16 << 20, Agent: newAgent(t), Slabs: []tiers.SlabSpec{
			{Path: filepath.Join(dir, "s0"), Bytes: 32 << 20}, {Path: filepath.Join(dir, "s1"), Bytes: 32 << 20},
		}}
		s := openStore(t, o)
		ns := space(t, s, "a", 2<<20)
		for i := 1; i <= 20; i++ {
			mustPut(t, s, ns, i, 5000, block.PutOptions{Durable: block.G3})
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		loseCatalog(t, o.Dir, "lost")
		return o, index.ManifestPath(filepath.Join(o.Dir, "catalog"))
	}
	t.Run("NoManifest", func(t *testing.T) {
		o, manifest := newStore(t)
		if err := os.Remove(manifest); err != nil {
			t.Fatal(err)
		}
		if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("repair: %v", err)
		}
	})
	t.Run("DamagedManifest", func(t *testing.T) {
		o, manifest := newStore(t)
		b, err := os.ReadFile(manifest)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(manifest, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("repair: %v", err)
		}
	})
	t.Run("AbsentSlab", func(t *testing.T) {
		o, _ := newStore(t)
		away := o.Slabs[1].Path + ".away"
		if err := os.Rename(o.Slabs[1].Path, away); err != nil {
			t.Fatal(err)
		}
		if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), o.Slabs[1].Path) {
			t.Errorf("repair: %v", err)
		}
		if rep := repair(t, o, &tiers.RepairOptions{Slabs: []string{away}}); rep.Blocks != 20 {
			t.Errorf("repair with the slab at its new place: %+v", rep)
		}
		loseCatalog(t, o.Dir, "lost")
		rep := repair(t, o, &tiers.RepairOptions{Partial: true})
		if rep.Blocks == 0 || rep.Blocks >= 20 || len(rep.Problems) == 0 {
			t.Errorf("partial repair: %+v", rep)
		}
	})
	t.Run("InUse", func(t *testing.T) {
		o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
		openStore(t, o)
		if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("repair of a store in use: %v", err)
		}
	})
	t.Run("BrokenOff", func(t *testing.T) {
		o, _ := newStore(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := tiers.Repair(ctx, o.Dir, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("repair: %v", err)
		}
		if rep := repair(t, o, nil); rep.Blocks != 20 {
			t.Errorf("repair after one that was broken off: %+v", rep)
		}
	})
}

// TestRepairStrangePayload: on a slab of version 1, where headers are not sealed, a
// payload that looks like the header of a version to come keeps no repair from the
// other blocks.
func TestRepairStrangePayload(t *testing.T) {
	withoutRace(t)
	t.Parallel()
	o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20}
	s := openStore(t, o)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := tiers.MakeV1(o.Slabs[0].Path); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, o)
	ns := space(t, s, "a", 8<<20)
	g3 := block.PutOptions{Durable: block.G3}
	strange := make([]byte, 512)
	tiers.EncodeHeader(strange, &tiers.SlotHeader{HashLen: hashLen}, tiers.Seal{Version: 1})
	strange[8] = 9
	binary.LittleEndian.PutUint64(strange[248:], xxhash.Sum64(strange[:248]))
	if err := put(s, ns, 1, strange, g3); err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, ns, 2, 3000, g3)
	mustDelete(t, s, ns, 1, 1) // its payload stays where it was
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	loseCatalog(t, o.Dir, "lost")
	// Nor is it trusted unasked: another payload could pass for a block.
	if _, err := tiers.Repair(t.Context(), o.Dir, nil); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), o.Slabs[0].Path) {
		t.Errorf("repair: %v", err)
	}
	if rep := repair(t, o, &tiers.RepairOptions{Unsealed: true}); rep.Blocks != 1 {
		t.Errorf("repair: %+v", rep)
	}
}

// TestRepairOlderCopy: a crash has left a header of a block that was evicted, and the
// block was put again, with other bytes or the same, or with a time to live. Whatever
// becomes of the younger copy, a repair brings no bytes back but those, and none that
// were deleted in between.
func TestRepairOlderCopy(t *testing.T) {
	t.Parallel()
	const size = 70_000
	g3 := block.PutOptions{Durable: block.G3}
	_, header := tiers.SlotBytes(size)
	payloadBit := func(b []byte) { b[header+5] ^= 1 }
	headerBit := func(b []byte) { b[20] ^= 1 }
	for _, c := range []struct {
		name    string
		younger int // whose payload the younger copy has
		delete  bool
		ttl     time.Duration
		damage  func(b []byte)
		blocks  int64
	}{
		{"SameBytes", 1, false, 0, payloadBit, 1},
		{"OtherBytes", 2, false, 0, payloadBit, 0},
		{"DeletedBefore", 2, true, 0, payloadBit, 0},
		{"DeletedBeforeHeader", 2, true, 0, headerBit, 0},
		{"DeletedBeforeSame", 1, true, 0, headerBit, 0},
		{"Expired", 1, false, time.Second, func([]byte) {}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := tiers.Options{Dir: t.TempDir(), Slabs: slabIn(t, 64<<20), Agent: newAgent(t), DRAM: 16 << 20, SweepAfter: unswept}
			s := openStore(t, o)
			ns := space(t, s, "a", 8<<20)
			mustPut(t, s, ns, 1, size, g3)
			mustPut(t, s, ns, 3, size, g3) // keeps the room for this size
			old := placeIn(t, s, ns, 1, block.G3)
			back := raw(t, s, o, ns, 1, size)
			eventually(t, "it is evicted", func() bool {
				tiers.Evict(s, block.G2, tiers.HandleOf(s, keyOf(ns, 1)))
				tiers.EvictG3(s, tiers.HandleOf(s, keyOf(ns, 1)))
				return tiersOf(t, s, ns, 1) == ""
			})
			tiers.CloseUnclean(t, s)
			s = openStore(t, o)
			mustPut(t, s, ns, 4, size, g3) // takes the slot, so that the next one goes elsewhere
			if c.delete {
				mustDelete(t, s, ns, 0, 1)
			}
			po := g3
			po.TTL = c.ttl
			if err := put(s, ns, 1, payload(c.younger, size), po); err != nil && c.ttl == 0 {
				t.Fatal(err)
			}
			slot, _ := tiers.SlotBytes(size)
			var now int64
			if c.ttl == 0 {
				now = placeIn(t, s, ns, 1, block.G3).Offset()
				if now == old.Offset() {
					t.Fatal("the younger copy is where the older one was")
				}
			}
			mustDelete(t, s, ns, 1, 4)
			tiers.CloseUnclean(t, s)
			if c.ttl == 0 {
				inFile(t, o.Slabs[0].Path, now, int(slot), c.damage)
			} else {
				time.Sleep(2100 * time.Millisecond)
			}
			back() // as the crash had left it
			loseCatalog(t, o.Dir, "lost")
			if rep := repair(t, o, nil); rep.Blocks != 1+c.blocks {
				t.Errorf("repair: %+v", rep)
			}
			s = openStore(t, o)
			if c.blocks == 0 {
				wantMiss(t, s, ns, 1, block.MissAbsent)
			} else {
				wantHit(t, s, ns, 1, size)
			}
			wantHit(t, s, ns, 3, size)
		})
	}
}
