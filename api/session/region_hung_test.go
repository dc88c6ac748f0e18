package session_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/internal/servers"
)

// hungFS mounts a file system that answers nobody, until answer ends all calls of it
// with an error.
func hungFS(t *testing.T) (dir string, answer func()) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		servers.Missing(t, "root", err)
	}
	dir = t.TempDir()
	if err := unix.Mount("fuse", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)); err != nil {
		_ = unix.Close(fd)
		servers.Missing(t, "root", err)
	}
	answer = sync.OnceFunc(func() { _ = unix.Close(fd) })
	t.Cleanup(func() {
		answer()
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	return dir, answer
}

// TestRegionHung opens sessions with regions on a file system that does not answer. The
// hello is refused in its time, others are not held up, and when the file system answers
// all is as before.
func TestRegionHung(t *testing.T) {
	dir, answer := hungFS(t)
	r := newRig(t, nil, &session.ServerOptions{HelloTimeout: 2 * time.Second, Openings: 2})
	hung := session.HelloRegion{Length: 4096, Path: filepath.Join(dir, "region")}
	f, _ := unsealed(t, 4096)
	c := dial(t, "unix", r.unix)
	if err := c.withRegions([]int{int(f.Fd())}, session.HelloRegion{Length: 4096}, hung); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("error %v, want one that tells of the file system", err)
	}
	if st := r.server.Stats(); st.Openings != 1 || st.OpenLate != 1 {
		t.Errorf("%d hellos are being opened and %d were late, want 1 each", st.Openings, st.OpenLate)
	}
	// The same process has to wait for it, but only with regions.
	if err := dial(t, "unix", r.unix).withRegions(nil, hung); !errors.Is(err, session.ErrBusy) {
		t.Errorf("a second try of the same process: error %v, want busy", err)
	}
	if err := dial(t, "unix", r.unix).hello(session.HelloMessage{}); err != nil {
		t.Error(err)
	}
	answer()
	r.await("the end of the opening", func() bool { st := r.server.Stats(); return st.Openings == 0 && st.Regions == 0 })
	c = dial(t, "unix", r.unix)
	if err := c.withRegions([]int{int(f.Fd())}, session.HelloRegion{Length: 4096}); err != nil {
		t.Errorf("when it has answered: %v", err)
	}
	_ = c.c.Close()
	r.await("no region", func() bool { return r.server.Stats().Regions == 0 })
}

// TestRegionHungFull has as many hellos wait for their file system as may: another one
// with regions is told so, and the server ends all the same.
func TestRegionHungFull(t *testing.T) {
	dir, _ := hungFS(t)
	r := newRig(t, nil, &session.ServerOptions{HelloTimeout: 2 * time.Second, Openings: 1})
	hung := session.HelloRegion{Length: 4096, Path: filepath.Join(dir, "region")}
	var both sync.WaitGroup
	texts := make([]string, 2)
	for i := range texts {
		c := dial(t, "unix", r.unix)
		both.Go(func() {
			err := c.withRegions(nil, hung)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v, want that its time is over", err)
				return
			}
			texts[i] = err.Error()
		})
	}
	both.Wait()
	if all := strings.Join(texts, "; "); !strings.Contains(all, "does not answer") || !strings.Contains(all, "other clients are being opened") {
		t.Errorf("one waits for its files and one for the other: %s", all)
	}
	if st := r.server.Stats(); st.Openings != 1 || st.OpenLate != 2 {
		t.Errorf("%d hellos are being opened and %d were late, want 1 and 2", st.Openings, st.OpenLate)
	}
	if err := r.server.Close(); err != nil {
		t.Error(err)
	}
}
