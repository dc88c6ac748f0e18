package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvtier/kvtier/backends/s3"
	realservers "github.com/kvtier/kvtier/internal/servers"
)

// asProgram makes the test binary behave as kvtier, for tests that start it as
// a process of its own.
const asProgram = "KVTIER_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// tinyScale measures so little that only the rows' shape is worth looking at.
func tinyScale() benchScale {
	return benchScale{
		pairs: 1, payload: 64 << 10, blocks: 8, records: 2500,
		tableBlocks: 1500, lookups: 2, calls: 3,
		restartBlocks: 300, restartDRAM: "32MiB",
		policyBlocks: 2000, objects: 2,
	}
}

func TestBenchRows(t *testing.T) {
	if raceEnabled {
		t.Skip("runs without the race detector only: a bench serves nobody")
	}
	t.Setenv(asProgram, "1") // for the daemons of restart
	type want struct {
		name, unit string
		limited    bool
	}
	for target, wants := range map[string][]want{
		"dram": {
			{"dram.put.1MiB", "GB/s", true},
			{"dram.get.1MiB", "GB/s", true},
			{"dram.get_verified.1MiB", "GB/s", true},
		},
		"nvme": {
			{"nvme.write.1MiB.d8", "GB/s", true},
			{"nvme.put_durable.1MiB.d8", "GB/s", true},
			{"nvme.read.1MiB.d1", "GB/s", true},
			{"nvme.read.1MiB.d8", "GB/s", true},
		},
		"object": {
			{"object.put.d8", "GB/s", true},
			{"object.get.d8", "GB/s", true},
			{"object.requests_per_block", "requests", true},
		},
		"catalog": {{"catalog.insert", "k/s", true}},
		"match":   {{"match.inproc.256", "ns", false}},
		"grpc":    {{"grpc.match.256", "us", true}},
		"policy": {
			{"policy.lru-leaf.ref", "ns", false},
			{"policy.lru-leaf.victim", "ns", false},
			{"policy.lru-leaf.bytes", "bytes", false},
			{"policy.lru-leaf.pinned", "ratio", false},
			{"policy.s3-ghost.ref", "ns", false},
			{"policy.s3-ghost.victim", "ns", false},
			{"policy.s3-ghost.bytes", "bytes", false},
			{"policy.s3-ghost.pinned", "ratio", false},
			{"policy.arc.ref", "ns", false},
			{"policy.arc.victim", "ns", false},
			{"policy.arc.bytes", "bytes", false},
			{"policy.arc.pinned", "ratio", false},
			{"policy.gdsf.ref", "ns", false},
			{"policy.gdsf.victim", "ns", false},
			{"policy.gdsf.bytes", "bytes", false},
			{"policy.gdsf.pinned", "ratio", false},
			{"policy.switch.ref", "ns", false},
			{"policy.switch.victim", "ns", false},
			{"policy.switch.bytes", "bytes", false},
			{"policy.switch.pinned", "ratio", false},
		},
		"restart": {{"restart.1M", "s", false}, {"memory.resident", "bytes", false}},
		"tcp": {
			{"tcp.read.1MiB.c1", "GB/s", true},
			{"tcp.write.1MiB.c1", "GB/s", true},
			{"tcp.read.1MiB.c4", "GB/s", true},
			{"tcp.write.1MiB.c4", "GB/s", true},
		},
		"shm": {
			{"shm.read.1MiB.d1", "GB/s", true},
			{"shm.write.1MiB.d1", "GB/s", true},
			{"shm.read.1MiB.d16", "GB/s", true},
			{"shm.write.1MiB.d16", "GB/s", true},
		},
		"store": {
			{"store.put.1MiB.c1", "GB/s", true},
			{"store.get.1MiB.c1", "GB/s", true},
			{"store.put.1MiB.p99", "p99/p50", false},
			{"store.local_get.1MiB.c1", "GB/s", true},
			{"store.cpu.get.1MiB", "ms/GB", true},
			{"store.put.1MiB.c4", "GB/s", true},
			{"store.get.1MiB.c4", "GB/s", true},
			{"store.put.64KiB.c1", "GB/s", true},
			{"store.get.64KiB.c1", "GB/s", true},
			{"store.get_batch16.64KiB.c1", "GB/s", true},
			{"store.put.64KiB.c4", "GB/s", true},
			{"store.get.64KiB.c4", "GB/s", true},
			{"store.put.4MiB.c1", "GB/s", true},
			{"store.get.4MiB.c1", "GB/s", true},
			{"store.put.4MiB.c4", "GB/s", true},
			{"store.get.4MiB.c4", "GB/s", true},
			{"store.nvme_get.1MiB.c1", "GB/s", true},
			{"store.nvme_get.1MiB.c1.disk", "GB/s", true},
			{"store.nvme_get.1MiB.c4", "GB/s", true},
			{"store.nvme_get.1MiB.c4.disk", "GB/s", true},
		},
	} {
		t.Run(target, func(t *testing.T) {
			targets, err := chooseTargets([]string{target}, false)
			if err != nil {
				t.Fatal(err)
			}
			bucket := ""
			if target == "object" {
				server := realservers.StartVersityGW(t)
				server.Bucket(t, "bench")
				server.Login(t)
				bucket = "s3://bench/of?path_style=true&region=us-east-1&endpoint=" + server.Endpoint
				defer wantEmpty(t, bucket)
			}
			dir := t.TempDir()
			rows, err := runBench(t.Context(), targets, dir, "", bucket, tinyScale(), &bytes.Buffer{})
			if err != nil {
				t.Fatal(err)
			}
			data, err := json.Marshal(rows)
			if err != nil {
				t.Fatal(err)
			}
			var got []map[string]any
			if err := json.Unmarshal(data, &got); err != nil {
				t.Fatal(err)
			}
			if len(got) != len(wants) {
				t.Fatalf("rows %s, want %d", data, len(wants))
			}
			for i, w := range wants {
				r := got[i]
				if len(r) != 5 || r["name"] != w.name || r["unit"] != w.unit {
					t.Errorf("row %v, want name %s, value, unit %s, limit and ratio", r, w.name, w.unit)
				}
				value, isNumber := r["value"].(float64)
				if target != "restart" && !(value > 0) || !isNumber {
					t.Errorf("%s: value %v", w.name, r["value"])
				}
				for _, k := range []string{"limit", "ratio"} {
					v, isNumber := r[k].(float64)
					if isNumber != w.limited || w.limited && !(v > 0) || !w.limited && r[k] != nil {
						t.Errorf("%s: %s is %v", w.name, k, r[k])
					}
				}
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// wantEmpty looks whether nothing is left in a bucket.
func wantEmpty(t *testing.T, url string) {
	t.Helper()
	b, err := s3.New(t.Context(), &s3.Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	if page, err := b.List(t.Context(), "", "", 0); err != nil || len(page.Objects) > 0 {
		t.Errorf("left in the bucket: %+v, %v", page.Objects, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

func TestBenchCleansUpWhenItIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	interrupt := benchTarget{name: "interrupt", run: func(ctx context.Context, b *bench) error {
		if err := os.WriteFile(filepath.Join(b.dir, "file"), nil, 0o600); err != nil {
			return err
		}
		cancel()
		return b.compare(ctx, "x", "s", 1, func(context.Context) (float64, error) { return 1, nil }, nil)
	}}
	dir := t.TempDir()
	if rows, err := runBench(ctx, []benchTarget{interrupt}, dir, "", "", tinyScale(), &bytes.Buffer{}); err == nil {
		t.Errorf("no error, rows %v", rows)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestBenchComparesByTurns(t *testing.T) {
	b := &bench{benchScale: benchScale{warmups: 2}, out: &bytes.Buffer{}}
	var turns []string
	figures := func(name string, v ...float64) pass {
		return func(context.Context) (float64, error) {
			turns = append(turns, name)
			f := v[0]
			v = v[1:]
			return f, nil
		}
	}
	// Warm-ups 100 and 200 do not count. Ratios: 0.5, 2, 0.8.
	err := b.compare(t.Context(), "x", "GB/s", 3, figures("v", 100, 200, 1, 8, 4), figures("l", 1, 1, 2, 4, 5))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(turns, ""); got != "vllvvllvvl" {
		t.Errorf("turns %s", got)
	}
	if r := b.rows[0]; r.Value != 4 || *r.Limit != 4 || *r.Ratio != 0.8 {
		t.Errorf("row %v, limit %v, ratio %v, want the medians 4, 4 and 0.8", r, *r.Limit, *r.Ratio)
	}
}

func TestBenchArguments(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"bench"}, "requires at least 1 arg"},
		{[]string{"bench", "disk"}, `target "disk": want dram, nvme, catalog, match, grpc, policy, tcp, shm, store, attach, object, restart or all`},
		{[]string{"bench", "dram", "--pairs", "6"}, "--pairs 6: want at least 7"},
		{[]string{"bench", "object"}, "want --object"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), tt.args, nil, &stdout, &stderr); code != exitUsage || !strings.Contains(stderr.String(), tt.want) {
			t.Errorf("%v: exit %d, %s, want %q", tt.args, code, stderr.String(), tt.want)
		}
	}
	all, err := chooseTargets([]string{"grpc", "all"}, true)
	if err != nil || len(all) != len(benchTargets()) {
		t.Errorf("all: %d targets, %v", len(all), err)
	}
	all, err = chooseTargets([]string{"all"}, false)
	if err != nil || len(all) != len(benchTargets())-1 || slices.ContainsFunc(all, func(t benchTarget) bool { return t.name == "object" }) {
		t.Errorf("all without a bucket: %d targets, %v", len(all), err)
	}
	some, err := chooseTargets([]string{"grpc", "dram", "grpc"}, false)
	if err != nil || len(some) != 2 || some[0].name != "dram" {
		t.Errorf("two: %d targets, %v", len(some), err)
	}
}

func TestBenchWarnsOfLoad(t *testing.T) {
	for load, want := range map[string]bool{"0.00 1 1 1/2 3\n": false, "999.5 1 1 1/2 3\n": true} {
		var out bytes.Buffer
		b := &bench{out: &out}
		b.warnIfBusy(fstest.MapFS{"proc/loadavg": {Data: []byte(load)}})
		if got := strings.Contains(out.String(), "busy"); got != want {
			t.Errorf("load %q: %q", load, out.String())
		}
	}
}

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		in   []float64
		want float64
	}{
		{[]float64{3}, 3},
		{[]float64{3, 1}, 2},
		{[]float64{9, 1, 5}, 5},
	} {
		if got := median(slices.Clone(tt.in)); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.in, got, tt.want)
		}
	}
}

func TestNumberAfter(t *testing.T) {
	const page = "# HELP a_bytes x\na_bytes 1.5e+03\nb: 12 kB\nc x\n"
	for text, want := range map[string]int64{"\na_bytes ": 1500, "\nb:": 12} {
		if got, err := numberAfter(page, text); got != want || err != nil {
			t.Errorf("after %q: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"\nc ", "\nd "} {
		if got, err := numberAfter(page, text); err == nil {
			t.Errorf("after %q: %d, want an error", text, got)
		}
	}
}
