package index

import (
	"errors"
	"os"
	"reflect"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// TestRestoreCatalog loses a catalog and makes it again from its manifest and its
// records, and opens what a crash leaves of that.
func TestRestoreCatalog(t *testing.T) {
	disk := vfs.NewCrashableMem()
	c := openCatalog(t, "cat", &CatalogOptions{FS: disk})
	a, b := putSpace(t, c, "a"), putSpace(t, c, "b")
	a.Epoch += 3
	if err := errors.Join(c.ClearNamespace(a), c.DropNamespace(b.ID), c.PutSlab(sampleSlab())); err != nil {
		t.Fatal(err)
	}
	want := make(map[block.Key]Record)
	for i := range uint64(2500) {
		r := recordOf(a.ID, i)
		r.Pinned = i%3 == 0
		want[r.Key] = *r
	}
	first, err := c.FirstEpoch(b.Desc)
	if err != nil {
		t.Fatal(err)
	}
	store := c.StoreID()
	closeCatalog(t, c)
	m, err := readManifest(disk, ManifestPath("cat"))
	if err != nil {
		t.Fatal(err)
	}
	fill := func(put func(*Record) error) error {
		for _, r := range want {
			if err := put(&r); err != nil {
				return err
			}
		}
		return nil
	}
	if err := RestoreCatalog("new", &m, 40, fill, &CatalogOptions{FS: disk}); err != nil {
		t.Fatal(err)
	}
	crashed := disk.CrashClone(vfs.CrashCloneCfg{})
	left, err := readManifest(crashed, ManifestPath("new"))
	if err != nil || left.Boot < 40 || left.NextSpace != m.NextSpace || !reflect.DeepEqual(left.Spaces, m.Spaces) || !reflect.DeepEqual(left.Slabs, m.Slabs) {
		t.Errorf("manifest %+v, %v, want that of %+v", left, err, m)
	}
	if err := crashed.RemoveAll("cat"); err != nil {
		t.Fatal(err)
	}
	if err := crashed.Rename("new", "cat"); err != nil {
		t.Fatal(err)
	}
	c = openCatalog(t, "cat", &CatalogOptions{FS: crashed})
	if c.StoreID() != store || c.Boot() <= 40 || c.Clean() {
		t.Errorf("store %x, boot %d, clean %v", c.StoreID(), c.Boot(), c.Clean())
	}
	if got := scan(t, c); !reflect.DeepEqual(got, want) {
		t.Errorf("%d records, want %d", len(got), len(want))
	}
	if all, err := c.Namespaces(); err != nil || len(all) != 1 || all[0] != a {
		t.Errorf("namespaces %+v, %v", all, err)
	}
	if all, err := c.Slabs(); err != nil || len(all) != 1 || all[0] != sampleSlab() {
		t.Errorf("slabs %+v, %v", all, err)
	}
	if e, err := c.FirstEpoch(b.Desc); err != nil || e != first {
		t.Errorf("first epoch of a dropped namespace %d, %v, want %d", e, err, first)
	}
	if id, err := c.NewNamespaceID(); err != nil || id != m.NextSpace {
		t.Errorf("id %d, %v, want %d", id, err, m.NextSpace)
	}
}

// TestRestoreKeepsHigherBoot: the manifest may know of more openings.
func TestRestoreKeepsHigherBoot(t *testing.T) {
	disk := vfs.NewMem()
	nothing := func(func(*Record) error) error { return nil }
	if err := RestoreCatalog("cat", &Manifest{Boot: 90, NextSpace: 1}, 40, nothing, &CatalogOptions{FS: disk}); err != nil {
		t.Fatal(err)
	}
	if c := openCatalog(t, "cat", &CatalogOptions{FS: disk}); c.Boot() <= 90 {
		t.Errorf("boot %d", c.Boot())
	}
}

func TestRestoreRefuses(t *testing.T) {
	withoutRace(t)
	enough := errors.New("enough")
	nothing := func(func(*Record) error) error { return nil }
	twice := sampleManifest()
	twice.Spaces = append(twice.Spaces, twice.Spaces[1])
	unknown := sampleManifest()
	unknown.NextSpace = 7
	nameless := sampleManifest()
	nameless.Spaces[1].Desc.Name = ""
	for _, c := range []struct {
		name string
		m    *Manifest
		fill func(put func(*Record) error) error
		want error
	}{
		{"a namespace twice", twice, nothing, block.ErrInvalid},
		{"an id that was not given out", unknown, nothing, block.ErrInvalid},
		{"a descriptor", nameless, nothing, block.ErrInvalid},
		{"a record", sampleManifest(), func(put func(*Record) error) error { return put(&Record{HashLen: 7}) }, block.ErrInvalid},
		{"what fill says", sampleManifest(), func(put func(*Record) error) error {
			for i := range uint64(2 * restoreBatch) {
				if err := put(recordOf(7, i)); err != nil {
					return err
				}
			}
			return enough
		}, enough},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := vfs.NewMem()
			old := openCatalog(t, "cat", &CatalogOptions{FS: disk})
			closeCatalog(t, old)
			if err := disk.RemoveAll("cat"); err != nil {
				t.Fatal(err)
			}
			if err := RestoreCatalog("cat", c.m, 1, c.fill, &CatalogOptions{FS: disk}); !errors.Is(err, c.want) {
				t.Errorf("restored: %v, want %v", err, c.want)
			}
			if _, err := disk.Stat("cat"); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory: %v", err)
			}
			if m, err := readManifest(disk, ManifestPath("cat")); err != nil || m.Store != old.StoreID() {
				t.Errorf("the manifest from before: %+v, %v", m, err)
			}
		})
	}
	disk := vfs.NewMem()
	closeCatalog(t, openCatalog(t, "cat", &CatalogOptions{FS: disk}))
	if err := RestoreCatalog("cat", sampleManifest(), 1, nothing, &CatalogOptions{FS: disk}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("over a catalog: %v", err)
	}
	openCatalog(t, "cat", &CatalogOptions{FS: disk})
}
