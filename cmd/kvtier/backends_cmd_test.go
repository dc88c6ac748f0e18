package main

import (
	"bytes"
	"encoding/json"
	"regexp"
	"testing"
)

func TestBackends(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"backends", "--json"}, nil, &stdout, &stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, &stderr)
	}
	var infos []backendInfo
	if err := json.Unmarshal(stdout.Bytes(), &infos); err != nil {
		t.Fatal(err)
	}
	moves := map[string]string{} // the first pair of each kind that works
	for _, in := range infos {
		if in.Usable {
			moves[in.Kind] = in.Pairs[0].Local + "-" + in.Pairs[0].Remote
		}
	}
	// These need nothing that a machine could lack.
	if moves["mem"] != "DRAM-DRAM" || moves["posix"] != "DRAM-FILE" || moves["tcp"] != "DRAM-DRAM" {
		t.Errorf("%+v", infos)
	}

	stdout.Reset()
	if code := run(t.Context(), []string{"backends"}, nil, &stdout, &stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, &stderr)
	}
	want := regexp.MustCompile(`^BACKEND +USABLE +ENGINE +MOVES +NOTE\nmem +yes +copy +DRAM-DRAM +-\nposix +yes +(io_uring|goroutines) +DRAM-FILE DRAM-BLK +`)
	if !want.Match(stdout.Bytes()) {
		t.Errorf("got\n%s", &stdout)
	}
}

func TestPrintBackends(t *testing.T) {
	var out bytes.Buffer
	err := printBackends(&out, []backendInfo{
		{Kind: "mem", Usable: true, Engine: "copy", Pairs: []pairInfo{{"DRAM", "DRAM"}}},
		{Kind: "ucx", Why: "libucp.so.0 is not there"},
	})
	const want = "BACKEND  USABLE  ENGINE  MOVES      NOTE\n" +
		"mem      yes     copy    DRAM-DRAM  -\n" +
		"ucx      no      -       -          libucp.so.0 is not there\n"
	if err != nil || out.String() != want {
		t.Errorf("%v, got\n%s", err, &out)
	}
}
