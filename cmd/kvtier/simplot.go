package main

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
)

// The drawing, in pixels.
const (
	plotWidth, plotHeight = 720, 440
	plotLeft, plotRight   = 64, 136 // margins; the names are in the right one
	plotTop, plotBottom   = 40, 56
)

// plotColors tell policies apart, also for those who see few colours (Okabe and
// Ito 2008). Belady is black.
var plotColors = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"}

// plot maps capacities and hit rates to the drawing.
type plot struct {
	bytes.Buffer
	low, high float64 // capacities at the edges
	top       float64 // hit rate at the upper edge
}

// simPlot draws the prefix hit rate over the capacity, which has a logarithmic
// axis, with a line for each policy, as SVG.
func simPlot(reports []simReport) []byte {
	p := &plot{}
	capacity := func(a, b simReport) int { return cmp.Compare(a.Capacity, b.Capacity) }
	p.low = float64(slices.MinFunc(reports, capacity).Capacity)
	p.high = float64(slices.MaxFunc(reports, capacity).Capacity)
	if p.low == p.high {
		p.low, p.high = p.low/2, p.high*2
	}
	for _, r := range reports {
		p.top = max(p.top, r.PrefixHitRate)
	}
	p.top = max(0.1, math.Ceil(p.top*10)/10)
	fmt.Fprintf(p, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(p, `<rect width="%d" height="%d" fill="white"/>`+"\n", plotWidth, plotHeight)
	first := reports[0]
	p.text(plotLeft, 24, "start", fmt.Sprintf("prefix hit rate, %d requests, %d unique blocks", first.Requests, first.UniqueBlocks))
	p.axes(reports)
	for i, l := range byPolicy(reports) {
		p.line(i, l)
	}
	fmt.Fprintln(p, "</svg>")
	return p.Bytes()
}

func (p *plot) x(capacity float64) float64 {
	return plotLeft + (plotWidth-plotLeft-plotRight)*math.Log(capacity/p.low)/math.Log(p.high/p.low)
}

func (p *plot) y(rate float64) float64 {
	return plotHeight - plotBottom - (plotHeight-plotTop-plotBottom)*rate/p.top
}

func (p *plot) text(x, y float64, anchor, s string) {
	fmt.Fprintf(p, `<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, s)
}

// axes draws a grid with a line for each tenth of the hit rate and each capacity.
func (p *plot) axes(reports []simReport) {
	for tenth := range int(math.Round(p.top*10)) + 1 {
		rate := float64(tenth) / 10
		p.grid(plotLeft, p.y(rate), plotWidth-plotRight, p.y(rate))
		p.text(plotLeft-8, p.y(rate)+4, "end", fmt.Sprintf("%.1f", rate))
	}
	for _, r := range byPolicy(reports)[0] {
		x := p.x(float64(r.Capacity))
		p.grid(x, plotTop, x, plotHeight-plotBottom)
		p.text(x, plotHeight-plotBottom+18, "middle", fmt.Sprint(r.Capacity))
		p.text(x, plotHeight-plotBottom+34, "middle", fmt.Sprintf("%.3g %%", 100*r.share()))
	}
	p.text(plotLeft, plotHeight-6, "start", "capacity in blocks, and as a share of the unique blocks")
}

func (p *plot) grid(x1, y1, x2, y2 float64) {
	fmt.Fprintf(p, `<path d="M%.1f %.1fL%.1f %.1f" stroke="#ddd"/>`+"\n", x1, y1, x2, y2)
}

// line draws one policy and names it.
func (p *plot) line(i int, reports []simReport) {
	color := plotColors[i%len(plotColors)]
	if reports[0].Policy == beladyName {
		color = "black"
	}
	sorted := slices.SortedFunc(slices.Values(reports), func(a, b simReport) int { return cmp.Compare(a.Capacity, b.Capacity) })
	fmt.Fprintf(p, `<polyline fill="none" stroke="%s" stroke-width="2" points="`, color)
	for _, r := range sorted {
		fmt.Fprintf(p, "%.1f,%.1f ", p.x(float64(r.Capacity)), p.y(r.PrefixHitRate))
	}
	fmt.Fprintln(p, `"/>`)
	for _, r := range sorted {
		fmt.Fprintf(p, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"><title>%s, %d blocks: %.4f</title></circle>`+"\n",
			p.x(float64(r.Capacity)), p.y(r.PrefixHitRate), color, r.Policy, r.Capacity, r.PrefixHitRate)
	}
	y := float64(plotTop + 8 + 18*i)
	fmt.Fprintf(p, `<path d="M%d %.1fh20" stroke="%s" stroke-width="2"/>`+"\n", plotWidth-plotRight+16, y, color)
	p.text(plotWidth-plotRight+42, y+4, "start", reports[0].Policy)
}
