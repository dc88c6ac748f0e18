package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
)

// A service that serves few requests at once, then none for a while, then all again: every
// call succeeds, hardly a request is made in vain, and in the end as many run as before.
func TestThrottlingStorm(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	b := newBackend(t, p.URL, object.Options{Concurrency: 16})
	var inside, refused, most atomic.Int64
	var room atomic.Int64
	room.Store(1 << 30)
	p.Behave(func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		n := inside.Add(1)
		defer inside.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		if n > room.Load() {
			refused.Add(1)
			io.Copy(io.Discard, r.Body)
			servers.FailS3(w, r, 503, "SlowDown")
			return
		}
		forward.ServeHTTP(w, r)
	})
	var done atomic.Int64
	work := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		for w := range 16 {
			wg.Go(func() {
				for i := range n / 16 {
					key := fmt.Sprintf("k-%d-%d", w, i)
					if _, err := b.Put(t.Context(), key, object.Vector{random(1000)}, false); err != nil {
						t.Error(err)
					}
					done.Add(1)
				}
			})
		}
		wg.Wait()
	}
	work(160)
	if most.Load() < 8 {
		t.Errorf("%d requests at once on a healthy service", most.Load())
	}
	room.Store(3)
	work(160)
	if l := b.Stats().Limit; l > 6 {
		t.Errorf("limit %d of a service that has room for 3", l)
	}
	room.Store(0)
	var wg sync.WaitGroup
	wg.Go(func() { work(160) })
	for before := b.Stats().Throttled; b.Stats().Throttled < before+4 && t.Context().Err() == nil; {
		time.Sleep(time.Millisecond)
	}
	room.Store(1 << 30)
	wg.Wait()
	work(320)
	st := b.Stats()
	if total, useful := p.Requests.Load(), done.Load(); float64(total) > 1.3*float64(useful) {
		t.Errorf("%d requests for %d objects", total, useful)
	}
	if refused.Load() == 0 || st.Throttled != uint64(refused.Load()) || st.Shrunk == 0 || st.Retries < st.Throttled {
		t.Errorf("%d were refused, but %+v", refused.Load(), st)
	}
	if st.Limit < 16 || st.InFlight+st.Waiting != 0 {
		t.Errorf("after the storm: %+v", st)
	}
}

// A service that is throttled for ever fails calls by their deadlines, and is left alone
// meanwhile.
func TestEndlessThrottling(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	p.Behave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		servers.FailS3(w, r, 429, "TooManyRequests")
	})
	b := newBackend(t, p.URL, object.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			_, err := b.Head(ctx, "x")
			if !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v", err)
			}
		})
	}
	wg.Wait()
	if n := p.Requests.Load(); n > 32 {
		t.Errorf("%d requests", n)
	}
}

// What breaks once is made again; the bytes are right in the end.
func TestOnceBroken(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	want := random(300_000)
	abort := func(http.ResponseWriter, *http.Request, http.Handler) { panic(http.ErrAbortHandler) }
	for name, broken := range map[string]servers.Rule{
		"connection closed": abort,
		"internal error": func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			servers.FailS3(w, r, 500, "InternalError")
		},
		"bad gateway, not XML": func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			w.WriteHeader(502)
			io.WriteString(w, "<html>sorry")
		},
		"cut in the body": func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				io.CopyN(io.Discard, r.Body, 1000)
				panic(http.ErrAbortHandler)
			}
			rec := servers.Record(r, forward)
			servers.Answer(w, rec, rec.Body.Bytes()[:rec.Body.Len()/2])
			panic(http.ErrAbortHandler)
		},
		"wrong bytes": func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				b, _ := io.ReadAll(r.Body)
				b[12345] ^= 4
				r.Body = io.NopCloser(bytes.NewReader(b))
				forward.ServeHTTP(w, r)
				return
			}
			rec := servers.Record(r, forward)
			b := rec.Body.Bytes()
			b[12345] ^= 4
			servers.Answer(w, rec, b)
		},
		"answer lost": func(_ http.ResponseWriter, r *http.Request, forward http.Handler) {
			servers.Record(r, forward)
			panic(http.ErrAbortHandler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBackend(t, p.URL, object.Options{})
			var times atomic.Int64
			once := func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
				if times.Add(1) == 1 {
					broken(w, r, forward)
					return
				}
				forward.ServeHTTP(w, r)
			}
			p.Behave(once)
			info, err := b.Put(t.Context(), name, object.Vector{want[:1000], want[1000:]}, true)
			if err != nil || info.Bytes != int64(len(want)) {
				t.Fatalf("put: %+v, %v", info, err)
			}
			times.Store(0)
			got := make([]byte, len(want))
			if g, err := b.Get(t.Context(), name, 0, object.Vector{got[:7], got[7:]}, true); err != nil || !g.Verified || !bytes.Equal(got, want) {
				t.Errorf("get: %+v, %v, right bytes: %v", g, err, bytes.Equal(got, want))
			}
			// The HTTP client makes a GET again by itself when a kept connection was closed.
			if st := b.Stats(); st.Retries < 1 || st.Retries > 2 || st.Verified != uint64(len(want)) {
				t.Errorf("%+v", st)
			}
		})
	}

	// What is always wrong is never taken for right.
	b := newBackend(t, p.URL, object.Options{})
	p.Behave(func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
		rec := servers.Record(r, forward)
		body := rec.Body.Bytes()
		body[len(body)-1] ^= 1
		servers.Answer(w, rec, body)
	})
	_, err := b.Get(t.Context(), "wrong bytes", 0, object.Vector{make([]byte, len(want))}, true)
	if wantError(t, err, object.ClassCorrupt, ""); !errors.Is(err, object.ErrCorrupt) {
		t.Error(err)
	}
}

// An outage is not answered by a storm of retries.
func TestOutageSpendsTheBudget(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	p.Behave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		servers.FailS3(w, r, 500, "InternalError")
	})
	b := newBackend(t, p.URL, object.Options{RetryBudget: 10})
	const calls = 100
	for range calls {
		_, err := b.Head(t.Context(), "x")
		wantError(t, err, object.ClassUnavailable, "")
	}
	if n := p.Requests.Load(); n > calls+30 {
		t.Errorf("%d requests for %d calls", n, calls)
	}
	p.Behave(func(w http.ResponseWriter, r *http.Request, forward http.Handler) { forward.ServeHTTP(w, r) })
	if _, err := b.Put(t.Context(), "x", object.Vector{[]byte("x")}, false); err != nil {
		t.Errorf("after the outage: %v", err)
	}
}

// Whether the service answers can be asked while all that may run at once hangs: also when it
// says no. One that sends its answer byte by byte does not answer.
func TestAnswers(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	b := newBackend(t, p.URL, object.Options{Concurrency: 1})
	held, end := make(chan struct{}), make(chan struct{})
	behave := func(rule servers.Rule) {
		p.Behave(func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Method == http.MethodPut {
				close(held)
				<-end
			}
			rule(w, r, forward)
		})
	}
	behave(func(w http.ResponseWriter, r *http.Request, forward http.Handler) { forward.ServeHTTP(w, r) })
	put := make(chan error, 1)
	go func() {
		_, err := b.Put(t.Context(), "x", object.Vector{[]byte("x")}, false)
		put <- err
	}()
	<-held
	long, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if !b.Answers(long) {
		t.Error("it is not heard behind a request that hangs")
	}
	behave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		servers.FailS3(w, r, http.StatusServiceUnavailable, "SlowDown")
	})
	if !b.Answers(long) {
		t.Error("that it is busy is no answer")
	}
	behave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		w.Header().Set("Content-Length", "200000")
		for r.Context().Err() == nil {
			w.Write([]byte{0xee})
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
		}
	})
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if b.Answers(short) {
		t.Error("a byte now and then is an answer")
	}
	p.Behave(nil)
	close(end)
	if err := <-put; err != nil {
		t.Error(err)
	}
}

// A service that sends or takes a body byte by byte, or never answers, does not keep a call
// beyond its deadline; one without a deadline ends by the time of a try. The memory is
// quiet then.
func TestSlowLoris(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	content := random(200_000)
	if _, err := newBackend(t, p.URL, object.Options{}).Put(t.Context(), "x", object.Vector{content}, false); err != nil {
		t.Fatal(err)
	}
	end := make(chan struct{})
	defer close(end)
	drip := func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		if r.Method == http.MethodPut {
			<-end // with the client in the middle of its body
			return
		}
		w.Header().Set("Content-Length", "200000")
		w.WriteHeader(200)
		for r.Context().Err() == nil {
			w.Write([]byte{0xee})
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
		}
	}
	p.Behave(drip)
	for name, call := range map[string]func(ctx context.Context, b *object.Backend, mem []byte) error{
		"get": func(ctx context.Context, b *object.Backend, mem []byte) error {
			_, err := b.Get(ctx, "x", 0, object.Vector{mem}, true)
			return err
		},
		"put": func(ctx context.Context, b *object.Backend, mem []byte) error {
			v := object.Vector{mem}
			if _, soon := ctx.Deadline(); soon {
				for range 50 { // more than the sockets hold
					v = append(v, mem)
				}
			}
			_, err := b.Put(ctx, "y", v, false)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBackend(t, p.URL, object.Options{})
			mem := make([]byte, len(content))
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if err := call(ctx, b, mem); !errors.Is(err, xfer.ErrCanceled) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("by the deadline: %v", err)
			}
			// The race detector sees it if anything still reads or writes this.
			copy(mem, content)

			b = newBackend(t, p.URL, object.Options{TryTimeout: 50 * time.Millisecond, RetryBudget: 1})
			err := call(t.Context(), b, mem)
			if e := wantError(t, err, object.ClassTimeout, ""); !strings.Contains(e.Error(), "a try took more than") {
				t.Error(err)
			}
			copy(mem, content)
		})
	}
}

// Per object refusals of a batch come with code and request id, and the busy ones are
// asked for again.
func TestDeleteErrors(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	b := newBackend(t, p.URL, object.Options{})
	var asked []int
	p.Behave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		body, _ := io.ReadAll(r.Body)
		asked = append(asked, bytes.Count(body, []byte("<Key>")))
		w.Header().Set("X-Amz-Request-Id", "batch-7")
		fmt.Fprint(w, `<DeleteResult>`)
		for key, code := range map[string]string{"locked": "AccessDenied", "busy": "SlowDown", "none": "NoSuchKey"} {
			if bytes.Contains(body, []byte("some/prefix/"+key+"<")) && (code != "SlowDown" || len(asked) == 1) {
				fmt.Fprintf(w, "<Error><Key>some/prefix/%s</Key><Code>%s</Code><Message>no</Message></Error>", key, code)
			}
		}
		fmt.Fprint(w, `</DeleteResult>`)
	})
	errs, err := b.Delete(t.Context(), []string{"a", "locked", "busy", "none", "z"})
	if e := wantError(t, err, object.ClassDenied, "AccessDenied"); e.Request != "batch-7" || e.Key != "locked" {
		t.Errorf("%+v", e)
	}
	for i, e := range errs {
		if (e != nil) != (i == 1) {
			t.Errorf("answer %d: %v", i, e)
		}
	}
	if fmt.Sprint(asked) != "[5 1]" {
		t.Errorf("asked for %v objects", asked)
	}
}

// A service that answers nonsense is not believed.
func TestNonsense(t *testing.T) {
	s := newServer(t)
	p := servers.NewProxy(t, s.Endpoint)
	b := newBackend(t, p.URL, object.Options{RetryBudget: 1})
	for name, answer := range map[string]struct {
		status int
		header string
		body   string
	}{
		"range ignored":       {200, "", strings.Repeat("x", 100)},
		"other range":         {206, "bytes 0-9/100", "0123456789"},
		"more than the range": {206, "bytes 10-29/100", strings.Repeat("x", 20)},
		"less, not at an end": {206, "bytes 10-14/100", "01234"},
		"garbage":             {206, "bytes ten", "0123456789"},
	} {
		p.Behave(func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			if answer.header != "" {
				w.Header().Set("Content-Range", answer.header)
			}
			w.WriteHeader(answer.status)
			io.WriteString(w, answer.body)
		})
		_, err := b.Get(t.Context(), "x", 10, object.Vector{make([]byte, 10)}, false)
		var e *object.Error
		if !errors.As(err, &e) || e.Class != object.ClassNetwork {
			t.Errorf("%s: %v", name, err)
		}
	}
	p.Behave(func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		servers.FailS3(w, r, 403, "AccessDenied")
	})
	_, err := b.Get(t.Context(), "x", 10, object.Vector{make([]byte, 10)}, false)
	if e := wantError(t, err, object.ClassDenied, "AccessDenied"); e.Request != "req-AccessDenied" || e.Hint == "" {
		t.Errorf("%+v", e)
	}
}
