package session

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
)

// openings are the hellos whose regions are being opened and mapped. Where a file
// system does not answer that takes as long as it likes, and no system call of it can be
// cancelled: each has a goroutine, which the hello does not wait for beyond its time.
type openings struct {
	slots chan struct{} // one is in it for each
	once  sync.Once
	mu    struct {
		sync.Mutex
		stuck map[int32]int // by process: those that their hello has given up
	}
}

func (o *openings) init(most int) {
	o.slots = make(chan struct{}, most)
	o.mu.stuck = make(map[int32]int)
}

// giveUp notes that a hello of a process has not waited for its regions any longer, with
// 1, and that they are given back, with -1.
func (o *openings) giveUp(pid int32, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mu.stuck[pid] += n; o.mu.stuck[pid] == 0 {
		delete(o.mu.stuck, pid)
	}
}

// free fails with ErrBusy for a process of which an opening is stuck: one that tries
// again and again must not take all slots. Processes that cannot be seen from here have
// no number, and are let through.
func (o *openings) free(pid int32) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if pid != 0 && o.mu.stuck[pid] > 0 {
		return fmt.Errorf("%w: the files of an earlier hello of process %d are being opened still", ErrBusy, pid)
	}
	return nil
}

// wait waits a moment for all of them, when none begins any more, and says how many are
// left. It does so once.
func (o *openings) wait(within time.Duration) (left int) {
	o.once.Do(func() {
		end := time.NewTimer(within)
		defer end.Stop()
		ended := 0
		defer func() {
			left = cap(o.slots) - ended
			for range ended {
				<-o.slots
			}
		}()
		for ; ended < cap(o.slots); ended++ {
			select {
			case o.slots <- struct{}{}:
			case <-end.C:
				return
			}
		}
	})
	return left
}

// openRegions is registerRegions within the time of ctx. The files are closed by then,
// or are no longer the caller's.
func (s *Server) openRegions(ctx context.Context, client *unix.Ucred, list []HelloRegion, files []int) (regions, error) {
	pid := int32(0)
	if client != nil {
		pid = client.Pid
	}
	err := s.openings.free(pid)
	if err == nil {
		select {
		case s.openings.slots <- struct{}{}:
		case <-ctx.Done():
			err = s.late(ctx, "files of other clients are being opened")
		}
	}
	if err != nil {
		closeFiles(files)
		return regions{}, err
	}
	type opened struct {
		rs  regions
		err error
	}
	done := make(chan opened) // of which nothing gets lost: who does not take it lets ctx end first
	go func() {
		defer func() { <-s.openings.slots }()
		rs, err := s.registerRegions(ctx, client, list, files)
		closeFiles(files)
		select {
		case done <- opened{rs, err}:
		case <-ctx.Done():
			if err == nil {
				if err := s.dropRegions(&rs); err != nil {
					s.log.Warn("regions of a hello that was given up", "err", err)
				}
			}
			s.openings.giveUp(pid, -1)
		}
	}()
	select {
	case o := <-done:
		return o.rs, o.err
	case <-ctx.Done():
		s.openings.giveUp(pid, 1)
		return regions{}, s.late(ctx, "their file system does not answer")
	}
}

// late is why a hello is not waited for.
func (s *Server) late(ctx context.Context, why string) error {
	if s.ctx.Err() != nil {
		return fmt.Errorf("%w: the server is closing", block.ErrClosed)
	}
	s.stats.openLate.Add(1)
	return fmt.Errorf("regions: %s: %w", why, ctx.Err())
}
