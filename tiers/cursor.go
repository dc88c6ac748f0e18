package tiers

import (
	"fmt"
	"math"
	"strconv"

	"github.com/kvtier/kvtier/index/block"
)

// formatCursor writes the cursor of a listing that ended with a handle, which is
// not 0.
func formatCursor(last block.Handle) string { return strconv.FormatUint(uint64(last), 36) }

// parseCursor reads a cursor. Anything that formatCursor does not write fails
// with block.ErrInvalid.
func parseCursor(s string) (block.Handle, error) {
	last, err := strconv.ParseUint(s, 36, 32)
	if err != nil || last == 0 || last == math.MaxUint32 || formatCursor(block.Handle(last)) != s {
		return 0, fmt.Errorf("%w: cursor %q", block.ErrInvalid, s)
	}
	return block.Handle(last), nil
}
