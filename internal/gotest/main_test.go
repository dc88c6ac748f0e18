package main

import (
	"strings"
	"testing"
)

// input is what go test -json wrote for four packages: one that passed with a
// skip, one that failed, one without tests, and one that did not build.
const input = `go: downloading something
{"Action":"start","Package":"m/a"}
{"Action":"run","Package":"m/a","Test":"TestLoop"}
{"Action":"output","Package":"m/a","Test":"TestLoop","Output":"=== RUN   TestLoop\n"}
{"Action":"output","Package":"m/a","Test":"TestLoop","Output":"    a_test.go:9: needs loop devices (loop): permission denied\n"}
{"Action":"output","Package":"m/a","Test":"TestLoop","Output":"--- SKIP: TestLoop (0.00s)\n"}
{"Action":"skip","Package":"m/a","Test":"TestLoop","Elapsed":0}
{"Action":"output","Package":"m/a","Test":"TestFine","Output":"=== RUN   TestFine\n"}
{"Action":"output","Package":"m/a","Test":"TestFine","Output":"=== ATTR  TestFine did 3 crashes\n"}
{"Action":"attr","Package":"m/a","Test":"TestFine","Key":"did","Value":"3 crashes"}
{"Action":"pass","Package":"m/a","Test":"TestFine","Elapsed":0}
{"Action":"output","Package":"m/a","Output":"PASS\n"}
{"Action":"output","Package":"m/a","Output":"ok  \tm/a\t0.1s\n"}
{"Action":"pass","Package":"m/a","Elapsed":0.1}
{"Action":"output","Package":"m/b","Test":"TestBad","Output":"    b_test.go:5: wrong\n"}
{"Action":"output","Package":"m/b","Test":"TestBad","Output":"--- FAIL: TestBad (0.00s)\n"}
{"Action":"fail","Package":"m/b","Test":"TestBad","Elapsed":0}
{"Action":"output","Package":"m/b","Output":"FAIL\n"}
{"Action":"output","Package":"m/b","Output":"FAIL\tm/b\t0.2s\n"}
{"Action":"fail","Package":"m/b","Elapsed":0.2}
{"Action":"output","Package":"m/c","Output":"?   \tm/c\t[no test files]\n"}
{"Action":"skip","Package":"m/c","Elapsed":0}
{"ImportPath":"m/d","Action":"build-output","Output":"d.go:1: undefined: x\n"}
{"ImportPath":"m/d","Action":"build-fail"}
{"Action":"output","Package":"m/d","Output":"FAIL\tm/d [build failed]\n"}
{"Action":"fail","Package":"m/d","Elapsed":0,"FailedBuild":"m/d"}
`

const want = `go: downloading something
SKIP m/a TestLoop: a_test.go:9: needs loop devices (loop): permission denied
DID m/a TestFine: 3 crashes
ok  	m/a	0.1s
    b_test.go:5: wrong
--- FAIL: TestBad (0.00s)
FAIL
FAIL	m/b	0.2s
?   	m/c	[no test files]
d.go:1: undefined: x
FAIL	m/d [build failed]
`

func TestReport(t *testing.T) {
	var out strings.Builder
	ok, err := report(strings.NewReader(input), &out)
	if err != nil || ok {
		t.Errorf("report: ok %v, error %v, want false and nil", ok, err)
	}
	if out.String() != want {
		t.Errorf("have:\n%s\nwant:\n%s", out.String(), want)
	}
}

func TestReportPassed(t *testing.T) {
	passed, _, _ := strings.Cut(input, `{"Action":"output","Package":"m/b"`)
	var out strings.Builder
	if ok, err := report(strings.NewReader(passed), &out); err != nil || !ok {
		t.Errorf("report: ok %v, error %v, want true and nil", ok, err)
	}
}

// TestReportCutOff: a test binary that died has ended nothing.
func TestReportCutOff(t *testing.T) {
	in := `{"Action":"output","Package":"m/a","Test":"TestDies","Output":"panic: help\n"}
{"Action":"fail","Package":"m/a"}
`
	var out strings.Builder
	if ok, err := report(strings.NewReader(in), &out); err != nil || ok {
		t.Errorf("report: ok %v, error %v, want false and nil", ok, err)
	}
	if !strings.Contains(out.String(), "panic: help") {
		t.Errorf("the output lacks what the test said last: %q", out.String())
	}
}
