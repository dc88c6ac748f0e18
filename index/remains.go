package index

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// checkRemains refuses a directory in which Pebble would begin a new database
// beside what is there already: somebody else's files, or a catalog that has lost
// the marker of its manifest and whose tables Pebble would then take for rubbish.
// A database that was being made when the machine stopped has neither. Unless
// anew, it also refuses to begin one beside the manifest of a catalog that is lost.
func checkRemains(v vfs.FS, dir string, anew bool) error {
	names, err := v.List(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	strange := ""
	for _, name := range names {
		switch {
		case strings.HasPrefix(name, "marker.manifest."):
			return nil
		case name == "LOCK", name == "MANIFEST-000001", strings.HasPrefix(name, "marker.format-version."), strings.HasPrefix(name, "OPTIONS-"), strings.HasSuffix(name, ".dbtmp"):
		case strange == "" || name < strange:
			strange = name
		}
	}
	if strange != "" {
		return fmt.Errorf("%w: %s and no marker of a manifest: the remains of a catalog, or not one at all", block.ErrCorrupt, strange)
	}
	if anew {
		return nil
	}
	if _, err := v.Stat(ManifestPath(dir)); err == nil {
		return fmt.Errorf("%w: there is %s and no catalog: it is lost, and a repair can make it anew", block.ErrCorrupt, ManifestPath(dir))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return nil
}
