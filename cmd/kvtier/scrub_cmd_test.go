package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
)

// scrubbed is a store whose scrub goes on a step each time that it is asked of.
type scrubbed struct {
	*memstore.Store
	steps int                // until it ends
	end   block.ScrubStatus  // how
	asked chan struct{}      // gets a word each time, when there is room
	opts  block.ScrubOptions // of the last start

	mu     sync.Mutex
	status block.ScrubStatus
	left   int
}

func (s *scrubbed) StartScrub(o block.ScrubOptions) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State == block.ScrubRunning {
		return fmt.Errorf("start scrub: %w: one is running", block.ErrUnavailable)
	}
	s.status = block.ScrubStatus{State: block.ScrubRunning, Started: time.Unix(1_700_000_000, 0), Total: s.end.Total}
	s.opts, s.left = o, s.steps
	return nil
}

func (s *scrubbed) StopScrub() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State == block.ScrubRunning {
		s.status.State = block.ScrubStopped
	}
}

func (s *scrubbed) Stats() block.Stats {
	st := s.Store.Stats()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State == block.ScrubRunning && s.left == 0 {
		s.status = s.end
	}
	s.left--
	st.Scrub = s.status
	select {
	case s.asked <- struct{}{}:
	default:
	}
	return st
}

func TestScrub(t *testing.T) {
	done := block.ScrubStatus{
		State: block.ScrubDone, Started: time.Unix(1_700_000_000, 0), Ended: time.Unix(1_700_000_010, 0),
		Done: 1 << 30, Total: 1 << 30, Blocks: 7, Damaged: 2, Repaired: 2, Stale: 1,
	}
	lossy, failed, stopped := done, done, done
	lossy.Repaired, lossy.Dropped = 1, 1
	failed.State, failed.Error = block.ScrubFailed, "read slab: input/output error"
	stopped.State = block.ScrubStopped
	for name, c := range map[string]struct {
		end    block.ScrubStatus
		code   int
		stdout string
		stderr string
	}{
		"good":    {done, 0, "done: 1.0 GiB of 1.0 GiB, 7 blocks: 2 damaged, 2 repaired, 0 dropped, 1 stale header\n", ""},
		"lossy":   {lossy, 3, "done: 1.0 GiB of 1.0 GiB, 7 blocks: 2 damaged, 1 repaired, 1 dropped, 1 stale header\n", "1 block damaged in every tier, and dropped"},
		"failed":  {failed, 1, "failed: 1.0 GiB of 1.0 GiB, 7 blocks: 2 damaged, 2 repaired, 0 dropped, 1 stale header: read slab: input/output error\n", "it has failed before its end"},
		"stopped": {stopped, 1, "stopped: 1.0 GiB of 1.0 GiB, 7 blocks: 2 damaged, 2 repaired, 0 dropped, 1 stale header\n", "it has stopped before its end"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scrubbed{Store: memstore.New(nil), steps: 2, end: c.end}
			addr, _ := startServer(t, s, nil)
			kvtier(t, addr, "", "scrub", "--rate", "1MiB", "--restart").want(t, c.code, c.stdout, c.stderr)
			if s.opts != (block.ScrubOptions{BytesPerSecond: 1 << 20, Restart: true}) {
				t.Errorf("the scrub was started with %+v", s.opts)
			}
		})
	}
}

func TestScrubStartAndStop(t *testing.T) {
	s := &scrubbed{Store: memstore.New(nil), steps: 1 << 30, end: block.ScrubStatus{Total: 4096}, asked: make(chan struct{}, 1)}
	addr, _ := startServer(t, s, nil)
	scrub := []string{"scrub"}
	kvtier(t, addr, "", append(scrub, "--stop")...).want(t, 0, "never\n", "")
	r := kvtier(t, addr, "", append(scrub, "--wait=false", "--json")...)
	var got scrubOutput
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || r.code != 0 || got.State != "running" || got.TotalBytes != 4096 || got.Started != "2023-11-14T22:13:20Z" || got.Ended != "" {
		t.Errorf("scrub --wait=false: %+v, %v", r, err)
	}
	kvtier(t, addr, "", append(scrub, "--wait=false")...).want(t, 0, "running: 0 B of 4.0 KiB, 0 blocks: 0 damaged, 0 repaired, 0 dropped, 0 stale headers\n", "")
	kvtier(t, addr, "", append(scrub, "--restart")...).want(t, 1, "", "one is running")

	// A command that is interrupted leaves the scrub running.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	<-s.asked // by the commands above
	go func() {
		for range 3 { // it has joined the scrub, and waits
			<-s.asked
		}
		cancel()
	}()
	var stdout, stderr bytes.Buffer
	code := run(ctx, []string{"scrub", "--server", addr}, strings.NewReader(""), &stdout, &stderr)
	result{code, stdout.String(), stderr.String()}.want(t, 1, "", "it goes on in the daemon, 'kvtier scrub --stop' stops it")
	kvtier(t, addr, "", append(scrub, "--stop")...).want(t, 0, "stopped: 0 B of 4.0 KiB, 0 blocks: 0 damaged, 0 repaired, 0 dropped, 0 stale headers\n", "")

	kvtier(t, addr, "", append(scrub, "--stop", "--rate", "1MiB")...).want(t, 2, "", "stop")
	kvtier(t, addr, "", append(scrub, "--rate", "-1")...).want(t, 2, "", "-1")
	kvtier(t, addr, "", append(scrub, hashA)...).want(t, 2, "", hashA)

	none, _ := startServer(t, memstore.New(nil), nil)
	kvtier(t, none, "", scrub...).want(t, 1, "", "start scrub")
}
