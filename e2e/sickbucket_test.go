package e2e

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/servers"
)

// sickBlock is the length of the blocks of these tests.
const sickBlock = 128 << 10

// sick is a daemon whose bucket is behind a proxy.
type sick struct {
	*testing.T
	d     *daemon
	c     *api.Client
	ns    block.Namespace
	proxy *servers.Proxy
	put   int // blocks 0 to put-1 were put
}

// isBlocks reports whether a request is about a packed object.
func isBlocks(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blocks/") }

// far are blocks that only the bucket has.
func (s *sick) far(n int) (is []int) {
	s.Helper()
	for i := 0; i < s.put && len(is) < n; i++ {
		all, err := s.c.Locate(timeout(s.T), s.ns, []block.Hash{hashOf(i)})
		if err != nil {
			s.Fatal(err)
		}
		if len(all[0]) == 1 && all[0][0].Tier == block.G4 {
			is = append(is, i)
		}
	}
	if len(is) < n {
		s.Fatalf("%d blocks are in the bucket only, want %d", len(is), n)
	}
	return is
}

// read reads one block with a deadline, where it is. A call that does not end, or gives other
// bytes, fails the test.
func (s *sick) read(i int, d time.Duration) block.MissReason {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), d)
	defer cancel()
	why := block.MissDeadline
	err := s.c.Get(ctx, s.ns, []block.Wanted{{Hash: hashOf(i)}}, block.GetOptions{NoPromote: true}, func(_ int, p block.Payload) error {
		if why = p.Reason; why == block.Hit && !bytes.Equal(p.Bytes, payload(i, sickBlock)) {
			s.Errorf("block %d: wrong bytes from %v", i, p.Tier)
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		s.Errorf("get %d: %v", i, err)
	}
	return why
}

// more puts n blocks, each until there is room for it.
func (s *sick) more(n int, durable block.TierID) {
	s.Helper()
	for range n {
		until(s.T, "there is room for a block", func() bool {
			res, err := s.c.Put(timeout(s.T), s.ns, []api.PutItem{{Hash: hashOf(s.put), Data: payload(s.put, sickBlock)}}, api.PutOptions{Durable: durable})
			switch {
			case err != nil:
				s.Fatal(err)
			case res[0].Err != nil && !errors.Is(res[0].Err, block.ErrNoSpace):
				s.Fatalf("put %d: %v", s.put, res[0].Err)
			}
			return res[0].Err == nil
		})
		s.put++
	}
}

// state is what the daemon says of the bucket.
func (s *sick) state() block.DeviceStats { return tierStats(s.T, s.c, block.G4).Devices[0] }

// recovers has the bucket be well again, and waits until the daemon knows.
func (s *sick) recovers() {
	s.Helper()
	s.proxy.Behave(nil)
	until(s.T, "the bucket is healthy", func() bool { return s.state().State == block.Healthy })
}

// TestSickBucket: whatever a bucket does, each call ends by its deadline, no wrong bytes come,
// and the other tiers go on; when the bucket is well again so is the daemon, by itself, and
// all is there that it says is there.
func TestSickBucket(t *testing.T) {
	withoutRace(t)
	server, url := bucketOf(t)
	s := &sick{T: t, proxy: servers.NewProxy(t, server.Endpoint)}
	dir := t.TempDir()
	args := []string{
		"--data", filepath.Join(dir, "data"), "--dram", "32MiB", "--nvme", filepath.Join(dir, "slab") + "=32MiB", "--grace", "0s",
		"--object", strings.Replace(url, server.Endpoint, s.proxy.URL, 1),
	}
	s.d = serve(t, args...)
	s.c = dial(t, s.d)
	s.ns = open(t, s.c, "sick", sickBlock)
	s.more(800, block.G3)
	leave := make(chan struct{}) // ends requests that hang
	type reasons = map[block.MissReason]bool
	for _, f := range []struct {
		name   string
		rule   servers.Rule
		why    reasons // that blocks of the bucket may be missed for
		sick   bool    // the daemon must notice, of reads
		writes bool    // and of writes
	}{
		{"slow", func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			time.Sleep(50 * time.Millisecond)
			forward.ServeHTTP(w, r)
		}, reasons{block.Hit: true}, false, false},
		{"cut in the body", func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				_, _ = io.CopyN(io.Discard, r.Body, 1000)
				panic(http.ErrAbortHandler)
			}
			rec := servers.Record(r, forward)
			servers.Answer(w, rec, rec.Body.Bytes()[:rec.Body.Len()/2])
			panic(http.ErrAbortHandler)
		}, reasons{block.MissUnavailable: true, block.MissDeadline: true}, true, true},
		{"busy", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			servers.FailS3(w, r, http.StatusServiceUnavailable, "SlowDown")
		}, reasons{block.MissUnavailable: true, block.MissDeadline: true}, false, false},
		{"wrong bytes", func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method != http.MethodGet {
				forward.ServeHTTP(w, r)
				return
			}
			rec := servers.Record(r, forward)
			b := rec.Body.Bytes()
			if len(b) > 0 {
				b[len(b)/2] ^= 4
			}
			servers.Answer(w, rec, b)
		}, reasons{block.MissCorrupt: true, block.MissUnavailable: true, block.MissDeadline: true}, true, false},
		{"not found after list", func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodGet && isBlocks(r) {
				servers.FailS3(w, r, http.StatusNotFound, "NoSuchKey")
				return
			}
			forward.ServeHTTP(w, r)
		}, reasons{block.MissAbsent: true, block.MissUnavailable: true}, true, false},
		{"forbidden", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			servers.FailS3(w, r, http.StatusForbidden, "AccessDenied")
		}, reasons{block.MissUnavailable: true}, true, true},
		{"hangs", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			w.Header().Set("Content-Length", "200000")
			w.WriteHeader(http.StatusOK)
			for {
				_, _ = w.Write([]byte{0xee})
				_ = http.NewResponseController(w).Flush()
				select {
				case <-time.After(20 * time.Millisecond):
				case <-r.Context().Done():
					return
				case <-leave:
					return
				}
			}
		}, reasons{block.MissUnavailable: true, block.MissDeadline: true}, true, true},
		{"full", func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				servers.FailS3(w, r, http.StatusInsufficientStorage, "XMinioStorageFull")
				return
			}
			forward.ServeHTTP(w, r)
		}, reasons{block.Hit: true}, false, true},
	} {
		far := s.far(6)
		begun := time.Now()
		s.proxy.Behave(f.rule)
		for _, i := range far {
			if why := s.read(i, 2*time.Second); !f.why[why] {
				t.Errorf("%s: block %d: %v", f.name, i, why)
			}
		}
		// Memory does not notice, nor what is put there.
		s.more(1, block.G2)
		if why := s.read(s.put-1, time.Minute); why != block.Hit {
			t.Errorf("%s: the block put last is a miss: %v", f.name, why)
		}
		if f.sick || f.writes { // else what is to leave may wait, and so do puts
			s.more(8, block.G3)
			if f.writes {
				s.more(100, block.G3) // some have to leave NVMe
			}
			until(t, f.name+": the daemon notices", func() bool { return s.state().State != block.Healthy })
		}
		s.recovers()
		for _, i := range far {
			if why := s.read(i, time.Minute); why != block.Hit {
				t.Errorf("%s: afterwards block %d is a miss: %v", f.name, i, why)
			}
		}
		t.Logf("%s: %v", f.name, time.Since(begun).Round(time.Millisecond))
	}
	until(t, "calls have ended", func() bool {
		all, err := s.c.Sessions(timeout(t))
		if err != nil {
			t.Fatal(err)
		}
		calls := 0
		for _, i := range all {
			calls += i.Calls
		}
		return calls == 0
	})
	s.throttled()

	// What it says is there is there, also after a crash.
	s.d.kill()
	s.d = serve(t, args...)
	s.c = dial(t, s.d)
	if n := s.listed(); n < 600 {
		t.Errorf("%d blocks are listed", n)
	}
	// A stop does not wait for a bucket that hangs.
	s.proxy.Behave(func(http.ResponseWriter, *http.Request, http.Handler) { <-leave })
	s.d.stop(0, 3)
	close(leave)
}

// listed reads all that the daemon lists.
func (s *sick) listed() (n int) {
	s.Helper()
	known := map[block.Hash]int{}
	for i := range s.put {
		known[hashOf(i)] = i
	}
	var blocks []int
	for cursor := ""; ; {
		entries, next, err := s.c.List(timeout(s.T), s.ns, cursor, 500)
		if err != nil {
			s.Fatal(err)
		}
		for _, e := range entries {
			blocks = append(blocks, known[e.Hash])
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	slices.Sort(blocks)
	for i, why := range get(timeout(s.T), s.T, s.c, s.ns, blocks, func(int) int { return sickBlock }) {
		s.Errorf("block %d is listed, and a miss: %v", i, why)
	}
	return len(blocks)
}

// throttled has a bucket serve three requests at a time and refuse all others: hardly a
// request is made in vain.
func (s *sick) throttled() {
	s.Helper()
	var inside, useful atomic.Int64
	s.proxy.Behave(func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		defer inside.Add(-1)
		if inside.Add(1) > 3 {
			_, _ = io.Copy(io.Discard, r.Body)
			servers.FailS3(w, r, http.StatusServiceUnavailable, "SlowDown")
			return
		}
		useful.Add(1)
		forward.ServeHTTP(w, r)
	})
	s.proxy.Requests.Store(0)
	far := s.far(150)
	var all sync.WaitGroup
	for k := range 12 {
		all.Go(func() {
			for at := k; at < len(far); at += 12 {
				if why := s.read(far[at], time.Minute); why != block.Hit {
					s.Errorf("throttled: block %d is a miss: %v", far[at], why)
				}
			}
		})
	}
	all.Go(func() { s.more(60, block.G3) })
	all.Wait()
	total, served := s.proxy.Requests.Load(), useful.Load()
	if float64(total) > 1.3*float64(served) {
		s.Errorf("%d requests for %d that were served", total, served)
	}
	s.Logf("%d requests, %d served", total, served)
	s.recovers()
}
