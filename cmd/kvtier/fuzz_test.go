package main

import (
	"bytes"
	"errors"
	"math"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

// wantUsage wants the error of a bad command line, which names what is bad.
func wantUsage(t *testing.T, err error, name string) {
	t.Helper()
	var ee *exitError
	if !errors.As(err, &ee) || ee.code != exitUsage {
		t.Fatalf("%v: no exit code %d", err, exitUsage)
	}
	if !strings.Contains(err.Error(), name) {
		t.Fatalf("%v does not name %s", err, name)
	}
}

// FuzzParseSize: a size that is accepted is a number of bytes, and one only.
func FuzzParseSize(f *testing.F) {
	for _, s := range []string{
		"0", "4GiB", "1.5G", "64kib", "10MB", "1048576", "0.5B", "1e3", "-1", "+1", "1_0", "0x10", ".5G", "5.", "1..2", "8EiB", "9223372036854775807",
		"9223372036854775808", "8388608TiB", "0000000000000000000000000000000000001", "0.000000000000000000000000000001TiB", "ſ", "1\u212aB",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseSize(s)
		if err != nil {
			if !strings.Contains(err.Error(), strconv.Quote(s)) {
				t.Fatalf("%v does not name %q", err, s)
			}
			return
		}
		if n < 0 {
			t.Fatalf("%q is %d", s, n)
		}
		if again, err := parseSize(formatSize(n)); err != nil || again != n {
			t.Fatalf("%q is %d, written %q, which is %d, %v", s, n, formatSize(n), again, err)
		}
		// Digits alone are the number itself.
		if digits, err := strconv.ParseInt(s, 10, 64); err == nil && digits != n {
			t.Fatalf("%q is %d", s, n)
		}
	})
}

// FuzzRange: a range that is accepted is what it says.
func FuzzRange(f *testing.F) {
	for _, s := range []string{"0:1", "4096:64KiB", "1KiB:", "7", ":5", "5:0", "-1:5", "1:2:3", "", ":"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		off, length, err := parseRange(s)
		if err != nil {
			wantUsage(t, err, strconv.Quote(s))
			return
		}
		again := formatSize(off) + ":"
		if length > 0 {
			again += formatSize(length)
		}
		if o, l, err := parseRange(again); err != nil || o != off || l != length || off < 0 || length < 0 {
			t.Fatalf("%q is %d and %d, written %q, which is %d and %d, %v", s, off, length, again, o, l, err)
		}
	})
}

// FuzzHashes: hashes that are accepted are those given, all of one length.
func FuzzHashes(f *testing.F) {
	for _, s := range []string{"", hashA, hashA + " " + hashB, hashA + " " + hashB[:16], strings.ToUpper(hashB), hashA + " ", "0x" + hashA[2:], hashA + hashB[:1]} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, " ")
		hashes, n, err := parseHashes(args)
		if err != nil {
			wantUsage(t, err, "hash ")
			return
		}
		if !block.ValidHashLen(n) || len(hashes) != len(args) {
			t.Fatalf("%q: %d hashes of %d bytes", args, len(hashes), n)
		}
		for i, h := range hashes {
			if h.Hex(n) != strings.ToLower(args[i]) {
				t.Fatalf("%q is %s", args[i], h.Hex(n))
			}
		}
	})
}

// FuzzJournal: a journal that is accepted is one that is written, but for a last
// line that has no end, and for hashes written twice.
func FuzzJournal(f *testing.F) {
	one, two := traceHash(1).Hex(traceHashBytes)+"\n", traceHash(2).Hex(traceHashBytes)+"\n"
	for _, s := range []string{"", "\n", one, one + two, one + one, one + two[:20], two[:16] + "\n", strings.ToUpper(one), one + "\r\n", strings.Repeat("0", 100)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		hashes, err := parseJournal(bytes.NewReader(data))
		if err != nil {
			if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "line ") {
				t.Fatalf("error %v has no class or no line", err)
			}
			return
		}
		whole := data[:bytes.LastIndexByte(data, '\n')+1]
		lines := map[string]bool{}
		for line := range bytes.Lines(whole) {
			lines[string(line)] = true
		}
		for h := range hashes {
			if !lines[h.Hex(traceHashBytes)+"\n"] {
				t.Fatalf("%s is in no line", h.Hex(traceHashBytes))
			}
		}
		if len(lines) != len(hashes) {
			t.Fatalf("%d hashes of %d lines", len(hashes), len(lines))
		}
	})
}

// What the journal writes is what it reads, by several writers at once too.
func TestJournalWritesWhatItReads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	const writers, each = 4, 50
	for w := range uint64(writers) {
		go func() {
			var err error
			for i := range uint64(each) {
				err = errors.Join(err, j.write([]block.Hash{traceHash(2 * (w*each + i)), traceHash(2*(w*each+i) + 1)}))
			}
			done <- err
		}()
	}
	for range writers {
		err = errors.Join(err, <-done)
	}
	if err := errors.Join(err, j.write(nil), j.close()); err != nil {
		t.Fatal(err)
	}
	hashes, err := readJournal(path)
	if err != nil || len(hashes) != 2*writers*each {
		t.Errorf("%d blocks, %v; want %d", len(hashes), err, 2*writers*each)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// FuzzEndpoint: an address that is accepted can be written and read again, and
// has a port or a path that can be one.
func FuzzEndpoint(f *testing.F) {
	for _, s := range []string{
		"127.0.0.1:7070", ":0", "[::1]:65535", "::1:80", "host:65536", "host:-1", "host:+1", "host:", "host", "unix:", "unix:/a", "unix:rel", "unix:@x",
		"UNIX:/a", "unix:" + strings.Repeat("x", maxUnixPath), "unix:" + strings.Repeat("x", maxUnixPath+1), "unix:a\x00b", "a b:1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := parseEndpoint(s)
		if err != nil {
			if !strings.Contains(err.Error(), strconv.Quote(s)) {
				t.Fatalf("%v does not name %q", err, s)
			}
			return
		}
		if again, err := parseEndpoint(e.String()); err != nil || again != e {
			t.Fatalf("%q is %v, read again %v, %v", s, e, again, err)
		}
		switch e.network {
		case "unix":
			if n := len(e.address); n == 0 || n > maxUnixPath || strings.ContainsRune(e.address, 0) {
				t.Fatalf("%q has the path %q", s, e.address)
			}
		case "tcp":
			_, port, err := net.SplitHostPort(e.address)
			if n, perr := strconv.Atoi(port); err != nil || perr != nil || n < 0 || n > math.MaxUint16 || strings.Trim(port, "0123456789") != "" {
				t.Fatalf("%q has the port %q, %v", s, port, err)
			}
		default:
			t.Fatalf("%q has the network %q", s, e.network)
		}
	})
}

// FuzzSlab: a slab that is accepted has a path and a size, and can be written and
// read again.
func FuzzSlab(f *testing.F) {
	for _, s := range []string{"/a=1GiB", "a=1", "=1", "/a=", "/a=0", "/a=b=2K", "none", "", "/a=-1", "/a=1e3", "a\x00b=1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		sl, err := parseSlab(s)
		if err != nil {
			if !strings.Contains(err.Error(), strconv.Quote(s)) {
				t.Fatalf("%v does not name %q", err, s)
			}
			return
		}
		if sl.bytes <= 0 || !filepath.IsAbs(sl.path) || strings.ContainsRune(sl.path, 0) {
			t.Fatalf("%q is %+v", s, sl)
		}
		if again, err := parseSlab(sl.path + "=" + formatSize(sl.bytes)); err != nil || again != sl {
			t.Fatalf("%q is %+v, read again %+v, %v", s, sl, again, err)
		}
	})
}

// FuzzPrefill: a prefill cost that is accepted is more than nothing, for a glob that can
// be matched, and can be written and read again.
func FuzzPrefill(f *testing.F) {
	for _, s := range []string{
		"*=33us", "llama-*=33us,0.4", "a=b=1ms,1e3", "=1us", "a=", "a=0", "a=0,0", "a=-1us", "a=1us,", "a=1us,NaN", "a=1us,-Inf", "a=1us,1e308", "[=1us", "a=9999999h", "1us",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseNamedPrefill(s)
		if err != nil {
			if !strings.Contains(err.Error(), "prefill") {
				t.Fatalf("%v does not say what %q was to be", err, s)
			}
			return
		}
		if _, err := path.Match(n.glob, "name"); err != nil || n.cost.Check() != nil || n.cost == (block.Prefill{}) {
			t.Fatalf("%q is %+v, %v", s, n, err)
		}
		if again, err := parseNamedPrefill(n.glob + "=" + (&prefillValue{&n.cost}).String()); err != nil || again != n {
			t.Fatalf("%q is %+v, read again %+v, %v", s, n, again, err)
		}
	})
}

// FuzzTierPolicy: what is accepted names a policy, of a tier that can have one, or of all.
func FuzzTierPolicy(f *testing.F) {
	for _, s := range []string{"switch", "g2=arc", "g3=lru-leaf", "g4=arc", "none=arc", "=arc", "g2=", "g2=g3=arc", "", "ARC"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, name, err := parseTierPolicy(s)
		if err != nil {
			return
		}
		if !slices.Contains(policy.Names(), name) || id != block.NoTier && id != block.G2 && id != block.G3 {
			t.Fatalf("%q is policy %q of %v", s, name, id)
		}
		if id == block.NoTier && s != name || id != block.NoTier && !strings.HasSuffix(s, "="+name) {
			t.Fatalf("%q is policy %q of %v", s, name, id)
		}
	})
}
