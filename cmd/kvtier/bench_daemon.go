package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// benchDaemon is kvtier serve in a process of its own.
type benchDaemon struct {
	cmd     *exec.Cmd
	addr    string
	metrics string // HOST:PORT
	stderr  strings.Builder
	waited  chan error
}

// startBenchDaemon starts self as a daemon and returns when it is ready.
func startBenchDaemon(ctx context.Context, self string, args ...string) (*benchDaemon, error) {
	metrics, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	d := &benchDaemon{metrics: metrics, waited: make(chan error, 1)}
	d.cmd = exec.CommandContext(ctx, self, append([]string{"serve", "--metrics", metrics}, args...)...)
	d.cmd.Stderr = &d.stderr
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	d.cmd.Stdout = w
	err = d.cmd.Start()
	w.Close() // the daemon has its own
	if err != nil {
		return nil, fmt.Errorf("start a daemon: %w", err)
	}
	go func() { d.waited <- d.cmd.Wait() }()
	line, err := bufio.NewReader(r).ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "ready ")
	if err != nil || !ok {
		err = errors.Join(err, d.kill())
		return nil, fmt.Errorf("the daemon did not become ready: %w: %s", err, strings.TrimSpace(d.stderr.String()))
	}
	d.addr = addr
	return d, nil
}

// freePort is an address on which nobody listens.
func freePort(ctx context.Context) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// kill ends the daemon by SIGKILL and waits for its end.
func (d *benchDaemon) kill() error {
	err := d.cmd.Process.Kill()
	<-d.waited // tells of the signal
	if errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("the daemon had ended by itself: %s", strings.TrimSpace(d.stderr.String()))
	}
	return err
}

// processMemory is what a daemon's memory consists of.
type processMemory struct {
	resident  int64 // anonymous pages and shared memory, not those of files
	freeHeap  int64 // of those, what the Go heap keeps for later
	memTables int64 // of Pebble
	cache     int64 // of Pebble
}

// held is what grows with the blocks.
func (m processMemory) held() int64 { return m.resident - m.freeHeap - m.memTables - m.cache }

// String tells how it comes about.
func (m processMemory) String() string {
	return fmt.Sprintf("%.1f MB (resident %.1f, free heap %.1f, memory tables %.1f, cache %.1f)",
		float64(m.held())/1e6, float64(m.resident)/1e6, float64(m.freeHeap)/1e6, float64(m.memTables)/1e6, float64(m.cache)/1e6)
}

const (
	settleEvery  = 500 * time.Millisecond
	settleWithin = 1 << 20 // bytes
	settleTries  = 120
)

// settledMemory takes the memory when it has stopped changing: after a start,
// the DRAM tier is still being populated.
func (d *benchDaemon) settledMemory(ctx context.Context) (processMemory, error) {
	var last processMemory
	same := 0
	for range settleTries {
		m, err := d.memory(ctx)
		if err != nil {
			return m, fmt.Errorf("take the daemon's memory: %w", err)
		}
		if diff := m.held() - last.held(); diff > settleWithin || diff < -settleWithin {
			same = 0
		} else if same++; same == 3 {
			return m, nil
		}
		last = m
		select {
		case <-time.After(settleEvery):
		case <-ctx.Done():
			return m, context.Cause(ctx)
		}
	}
	return last, errors.New("the daemon's memory does not stop changing")
}

// memory takes a snapshot after a garbage collection.
func (d *benchDaemon) memory(ctx context.Context) (m processMemory, err error) {
	heap, err := d.get(ctx, "/debug/pprof/heap?gc=1&debug=1")
	if err != nil {
		return m, err
	}
	idle, err := numberAfter(heap, "# HeapIdle = ")
	if err != nil {
		return m, err
	}
	released, err := numberAfter(heap, "# HeapReleased = ")
	if err != nil {
		return m, err
	}
	m.freeHeap = idle - released
	metrics, err := d.get(ctx, "/metrics")
	if err != nil {
		return m, err
	}
	if m.memTables, err = numberAfter(metrics, "\nkvtier_catalog_memtable_bytes "); err != nil {
		return m, err
	}
	if m.cache, err = numberAfter(metrics, "\nkvtier_catalog_cache_bytes "); err != nil {
		return m, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	if err != nil {
		return m, err
	}
	for _, field := range []string{"\nRssAnon:", "\nRssShmem:"} {
		kib, err := numberAfter(string(status), field)
		if err != nil {
			return m, err
		}
		m.resident += kib << 10
	}
	return m, nil
}

// get fetches a page of the daemon's monitor.
func (d *benchDaemon) get(ctx context.Context, path string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.metrics+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("get %s: %s", path, resp.Status)
	}
	return string(body), err
}

// numberAfter reads the whole number that follows a text.
func numberAfter(s, text string) (int64, error) {
	_, rest, ok := strings.Cut(s, text)
	if ok {
		if f := strings.Fields(rest); len(f) > 0 {
			// Prometheus writes large numbers as 1.2e+07.
			if v, err := strconv.ParseFloat(f[0], 64); err == nil {
				return int64(v), nil
			}
		}
	}
	return 0, fmt.Errorf("no number after %q", strings.TrimSpace(text))
}
