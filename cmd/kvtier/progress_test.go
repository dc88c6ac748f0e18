package main

import (
	"bytes"
	"testing"
	"time"
)

func TestProgress(t *testing.T) {
	line := func() string { return "half way" }
	var out bytes.Buffer
	p := newProgress(&out)
	p.every = time.Hour
	p.update(line)
	if out.Len() != 0 {
		t.Errorf("before the first period it showed %q", out.String())
	}
	p.every = 0
	p.update(line)
	p.update(line)
	p.done()
	if got, want := out.String(), "half way\nhalf way\n"; got != want {
		t.Errorf("elsewhere than on a terminal it showed %q, want %q", got, want)
	}

	out.Reset()
	p = newProgress(&out)
	p.terminal, p.every = true, 0
	p.update(line)
	p.done()
	p.done()
	if got, want := out.String(), "\r\x1b[Khalf way\r\x1b[K"; got != want {
		t.Errorf("on a terminal it showed %q, want %q", got, want)
	}
}

func TestCountsIn(t *testing.T) {
	for want, m := range map[string]map[string]int64{
		"":              nil,
		" (g2 1)":       {"g2": 1, "g3": 0},
		" (g2 1, g3 2)": {"g3": 2, "g2": 1},
	} {
		if got := countsIn(m); got != want {
			t.Errorf("countsIn(%v) = %q, want %q", m, got, want)
		}
	}
}
