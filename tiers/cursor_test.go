package tiers

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// FuzzCursor: what parseCursor accepts is what formatCursor writes, with a handle
// behind it to go on from.
func FuzzCursor(f *testing.F) {
	for _, s := range []string{"", "0", "1", "z", "Z", "01", "+1", "1z141z3", "1z141z4", "1z141z5", "-1", " 1", "1_0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, err := parseCursor(s)
		if err != nil {
			if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "cursor") {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		if formatCursor(h) != s || h == 0 || h+1 == 0 {
			t.Fatalf("%q is %d, which is %q", s, h, formatCursor(h))
		}
	})
}

func TestCursor(t *testing.T) {
	for _, h := range []block.Handle{1, 35, 36, 1 << 20, math.MaxUint32 - 1} {
		if got, err := parseCursor(formatCursor(h)); err != nil || got != h {
			t.Errorf("%d: %d, %v", h, got, err)
		}
	}
}
