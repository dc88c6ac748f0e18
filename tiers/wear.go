package tiers

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// wearEvery is how often devices are asked for their wear, which changes by the week.
const wearEvery = time.Hour

// wearWatch asks the devices under a slab for their wear. Nobody waits for it but Close,
// as for other work of a device: the kernel gives up what the device does not answer.
type wearWatch struct {
	slab string
	log  *slog.Logger
	// ask returns what the devices under the slab tell, and why others do not.
	ask  func() ([]block.DeviceWear, error)
	rank func() uint32                    // of the slab's health
	last atomic.Pointer[block.DeviceWear] // the worst of those that told; nil: none did

	// Of the goroutine.
	told   map[string]block.DeviceWear // what was last heard, by device
	silent bool                        // it was logged that a device does not tell
}

func newWearWatch(slab *Slab, rank func() uint32, log *slog.Logger) *wearWatch {
	return &wearWatch{slab: slab.Path(), log: log, ask: slab.wear, rank: rank, told: map[string]block.DeviceWear{}}
}

// run asks until ctx ends.
func (w *wearWatch) run(ctx context.Context) {
	tick := time.NewTicker(wearEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		if w.rank() != rankDown { // it is left alone
			w.look()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look asks once, and warns of what was not so before.
func (w *wearWatch) look() {
	all, err := w.ask()
	if err != nil && !w.silent {
		w.log.Debug("device does not tell of its wear", "slab", w.slab, "err", err)
	}
	w.silent = err != nil
	var worst *block.DeviceWear
	for i := range all {
		now := &all[i]
		was := w.told[now.Device]
		if now.CriticalWarning&^was.CriticalWarning != 0 || endurance(now) > endurance(&was) {
			w.log.Warn("device wears out", "slab", w.slab, "device", now.Device, "used_percent", now.UsedPercent,
				"spare_percent", now.SparePercent, "spare_threshold", now.SpareThreshold, "warnings", strings.Join(now.Warnings(), ", "))
		}
		w.told[now.Device] = *now
		if worst == nil || worseWear(now, worst) {
			worst = now
		}
	}
	w.last.Store(worst)
}

// endurance is the last of the steps that a device's use has reached of which a warning
// tells, 0 for none.
func endurance(w *block.DeviceWear) int {
	switch {
	case w.UsedPercent >= 100:
		return 2
	case w.UsedPercent >= 90:
		return 1
	}
	return 0
}

// worseWear reports whether a is nearer to its end than b: one that warns, then the one
// that is used more, then the one with less spare above its threshold.
func worseWear(a, b *block.DeviceWear) bool {
	left := func(w *block.DeviceWear) int { return int(w.SparePercent) - int(w.SpareThreshold) }
	if warns := a.CriticalWarning != 0; warns != (b.CriticalWarning != 0) {
		return warns
	}
	return cmp.Or(cmp.Compare(a.UsedPercent, b.UsedPercent), cmp.Compare(left(b), left(a))) > 0
}

// wear asks the devices under the slab. The error says why some do not tell.
func (s *Slab) wear() (told []block.DeviceWear, _ error) {
	st, err := s.f.Stat()
	if err != nil {
		return nil, err
	}
	sys := st.Sys().(*syscall.Stat_t)
	number := sys.Dev
	if s.device {
		number = sys.Rdev
	}
	disks, err := disksUnder("/sys", number)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, d := range disks {
		w, err := readWear("/dev", d)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		told = append(told, w)
	}
	return told, errors.Join(errs...)
}
