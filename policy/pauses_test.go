package policy_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/policy"
)

// TestPausesOwn: a conversation is known by its own last pauses once there are nine, by
// those of its class before, and not at all while there are few of either.
func TestPausesOwn(t *testing.T) {
	p := policy.NewPauses(100)
	now := time.Duration(0)
	ask := func(conversation, class uint64, pauses ...time.Duration) {
		for _, d := range pauses {
			now += d
			p.Request(conversation, class, now)
		}
	}
	want := func(conversation, class uint64, least, most time.Duration) {
		t.Helper()
		if got := p.Until(conversation, class); got < least || got > most {
			t.Errorf("conversation %d of class %d: %v, want %v to %v", conversation, class, got, least, most)
		}
	}
	ms := time.Millisecond
	want(1, 1, 0, 0)
	ask(1, 1, 0, time.Second, 2*time.Second, 3*time.Second)
	ask(1, 1, slices.Repeat([]time.Duration{time.Second}, 5)...)
	want(1, 1, 0, 0) // eight pauses say nothing
	want(2, 1, 0, 0) // of its class neither
	ask(1, 1, time.Second)
	want(1, 1, 3*time.Second, 3*time.Second+ms) // of nine the longest
	want(2, 1, 3*time.Second, 3*time.Second+ms)
	ask(1, 1, slices.Repeat([]time.Duration{time.Second}, 30)...)
	want(1, 1, time.Second, time.Second+ms) // the longer ones are long ago
	want(2, 2, 0, 0)
	ask(2, 1, slices.Repeat([]time.Duration{60 * ms}, 10)...)
	want(2, 1, 60*ms, 3*time.Second+ms)
	ask(2, 1, slices.Repeat([]time.Duration{60 * ms}, 10)...)
	want(2, 1, 60*ms, 61*ms)
	ask(2, 1, slices.Repeat([]time.Duration{40 * ms}, 20)...) // no pauses
	want(2, 1, 60*ms, 61*ms)
	want(1, 1, time.Second, time.Second+ms)
	// Clocks and pauses beyond any number do no harm.
	ask(3, 3, slices.Repeat([]time.Duration{math.MaxInt64 / 16}, 10)...)
	want(3, 3, 1000*time.Hour, math.MaxInt64)
	p.Request(3, 3, 0)
	want(3, 3, 1000*time.Hour, math.MaxInt64)
}

// TestPausesCover: of the next requests nine in ten come by the time that was said, for
// conversations of every pace; and that is not much later than it must be.
func TestPausesCover(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	p := policy.NewPauses(1000)
	var asked, covered int
	var held, needed float64
	for c := range uint64(200) {
		pace := math.Exp(r.Float64()*6 - 1) // seconds: 0.4 to 150
		now := time.Duration(0)
		p.Request(c, 0, now)
		for i := range 60 {
			until := p.Until(c, 0)
			pause := time.Duration(pace * math.Exp(r.NormFloat64()*0.6) * float64(time.Second))
			if i >= 30 { // from then on its own are all there
				asked++
				if pause <= until {
					covered++
				}
				held += until.Seconds() / pace
				needed += math.Exp(1.2816 * 0.6) // the true quantile
			}
			now += pause
			p.Request(c, 0, now)
		}
	}
	if share := float64(covered) / float64(asked); share < 0.88 || share > 0.92 {
		t.Errorf("%.3f of the pauses are covered", share)
	}
	if held > 1.25*needed {
		t.Errorf("held %.2f times as long as must be", held/needed)
	}
}

// TestPausesBounded: those whose last request is longest ago are forgotten.
func TestPausesBounded(t *testing.T) {
	const most = 50
	p := policy.NewPauses(most)
	r := rand.New(rand.NewPCG(3, 4))
	var order []uint64 // last used at the end
	count := map[uint64]int{}
	for i := range 20_000 {
		c := r.Uint64N(60)
		p.Request(c, c, time.Duration(i)*time.Second)
		if at := slices.Index(order, c); at >= 0 {
			order = slices.Delete(order, at, at+1)
		} else {
			count[c] = 0
		}
		if order = append(order, c); len(order) > most {
			delete(count, order[0])
			order = order[1:]
		}
		count[c]++
		// Of another class: what is said is its own.
		c = r.Uint64N(60)
		if got, want := p.Until(c, 1000) > 0, count[c] > 9; got != want {
			t.Fatalf("after %d requests conversation %d is known: %v, want %v", i+1, c, got, want)
		}
	}
}
