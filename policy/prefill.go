package policy

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// Prefills learns what prefill costs the engines of a namespace from what they report: the
// line through the last reports, time of a token over its position. Its slope is the
// median of those between reports of the lower and of the upper half of the positions
// (a Theil-Sen estimate from so many pairs as there are points for), and half of the
// reports are above it and half below; they count by their tokens. Some that are far off,
// since an engine did other work meanwhile, do not move it. The zero value has no reports.
type Prefills struct {
	last [64]prefillPoint
	n    int // reports so far
}

// prefillPoint is a report as a point of that line.
type prefillPoint struct {
	position float64 // of the token in the middle
	token    float64 // ns
	weight   float64
}

const (
	// There must be so many reports before they say something.
	enoughPrefills = 8
	// A report does not count for more than one of so many tokens.
	mostPrefillWeight = 4096
	// Reports whose positions are nearer to each other say nothing about what a position
	// costs.
	farPositions = 256
)

// Add takes a report, which must be a good one, in place of the oldest.
func (p *Prefills) Add(r block.PrefillReport) {
	p.last[p.n%len(p.last)] = prefillPoint{
		position: float64(r.Position) + float64(r.Tokens)/2, token: float64(r.Took) / float64(r.Tokens), weight: min(float64(r.Tokens), mostPrefillWeight),
	}
	p.n++
}

// Cost is what prefill costs, the zero value while there are few reports.
func (p *Prefills) Cost() block.Prefill {
	if p.n < enoughPrefills {
		return block.Prefill{}
	}
	points := p.last // in order of position
	last := points[:min(p.n, len(points))]
	slices.SortFunc(last, func(a, b prefillPoint) int { return cmp.Compare(a.position, b.position) })
	values := make([]weighted, 0, len(points))
	lower, upper := last[:len(last)/2], last[len(last)/2:]
	for i, a := range lower {
		b := upper[i]
		if d := b.position - a.position; d >= farPositions {
			values = append(values, weighted{(b.token - a.token) / d, a.weight * b.weight})
		}
	}
	position := max(median(values), 0)
	values = values[:0]
	for _, a := range last {
		values = append(values, weighted{a.token - position*a.position, a.weight})
	}
	token := math.Round(median(values))
	if token < 0 { // then the position does not cost that much
		token, values = 0, values[:0]
		for _, a := range last {
			values = append(values, weighted{a.token / a.position, a.weight})
		}
		position = median(values)
	}
	if token == 0 && position == 0 {
		token = 1 // none of them took no time at all
	}
	return block.Prefill{Token: time.Duration(token), Position: position}
}

type weighted struct{ value, weight float64 }

// median is the value that half of the weight is below; 0 of nothing. It sorts them.
func median(all []weighted) float64 {
	slices.SortFunc(all, func(a, b weighted) int { return cmp.Compare(a.value, b.value) })
	half := 0.0
	for _, w := range all {
		half += w.weight / 2
	}
	for _, w := range all {
		if half -= w.weight; half <= 0 {
			return w.value
		}
	}
	return 0
}
