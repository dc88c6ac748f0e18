package main

import (
	"os"
	"slices"
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
	r, err := report(strings.NewReader(input), &out)
	if err != nil || r.ok() {
		t.Errorf("report: ok %v, error %v, want false and nil", r.ok(), err)
	}
	if _, why := r.suspects(); why != "a package does not build" {
		t.Errorf("not run again, since %q", why)
	}
	if out.String() != want {
		t.Errorf("have:\n%s\nwant:\n%s", out.String(), want)
	}
}

// TestSuspects: a failure is only excused when it is one of a few, of a test, and does
// not speak of a broken promise.
func TestSuspects(t *testing.T) {
	fail := func(test, text string) string {
		return `{"Action":"output","Package":"m/b","Test":"` + test + `","Output":"` + text + `\n"}
{"Action":"fail","Package":"m/b","Test":"` + test + `"}
`
	}
	const end = `{"Action":"fail","Package":"m/b"}` + "\n"
	for _, c := range []struct {
		name, input, why string
	}{
		{"one", fail("TestBad/sub", "not there after 5 s") + fail("TestBad", "--- FAIL") + end, ""},
		{"four", fail("TestA", "x") + fail("TestB", "x") + fail("TestC", "x") + fail("TestD", "x") + end, "4 tests failed"},
		{"a subtest says it", fail("TestBad/sub", "3 wrong bytes") + fail("TestBad", "--- FAIL") + end, `a test says "wrong"`},
		{"race", fail("TestBad", "WARNING: DATA RACE") + end, `a test says "DATA RACE"`},
		{"panic", `{"Action":"output","Package":"m/b","Test":"TestBad","Output":"panic: x\n"}` + "\n" + end, "1 tests did not end"},
		{"without an end", `{"Action":"output","Package":"m/b","Test":"TestBad","Output":"x\n"}` + "\n" + fail("TestA", "x") + end, "1 tests did not end"},
		{"TestMain", `{"Action":"output","Package":"m/b","Output":"left over"}` + "\n" + end, "m/b failed without a failed test"},
	} {
		var out strings.Builder
		r, err := report(strings.NewReader(c.input), &out)
		if err != nil || r.ok() {
			t.Fatalf("%s: ok %v, error %v", c.name, r.ok(), err)
		}
		packages, why := r.suspects()
		if why != c.why || why == "" && !slices.Equal(packages, []string{"m/b"}) {
			t.Errorf("%s: %q, %v, want %q", c.name, why, packages, c.why)
		}
	}
}

// TestAgain runs a package whose test fails until the file beside it is there.
func TestAgain(t *testing.T) {
	const code = `package m

import (
	"os"
	"testing"
)

func TestFlaky(t *testing.T) {
	_, err := os.Stat("there")
	if f, e := os.Create(os.Getenv("CREATES")); e == nil {
		f.Close()
	}
	if err != nil {
		t.Error("not there yet")
	}
}

func TestFine(*testing.T) {}
`
	for _, c := range []struct {
		name, creates string
		again         int
		ok            bool
		want          string
	}{
		{"passes then", "there", 2, true, "FLAKY m TestFlaky: failed, and passed 2 times when it was run again\n"},
		{"fails for ever", "elsewhere", 2, false, "again, 2 times: m TestFlaky\n"},
		{"not asked for", "there", 0, false, "--- FAIL: TestFlaky"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			t.Chdir(dir)
			t.Setenv("CREATES", c.creates)
			for name, text := range map[string]string{"go.mod": "module m\n", "m_test.go": code} {
				if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			var out strings.Builder
			ok, err := test(t.Context(), []string{"go", "test", "-json", "-count=1", "./..."}, c.again, &out)
			if err != nil || ok != c.ok || !strings.Contains(out.String(), c.want) {
				t.Errorf("ok %v, error %v, printed:\n%s", ok, err, out.String())
			}
			if strings.Contains(out.String(), "FLAKY") != c.ok {
				t.Errorf("printed:\n%s", out.String())
			}
		})
	}
}

func TestReportPassed(t *testing.T) {
	passed, _, _ := strings.Cut(input, `{"Action":"output","Package":"m/b"`)
	var out strings.Builder
	if r, err := report(strings.NewReader(passed), &out); err != nil || !r.ok() {
		t.Errorf("report: ok %v, error %v, want true and nil", r.ok(), err)
	}
}

// TestReportCutOff: a test binary that died has ended nothing.
func TestReportCutOff(t *testing.T) {
	in := `{"Action":"output","Package":"m/a","Test":"TestDies","Output":"panic: help\n"}
{"Action":"fail","Package":"m/a"}
`
	var out strings.Builder
	if r, err := report(strings.NewReader(in), &out); err != nil || r.ok() {
		t.Errorf("report: ok %v, error %v, want false and nil", r.ok(), err)
	}
	if !strings.Contains(out.String(), "panic: help") {
		t.Errorf("the output lacks what the test said last: %q", out.String())
	}
}
