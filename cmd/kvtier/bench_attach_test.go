package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// testPython is a Python with what the package of this repository needs: what
// KVTIER_PYTHON names, that of make python-test, or python3.
func testPython(t *testing.T) string {
	t.Helper()
	root := filepath.Join("..", "..")
	path, err := filepath.Abs(filepath.Join(root, "python"))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", path)
	python := os.Getenv("KVTIER_PYTHON")
	if python == "" {
		if python, err = filepath.Abs(filepath.Join(root, ".bin", "venv-python3", "bin", "python")); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(python); err != nil {
			python = "python3"
		}
	}
	if err := needPython(t.Context(), &bench{python: python}); err != nil {
		if slices.Contains(strings.Split(os.Getenv("KVTIER_REQUIRE"), ","), "python") {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return python
}

func TestBenchAttach(t *testing.T) {
	python := testPython(t)
	t.Setenv(asProgram, "1") // for the daemon
	targets, err := chooseTargets([]string{"attach"}, false)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	rows, err := runBench(t.Context(), targets, dir, python, "", tinyScale(), &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rows {
		got = append(got, r.Name+" "+r.Unit)
		if r.Limit == nil || !(r.Value > 0 && *r.Limit > 0 && *r.Ratio > 0) {
			t.Errorf("row %+v", r)
		}
	}
	want := []string{
		"attach.put.1MiB.d16 GB/s", "attach.region_put.1MiB.d16 GB/s", "attach.get.1MiB.d16 GB/s", "attach.region_get.1MiB.d16 GB/s",
		"attach.lease_read.1MiB us", "attach.match_lease.256 us",
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows %q, want %q", got, want)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestBenchWithoutPython tells what is missing before anything is measured.
func TestBenchWithoutPython(t *testing.T) {
	lacking := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(lacking, []byte("#!/bin/sh\necho xxhash\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	broken := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(broken, []byte("#!/bin/sh\necho no good >&2; exit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for python, want := range map[string]string{
		"/no/python": "no Python",
		lacking:      "lacks the package xxhash",
		broken:       "no good",
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), []string{"bench", "all", "--dir", t.TempDir(), "--python", python}, nil, &stdout, &stderr)
		if code == 0 || !strings.Contains(stderr.String(), want) || !strings.Contains(stderr.String(), "bench attach") {
			t.Errorf("%s: exit %d, %s, want %q", python, code, stderr.String(), want)
		}
	}
}

// TestBenchWorkerEnds shows that a worker that ends amid a pass is told of with all that
// it said, also when that comes late.
func TestBenchWorkerEnds(t *testing.T) {
	worker := filepath.Join(t.TempDir(), "python")
	script := "#!/bin/sh\necho ready; read order; exec >&-; sleep 0.2; echo no memory >&2; exit 3\n"
	if err := os.WriteFile(worker, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	w, err := startWorker(t.Context(), worker, "", "", 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.do("put", nil, 0); err == nil || !strings.Contains(err.Error(), "put") || !strings.Contains(err.Error(), "exit status 3: no memory") {
		t.Errorf("error %v", err)
	}
	if err := w.close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
}
