package index

import (
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

func TestSettleAndDetach(t *testing.T) {
	table := tableForTest(t)
	k := small(1, 5)
	h := table.Upsert(k, 8, nothing)
	if !table.Settle(h, func(*Entry) bool { return false }) || table.Len() != 1 {
		t.Error("Settle frees what it was told to keep")
	}
	if !table.Detach(k, func(g block.Handle, _ *Entry) bool { return g != h }) || table.Len() != 1 {
		t.Error("Detach unlinks what it was told to keep")
	}
	if !table.Detach(k, func(g block.Handle, _ *Entry) bool { return g == h }) || table.Len() != 0 {
		t.Error("Detach does not unlink")
	}
	if table.Detach(k, func(block.Handle, *Entry) bool { return true }) {
		t.Error("Detach finds an unlinked entry")
	}
	if !table.View(h, func(*Entry) {}) {
		t.Error("Detach frees the entry")
	}
	if !table.Settle(h, func(*Entry) bool { return true }) || table.Settle(h, nil) || table.Settle(0, nil) {
		t.Error("Settle does not free the entry once")
	}
}
