package e2e

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// A point is a place in the code at which the checked program kills itself when
// KVTIER_CRASH names it. often is how often a short run passes it, at least: the
// passage at which it dies is drawn from as many.
type point struct {
	name  string
	often int
}

// crashPoints are all of them.
var crashPoints = []point{
	{"g3-written", 20},
	{"g3-flushed", 10},
	{"g3-committed", 10},
	{"erased", 10},
	{"tombstones", 10},
	{drainPoint, 2},
	{"catalog-manifest", 3},
	{"catalog-flush", 1},
	{"catalog-compaction", 1},
	{"catalog-wal", 1},
}

// drainPoint is passed only at a stop in order.
const drainPoint = "drain"

// deaths counts how daemons ended.
type deaths struct {
	mu struct {
		sync.Mutex
		at map[string]int
	}
}

func (d *deaths) add(how string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.at == nil {
		d.mu.at = map[string]int{}
	}
	d.mu.at[how]++
}

func (d *deaths) count(how string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.at[how]
}

// String lists them by name.
func (d *deaths) String() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var s []string
	for how, n := range d.mu.at {
		s = append(s, fmt.Sprintf("%d %s", n, how))
	}
	slices.SortFunc(s, func(a, b string) int {
		return strings.Compare(a[strings.IndexByte(a, ' '):], b[strings.IndexByte(b, ' '):])
	})
	return strings.Join(s, ", ")
}
