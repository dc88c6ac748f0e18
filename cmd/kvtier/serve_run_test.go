package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// daemon is serve running in this process.
type daemon struct {
	addr   string
	stderr *syncBuffer
	stop   context.CancelFunc // as SIGTERM does
	code   chan int
}

// syncBuffer is a buffer that several goroutines write.
type syncBuffer struct {
	mu struct {
		sync.Mutex
		buf bytes.Buffer
	}
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.buf.String()
}

// startDaemon runs serve with args until it is ready.
func startDaemon(t *testing.T, args ...string) *daemon {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &daemon{stderr: &syncBuffer{}, stop: cancel, code: make(chan int, 1)}
	r, w := io.Pipe()
	go func() {
		d.code <- run(ctx, append([]string{"serve"}, args...), nil, w, d.stderr)
		w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		r.Close()
	})
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		t.Fatalf("no ready line: %v: %s", err, d.stderr)
	}
	addr, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "ready ")
	if !ok {
		t.Fatalf("first line %q", line)
	}
	d.addr = addr
	return d
}

// wait stops the daemon and checks its exit code.
func (d *daemon) wait(t *testing.T, want int) {
	t.Helper()
	d.stop()
	if code := <-d.code; code != want {
		t.Fatalf("exit code %d, want %d: %s", code, want, d.stderr)
	}
}

// dial connects to a daemon.
func dial(t *testing.T, addr string, o *api.ClientOptions) *api.Client {
	t.Helper()
	c, err := api.Dial(t.Context(), addr, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

const testBlock = 64 << 10

// openTestNamespace opens a namespace of blocks of testBlock bytes.
func openTestNamespace(t *testing.T, c *api.Client) block.Namespace {
	t.Helper()
	ns, err := c.OpenNamespace(t.Context(), block.Descriptor{Name: "test", BlockBytes: testBlock}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns.HashLen = 16
	return ns
}

func testHash(i int) (h block.Hash) {
	h[0], h[15] = byte(i), 1
	return h
}

// putBlocks puts n blocks.
func putBlocks(t *testing.T, c *api.Client, n int, durable block.TierID) {
	t.Helper()
	ns := openTestNamespace(t, c)
	var items []api.PutItem
	for i := range n {
		h := testHash(i)
		data := make([]byte, testBlock)
		fillPattern(data, h)
		items = append(items, api.PutItem{Hash: h, Data: data})
	}
	res, err := c.Put(t.Context(), ns, items, api.PutOptions{Durable: durable})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range res {
		if r.Err != nil {
			t.Fatalf("put %d: %v", i, r.Err)
		}
	}
}

// hits gets n blocks, checks the bytes of those that are there and counts them.
func hits(t *testing.T, c *api.Client, n int) int {
	t.Helper()
	ns := openTestNamespace(t, c)
	var want []block.Wanted
	for i := range n {
		want = append(want, block.Wanted{Hash: testHash(i)})
	}
	count := 0
	err := c.Get(t.Context(), ns, want, block.GetOptions{}, func(i int, p block.Payload) error {
		if p.Reason != block.Hit {
			return nil
		}
		count++
		if bad := wrongPattern(p.Bytes, testHash(i)); bad != 0 || len(p.Bytes) != testBlock {
			t.Errorf("block %d: %d bytes, %d wrong", i, len(p.Bytes), bad)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return count
}

// small are the flags of a small daemon that keeps its data in dir.
func small(dir string, more ...string) []string {
	return append([]string{"--data", dir, "--dram", "64MiB", "--listen", "127.0.0.1:0"}, more...)
}

// A clean stop keeps what was only in DRAM, the next serve finds the slab by
// itself, and verify agrees.
func TestServeKeepsBlocks(t *testing.T) {
	dir := t.TempDir()
	slab := filepath.Join(t.TempDir(), "slab")
	d := startDaemon(t, small(dir, "--nvme", slab+"=256MiB")...)
	putBlocks(t, dial(t, d.addr, nil), 20, block.G2)
	d.wait(t, 0)

	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"verify", "--data", dir, "--json"}, nil, &stdout, &stderr); code != 0 {
		t.Fatalf("verify: exit code %d: %s%s", code, &stdout, &stderr)
	}
	var rep verifyReport
	if err := json.Unmarshal(stdout.Bytes(), &rep); err != nil {
		t.Fatal(err)
	}
	if rep.Records != 20 || rep.Good != 20 || rep.Bad != 0 || rep.Bytes != 20*testBlock {
		t.Errorf("verify: %+v", rep)
	}

	d = startDaemon(t, small(dir)...)
	c := dial(t, d.addr, nil)
	if n := hits(t, c, 20); n != 20 {
		t.Errorf("%d of 20 blocks are there after the restart", n)
	}
	d.wait(t, 0)
}

// Without a drain what is only in DRAM is lost, and the exit code says so.
func TestServeDrainTimeout(t *testing.T) {
	d := startDaemon(t, small(t.TempDir(), "--nvme", filepath.Join(t.TempDir(), "slab")+"=256MiB", "--drain-timeout", "0s")...)
	putBlocks(t, dial(t, d.addr, nil), 20, block.G2)
	d.wait(t, exitMiss)
	if !strings.Contains(d.stderr.String(), "kvtier: stopped, but 20 blocks ") || !strings.Contains(d.stderr.String(), "--drain-timeout 0s") {
		t.Errorf("standard error: %s", d.stderr)
	}
}

// Verify finds a block whose bytes were changed on the slab.
func TestVerifyFindsDamage(t *testing.T) {
	dir := t.TempDir()
	slab := filepath.Join(t.TempDir(), "slab")
	d := startDaemon(t, small(dir, "--nvme", slab+"=256MiB")...)
	putBlocks(t, dial(t, d.addr, nil), 3, block.G3)
	d.wait(t, 0)

	piece := make([]byte, testBlock)
	fillPattern(piece, testHash(1))
	damage(t, slab, piece[4096:8192])
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), []string{"verify", "--data", dir}, nil, &stdout, &stderr)
	if code != exitFailure || !strings.Contains(stderr.String(), "1 of 3 committed blocks do not read back right") {
		t.Errorf("exit code %d: %s%s", code, &stdout, &stderr)
	}
	if !strings.Contains(stdout.String(), testHash(1).Hex(16)) {
		t.Errorf("the block is not named in %s", &stdout)
	}
}

// damage flips a bit in the one place of a file that holds piece.
func damage(t *testing.T, path string, piece []byte) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	i := bytes.Index(data, piece)
	if i < 0 || bytes.Contains(data[i+1:], piece) {
		t.Fatalf("%s does not hold the piece exactly once", path)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{data[i] ^ 1}, int64(i)); err != nil {
		t.Fatal(err)
	}
}

func TestServeNone(t *testing.T) {
	d := startDaemon(t, small(t.TempDir(), "--nvme", "none")...)
	c := dial(t, d.addr, nil)
	putBlocks(t, c, 3, block.G2)
	ns := openTestNamespace(t, c)
	data := make([]byte, testBlock)
	res, err := c.Put(t.Context(), ns, []api.PutItem{{Hash: testHash(9), Data: data}}, api.PutOptions{Durable: block.G3})
	if err == nil {
		err = res[0].Err
	}
	if !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("a durable put: %v, want unavailable", err)
	}
	d.wait(t, 0)
}

func TestServeListeners(t *testing.T) {
	dir := t.TempDir()
	cert, key := selfSigned(t, dir)
	token := filepath.Join(dir, "token")
	write(t, token, "secret\n")
	sock := filepath.Join(dir, "s")
	d := startDaemon(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", "none",
		"--listen", "unix:"+sock, "--listen", "127.0.0.1:0",
		"--tls-cert", cert, "--tls-key", key, "--token-file", token)
	if d.addr != "unix:"+sock {
		t.Errorf("ready %s, want the first listener, unix:%s", d.addr, sock)
	}
	c := dial(t, d.addr, &api.ClientOptions{Token: "secret"})
	if _, err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := api.Dial(t.Context(), d.addr, nil); !errors.Is(err, block.ErrDenied) {
		t.Errorf("without a token: %v, want denied", err)
	}
	d.wait(t, 0)
	if _, err := os.Stat(sock); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestServeMetrics(t *testing.T) {
	d := startDaemon(t, small(t.TempDir(), "--nvme", "none", "--metrics", "127.0.0.1:0")...)
	said := regexp.MustCompile(`msg="metrics listen" address=(\S+)`).FindStringSubmatch(d.stderr.String())
	if said == nil {
		t.Fatalf("no metrics address in %s", d.stderr)
	}
	addr := said[1]
	putBlocks(t, dial(t, d.addr, nil), 3, block.G2)
	for _, tc := range []struct{ path, want string }{
		{"/readyz", "ready"},
		{"/metrics", `kvtier_tier_blocks{tier="g2"} 3`},
		{"/metrics", "kvtier_session_accepted_total 1\n"},
		{"/metrics", `kvtier_session_calls_total{call="put"} 1`},
	} {
		path, want := tc.path, tc.want
		resp, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
			t.Errorf("%s: %v, status %d, want %q in\n%s", path, err, resp.StatusCode, want, body)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	d.wait(t, 0)
}

// What serve cannot work with it refuses with exit code 1 and one line that
// names it.
func TestServeRefuses(t *testing.T) {
	dir := t.TempDir()
	busy := startDaemon(t, small(filepath.Join(dir, "busy"), "--nvme", "none")...)
	file := filepath.Join(dir, "file")
	write(t, file, "not a directory")
	foreign := filepath.Join(dir, "foreign")
	write(t, foreign, strings.Repeat("x", 4096))
	short := filepath.Join(dir, "short")
	startDaemon(t, small(filepath.Join(dir, "b"), "--nvme", short+"=256MiB")...).wait(t, 0)
	for _, tc := range []struct {
		name string
		args []string
		want []string
	}{
		{"second daemon on a data directory", small(filepath.Join(dir, "busy"), "--nvme", "none"), []string{filepath.Join(dir, "busy"), "in use"}},
		{"data directory that is a file", small(file, "--nvme", "none"), []string{file, "not a directory"}},
		{"data directory below a file", small(filepath.Join(file, "sub")), []string{file, "not a directory"}},
		{"slab too short", small(filepath.Join(dir, "a"), "--nvme", filepath.Join(dir, "tiny")+"=1MiB"), []string{"tiny", "1048576"}},
		{"slab that is there and too short", small(filepath.Join(dir, "b"), "--nvme", short+"=512MiB"), []string{short, "too short", "268435456", "536870912"}},
		{"slab that is another file", small(filepath.Join(dir, "f"), "--nvme", foreign+"=256MiB"), []string{foreign, "no slab"}},
		{"address in use", []string{"--data", filepath.Join(dir, "c"), "--dram", "64MiB", "--nvme", "none", "--listen", busy.addr}, []string{"listen on " + busy.addr, "in use"}},
		{"address of another host", []string{"--data", filepath.Join(dir, "d"), "--dram", "64MiB", "--nvme", "none", "--insecure", "--listen", "192.0.2.1:7070"}, []string{"listen on 192.0.2.1:7070", "cannot assign"}},
		{"metrics address in use", small(filepath.Join(dir, "e"), "--nvme", "none", "--metrics", busy.addr), []string{"--metrics", busy.addr, "in use"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var stdout bytes.Buffer
			stderr := &syncBuffer{}
			code := run(ctx, append([]string{"serve", "--log-level", "error"}, tc.args...), nil, &stdout, stderr)
			if code != exitFailure || stdout.Len() != 0 {
				t.Errorf("exit code %d, standard output %q", code, &stdout)
			}
			got := stderr.String()
			if !strings.HasPrefix(got, "kvtier: ") || strings.Count(got, "\n") != 1 {
				t.Errorf("standard error: %s", got)
			}
			for _, w := range tc.want {
				if !strings.Contains(got, w) {
					t.Errorf("no %q in %s", w, got)
				}
			}
		})
	}
	busy.wait(t, 0)
}
