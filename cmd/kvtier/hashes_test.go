package main

import (
	"errors"
	"strings"
	"testing"
)

func TestParseHashes(t *testing.T) {
	const a, b = "0011223344556677", "8899aabbccddeeff"
	for _, tc := range []struct {
		args    []string
		hashLen int
		wantErr string // text that the error holds; "" for none
	}{
		{args: []string{a}, hashLen: 8},
		{args: []string{a, b}, hashLen: 8},
		{args: []string{a + b}, hashLen: 16},
		{args: []string{a + b + a[:8]}, hashLen: 20},
		{args: []string{a + b + a + b}, hashLen: 32},
		{args: []string{strings.ToUpper(b)}, hashLen: 8},
		{args: []string{a, a + b}, wantErr: a + b},
		{args: []string{a + b + a}, wantErr: "24 bytes"},
		{args: []string{"xyz"}, wantErr: "not hex"},
		{args: []string{""}, wantErr: "length 0"},
	} {
		hashes, n, err := parseHashes(tc.args)
		if tc.wantErr != "" {
			var ee *exitError
			if err == nil || !strings.Contains(err.Error(), tc.wantErr) || !errors.As(err, &ee) || ee.code != exitUsage {
				t.Errorf("%q: error %v, want exit %d with %q", tc.args, err, exitUsage, tc.wantErr)
			}
			continue
		}
		if err != nil || n != tc.hashLen || len(hashes) != len(tc.args) {
			t.Errorf("%q: %d hashes of %d bytes, error %v", tc.args, len(hashes), n, err)
			continue
		}
		for i, h := range hashes {
			if h.Hex(n) != strings.ToLower(tc.args[i]) {
				t.Errorf("%q: hash %d is %s", tc.args, i, h.Hex(n))
			}
		}
	}
}

func TestParseRange(t *testing.T) {
	for _, tc := range []struct {
		in          string
		off, length int64
		ok          bool
	}{
		{"0:1", 0, 1, true},
		{"4096:64KiB", 4096, 64 << 10, true},
		{"1KiB:", 1 << 10, 0, true},
		{"7", 0, 0, false},
		{"", 0, 0, false},
		{":5", 0, 0, false},
		{"5:0", 0, 0, false},
		{"-1:5", 0, 0, false},
		{"1:-5", 0, 0, false},
		{"1:2:3", 0, 0, false},
	} {
		off, length, err := parseRange(tc.in)
		if (err == nil) != tc.ok || off != tc.off || length != tc.length {
			if tc.ok || err == nil {
				t.Errorf("%q: %d, %d, %v", tc.in, off, length, err)
			}
		}
		if err != nil && !strings.Contains(err.Error(), `"`+tc.in+`"`) {
			t.Errorf("%q: the error does not name it: %v", tc.in, err)
		}
	}
}
