package main

import (
	"math/bits"
	"time"
)

// Each power of two is cut in histogramSteps buckets of one width, which is at
// most 1/histogramSteps of the values in it: that bounds the error of a quantile
// to 0.8 %.
const (
	histogramBits  = 7
	histogramSteps = 1 << histogramBits
	// histogramMost is the longest duration that has a bucket of its own, 4.9 h.
	// What is longer is counted with it, but for the maximum, which is exact.
	histogramMost = time.Duration(1<<44 - 1)
)

// histogram counts durations. Its memory is bounded, 39 KiB, whatever it counts.
// It is not safe for concurrent use.
type histogram struct {
	count   int64
	longest time.Duration
	buckets [(44 - histogramBits + 1) * histogramSteps]int64
}

// record counts one duration. One below zero is counted as zero.
func (h *histogram) record(d time.Duration) {
	d = max(d, 0)
	h.count++
	h.longest = max(h.longest, d)
	h.buckets[bucketOf(min(d, histogramMost))]++
}

// bucketOf is the bucket of a duration: below 2*histogramSteps one for each
// nanosecond, above as many for each power of two as there are steps.
func bucketOf(d time.Duration) int {
	shift := max(0, bits.Len64(uint64(d))-histogramBits-1)
	return shift<<histogramBits + int(d>>shift)
}

// bucketEnd is the longest duration of a bucket.
func bucketEnd(i int) time.Duration {
	shift := max(0, i>>histogramBits-1)
	return time.Duration(i-shift<<histogramBits+1)<<shift - 1
}

// quantile is the duration that a share q of those counted does not exceed, 0
// when nothing was counted. It is never too short, and at most 0.8 % too long.
func (h *histogram) quantile(q float64) time.Duration {
	rank := q * float64(h.count)
	var n int64
	for i, c := range h.buckets[:] {
		if n += c; c > 0 && float64(n) >= rank {
			if i == len(h.buckets)-1 {
				break
			}
			return min(bucketEnd(i), h.longest)
		}
	}
	return h.longest
}
