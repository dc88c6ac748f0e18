package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
)

// putDemo stores A, and B behind it, in the namespace demo.
func putDemo(t *testing.T, addr string) {
	t.Helper()
	put := []string{"put", "--namespace", "demo", "--max-block-bytes", "1KiB"}
	for _, args := range [][]string{{hashA, "-"}, {"--parent", hashA, "--durable", "g3", hashB, "-"}} {
		if r := kvtier(t, addr, strings.Repeat("x", 5*len(args)), append(put, args...)...); r.code != 0 {
			t.Fatalf("put: %+v", r)
		}
	}
}

func TestMatch(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	putDemo(t, addr)
	match := []string{"match", "--namespace", "demo"}
	kvtier(t, addr, "", append(match, hashA, hashC, hashB)...).want(t, 0,
		"HASH                              STATE     TIER  BYTES\n"+
			hashA+"  resident  g2    10\n"+
			hashC+"  absent    -     -\n"+
			"prefix 1 of 3\n", "")
	r := kvtier(t, addr, "", append(match, "--all", "--lease", "10s", "--json", hashA, hashC, hashB)...)
	var got matchOutput
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if got.Prefix != 1 || len(got.Blocks) != 3 || got.Blocks[2] != (matchedBlock{hashB, "resident", "g2", 30}) {
		t.Errorf("match --all: %+v", got)
	}
	if got.Lease == nil || got.Lease.ID == 0 || got.Lease.Blocks != 2 || got.Lease.LeftMS <= 0 {
		t.Errorf("match --lease: %+v", got.Lease)
	}
	kvtier(t, addr, "", append(match, hashA, "0011223344556677")...).want(t, 2, "", "length 8 bytes")
	kvtier(t, addr, "", append(match, "--lease", "-1s", hashA)...).want(t, 2, "", "--lease -1s")
	if r := kvtier(t, addr, "", append(match, "--lease", "10s", "--conversation", "run 1", hashA)...); r.code != 0 || !strings.Contains(r.stdout, ": 1 block for 10s\n") {
		t.Errorf("match --conversation: %+v", r)
	}
	kvtier(t, addr, "", append(match, "--conversation", "run 1", hashA)...).want(t, 2, "", "--conversation is for --lease")
	kvtier(t, addr, "", match...).want(t, 2, "", "1 arg")
}

func TestLocate(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	putDemo(t, addr)
	r := kvtier(t, addr, "", "locate", "--namespace", "demo", "--json", hashB, hashC)
	var got []locatedBlock
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if len(got) != 2 || len(got[0].Places) != 2 || got[0].Places[0].Tier != "g2" || got[0].Places[1].Tier != "g3" || got[0].Places[0].Bytes != 30 || len(got[1].Places) != 0 {
		t.Errorf("locate: %+v", got)
	}
	r = kvtier(t, addr, "", "locate", "--namespace", "demo", hashB, hashC)
	if lines := strings.Split(r.stdout, "\n"); r.code != 0 || len(lines) != 5 || !strings.HasPrefix(lines[1], hashB+"  g2") || !strings.HasPrefix(lines[3], hashC+"  -") {
		t.Errorf("locate: %+v", r)
	}
}

func TestPrefetch(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	putDemo(t, addr)
	prefetch := []string{"prefetch", "--namespace", "demo"}
	kvtier(t, addr, "", append(prefetch, "--id", "r1", hashA, hashC)...).want(t, 0,
		"1/2 "+hashA+" in g2\n2/2 "+hashC+" missed: absent\n", "")
	kvtier(t, addr, "", append(prefetch, "--json", hashC, hashA)...).want(t, 0,
		`{"index":0,"hash":"`+hashC+`","reason":"absent"}`+"\n"+`{"index":1,"hash":"`+hashA+`","reason":"hit","tier":"g2"}`+"\n", "")
	kvtier(t, addr, "", append(prefetch, "--priority", "9", "--within", "1m", hashA)...).want(t, 0, "1/1 "+hashA+" in g2\n", "")
	kvtier(t, addr, "", append(prefetch, "--priority", "10", hashA)...).want(t, 2, "", "priority: 10, at most 9")
	kvtier(t, addr, "", append(prefetch, "--within", "-1s", hashA)...).want(t, 2, "", "within: -1s")
	kvtier(t, addr, "", "prefetch", "--cancel", "r1", "--priority", "1").want(t, 2, "", "priority")
	kvtier(t, addr, "", "prefetch", "--cancel", "r1").want(t, 1, "", "r1")
	kvtier(t, addr, "", "prefetch", "--cancel", "r1", hashA).want(t, 2, "", hashA)
	kvtier(t, addr, "", "prefetch", hashA).want(t, 2, "", "namespace")
}

func TestLsAndRm(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	putDemo(t, addr)
	ls := []string{"ls", "--namespace", "demo"}
	kvtier(t, addr, "", ls...).want(t, 0, hashA+"        10  g2\n"+hashB+"        30  g2,g3  parent "+hashA+"\n", "")
	kvtier(t, addr, "", append(ls, "--limit", "1")...).want(t, 0, hashA+"        10  g2\n", "")
	kvtier(t, addr, "", append(ls, "--limit", "-1")...).want(t, 2, "", "--limit -1")
	r := kvtier(t, addr, "", append(ls, "--json")...)
	dec := json.NewDecoder(strings.NewReader(r.stdout))
	var got []listedBlock
	for {
		var b listedBlock
		if err := dec.Decode(&b); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		got = append(got, b)
	}
	if len(got) != 2 || got[1].Parent != hashA || got[1].Bytes != 30 || len(got[1].Tiers) != 2 || len(got[1].Sum) != 32 {
		t.Errorf("ls --json: %+v", got)
	}

	rm := []string{"rm", "--namespace", "demo"}
	kvtier(t, addr, "", append(rm, hashB, hashC)...).want(t, 0, "deleted 1 of 2\n", "")
	kvtier(t, addr, "", "get", "--namespace", "demo", hashB).want(t, 3, "", "absent")
	kvtier(t, addr, "", append(rm, "--all")...).want(t, 2, "", "add --yes")
	kvtier(t, addr, "", append(rm, "--all", "--yes", hashA)...).want(t, 2, "", `kvtier rm --all takes no arguments: "`+hashA+`"`)
	kvtier(t, addr, "", rm...).want(t, 2, "", "1 arg")
	kvtier(t, addr, "", ls...).want(t, 0, hashA+"        10  g2\n", "")
	kvtier(t, addr, "", append(rm, "--all", "--yes", "--json")...).want(t, 0, "{\n  \"namespace\": \"demo\",\n  \"deleted\": 1\n}\n", "")
	kvtier(t, addr, "", ls...).want(t, 0, "", "")
}

// A listing of more blocks than a page has each of them once.
func TestLsPages(t *testing.T) {
	s := memstore.New(nil)
	addr, _ := startServer(t, s, nil)
	const blocks = 2*listPage + 17
	var ids []string
	for i := range blocks {
		ids = append(ids, fmt.Sprint(i))
	}
	trace := writeTrace(t, requestLine(strings.Join(ids, ",")))
	if r := kvtier(t, addr, "", "replay", trace, "--block-bytes", "8"); r.code != 0 {
		t.Fatalf("replay: %+v", r)
	}
	for _, tc := range []struct{ limit, want int }{{0, blocks}, {listPage, listPage}, {listPage + 1, listPage + 1}, {blocks + 5, blocks}} {
		r := kvtier(t, addr, "", "ls", "--namespace", "replay", "--limit", fmt.Sprint(tc.limit))
		seen := make(map[string]bool)
		for line := range strings.Lines(r.stdout) {
			hash, _, _ := strings.Cut(line, " ")
			if seen[hash] {
				t.Fatalf("limit %d: %s is listed twice", tc.limit, hash)
			}
			seen[hash] = true
		}
		if r.code != 0 || len(seen) != tc.want {
			t.Errorf("limit %d: %d blocks, exit %d, %s; want %d", tc.limit, len(seen), r.code, r.stderr, tc.want)
		}
	}
}

func TestNs(t *testing.T) {
	addr, _ := startServer(t, memstore.New(nil), nil)
	open := []string{"ns", "open", "llama", "--model", "llama-3-8b", "--tokens-per-block", "16"}
	if r := kvtier(t, addr, "", append(open, "--block-bytes", "2MiB", "--ttl", "1h")...); r.code != 0 || !strings.Contains(r.stdout, "model             llama-3-8b\n") {
		t.Errorf("ns open: %+v", r)
	}
	kvtier(t, addr, "", append(open, "--block-bytes", "1MiB")...).want(t, 1, "", `block_bytes is "2097152", not "1048576"`)
	kvtier(t, addr, "", open...).want(t, 2, "", "block-bytes")
	kvtier(t, addr, "", "ns", "open", "a/b", "--block-bytes", "1").want(t, 2, "", `"a/b"`)
	putOne(t, addr)

	r := kvtier(t, addr, "", "ns", "show", "llama", "--json")
	var got namespaceOutput
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if got.Name != "llama" || got.Model != "llama-3-8b" || got.TokensPerBlock != 16 || got.BlockBytes != 2<<20 || got.TTLMS != 3600_000 || len(got.Digest) != 64 {
		t.Errorf("ns show: %+v", got)
	}
	kvtier(t, addr, "", "ns").want(t, 0,
		"NAME   BLOCKS  PAYLOAD  BLOCK BYTES  HASH LENGTH  EPOCH  TIME TO LIVE\n"+
			"demo   1       10 B     <=1024       16           0      none\n"+
			"llama  0       0 B      2097152      open         0      1h0m0s\n", "")
	kvtier(t, addr, "", "ns", "lst").want(t, 2, "", `"lst"`)
}

// putOne stores A alone, in memory.
func putOne(t *testing.T, addr string) {
	t.Helper()
	if r := kvtier(t, addr, "0123456789", "put", "--namespace", "demo", "--max-block-bytes", "1KiB", hashA, "-"); r.code != 0 {
		t.Fatalf("put: %+v", r)
	}
}

func TestStat(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	putDemo(t, addr)
	r := kvtier(t, addr, "", "stat", "--json")
	var got statOutput
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if got.Blocks != 2 || got.Namespaces != 1 || len(got.Tiers) == 0 || got.Tiers[0].PayloadBytes != 40 || got.Tiers[0].Devices[0].State != "healthy" {
		t.Errorf("stat: %+v", got)
	}
	if r := kvtier(t, addr, "", "stat"); r.code != 0 || !strings.Contains(r.stdout, "2 in 1 namespace\n") || !strings.Contains(r.stdout, "healthy") {
		t.Errorf("stat: %+v", r)
	}
}

// What stat prints for people is that of the golden file.
func TestStatGolden(t *testing.T) {
	o := describeStats("v1", aStats())
	var got strings.Builder
	if err := o.print(&got); err != nil {
		t.Fatal(err)
	}
	compareGolden(t, "testdata/stat.golden", got.String())
}

func TestWatch(t *testing.T) {
	addr, srv := startServer(t, memstore.New(&memstore.Options{Durable: true}), nil)
	putOne(t, addr)

	r := kvtier(t, addr, "", "stat", "--json")
	var stat statOutput
	if err := json.Unmarshal([]byte(r.stdout), &stat); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	incarnation := stat.Incarnation
	if n, err := parseIncarnation(incarnation); err != nil || n == 0 {
		t.Fatalf("incarnation %q", incarnation)
	}

	var first string // line of a watch on standard error
	watch := func(args ...string) (lines *bufio.Scanner, wait func() result) {
		out, stdout := io.Pipe()
		ready, stderr := io.Pipe()
		done := make(chan result, 1)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		t.Cleanup(cancel)
		go func() {
			code := run(ctx, append(append([]string{"watch"}, args...), "--server", addr), strings.NewReader(""), stdout, stderr)
			stdout.Close()
			stderr.Close()
			done <- result{code: code}
		}()
		errs := bufio.NewReader(ready)
		line, err := errs.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "watching incarnation "+incarnation+" after ") {
			t.Fatalf("watch began with %q, %v", line, err)
		}
		first = line
		return bufio.NewScanner(out), func() result {
			text, _ := io.ReadAll(errs)
			r := <-done
			r.stderr = string(text)
			return r
		}
	}
	next := func(lines *bufio.Scanner) watchLine {
		t.Helper()
		var l watchLine
		if !lines.Scan() {
			t.Fatalf("watch ended: %v", lines.Err())
		}
		if err := json.Unmarshal(bytes.TrimSpace(lines.Bytes()), &l); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		l.Seq = 0
		return l
	}

	lines, wait := watch("--namespace", "demo", "--count", "3", "--json")
	if r := kvtier(t, addr, "other", "put", "--namespace", "other", "--block-bytes", "5", hashC, "-"); r.code != 0 {
		t.Fatalf("put: %+v", r)
	}
	if r := kvtier(t, addr, "abc", "put", "--namespace", "demo", "--max-block-bytes", "1KiB", "--parent", hashA, hashB, "-"); r.code != 0 {
		t.Fatalf("put: %+v", r)
	}
	if got, want := next(lines), (watchLine{Event: "stored", Namespace: "demo", Hash: hashB, Parent: hashA, Tier: "g2", Bytes: 3}); got != want {
		t.Errorf("event %+v, want %+v", got, want)
	}
	kvtier(t, addr, "", "rm", "--namespace", "demo", hashA)
	if got := next(lines); got.Event != "removed" || got.Hash != hashA || got.Reason != "deleted" || !got.Last {
		t.Errorf("event %+v, want A removed", got)
	}
	kvtier(t, addr, "", "rm", "--namespace", "demo", "--all", "--yes")
	if got := next(lines); got.Event != "cleared" || got.Count != 1 {
		t.Errorf("event %+v, want one block cleared", got)
	}
	wait().want(t, 0, "", "")

	lines, wait = watch("--count", "1")
	kvtier(t, addr, strings.Repeat("x", 10), "put", "--namespace", "demo", "--max-block-bytes", "1KiB", "--parent", hashA, hashB, "-").want(t, 0, "stored "+hashB+", 10 bytes, g2\n", "")
	if !lines.Scan() || !strings.HasSuffix(lines.Text(), " stored demo "+hashB+" g2 10 bytes parent "+hashA) {
		t.Errorf("an event for people: %q", lines.Text())
	}
	wait().want(t, 0, "", "")

	// On a machine that is busy the time may be over before the daemon listens.
	for span := 300 * time.Millisecond; ; span *= 2 {
		r := kvtier(t, addr, "", "watch", "--for", span.String())
		if r.code == 0 && r.stderr == "" && span < 10*time.Second {
			continue
		}
		r.want(t, 0, "", "watching incarnation "+incarnation+" after ")
		break
	}

	// The put of A was the first event, and the put of B the last.
	lines, wait = watch("--incarnation", incarnation, "--after", "1", "--json", "--count", "1")
	if first != "watching incarnation "+incarnation+" after 1, resumed\n" {
		t.Errorf("a watch that goes on says %q", first)
	}
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), `{"seq":2,"event":"stored","namespace":"other"`) {
		t.Errorf("the event behind the first: %q", lines.Text())
	}
	wait().want(t, 0, "", "")
	lines, wait = watch("--namespace", "demo", "--snapshot", "--json", "--count", "2")
	if got, want := next(lines), (watchLine{Event: "present", Namespace: "demo", Hash: hashB, Parent: hashA, Tier: "g2", Bytes: 10}); got != want {
		t.Errorf("of a snapshot %+v, want %+v", got, want)
	}
	if got, want := next(lines), (watchLine{Event: "snapshot", Namespace: "demo", Count: 1}); got != want {
		t.Errorf("end of a snapshot %+v, want %+v", got, want)
	}
	wait().want(t, 0, "", "")
	lines, wait = watch("--incarnation", "1", "--count", "1")
	if !lines.Scan() || !strings.HasSuffix(lines.Text(), " lost") {
		t.Errorf("a watch of another incarnation begins with %q", lines.Text())
	}
	wait().want(t, 0, "", "")
	kvtier(t, addr, "", "watch", "--after", "7").want(t, 2, "", "--after 7")
	kvtier(t, addr, "", "watch", "--incarnation", "0").want(t, 2, "", `--incarnation "0"`)
	kvtier(t, addr, "", "watch", "--incarnation", "watching").want(t, 2, "", `--incarnation "watching"`)

	_, wait = watch()
	if err := srv.Drain(context.Background()); err != nil {
		t.Fatal(err)
	}
	if r := wait(); r.code != 1 || r.stderr == "" {
		t.Errorf("watch of a server that stops: %+v", r)
	}
}
