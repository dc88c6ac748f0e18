package session_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// TestRegionTruncated cuts regions short while they are copied to and from. The server
// lives, the region is of no use any more, and nobody else notices.
func TestRegionTruncated(t *testing.T) {
	r := newRig(t, &memstore.Options{Capacity: 256 << 20, Evict: true}, nil)
	const n, count = 1 << 20, 8
	other, _, omem := r.attach(n)
	oitems, oblocks := rows(500, 1, n)
	copy(omem, bytesOf(500, n))
	if _, err := other.RegionPut(t.Context(), r.handle(), oblocks, session.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for round := range 20 {
		c, f, mem := r.attach(n * count)
		copy(mem, bytesOf(round, n*count))
		items, blocks := rows(round*count, count, n)
		if _, err := c.RegionPut(t.Context(), r.handle(), blocks, session.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		stop := make(chan struct{})
		for i := range 2 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if i == 0 {
						if _, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{}); err != nil {
							t.Error(err)
						}
					} else if _, err := c.RegionPut(t.Context(), r.handle(), blocks, session.PutOptions{}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		time.Sleep(time.Duration(rand.IntN(int(3 * time.Millisecond))))
		// The last page at least is gone: one that is in part does not fault.
		if err := f.Truncate(int64(rand.IntN(n*count - os.Getpagesize()))); err != nil {
			t.Fatal(err)
		}
		// A key at the end of it meets the fault.
		last := items[count-1:]
		res, err := c.RegionGet(t.Context(), r.handle(), last, block.GetOptions{})
		close(stop)
		wg.Wait()
		if err != nil || !errors.Is(res[0].Err, block.ErrInvalid) {
			t.Fatalf("get into what is cut off: %+v, error %v", res, err)
		}
		if err := f.Truncate(n * count); err != nil {
			t.Fatal(err)
		}
		put, err := c.RegionPut(t.Context(), r.handle(), blocks[:1], session.PutOptions{})
		if err != nil || !errors.Is(put[0].Err, block.ErrInvalid) || !strings.Contains(put[0].Err.Error(), "region 0 was truncated") {
			t.Fatalf("put from a region that was cut short: %+v, error %v", put, err)
		}
		clear(omem)
		if res, err := other.RegionGet(t.Context(), r.handle(), oitems, block.GetOptions{}); err != nil || res[0].Reason != block.Hit || !bytes.Equal(omem, bytesOf(500, n)) {
			t.Fatalf("another session: %+v, error %v", res, err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := r.server.Stats().RegionFaults; n != 20 {
		t.Errorf("%d regions were cut short, want 20", n)
	}
	if st := r.store.Stats(); st.Reservations != 0 {
		t.Errorf("%d grants are left", st.Reservations)
	}
}

// TestRegionFull has the server write to a region on a file system that has no page
// left.
func TestRegionFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		servers.Missing(t, "root", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	path := dir + "/region"
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, nil, nil)
	c, err := session.Dial(t.Context(), "unix", r.unix, &session.ClientOptions{Regions: []session.Region{{Path: path, Length: 1 << 20}}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	putOne(t, c, r.handle(), 1, bytesOf(1, 1<<20))
	items, _ := rows(1, 1, 1<<20)
	if res, err := c.RegionGet(t.Context(), r.handle(), items, block.GetOptions{}); err != nil || !errors.Is(res[0].Err, block.ErrInvalid) {
		t.Errorf("%+v, error %v", res, err)
	}
	putOne(t, c, r.handle(), 2, bytesOf(2, 1<<20)) // the session goes on
}

// TestRegionPunched takes pages out of a region while it is read: what is put is what
// was there, with a right checksum.
func TestRegionPunched(t *testing.T) {
	r := newRig(t, &memstore.Options{Capacity: 64 << 20, Evict: true}, nil)
	const n = 1 << 20
	c, f, mem := r.attach(n)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(rand.IntN(n)), 64<<10); err != nil {
				t.Error(err)
			}
			mem[rand.IntN(n)]++
		}
	})
	for i := range 100 {
		_, blocks := rows(i, 1, n)
		if res, err := c.RegionPut(t.Context(), r.handle(), blocks, session.PutOptions{}); err != nil || res[0].Err != nil {
			t.Fatalf("put: %+v, error %v", res, err)
		}
		into := make([]byte, n)
		if res, err := c.Get(t.Context(), r.handle(), []session.GetItem{{Hash: hashOf(i), Into: into}}, block.GetOptions{}); err != nil || res[0].Reason != block.Hit {
			t.Fatalf("get: %+v, error %v", res, err)
		}
	}
	close(stop)
	wg.Wait()
}

// FuzzRegionCalls sends any bytes as a call on regions. Each is answered, and the
// session goes on.
func FuzzRegionCalls(f *testing.F) {
	for _, e := range examples() {
		switch e.message.(type) {
		case *session.RegionGetMessage:
			f.Add(true, e.message.Append(nil))
		case *session.RegionPutMessage:
			f.Add(false, e.message.Append(nil))
		}
	}
	r := newRig(f, &memstore.Options{Capacity: 16 << 20, Evict: true}, nil)
	file, _ := unsealed(f, 1<<20)
	ro, _ := unsealed(f, 1<<16)
	c := dial(f, "unix", r.unix)
	if err := c.withRegions([]int{int(file.Fd()), int(ro.Fd())}, session.HelloRegion{Length: 1 << 20}, session.HelloRegion{Length: 1 << 16, ReadOnly: true}); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, get bool, p []byte) {
		c.t = t
		if err := c.c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		code := session.CodeRegionPut
		if get {
			code = session.CodeRegionGet
		}
		if len(p) > 20 {
			copy(p, []byte{byte(r.ns.NS), 0, 0, 0}) // else nothing is behind the handle
			clear(p[8:16])
		}
		id := c.send(code, raw(p))
		h, answer := c.recv(id)
		switch got := session.Code(h.Flags); {
		case got == session.CodeFailed:
			var m session.FailedMessage
			if err := m.Decode(answer); err != nil || m.Status == session.StatusOK || m.Status == session.StatusInternal {
				t.Errorf("answer %+v, error %v", m, err)
			}
		case get && got != session.CodeGot || !get && got != session.CodePutDone:
			t.Errorf("answer with code %d", got)
		}
	})
}

type raw []byte

func (r raw) Append(b []byte) []byte { return append(b, r...) }
