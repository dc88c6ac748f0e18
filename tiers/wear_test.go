package tiers

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// wearRig is a watch over devices that the test plays.
type wearRig struct {
	wearWatch
	log  bytes.Buffer
	tell []block.DeviceWear
	fail error
}

func newWearRig() *wearRig {
	r := &wearRig{}
	r.wearWatch.log = slog.New(slog.NewTextHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r.slab, r.told = "/s", map[string]block.DeviceWear{}
	r.ask = func() ([]block.DeviceWear, error) { return r.tell, r.fail }
	r.rank = func() uint32 { return rankHealthy }
	return r
}

// lines are what was logged since it was asked last.
func (r *wearRig) lines(level string) int {
	defer r.log.Reset()
	return strings.Count(r.log.String(), "level="+level)
}

func TestWearWarnsOnce(t *testing.T) {
	r := newWearRig()
	now := block.DeviceWear{Device: "nvme0n1", SparePercent: 100, SpareThreshold: 10}
	for _, step := range []struct {
		used, warning uint32
		warns         int
	}{
		{0, 0, 0},
		{89, 0, 0},
		{90, 0, 1},
		{91, 0, 0},
		{99, 0, 0},
		{100, 0, 1},
		{255, 0, 0},
		{255, 1 << 2, 1},
		{255, 1 << 2, 0},
		{255, 1<<2 | 1<<1, 1},
		{255, 1 << 2, 0},
		{255, 0, 0},
		{255, 1 << 1, 1},
	} {
		now.UsedPercent, now.CriticalWarning = step.used, step.warning
		r.tell = []block.DeviceWear{now}
		r.look()
		if got := r.lines("WARN"); got != step.warns {
			t.Errorf("%+v: %d warnings", step, got)
		}
		if got := r.last.Load(); got == nil || *got != now {
			t.Errorf("%+v: shows %+v", step, got)
		}
	}

	// Of a device that does not tell nothing is shown, and that is said once.
	r.tell, r.fail = nil, errors.New("not permitted")
	for i := range 3 {
		r.look()
		if got := r.lines("DEBUG"); got != 1-min(i, 1) {
			t.Errorf("silence %d: %d lines", i, got)
		}
		if got := r.last.Load(); got != nil {
			t.Errorf("silence %d: shows %+v", i, got)
		}
	}

	// When it tells again, it is what it was.
	r.tell, r.fail = []block.DeviceWear{now}, nil
	r.look()
	if n := r.lines("WARN"); n != 0 || r.last.Load() == nil {
		t.Errorf("%d warnings, shows %+v", n, r.last.Load())
	}
}

func TestWearShowsTheWorst(t *testing.T) {
	good := block.DeviceWear{Device: "good", UsedPercent: 10, SparePercent: 100, SpareThreshold: 10}
	used := block.DeviceWear{Device: "used", UsedPercent: 11, SparePercent: 100, SpareThreshold: 10}
	thin := block.DeviceWear{Device: "thin", UsedPercent: 10, SparePercent: 100, SpareThreshold: 50}
	warns := block.DeviceWear{Device: "warns", UsedPercent: 1, SparePercent: 100, SpareThreshold: 10, CriticalWarning: 1}
	for _, c := range []struct {
		tell []block.DeviceWear
		want string
	}{
		{[]block.DeviceWear{good}, "good"},
		{[]block.DeviceWear{good, used}, "used"},
		{[]block.DeviceWear{used, good}, "used"},
		{[]block.DeviceWear{good, thin}, "thin"},
		{[]block.DeviceWear{thin, used}, "used"},
		{[]block.DeviceWear{used, warns, thin}, "warns"},
	} {
		r := newWearRig()
		r.tell, r.fail = c.tell, errors.New("another does not tell")
		r.look()
		if got := r.last.Load(); got == nil || got.Device != c.want {
			t.Errorf("%v: %+v, want %s", c.tell, got, c.want)
		}
	}
}

// Devices are asked at the start and each hour, but not while the slab is down; the end
// waits for one that has not answered, and nothing else does.
func TestWearAsksRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked, rank atomic.Uint32
		var hangs atomic.Bool
		answer := make(chan struct{})
		r := newWearRig()
		r.ask = func() ([]block.DeviceWear, error) {
			n := asked.Add(1)
			if hangs.Load() {
				<-answer
			}
			return []block.DeviceWear{{Device: "nvme0n1", UsedPercent: n, SparePercent: 100}}, nil
		}
		r.rank = rank.Load
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r.run(ctx)
		}()
		want := func(what string, n uint32) {
			t.Helper()
			synctest.Wait()
			if got := asked.Load(); got != n {
				t.Errorf("%s: asked %d times, want %d", what, got, n)
			}
		}
		want("at the start", 1)
		time.Sleep(wearEvery - time.Second)
		want("within the hour", 1)
		time.Sleep(2 * time.Second)
		want("after it", 2)
		rank.Store(rankDown)
		time.Sleep(3 * wearEvery)
		want("while it is down", 2)
		rank.Store(rankDegraded)
		hangs.Store(true)
		time.Sleep(wearEvery)
		want("when it is up again", 3)
		if got := r.last.Load(); got == nil || got.UsedPercent != 2 {
			t.Errorf("while it does not answer: shows %+v", got)
		}
		cancel()
		time.Sleep(wearEvery)
		select {
		case <-ended:
			t.Error("the end has not waited for the device")
		default:
		}
		close(answer)
		<-ended
		want("at the end", 3)
	})
}
