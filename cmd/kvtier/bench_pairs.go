package main

import (
	"context"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// A pass does one thing often enough to be timed and returns its figure. What
// it has to prepare or clear away it leaves out of the time.
type pass func(ctx context.Context) (float64, error)

// often is how many pairs are taken for one where a pass lasts only milliseconds:
// too short for the machine's noise to even out.
const often = 5

// compare takes value and limit by turns, in n pairs, and adds the row of their
// medians. limit may be nil. Which of the two comes first alternates, so that
// neither finds the machine in a better state than the other. The first passes
// are thrown away: fresh memory and files are slow for a while.
func (b *bench) compare(ctx context.Context, name, unit string, n int, value, limit pass) error {
	var values, limits, ratios []float64
	for i := range b.warmups + n {
		turns := []pass{value, limit}
		figures := make([]float64, 2)
		for j := range turns {
			k := (i + j) % 2
			if turns[k] == nil {
				continue
			}
			v, err := turns[k](ctx)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			figures[k] = v
		}
		if i < b.warmups {
			continue
		}
		values = append(values, figures[0])
		if limit == nil {
			b.note("%s %d/%d: %s %s", name, i-b.warmups+1, n, figure(figures[0]), unit)
			continue
		}
		limits = append(limits, figures[1])
		ratios = append(ratios, figures[0]/figures[1])
		b.note("%s %d/%d: %s of %s %s, %.3f", name, i-b.warmups+1, n, figure(figures[0]), figure(figures[1]), unit, figures[0]/figures[1])
	}
	row := benchRow{Name: name, Value: median(values), Unit: unit}
	if limit != nil {
		l, r := median(limits), median(ratios)
		row.Limit, row.Ratio = &l, &r
	}
	b.rows = append(b.rows, row)
	return nil
}

// once adds a row that is measured once and has no limit.
func (b *bench) once(name, unit string, value float64) {
	b.note("%s: %s %s", name, figure(value), unit)
	b.rows = append(b.rows, benchRow{Name: name, Value: value, Unit: unit})
}

// median is the middle of some values, which it sorts.
func median(v []float64) float64 {
	slices.Sort(v)
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}

// rate is GB/s.
func rate(bytes int, d time.Duration) float64 { return float64(bytes) / 1e9 / d.Seconds() }

// side runs fn for 0 to n-1 on depth goroutines, and on the caller's when depth
// is 1. It returns how long that took.
func side(ctx context.Context, n, depth int, fn func(ctx context.Context, i int) error) (time.Duration, error) {
	begin := time.Now()
	if depth == 1 {
		for i := range n {
			if err := fn(ctx, i); err != nil {
				return 0, err
			}
		}
		return time.Since(begin), nil
	}
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range depth {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := fn(ctx, i); err != nil {
					return err
				}
			}
		})
	}
	err := g.Wait()
	return time.Since(begin), err
}

// warnIfBusy tells when others use the machine: ratios then say little. root is
// the file system, os.DirFS("/").
func (b *bench) warnIfBusy(root fs.FS) {
	data, err := fs.ReadFile(root, "proc/loadavg")
	if err != nil {
		return
	}
	load, _, _ := strings.Cut(string(data), " ")
	if v, err := strconv.ParseFloat(load, 64); err == nil && v > float64(runtime.NumCPU())/2 {
		b.note("note: the machine is busy (load %.1f on %d cores); the figures will be off", v, runtime.NumCPU())
	}
}
