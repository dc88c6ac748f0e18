package session

import (
	"context"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Hints reports whether the server takes what clients tell of their requests: the
// conversation of a match, the options of a prefetch, and ReportPrefill.
func (c *Client) Hints() bool { return c.welcome.Features&FeatureHints != 0 }

// ReportPrefill tells what computing a part of a prompt of a namespace took an engine; see
// api.Store. ErrInvalid. Without Hints it does nothing.
func (c *Client) ReportPrefill(ctx context.Context, ns Namespace, r block.PrefillReport) error {
	if err := r.Check(); err != nil {
		return fmt.Errorf("report prefill: %w", err)
	}
	if !c.Hints() {
		return nil
	}
	micros := (r.Took-1)/time.Microsecond + 1 // rounded up: a short time does not become none
	m := ReportPrefillMessage{NS: ns.ID, Tag: ns.Tag, Position: uint32(r.Position), Tokens: uint32(r.Tokens), Micros: uint64(micros)}
	if err := c.once(ctx, CodeReportPrefill, &m, CodeReported, &ReportedMessage{}); err != nil {
		return c.fail("report prefill", err)
	}
	return nil
}
