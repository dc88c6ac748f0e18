package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// statOutput is what stat prints as JSON. Bytes are in slots, with headers and
// rounding, unless payload is said; counters are since the daemon's start.
type statOutput struct {
	Version       string           `json:"version"`
	UptimeSeconds float64          `json:"uptime_seconds"`
	Namespaces    int64            `json:"namespaces"`
	Blocks        int64            `json:"blocks"`
	Tiers         []statTier       `json:"tiers"`
	Misses        map[string]int64 `json:"misses"`  // by reason
	Removed       map[string]int64 `json:"removed"` // blocks gone for good, by reason
	Conflicts     int64            `json:"conflicts"`
	Corrupt       int64            `json:"corrupt"`
	Leases        int64            `json:"leases"`       // now
	Reservations  int64            `json:"reservations"` // now
	Prefetch      statPrefetch     `json:"prefetch"`
	Watchers      int64            `json:"watchers"` // now
	EventsLost    int64            `json:"events_lost"`
	TableBytes    int64            `json:"table_bytes"`
	Incarnation   string           `json:"incarnation"`  // of the store, hex
	EventSeq      uint64           `json:"event_seq"`    // number of the last event
	Pinned        int64            `json:"pinned"`       // blocks
	PinnedBytes   int64            `json:"pinned_bytes"` // of their payload
	Scrub         scrubOutput      `json:"scrub"`
	Catalog       statHealth       `json:"catalog"`
	ByNamespace   []statNamespace  `json:"by_namespace"`
	ObjectSweeps  []sweepOutput    `json:"object_sweeps,omitempty"` // of each bucket
}

// statNamespace counts what matches and gets asked a namespace for.
type statNamespace struct {
	Name    string           `json:"name"`
	Asked   int64            `json:"asked"`   // blocks in matches
	Matched int64            `json:"matched"` // of those, blocks in unbroken prefixes
	Misses  map[string]int64 `json:"misses"`  // keys not found or not served, by reason
	Prefill *statPrefill     `json:"prefill,omitempty"`
}

// statPrefill is what prefill costs the engines of a namespace.
type statPrefill struct {
	TokenNS    int64   `json:"token_ns"` // with position_ns 0, too: too few reports
	PositionNS float64 `json:"position_ns"`
	Learned    bool    `json:"learned"` // from reports; otherwise it is that of --prefill
	Reports    int64   `json:"reports"`
}

// statHealth is how well a medium is.
type statHealth struct {
	State  string `json:"state"`            // healthy, degraded or down
	Reason string `json:"reason,omitempty"` // why it is not healthy
	Since  string `json:"since,omitempty"`
	Errors int64  `json:"errors"`
}

func (h *statHealth) line() string {
	s := h.State
	if h.Reason != "" {
		s += ": " + h.Reason
	}
	if h.State != block.Healthy && h.Since != "" {
		s += ", since " + h.Since
	}
	if h.Errors > 0 {
		s += ", " + counted(h.Errors, "error")
	}
	return s
}

type statTier struct {
	Tier         string       `json:"tier"`
	Capacity     int64        `json:"capacity"`
	Used         int64        `json:"used"`
	Reserve      int64        `json:"reserve"`
	Blocks       int64        `json:"blocks"`
	PayloadBytes int64        `json:"payload_bytes"`
	High         int64        `json:"high"`
	Low          int64        `json:"low"`
	Hits         int64        `json:"hits"`
	BytesIn      int64        `json:"bytes_in"`
	BytesOut     int64        `json:"bytes_out"`
	Evictions    int64        `json:"evictions"`
	Dropped      int64        `json:"dropped"`
	Reclaimed    int64        `json:"reclaimed"`
	Refused      int64        `json:"refused"`
	QueueDrops   int64        `json:"queue_drops"`
	Policy       string       `json:"policy"`
	BehindMS     int64        `json:"behind_ms"` // that used has been above high; 0: eviction keeps up
	FellBehind   int64        `json:"fell_behind"`
	Devices      []statDevice `json:"devices"`

	Admission *statAdmission `json:"admission,omitempty"` // absent: all that leaves the tier above is written
	Uploads   *statUploads   `json:"uploads,omitempty"`   // of the object tier
	Curves    []statCurve    `json:"curves"`
}

// statCurve is what a tier would have had if it were another.
type statCurve struct {
	Policy string  `json:"policy,omitempty"` // absent where there is room for all
	Size   float64 `json:"size,omitempty"`   // in capacities of the tier; absent: room for all
	Asked  int64   `json:"asked"`            // blocks of matches
	Hits   int64   `json:"hits"`             // of those, estimated
}

func describeCurves(curves []block.Curve) []statCurve {
	out := []statCurve{}
	for _, k := range curves {
		out = append(out, statCurve(k))
	}
	return out
}

// statAdmission says what was decided about blocks that left the tier above.
type statAdmission struct {
	Budgets  []statBudget     `json:"budgets"`
	Admitted int64            `json:"admitted"`
	Rejected map[string]int64 `json:"rejected"` // turned away, by reason
}

func (a *statAdmission) line() string {
	return fmt.Sprintf("%s admitted, %d rejected%s", counted(a.Admitted, "block"), total(a.Rejected), countsIn(a.Rejected))
}

// statUploads says how blocks do that are to go into the bucket.
type statUploads struct {
	Blocks   int64 `json:"blocks"` // now
	Bytes    int64 `json:"bytes"`
	HeldBack int64 `json:"held_back"`
	Dropped  int64 `json:"dropped"`
	Through  int64 `json:"through_dropped"`
	Failed   int64 `json:"failed"`
}

func (u *statUploads) line() string {
	return fmt.Sprintf("%s (%s) on their way up; held back by a full queue %d, waited too long %d, put without room in it %d, failed %d",
		counted(u.Blocks, "block"), formatSizeShort(u.Bytes), u.HeldBack, u.Dropped, u.Through, u.Failed)
}

type statDevice struct {
	Path        string `json:"path,omitempty"`
	ID          string `json:"id,omitempty"`
	Bytes       int64  `json:"bytes"`
	FreeOnFS    int64  `json:"free_on_fs,omitempty"`
	Engine      string `json:"engine,omitempty"`
	PageBytes   int64  `json:"page_bytes,omitempty"`
	LockedBytes int64  `json:"locked_bytes,omitempty"`
	Quarantined int64  `json:"quarantined,omitempty"`
	statHealth
	Wear *statWear `json:"wear,omitempty"` // absent: the device does not tell
}

// statWear is what an NVMe device tells of its wear.
type statWear struct {
	Device         string   `json:"device"`
	UsedPercent    uint32   `json:"used_percent"` // of its rated endurance
	SparePercent   uint32   `json:"spare_percent"`
	SpareThreshold uint32   `json:"spare_threshold_percent"` // below which it warns
	Warnings       []string `json:"critical_warnings"`
	WrittenBytes   int64    `json:"written_bytes,omitempty"` // absent: it does not say
}

func describeWear(w *block.DeviceWear) *statWear {
	if w == nil {
		return nil
	}
	return &statWear{w.Device, w.UsedPercent, w.SparePercent, w.SpareThreshold, append([]string{}, w.Warnings()...), w.WrittenBytes}
}

func (w *statWear) line() string {
	s := fmt.Sprintf("%s: %d%% of its endurance used, %d%% spare (warns below %d%%)", w.Device, w.UsedPercent, w.SparePercent, w.SpareThreshold)
	if w.WrittenBytes > 0 {
		s += ", " + formatSizeShort(w.WrittenBytes) + " written"
	}
	if len(w.Warnings) > 0 {
		s += ", critical warning: " + strings.Join(w.Warnings, ", ")
	}
	return s
}

type statPrefetch struct {
	Queued    int64 `json:"queued"`
	Done      int64 `json:"done"`
	Dropped   int64 `json:"dropped"`   // the queue had no room
	Displaced int64 `json:"displaced"` // by those of a higher priority
	Stale     int64 `json:"stale"`     // not begun when they were of no use any more
	Cancelled int64 `json:"cancelled"`
	Useful    int64 `json:"useful"` // of those done, read in DRAM then
	Wasted    int64 `json:"wasted"` // of those done, that left DRAM without
}

func describePrefill(c *block.PrefillCost) *statPrefill {
	if c == nil {
		return nil
	}
	return &statPrefill{TokenNS: int64(c.Token), PositionNS: c.Position, Learned: c.Learned, Reports: c.Reports}
}

func describeStats(version string, s block.Stats) statOutput {
	o := statOutput{
		Version: version, UptimeSeconds: s.Uptime.Seconds(), Namespaces: s.Namespaces, Blocks: s.Blocks, Tiers: []statTier{},
		Misses: notNil(s.Misses), Removed: notNil(s.Removed), Conflicts: s.Conflicts, Corrupt: s.Corrupt,
		Leases: s.Leases, Reservations: s.Reservations, Prefetch: statPrefetch(s.Prefetch),
		Watchers: s.Watchers, EventsLost: s.EventsLost, TableBytes: s.TableBytes,
		Incarnation: formatIncarnation(s.Incarnation), EventSeq: s.EventSeq, Pinned: s.Pinned, PinnedBytes: s.PinnedBytes,
		Scrub:   describeScrub(s.Scrub),
		Catalog: statHealth{s.Catalog.State, s.Catalog.Reason, rfc3339(s.Catalog.Since), s.Catalog.Errors},
	}
	for _, w := range s.ObjectSweeps {
		o.ObjectSweeps = append(o.ObjectSweeps, describeSweep(w))
	}
	o.ByNamespace = []statNamespace{}
	for _, n := range s.ByNamespace {
		o.ByNamespace = append(o.ByNamespace, statNamespace{n.Name, n.Asked, n.Matched, notNil(n.Misses), describePrefill(n.Prefill)})
	}
	for _, t := range s.Tiers {
		st := statTier{
			Tier: t.Tier.String(), Capacity: t.Capacity, Used: t.Used, Reserve: t.Reserve, Blocks: t.Blocks, PayloadBytes: t.Payload,
			High: t.High, Low: t.Low, Hits: t.Hits, BytesIn: t.BytesIn, BytesOut: t.BytesOut, Evictions: t.Evictions,
			Dropped: t.Dropped, Reclaimed: t.Reclaimed, Refused: t.Refused, QueueDrops: t.QueueDrops, Policy: t.Policy, BehindMS: t.Behind.Milliseconds(), FellBehind: t.FellBehind, Devices: []statDevice{},
			Curves: describeCurves(t.Curves),
		}
		for _, d := range t.Devices {
			st.Devices = append(st.Devices, statDevice{
				Path: d.Path, ID: d.ID, Bytes: d.Bytes, FreeOnFS: d.FreeOnFS, Engine: d.Engine, PageBytes: d.PageBytes, LockedBytes: d.Locked, Quarantined: d.Quarantined,
				statHealth: statHealth{d.State, d.Reason, rfc3339(d.Since), d.Errors},
				Wear:       describeWear(d.Wear),
			})
		}
		if u := t.Uploads; u != nil {
			up := statUploads(*u)
			st.Uploads = &up
		}
		if a := t.Admission; a != nil {
			st.Admission = &statAdmission{describeBudgets(a), a.Admitted, notNil(a.Rejected)}
		}
		o.Tiers = append(o.Tiers, st)
	}
	return o
}

// notNil makes an absent map an empty JSON object.
func notNil(m map[string]int64) map[string]int64 {
	if m == nil {
		return map[string]int64{}
	}
	return m
}

func newStatCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "stat",
		Short: "Print the state and counters of a daemon",
		Args:  noArgs,
	}
	f.add(c, "print one JSON object")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.connect(c.Context(), func(client *api.Client) error {
			ctx, cancel := f.call(c.Context())
			defer cancel()
			info, err := client.Ping(ctx)
			if err != nil {
				return err
			}
			s, err := client.Stats(ctx)
			if err != nil {
				return err
			}
			o := describeStats(info.Version, s)
			if f.json {
				return writeJSON(c.OutOrStdout(), o)
			}
			return o.print(c.OutOrStdout())
		})
	}
	return c
}

func (o *statOutput) print(w io.Writer) error {
	uptime := time.Duration(o.UptimeSeconds * float64(time.Second)).Round(time.Second)
	rows := [][2]string{
		{"version", o.Version},
		{"incarnation", o.Incarnation},
		{"uptime", uptime.String()},
		{"blocks", fmt.Sprintf("%d in %s", o.Blocks, counted(o.Namespaces, "namespace"))},
		{"pinned", fmt.Sprintf("%s, %s", counted(o.Pinned, "block"), formatSizeShort(o.PinnedBytes))},
		{"table", formatSizeShort(o.TableBytes)},
		{"catalog", o.Catalog.line()},
		{"scrub", o.Scrub.line()},
		{"held now", counted(o.Leases, "lease") + ", " + counted(o.Reservations, "reservation") + ", " + counted(o.Watchers, "watcher")},
		{"prefetch", fmt.Sprintf("%d queued, %d done, %d dropped, %d displaced, %d stale, %d cancelled, %d useful, %d wasted",
			o.Prefetch.Queued, o.Prefetch.Done, o.Prefetch.Dropped, o.Prefetch.Displaced, o.Prefetch.Stale, o.Prefetch.Cancelled, o.Prefetch.Useful, o.Prefetch.Wasted)},
		{"misses", fmt.Sprintf("%d%s", total(o.Misses), countsIn(o.Misses))},
		{"removed", fmt.Sprintf("%d%s", total(o.Removed), countsIn(o.Removed))},
		{"conflicts", fmt.Sprint(o.Conflicts)},
		{"corrupt", fmt.Sprint(o.Corrupt)},
		{"events", fmt.Sprintf("%d, %d lost", o.EventSeq, o.EventsLost)},
	}
	for i := range o.ObjectSweeps {
		rows = append(rows, [2]string{"sweep of", o.ObjectSweeps[i].line()})
	}
	if err := printTable(w, rows); err != nil {
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "\nTIER\tBLOCKS\tPAYLOAD\tUSED\tCAPACITY\tHITS\tIN\tOUT\tEVICTED\tDROPPED\tREFUSED\tPOLICY")
	for _, t := range o.Tiers {
		capacity := "-" // of a bucket
		if t.Capacity > 0 {
			capacity = formatSizeShort(t.Capacity)
		}
		policy := cmp.Or(t.Policy, "-")
		fmt.Fprintf(tw, "%s\t%d\t%s\t%s\t%s\t%d\t%s\t%s\t%d\t%d\t%d\t%s\n",
			t.Tier, t.Blocks, formatSizeShort(t.PayloadBytes), formatSizeShort(t.Used), capacity,
			t.Hits, formatSizeShort(t.BytesIn), formatSizeShort(t.BytesOut), t.Evictions, t.Dropped, t.Refused, policy)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, t := range o.Tiers {
		if t.BehindMS > 0 {
			behind := time.Duration(t.BehindMS) * time.Millisecond
			fmt.Fprintf(w, "%s: eviction is behind: used is above the high watermark for %s\n", t.Tier, behind.Round(time.Second))
		}
		if t.Admission != nil {
			for _, b := range t.Admission.Budgets {
				fmt.Fprintln(w, b.line())
			}
			fmt.Fprintf(w, "%s: %s\n", t.Tier, t.Admission.line())
		}
		if t.Uploads != nil {
			fmt.Fprintf(w, "%s: %s\n", t.Tier, t.Uploads.line())
		}
	}
	fmt.Fprintln(tw, "\nTIER\tDEVICE\tSIZE\tSTATE\tDETAIL")
	for _, t := range o.Tiers {
		for i, d := range t.Devices {
			name := d.Path
			if name == "" {
				name = fmt.Sprint(i)
			}
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", t.Tier, name, d.size(), d.State, d.detail())
		}
	}
	if err := tw.Flush(); err != nil || len(o.ByNamespace) == 0 {
		return err
	}
	fmt.Fprintln(tw, "\nNAMESPACE\tASKED\tMATCHED\tMISSES")
	for _, n := range o.ByNamespace {
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d%s\n", cell(n.Name), n.Asked, n.Matched, total(n.Misses), countsIn(n.Misses))
	}
	return tw.Flush()
}

// size is that of the device; a bucket has none.
func (d *statDevice) size() string {
	if d.Bytes == 0 {
		return "-"
	}
	return formatSizeShort(d.Bytes)
}

// detail says what only some kinds of device have.
func (d *statDevice) detail() string {
	var s string
	add := func(format string, args ...any) {
		if s != "" {
			s += ", "
		}
		s += fmt.Sprintf(format, args...)
	}
	if d.Reason != "" {
		add("%s", d.Reason)
	}
	if d.State != block.Healthy && d.Since != "" {
		add("since %s", d.Since)
	}
	if d.Errors > 0 {
		add("%s", counted(d.Errors, "error"))
	}
	if d.Quarantined > 0 {
		add("%s in quarantine", formatSizeShort(d.Quarantined))
	}
	if d.Engine != "" {
		add("%s", d.Engine)
	}
	if d.PageBytes > 0 {
		add("pages of %s, %s locked", formatSizeShort(d.PageBytes), formatSizeShort(d.LockedBytes))
	}
	if d.FreeOnFS > 0 {
		add("%s free on its file system", formatSizeShort(d.FreeOnFS))
	}
	if d.Wear != nil {
		add("%s", d.Wear.line())
	}
	return s
}

func total(m map[string]int64) int64 {
	var n int64
	for _, v := range m {
		n += v
	}
	return n
}
