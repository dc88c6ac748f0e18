package index

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// A new catalog is made only where nothing is lost by it.
func TestCatalogBesideOtherFiles(t *testing.T) {
	for _, c := range []struct {
		files  string
		refuse string // the file that the error names; "" for none
	}{
		{"", ""},
		{"LOCK", ""},
		// What Pebble leaves when it is stopped while it makes a database.
		{"LOCK MANIFEST-000001", ""},
		{"MANIFEST-000001 OPTIONS-000003.dbtmp", ""},
		{"LOCK MANIFEST-000001 marker.format-version.000011.024", ""},
		{"LOCK letter.txt", "letter.txt"},
		{"LOCK MANIFEST-000001 OPTIONS-000003 000002.log", "000002.log"},
		{"LOCK MANIFEST-000006 000005.sst 000007.log marker.format-version.000011.024", "000005.sst"},
	} {
		o := &CatalogOptions{FS: vfs.NewMem()}
		if err := o.FS.MkdirAll("cat", 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range strings.Fields(c.files) {
			f, err := o.FS.Create("cat/"+name, vfs.WriteCategoryUnspecified)
			if err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
		cat, err := OpenCatalog("cat", o)
		if err == nil {
			closeCatalog(t, cat)
		}
		if (c.refuse != "") != errors.Is(err, block.ErrCorrupt) || (c.refuse == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.refuse) {
			t.Errorf("%q: %v, want it to name %q", c.files, err, c.refuse)
		}
	}
}

// A catalog that is lost is not begun anew: its manifest tells that it was there.
func TestLostCatalog(t *testing.T) {
	o := &CatalogOptions{FS: vfs.NewMem()}
	closeCatalog(t, openCatalog(t, "cat", o))
	if err := o.FS.RemoveAll("cat"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := OpenCatalog("cat", o); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), ManifestPath("cat")) {
			t.Errorf("open: %v", err)
		}
	}
	if _, err := o.FS.Stat("cat"); err == nil {
		t.Error("the directory is back")
	}
	if err := o.FS.Remove(ManifestPath("cat")); err != nil {
		t.Fatal(err)
	}
	closeCatalog(t, openCatalog(t, "cat", o))
}
