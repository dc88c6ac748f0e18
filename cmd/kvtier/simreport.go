package main

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// simReport is what kvtier sim prints of one replay.
type simReport struct {
	Policy        string  `json:"policy"`
	Requests      int64   `json:"requests"`
	BlockRefs     int64   `json:"block_refs"`
	UniqueBlocks  int64   `json:"unique_blocks"`
	Capacity      int64   `json:"capacity"` // blocks
	PrefixHitRate float64 `json:"prefix_hit_rate"`
	HitRate       float64 `json:"hit_rate"`
	Evictions     int64   `json:"evictions"`
	NsPerRef      float64 `json:"ns_per_ref"`
}

// share is the capacity's part of the unique blocks.
func (r *simReport) share() float64 { return float64(r.Capacity) / float64(r.UniqueBlocks) }

// print writes the report for people.
func (r simReport) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "policy\t%s\n", r.Policy)
	fmt.Fprintf(w, "capacity\t%d of %d unique blocks (%.1f %%)\n", r.Capacity, r.UniqueBlocks, 100*r.share())
	fmt.Fprintf(w, "requests\t%d, %d block references\n", r.Requests, r.BlockRefs)
	fmt.Fprintf(w, "prefix hit rate\t%.4f\n", r.PrefixHitRate)
	fmt.Fprintf(w, "hit rate\t%.4f\n", r.HitRate)
	fmt.Fprintf(w, "evictions\t%d\n", r.Evictions)
	fmt.Fprintf(w, "time\t%.0f ns a reference\n", r.NsPerRef)
	return w.Flush()
}

// printComparison writes a table of prefix hit rates: a line for each policy, a
// column for each capacity, and in brackets the percent of the optimum if that was
// replayed too.
func printComparison(out io.Writer, reports []simReport) error {
	lines := byPolicy(reports)
	best := slices.IndexFunc(lines, func(l []simReport) bool { return l[0].Policy == beladyName })
	first := lines[0][0]
	fmt.Fprintf(out, "%d requests, %d block references, %d unique blocks\n\n", first.Requests, first.BlockRefs, first.UniqueBlocks)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "CAPACITY\t")
	for _, r := range lines[0] {
		fmt.Fprintf(w, "%d\t", r.Capacity)
	}
	fmt.Fprintln(w)
	for _, l := range lines {
		fmt.Fprintf(w, "%s\t", l[0].Policy)
		for i, r := range l {
			fmt.Fprintf(w, "%.4f", r.PrefixHitRate)
			if best >= 0 && lines[best][i].PrefixHitRate > 0 {
				fmt.Fprintf(w, " (%.1f)", 100*r.PrefixHitRate/lines[best][i].PrefixHitRate)
			}
			fmt.Fprint(w, "\t")
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// byPolicy splits the reports, which are in the order of the policies.
func byPolicy(reports []simReport) (lines [][]simReport) {
	for _, r := range reports {
		if n := len(lines); n == 0 || lines[n-1][0].Policy != r.Policy {
			lines = append(lines, nil)
		}
		last := &lines[len(lines)-1]
		*last = append(*last, r)
	}
	return lines
}

// simCSV writes a line for each replay.
func simCSV(reports []simReport) []byte {
	var b bytes.Buffer
	fmt.Fprintln(&b, "policy,capacity,share,requests,block_refs,unique_blocks,prefix_hit_rate,hit_rate,evictions,ns_per_ref")
	for _, r := range reports {
		fmt.Fprintf(&b, "%s,%d,%.6f,%d,%d,%d,%.6f,%.6f,%d,%.1f\n",
			r.Policy, r.Capacity, r.share(), r.Requests, r.BlockRefs, r.UniqueBlocks, r.PrefixHitRate, r.HitRate, r.Evictions, r.NsPerRef)
	}
	return b.Bytes()
}
