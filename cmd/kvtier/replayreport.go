package main

import (
	"fmt"
	"io"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// replayReport is what replay prints at its end. Scripts rely on the names up to
// Latency; the others explain them.
type replayReport struct {
	Requests      int64            `json:"requests"`
	BlockRefs     int64            `json:"block_refs"`      // hashes in those requests
	PrefixHitRate float64          `json:"prefix_hit_rate"` // of the hashes, those resident with all before them
	HitRate       float64          `json:"hit_rate"`        // of the hashes, those resident
	BytesPut      int64            `json:"bytes_put"`       // payload of blocks that were stored
	BytesGot      int64            `json:"bytes_got"`
	WrongBytes    int64            `json:"wrong_bytes"` // needs --verify
	Refused       int64            `json:"refused"`     // blocks for which there was no room at the first try
	Errors        int64            `json:"errors"`      // blocks not put, and calls that failed
	HitsByTier    map[string]int64 `json:"hits_by_tier"`
	Evictions     *int64           `json:"evictions"` // by the server meanwhile, over all tiers; null when its counters are gone
	Seconds       float64          `json:"seconds"`
	Latency       latencyReport    `json:"latency"`

	Durable         string           `json:"durable"`
	BlockBytes      int64            `json:"block_bytes"`
	PrefixHits      int64            `json:"prefix_hits"`
	Hits            int64            `json:"hits"`
	Gets            int64            `json:"gets"`         // blocks asked for
	Missed          int64            `json:"missed"`       // of those, blocks that were gone since the match
	MissReasons     map[string]int64 `json:"miss_reasons"` // of Missed
	Puts            int64            `json:"puts"`         // blocks sent
	Existed         int64            `json:"existed"`      // of those, blocks that were there when they came
	Conflicts       int64            `json:"conflicts"`    // of Errors, blocks there with other bytes
	Retries         int64            `json:"retries"`      // tries after refusals
	Abandoned       int64            `json:"abandoned"`    // blocks of puts that --abandon was to break off, whose results count nowhere
	EvictionsByTier map[string]int64 `json:"evictions_by_tier"`
	Clients         int              `json:"clients"`
	Way             string           `json:"way"`             // that blocks went: shared memory, unix, tcp or grpc
	Rate            float64          `json:"rate,omitempty"`  // requests that should have begun each second
	Late            int64            `json:"late"`            // requests that began more than 1 ms behind their moment
	LagSeconds      float64          `json:"lag_seconds"`     // most that a request began behind its moment
	Error           string           `json:"error,omitempty"` // why the replay ended early
}

func newReplayReport() *replayReport {
	return &replayReport{
		HitsByTier:  make(map[string]int64),
		MissReasons: make(map[string]int64),
	}
}

// rates fills in the shares from the counts.
func (r *replayReport) rates() {
	if r.BlockRefs > 0 {
		r.PrefixHitRate = float64(r.PrefixHits) / float64(r.BlockRefs)
		r.HitRate = float64(r.Hits) / float64(r.BlockRefs)
	}
}

// add counts what o has counted too.
func (r *replayReport) add(o *replayReport) {
	r.Requests += o.Requests
	r.BlockRefs += o.BlockRefs
	r.BytesPut += o.BytesPut
	r.BytesGot += o.BytesGot
	r.WrongBytes += o.WrongBytes
	r.Refused += o.Refused
	r.Errors += o.Errors
	r.PrefixHits += o.PrefixHits
	r.Hits += o.Hits
	r.Gets += o.Gets
	r.Missed += o.Missed
	r.Puts += o.Puts
	r.Existed += o.Existed
	r.Conflicts += o.Conflicts
	r.Retries += o.Retries
	r.Abandoned += o.Abandoned
	r.Late += o.Late
	r.LagSeconds = max(r.LagSeconds, o.LagSeconds)
	for tier, n := range o.HitsByTier {
		r.HitsByTier[tier] += n
	}
	for reason, n := range o.MissReasons {
		r.MissReasons[reason] += n
	}
}

// countEvictions fills in what the daemon's counters have grown by, unless it
// was another daemon's that were read first.
func (r *replayReport) countEvictions(before, after block.Stats) {
	grown := make(map[string]int64)
	for _, t := range before.Tiers {
		grown[t.Tier.String()] -= t.Evictions
	}
	var all int64
	for _, t := range after.Tiers {
		grown[t.Tier.String()] += t.Evictions
	}
	for _, n := range grown {
		if all += n; n < 0 {
			return
		}
	}
	if before.Incarnation == after.Incarnation {
		r.Evictions, r.EvictionsByTier = &all, grown
	}
}

// evictions says how many there were, for people.
func (r *replayReport) evictions() string {
	if r.Evictions == nil {
		return "unknown"
	}
	return fmt.Sprintf("%d%s", *r.Evictions, countsIn(r.EvictionsByTier))
}

// progressLine says how far a replay is.
func (r *replayReport) progressLine(since time.Duration) string {
	return fmt.Sprintf("%d requests, %d blocks, %d hits, %s put, %s got, %d refused, %d wrong bytes, %.0f s",
		r.Requests, r.BlockRefs, r.Hits, formatSizeShort(r.BytesPut), formatSizeShort(r.BytesGot), r.Refused, r.WrongBytes, since.Seconds())
}

// print writes the report for people.
func (r *replayReport) print(w io.Writer) error {
	rows := [][2]string{
		{"requests", fmt.Sprint(r.Requests)},
		{"block refs", fmt.Sprint(r.BlockRefs)},
		{"prefix hits", fmt.Sprintf("%d (rate %.4f)", r.PrefixHits, r.PrefixHitRate)},
		{"hits", fmt.Sprintf("%d (rate %.4f)%s", r.Hits, r.HitRate, countsIn(r.HitsByTier))},
		{"got", fmt.Sprintf("%s in %s", formatSizeShort(r.BytesGot), counted(r.Gets-r.Missed, "block"))},
		{"gone since match", fmt.Sprintf("%d%s", r.Missed, countsIn(r.MissReasons))},
		{"put", fmt.Sprintf("%s in %s, %d existed", formatSizeShort(r.BytesPut), counted(r.Puts, "block"), r.Existed)},
		{"refused", fmt.Sprintf("%d, %d retries", r.Refused, r.Retries)},
		{"evictions", r.evictions()},
		{"wrong bytes", fmt.Sprint(r.WrongBytes)},
		{"errors", fmt.Sprintf("%d, %d conflicts", r.Errors, r.Conflicts)},
		{"seconds", fmt.Sprintf("%.2f (%s/s moved)", r.Seconds, perSecond(r.BytesGot+r.BytesPut, r.Seconds))},
		{"way", r.Way},
		{"match", r.Latency.Match.String()},
		{"get", r.Latency.Get.String()},
		{"put", r.Latency.Put.String()},
		{"request", r.Latency.Request.String()},
	}
	if r.LagSeconds > 0 {
		rows = append(rows, [2]string{"late", fmt.Sprintf("%d, at most %.3f s", r.Late, r.LagSeconds)})
	}
	if r.Abandoned > 0 {
		rows = append(rows, [2]string{"abandoned", counted(r.Abandoned, "block")})
	}
	return printTable(w, rows)
}

// checkReport is what replay --check-only prints at its end.
type checkReport struct {
	Listed     int64   `json:"listed"`  // keys of the trace that the server lists
	Present    int64   `json:"present"` // returned with the right bytes
	Missed     int64   `json:"missed"`  // listed, yet not returned
	WrongBytes int64   `json:"wrong_bytes"`
	Errors     int64   `json:"errors"`
	Seconds    float64 `json:"seconds"`

	TraceKeys   int64            `json:"trace_keys"` // unique block ids in the trace
	Foreign     int64            `json:"foreign"`    // listed keys that are not the trace's, not read
	BytesGot    int64            `json:"bytes_got"`
	MissReasons map[string]int64 `json:"miss_reasons"`
	HitsByTier  map[string]int64 `json:"hits_by_tier"`
	Error       string           `json:"error,omitempty"` // why the check ended early

	// With a journal.
	Acknowledged     *int64 `json:"acknowledged,omitempty"`      // its blocks
	AcknowledgedGone *int64 `json:"acknowledged_gone,omitempty"` // of those, not present
}

func newCheckReport() *checkReport {
	return &checkReport{HitsByTier: make(map[string]int64), MissReasons: make(map[string]int64)}
}

// progressLine says how far a check is.
func (r *checkReport) progressLine(since time.Duration) string {
	return fmt.Sprintf("%d listed of %d in the trace, %d present, %d missed, %d wrong bytes, %.0f s",
		r.Listed, r.TraceKeys, r.Present, r.Missed, r.WrongBytes, since.Seconds())
}

// print writes the report for people.
func (r *checkReport) print(w io.Writer) error {
	rows := [][2]string{
		{"trace keys", fmt.Sprint(r.TraceKeys)},
		{"listed", fmt.Sprintf("%d, %d foreign", r.Listed, r.Foreign)},
		{"present", fmt.Sprintf("%d%s", r.Present, countsIn(r.HitsByTier))},
		{"missed", fmt.Sprintf("%d%s", r.Missed, countsIn(r.MissReasons))},
		{"wrong bytes", fmt.Sprint(r.WrongBytes)},
		{"errors", fmt.Sprint(r.Errors)},
		{"seconds", fmt.Sprintf("%.2f (%s/s read)", r.Seconds, perSecond(r.BytesGot, r.Seconds))},
	}
	if r.Acknowledged != nil {
		rows = append(rows, [2]string{"acknowledged", fmt.Sprintf("%d, %d gone", *r.Acknowledged, *r.AcknowledgedGone)})
	}
	return printTable(w, rows)
}

func perSecond(n int64, seconds float64) string {
	if seconds <= 0 {
		return "-"
	}
	return formatSizeShort(int64(float64(n) / seconds))
}
