package tiers

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer"
)

// TestHealthStates walks through the states of a medium.
func TestHealthStates(t *testing.T) {
	var log bytes.Buffer
	h := newHealth("/s", Options{StallAfter: time.Minute, ProbeEvery: time.Hour, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	broken := errors.New("broken")
	do := func(n int, err error) {
		for range n {
			op := h.enter()
			op.failed = err
			h.end(op)
		}
	}
	want := func(state string, errs int64) {
		t.Helper()
		var st block.DeviceStats
		h.stats(&st)
		if st.State != state || st.Errors != errs || (st.Reason == "") != (state == block.Healthy) || st.Since.IsZero() {
			t.Errorf("%+v, want %s, %d errors", st, state, errs)
		}
		op, err := h.begin()
		if op != nil {
			op.void = true
			h.end(op)
		}
		if down := errors.Is(err, block.ErrUnavailable); down != (state == block.Down) {
			t.Errorf("%s: begin: %v", state, err)
		}
	}
	do(1, nil)
	want(block.Healthy, 0)
	do(downAfter-1, broken)
	want(block.Degraded, downAfter-1)
	do(healAfter, nil)
	want(block.Degraded, downAfter-1) // it failed a moment ago
	h.probed(nil)
	want(block.Degraded, downAfter-1)
	h.mu.failed = time.Now().Add(-2 * time.Hour)
	do(1, nil)
	want(block.Healthy, downAfter-1)

	up := h.up()
	do(downAfter, broken)
	want(block.Down, 2*downAfter-1)
	if up.Err() == nil {
		t.Error("who waits for it is not told")
	}
	do(1, nil)
	want(block.Down, 2*downAfter-1)
	if len(h.kick) != 1 {
		t.Error("it answers, and is not probed")
	}
	h.probed(nil)
	want(block.Healthy, 2*downAfter-1)
	if h.up().Err() != nil {
		t.Error("it is healthy, and who waits is told otherwise")
	}

	// An operation that was cancelled says nothing.
	op := h.enter()
	op.void = true
	h.end(op)
	first, second := h.enter(), h.enter()
	late := int64(-2 * time.Minute)
	first.heard.Store(late)
	h.end(first)
	second.heard.Store(late)
	second.goesOn()
	h.look()
	want(block.Healthy, 2*downAfter-1)
	second.heard.Store(late)
	h.look()
	want(block.Down, 2*downAfter-1)
	h.end(second)
	h.probed(nil)

	// A bucket is asked first.
	h.answers = func(context.Context) bool { return true }
	op = h.enter()
	op.heard.Store(late)
	if !h.look() {
		t.Error("a bucket that may stall is not asked")
	}
	want(block.Healthy, 2*downAfter-1)
	h.asked(true)
	if h.look() {
		t.Error("a bucket that has just answered is asked again")
	}
	op.heard.Store(late)
	h.asked(false)
	want(block.Down, 2*downAfter-1)
	if h.look() {
		t.Error("a bucket that is down is asked, beside the probes")
	}
	h.end(op)
	h.probed(nil)
	h.answers = nil

	if err := h.watchFlush(func() error { return broken })(); !errors.Is(err, broken) {
		t.Errorf("flush: %v", err)
	}
	want(block.Down, 2*downAfter)
	if err := h.watchFlush(func() error { return nil })(); err != nil {
		t.Errorf("flush: %v", err)
	}
	want(block.Down, 2*downAfter)

	if n := strings.Count(log.String(), "device is down"); n != 4 {
		t.Errorf("%d lines of a device that went down, want 4:\n%s", n, &log)
	}
}

// TestLogRate: of many lines a few come through, and the next one says how many
// did not.
func TestLogRate(t *testing.T) {
	var r logRate
	written := 0
	for range 1000 {
		if _, ok := r.next(); ok {
			written++
		}
	}
	// A test that is held up sees more seconds than one.
	if written < logLines || written > 500 {
		t.Errorf("%d of 1000 lines came through", written)
	}
	r.mu.since = time.Now().Add(-time.Second)
	if skipped, ok := r.next(); !ok || skipped == 0 {
		t.Errorf("a second later: %d, %v", skipped, ok)
	}
}

func TestHealthOptions(t *testing.T) {
	for _, tt := range []struct {
		change func(o *Options)
		field  string // "" when it is accepted
	}{
		{func(*Options) {}, ""},
		{func(o *Options) { o.StallAfter = -1 }, "stall after"},
		{func(o *Options) { o.ProbeEvery = -1 }, "probe every"},
	} {
		o := Options{Dir: "d", Agent: &xfer.Agent{}, DRAM: minDRAM}
		tt.change(&o)
		err := o.withDefaults().validate()
		if tt.field == "" && err != nil || tt.field != "" && (!errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), tt.field)) {
			t.Errorf("%q: %v", tt.field, err)
		}
	}
}
