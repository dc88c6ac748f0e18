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
	*tierReport           // nil of one tier
}

// tierReport is what there is to say of two tiers. The capacity and the evictions of a
// simReport are those of both together then.
type tierReport struct {
	CapacityByTier  byTier  `json:"capacity_by_tier"` // blocks
	HitsByTier      byTier  `json:"hits_by_tier"`     // prefix hit blocks
	SSDWrites       int64   `json:"ssd_writes"`       // blocks
	SSDWritesPerHit float64 `json:"ssd_writes_per_hit"`
}

// byTier is a number of blocks for each tier.
type byTier struct {
	DRAM int64 `json:"dram"`
	SSD  int64 `json:"ssd"`
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
	if t := r.tierReport; t != nil {
		fmt.Fprintf(w, "capacity by tier\tDRAM %d, SSD %d\n", t.CapacityByTier.DRAM, t.CapacityByTier.SSD)
		fmt.Fprintf(w, "prefix hits by tier\tDRAM %d, SSD %d\n", t.HitsByTier.DRAM, t.HitsByTier.SSD)
		fmt.Fprintf(w, "SSD writes\t%d, %.3f a prefix hit\n", t.SSDWrites, t.SSDWritesPerHit)
	}
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

// printTiers writes a line for each policy in two tiers; the percent of the optimum is
// in brackets if that was replayed too.
func printTiers(out io.Writer, reports []simReport) error {
	best := slices.IndexFunc(reports, func(r simReport) bool { return r.Policy == beladyName })
	first := reports[0]
	fmt.Fprintf(out, "%d requests, %d block references, %d unique blocks; %d in both tiers\n\n", first.Requests, first.BlockRefs, first.UniqueBlocks, first.Capacity)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "POLICY\tPREFIX HITS\tFROM DRAM\tFROM SSD\tSSD WRITES A REFERENCE\tA PREFIX HIT\t")
	for _, r := range reports {
		refs := float64(r.BlockRefs)
		fmt.Fprintf(w, "%s\t%.4f", r.Policy, r.PrefixHitRate)
		if best >= 0 && reports[best].PrefixHitRate > 0 {
			fmt.Fprintf(w, " (%.1f)", 100*r.PrefixHitRate/reports[best].PrefixHitRate)
		}
		if t := r.tierReport; t != nil {
			fmt.Fprintf(w, "\t%.4f\t%.4f\t%.3f\t%.3f\t\n", float64(t.HitsByTier.DRAM)/refs, float64(t.HitsByTier.SSD)/refs, float64(t.SSDWrites)/refs, t.SSDWritesPerHit)
		} else {
			fmt.Fprint(w, "\t\t\t\t\t\n")
		}
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

// simCSV writes a line for each replay. What is of two tiers only is empty for one.
func simCSV(reports []simReport) []byte {
	var b bytes.Buffer
	fmt.Fprintln(&b, "policy,capacity,share,requests,block_refs,unique_blocks,prefix_hit_rate,hit_rate,evictions,ns_per_ref,dram_capacity,ssd_capacity,dram_hits,ssd_hits,ssd_writes")
	for _, r := range reports {
		fmt.Fprintf(&b, "%s,%d,%.6f,%d,%d,%d,%.6f,%.6f,%d,%.1f",
			r.Policy, r.Capacity, r.share(), r.Requests, r.BlockRefs, r.UniqueBlocks, r.PrefixHitRate, r.HitRate, r.Evictions, r.NsPerRef)
		if t := r.tierReport; t != nil {
			fmt.Fprintf(&b, ",%d,%d,%d,%d,%d\n", t.CapacityByTier.DRAM, t.CapacityByTier.SSD, t.HitsByTier.DRAM, t.HitsByTier.SSD, t.SSDWrites)
		} else {
			fmt.Fprintln(&b, ",,,,,")
		}
	}
	return b.Bytes()
}
