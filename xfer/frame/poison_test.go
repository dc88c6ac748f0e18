//go:build invariants

package frame_test

import (
	"net"
	"testing"

	"github.com/kvtier/kvtier/internal/invariants"
	"github.com/kvtier/kvtier/xfer/frame"
)

// TestKeptMessage: a handler that keeps a payload finds poison in it.
func TestKeptMessage(t *testing.T) {
	over(t, func(t *testing.T, near, far net.Conn) {
		sizes := []int{1, 1000, 5000, 100_000}
		var kept []byte
		poisoned := make(chan bool, len(sizes))
		serve(t, near, nil, calls{frame: func(h *frame.Header, p []byte) error {
			if h.ID == 1 {
				kept = p
			} else {
				poisoned <- invariants.Poisoned(kept)
			}
			return nil
		}})
		peer, _ := serve(t, far, nil, calls{})
		for _, n := range sizes {
			first := message(string(pattern(1, n)))
			first.ID = 1
			if err := peer.Send(t.Context(), first, message("")); err != nil {
				t.Fatal(err)
			}
			if !<-poisoned {
				t.Errorf("a message of %d bytes is still there", n)
			}
		}
	})
}
