package session_test

import (
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

func sumOfBlock(p []byte) block.Sum { return xxh3.Hash128(p).Bytes() }

// memFile makes a memory file, sealed against shrinking or not.
func memFile(t *testing.T, n int64, sealed bool) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	if sealed {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// dialAnswered dials a listener that answers a hello by answer, and returns why that is
// no session.
func dialAnswered(t *testing.T, answer func(net.Conn) error) error {
	t.Helper()
	lis, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		c, err := lis.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		if _, _, err := frame.RecvHello(c); err != nil {
			t.Error(err)
		}
		if err := answer(c); err != nil {
			t.Error(err)
		}
		(&server{t, c}).hangUp()
	})
	c, err := session.Dial(t.Context(), "unix", lis.Addr().String(), &session.ClientOptions{NoShared: true})
	if err == nil {
		_ = c.Close()
	}
	return err
}

// playedWith is played for a server that passes files, and a client with options. run
// may be nil.
func playedWith(t *testing.T, w session.WelcomeMessage, files []int, o *session.ClientOptions, run func(s *server)) *session.Client {
	t.Helper()
	return playedBy(t, w.Append(nil), files, o, run)
}

// playedBy is playedWith for the bytes of a hello.
func playedBy(t *testing.T, hello []byte, files []int, o *session.ClientOptions, run func(s *server)) *session.Client {
	t.Helper()
	lis, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		c, err := lis.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		if _, _, err := frame.RecvHello(c); err != nil {
			t.Error(err)
		}
		if err := frame.SendHello(c, hello, files); err != nil {
			t.Error(err)
		}
		s := &server{t, c}
		if run != nil {
			run(s)
		}
		s.hangUp()
	})
	c, err := session.Dial(t.Context(), "unix", lis.Addr().String(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		lis.Close()
	})
	return c
}
