package main

import (
	"math"
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want int64
	}{
		{"0", 0},
		{"1", 1},
		{"1048576", 1 << 20},
		{"512B", 512},
		{"64KiB", 64 << 10},
		{"64k", 64 << 10},
		{"64Ki", 64 << 10},
		{"64KB", 64000},
		{"256MiB", 256 << 20},
		{"4GiB", 4 << 30},
		{"1G", 1 << 30},
		{"1.5GiB", 3 << 29},
		{"0.25kib", 256},
		{"2TiB", 2 << 40},
		{"2TB", 2e12},
		{"9223372036854775807", math.MaxInt64},
	} {
		got, err := parseSize(tc.in)
		if err != nil || got != tc.want {
			t.Errorf("parseSize(%q) = %d, %v, want %d", tc.in, got, err, tc.want)
		}
	}
}

func TestParseSizeRefuses(t *testing.T) {
	for _, in := range []string{
		"", "GiB", "-1", "+1", " 1", "1 GiB", "1GiB ", "4Gx", "0x10", "1e3", "1.", ".5", "1.2.3",
		"1.5", "0.3KiB", "9223372036854775808", "8388608TiB", "25%", "1_000", strings.Repeat("9", 100),
	} {
		got, err := parseSize(in)
		if err == nil {
			t.Errorf("parseSize(%q) = %d, want an error", in, got)
			continue
		}
		if !strings.Contains(err.Error(), in) {
			t.Errorf("parseSize(%q): %v: does not name the value", in, err)
		}
	}
}

func TestParseSizeNegative(t *testing.T) {
	for _, in := range []string{"-1", "-1.5GiB", "-0"} {
		if _, err := parseSize(in); err == nil || !strings.HasSuffix(err.Error(), `"`+in+`": negative`) {
			t.Errorf("parseSize(%q): %v, want negative", in, err)
		}
	}
}

func TestFormatSizeShort(t *testing.T) {
	for n, want := range map[int64]string{
		0:             "0 B",
		1023:          "1023 B",
		1 << 10:       "1.0 KiB",
		1<<20 - 1:     "1.0 MiB",
		3 << 29:       "1.5 GiB",
		math.MaxInt64: "8.0 EiB",
		-2 << 20:      "-2.0 MiB",
	} {
		if got := formatSizeShort(n); got != want {
			t.Errorf("formatSizeShort(%d) = %q, want %q", n, got, want)
		}
	}
}

func FuzzSize(f *testing.F) {
	for _, n := range []int64{0, 1, 1023, 1 << 20, 5912 << 20, 3 << 40, math.MaxInt64} {
		f.Add(n)
	}
	f.Fuzz(func(t *testing.T, n int64) {
		if n < 0 {
			n = -(n + 1)
		}
		s := formatSize(n)
		got, err := parseSize(s)
		if err != nil || got != n {
			t.Fatalf("parseSize(formatSize(%d) = %q) = %d, %v", n, s, got, err)
		}
	})
}
