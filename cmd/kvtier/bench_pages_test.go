package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/internal/arena"
)

// Without reserved pages bench says why, and on which pages it measures: those that
// shared memory has here.
func TestBenchPagesUnreserved(t *testing.T) {
	mem, err := arena.New(arena.HugeBytes, &arena.Options{Memfd: true, Reserved: arena.ReservedNever})
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	huge := mem.Obtained().PageBytes >= arena.HugeBytes
	var out bytes.Buffer
	b := &bench{out: &out}
	if got := b.unreserved(errors.New("nobody may")); got != huge {
		t.Errorf("huge pages: %v, want %v", got, huge)
	}
	kind := map[bool]string{true: "huge ones", false: "small ones"}[huge]
	if note := out.String(); !strings.Contains(note, kind) || !strings.Contains(note, "nobody may") {
		t.Errorf("note %q, want %q and the reason", note, kind)
	}
}

// The percentile of puts leaves out those of warm-ups.
func TestBenchPutsWithoutWarmups(t *testing.T) {
	if raceEnabled {
		t.Skip("runs without the race detector only: a bench serves nobody")
	}
	t.Setenv(asProgram, "1") // for the daemon
	scale := tinyScale()
	scale.warmups = 2
	s := &sessionBench{bench: &bench{benchScale: scale, dir: t.TempDir(), out: &bytes.Buffer{}}}
	defer func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}()
	if err := s.makeMemory(int64(s.blocks * s.payload)); err != nil {
		t.Fatal(err)
	}
	if err := s.start(t.Context(), s.dir, "--dram", "64MiB", "--nvme", noNVMe); err != nil {
		t.Fatal(err)
	}
	const n, pairs = 4, 3
	if err := s.compare(t.Context(), "puts", "GB/s", pairs, s.put(n, sized{"1MiB", s.payload}, 1), nil); err != nil {
		t.Fatal(err)
	}
	if len(s.puts) != n*pairs {
		t.Errorf("%d puts are kept after %d warm-ups, want %d", len(s.puts), s.warmups, n*pairs)
	}
}
