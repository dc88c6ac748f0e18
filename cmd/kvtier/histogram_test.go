package main

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// The buckets follow one another without a gap, and each duration lies in its own.
func TestHistogramBuckets(t *testing.T) {
	var h histogram
	for i := range h.buckets {
		end := bucketEnd(i)
		if got := bucketOf(end); got != i {
			t.Fatalf("bucket %d ends with %d, which is in bucket %d", i, end, got)
		}
		if end == histogramMost {
			if i != len(h.buckets)-1 {
				t.Errorf("bucket %d is the last, there are %d", i, len(h.buckets))
			}
			continue
		}
		if got := bucketOf(end + 1); got != i+1 {
			t.Fatalf("bucket %d ends with %d, the next duration is in bucket %d", i, end, got)
		}
	}
}

func TestHistogramQuantiles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, tc := range []struct {
		name string
		draw func() time.Duration
	}{
		{"even", func() time.Duration { return time.Duration(rng.Int64N(int64(time.Second))) }},
		{"a long tail", func() time.Duration { return time.Duration(math.Exp(rng.NormFloat64()*3+12)) % histogramMost }},
		{"nanoseconds", func() time.Duration { return time.Duration(rng.Int64N(300)) }},
		{"one value", func() time.Duration { return 123456789 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var h histogram
			all := make([]time.Duration, 20_000)
			for i := range all {
				all[i] = tc.draw()
				h.record(all[i])
			}
			slices.Sort(all)
			for _, q := range []float64{0.001, 0.5, 0.9, 0.99, 0.999, 1} {
				want := all[int(math.Ceil(q*float64(len(all))))-1]
				if got := h.quantile(q); got < want || float64(got) > 1.008*float64(want) {
					t.Errorf("quantile %v is %d, want %d", q, got, want)
				}
			}
			if h.count != int64(len(all)) || h.longest != all[len(all)-1] {
				t.Errorf("count %d, longest %d; want %d, %d", h.count, h.longest, len(all), all[len(all)-1])
			}
		})
	}
}

func TestHistogramEnds(t *testing.T) {
	var h histogram
	if got := h.quantile(0.5); got != 0 {
		t.Errorf("quantile of nothing is %v", got)
	}
	h.record(-time.Second)
	if got := h.quantile(1); got != 0 || h.count != 1 {
		t.Errorf("below zero: %v, count %d", got, h.count)
	}
	h.record(math.MaxInt64)
	h.record(histogramMost + 1)
	if got := h.quantile(1); got != math.MaxInt64 || h.longest != math.MaxInt64 || h.count != 3 {
		t.Errorf("beyond the last bucket: %v, longest %v, count %d", got, h.longest, h.count)
	}
}
