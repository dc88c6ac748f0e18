package api

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// The enumerations of the interface are those of package block, number by number.
func TestEnumsMatch(t *testing.T) {
	type pair struct{ name, want string }
	var pairs []pair
	for n, name := range pb.Tier_name {
		pairs = append(pairs, pair{name, "TIER_" + block.TierID(n).String()})
	}
	for n, name := range pb.MissReason_name {
		pairs = append(pairs, pair{name, "MISS_REASON_" + block.MissReason(n).String()})
	}
	for n, name := range pb.Reason_name {
		pairs = append(pairs, pair{name, "REASON_" + block.Reason(n).String()})
	}
	for n, name := range pb.EventKind_name {
		pairs = append(pairs, pair{name, "EVENT_KIND_" + block.EventKind(n).String()})
	}
	for n, name := range pb.ScrubState_name {
		pairs = append(pairs, pair{name, "SCRUB_STATE_" + block.ScrubState(n).String()})
	}
	for _, p := range pairs {
		if p.name != strings.ToUpper(p.want) {
			t.Errorf("%s should be %s", p.name, strings.ToUpper(p.want))
		}
	}
	for _, next := range []string{
		block.TierID(len(pb.Tier_name)).String(), block.MissReason(len(pb.MissReason_name)).String(), block.Reason(len(pb.Reason_name)).String(),
	} {
		if !strings.HasSuffix(next, ")") {
			t.Errorf("%s is not in the interface", next)
		}
	}
	if next := block.EventKind(len(pb.EventKind_name)).String(); next != "unknown" {
		t.Errorf("event kind %s is not in the interface", next)
	}
	if next := block.ScrubState(len(pb.ScrubState_name)).String(); next != "unknown" {
		t.Errorf("scrub state %s is not in the interface", next)
	}
}

// fill sets every field below v to a value of its own.
func fill(v reflect.Value, n *int) {
	*n++
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.UnixMilli(int64(*n))))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Float64:
		v.SetFloat(float64(*n) / 2)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf(fmt.Sprint("key", *n)), reflect.ValueOf(int64(*n)))
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), n)
		}
	case reflect.String:
		v.SetString(fmt.Sprint("text", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int64:
		if v.Type() == reflect.TypeFor[time.Duration]() {
			v.SetInt(int64(*n) * int64(time.Millisecond))
			return
		}
		v.SetInt(int64(*n))
	case reflect.Int, reflect.Int32:
		v.SetInt(int64(*n))
	case reflect.Uint8:
		v.SetUint(uint64(*n % 200))
	default:
		v.SetUint(uint64(*n))
	}
}

// No field is lost on the way to the wire and back.
func TestConversionsKeepEveryField(t *testing.T) {
	var st, stBack block.Stats
	n := 0
	fill(reflect.ValueOf(&st).Elem(), &n)
	if stBack = statsFromPB(statsToPB(st)); !reflect.DeepEqual(st, stBack) {
		t.Errorf("stats:\n%+v\ncame back as\n%+v", st, stBack)
	}
	var o block.PlanOptions
	fill(reflect.ValueOf(&o).Elem(), &n)
	if back := planFromPB(planToPB(&o)); *back != o {
		t.Errorf("plan options:\n%+v\ncame back as\n%+v", o, *back)
	}
	planned := block.MatchResult{Plan: new(block.Plan)}
	fill(reflect.ValueOf(planned.Plan).Elem(), &n)
	var back block.MatchResult
	if matchFromPB(matchToPB(&planned), &back); *back.Plan != *planned.Plan {
		t.Errorf("plan:\n%+v\ncame back as\n%+v", *planned.Plan, *back.Plan)
	}
	var l block.ListEntry
	fill(reflect.ValueOf(&l).Elem(), &n)
	if back := listEntryFromPB(listEntryToPB(l, block.HashBytes)); !reflect.DeepEqual(l, back) {
		t.Errorf("list entry:\n%+v\ncame back as\n%+v", l, back)
	}
	var imp block.ObjectImport
	fill(reflect.ValueOf(&imp).Elem(), &n)
	if back := importFromPB(importToPB(imp)); !reflect.DeepEqual(imp, back) {
		t.Errorf("import:\n%+v\ncame back as\n%+v", imp, back)
	}
	var obj block.ObjectInfo
	fill(reflect.ValueOf(&obj).Elem(), &n)
	if back := objectFromPB(objectToPB(obj)); back != obj {
		t.Errorf("object:\n%+v\ncame back as\n%+v", obj, back)
	}
	var u block.ObjectUsage
	fill(reflect.ValueOf(&u).Elem(), &n)
	if back := objectUsageFromPB(objectUsageToPB(u)); back != u {
		t.Errorf("usage:\n%+v\ncame back as\n%+v", u, back)
	}
	var i session.Info
	fill(reflect.ValueOf(&i).Elem(), &n)
	if back := sessionFromPB(sessionToPB(&i)); back != i {
		t.Errorf("session:\n%+v\ncame back as\n%+v", i, back)
	}
	var d block.Descriptor
	fill(reflect.ValueOf(&d).Elem(), &n)
	ns := block.Namespace{ID: 7, Desc: d, HashLen: 16, Epoch: 3, TTL: time.Minute, Created: time.UnixMilli(1700000000123)}
	if back := namespaceFromPB(namespaceToPB(ns)); back != ns {
		t.Errorf("namespace:\n%+v\ncame back as\n%+v", ns, back)
	}
	e := block.Event{
		Seq: 9, Kind: block.EventRemoved, NS: "ns", Hash: block.Hash{1, 2}, Hlen: 16, Parent: block.Hash{3}, HasPar: true,
		Tier: block.G3, Reason: block.Evicted, Len: 77, Last: true, Count: 5,
	}
	if back := eventFromPB(eventToPB(e)); back != e {
		t.Errorf("event:\n%+v\ncame back as\n%+v", e, back)
	}
}

func TestMatchPacking(t *testing.T) {
	r := func(tier block.TierID, n uint32) block.Found {
		return block.Found{State: block.Resident, Tier: tier, Len: n}
	}
	pending, absent := block.Found{State: block.Pending}, block.Found{}
	for name, res := range map[string]block.MatchResult{
		"nothing":  {},
		"absent":   {Blocks: []block.Found{absent}},
		"same":     {Prefix: 2, Blocks: []block.Found{r(block.G2, 9), r(block.G3, 9), absent, pending, r(block.G4, 9)}},
		"differ":   {Prefix: 2, Blocks: []block.Found{r(block.G1, 9), r(block.G2, math.MaxUint32), pending, absent}},
		"leased":   {Prefix: 1, Blocks: []block.Found{r(block.G2, 1)}, Lease: block.Lease{ID: math.MaxUint64, Left: time.Second, Count: 1}},
		"tailless": {Blocks: []block.Found{absent, absent, r(block.G2, 4)}},
	} {
		packed := matchToPB(&res)
		if name != "differ" && len(packed.GetLengths()) != 0 {
			t.Errorf("%s: lengths that are all the same are sent one by one", name)
		}
		got := block.MatchResult{Blocks: make([]block.Found, 0, 8)}
		matchFromPB(packed, &got)
		if got.Prefix != res.Prefix || got.Lease != res.Lease || fmt.Sprint(got.Blocks) != fmt.Sprint(res.Blocks) {
			t.Errorf("%s: %+v came back as %+v", name, res, got)
		}
	}
}

func TestMillisRoundsUp(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		0: 0, 1: 1, time.Millisecond: 1, time.Millisecond + 1: 2, time.Hour: 3_600_000, -time.Second: -1000,
	} {
		if got := millis(d); got != want {
			t.Errorf("%v is %d ms, want %d", d, got, want)
		}
	}
}
