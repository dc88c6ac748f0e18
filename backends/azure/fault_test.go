package azure_test

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvtier/kvtier/backends/azure"
	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
)

// TestCut: an answer that breaks off is made again; one that always does is a failure.
func TestCut(t *testing.T) {
	p, url := behind(t)
	b := newBackend(t, url, object.Options{})
	src := memory(t, 200_000)
	if _, err := b.Put(t.Context(), "a", src, false); err != nil {
		t.Fatal(err)
	}
	half := func(w http.ResponseWriter, r *http.Request) bool {
		resp, body := p.ask(r)
		if resp == nil {
			panic(http.ErrAbortHandler)
		}
		answer(w, resp, body, len(body)/2)
		return true
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool { return n == 1 && half(w, r) })
	dst := blank(t, 200_000)
	if got, err := b.Get(t.Context(), "a", 0, dst, true); err != nil || flat(dst) != flat(src) || !got.Verified {
		t.Errorf("get, cut once: %v, %+v", err, got)
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool { return half(w, r) })
	got, err := b.Get(t.Context(), "a", 0, dst, true)
	wantClass(t, err, object.ClassNetwork)
	if got.N != 0 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("get, always cut: %v, %+v", err, got)
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		if n == 1 {
			_, _ = io.CopyN(io.Discard, r.Body, 50_000)
			panic(http.ErrAbortHandler)
		}
		return false
	})
	if _, err := b.Put(t.Context(), "b", src, true); err != nil {
		t.Errorf("put, cut once: %v", err)
	}
	// The object is made, and nobody hears of it.
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		if n == 1 {
			p.ask(r)
			panic(http.ErrAbortHandler)
		}
		return false
	})
	if _, err := b.Put(t.Context(), "c", src, true); err != nil {
		t.Errorf("put whose answer was lost: %v", err)
	}
}

// TestWrongBytes: bytes that were changed on the way are never taken, either way.
func TestWrongBytes(t *testing.T) {
	p, url := behind(t)
	b := newBackend(t, url, object.Options{})
	src := memory(t, 70_000)
	flipSent := func(w http.ResponseWriter, r *http.Request) bool {
		sent, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		sent[len(sent)/3] ^= 4
		resp, body := p.askWith(r, sent)
		answer(w, resp, body, len(body))
		return true
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool { return n == 1 && flipSent(w, r) })
	if _, err := b.Put(t.Context(), "a", src, false); err != nil {
		t.Errorf("put, changed once: %v", err)
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool { return flipSent(w, r) })
	_, err := b.Put(t.Context(), "b", src, false)
	if e := wantClass(t, err, object.ClassCorrupt); e.Code != "Crc64Mismatch" {
		t.Errorf("put, always changed: %v", err)
	}
	p.behave()
	if _, err := b.Head(t.Context(), "b"); !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("changed bytes were stored: %v", err)
	}
	flipGot := func(w http.ResponseWriter, r *http.Request) bool {
		resp, body := p.ask(r)
		body[len(body)/3] ^= 4
		answer(w, resp, body, len(body))
		return true
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool { return n == 1 && flipGot(w, r) })
	dst := blank(t, 70_000)
	if got, err := b.Get(t.Context(), "a", 0, dst, true); err != nil || flat(dst) != flat(src) || !got.Verified {
		t.Errorf("get, changed once: %v, %+v", err, got)
	}
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool { return flipGot(w, r) })
	if _, err := b.Get(t.Context(), "a", 0, dst, true); !errors.Is(err, object.ErrCorrupt) {
		t.Errorf("get, always changed: %v", err)
	}
}

// TestNonsense: answers that do not fit the request are failures, not bytes.
func TestNonsense(t *testing.T) {
	p, url := behind(t)
	c, err := azure.Open(url, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	src := memory(t, 1000)
	mustPut(t, c, "a", src)
	for name, edit := range map[string]func(h http.Header, body []byte) []byte{
		"another range":    func(h http.Header, b []byte) []byte { h.Set("Content-Range", "bytes 101-200/1000"); return b },
		"no sense":         func(h http.Header, b []byte) []byte { h.Set("Content-Range", "bytes */*"); return b },
		"shorter":          func(h http.Header, b []byte) []byte { return b[:50] },
		"longer":           func(h http.Header, b []byte) []byte { return append(b, b...) },
		"the whole object": func(h http.Header, b []byte) []byte { h.Del("Content-Range"); return append(b, b...) },
		"no ETag":          func(h http.Header, b []byte) []byte { h.Del("ETag"); return b },
		"no length": func(h http.Header, b []byte) []byte {
			h["Transfer-Encoding"] = []string{"chunked"}
			return append(b, 1)
		},
	} {
		p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
			resp, body := p.ask(r)
			resp.Header.Del("Content-Length")
			body = edit(resp.Header, body)
			answer(w, resp, body, len(body))
			return true
		})
		dst := blank(t, 102)
		var guard byte = 0x5a
		dst[len(dst)-1][len(dst[len(dst)-1])-1] = guard
		_, err := c.Get(t.Context(), "a", 100, dst.Slice(0, 100), false)
		if object.ClassOf(err) != object.ClassNetwork {
			t.Errorf("%s: %v, want a failure of class network", name, err)
		}
		if dst[len(dst)-1][len(dst[len(dst)-1])-1] != guard {
			t.Errorf("%s: bytes behind the memory", name)
		}
	}
	// The answer to a batch.
	for name, text := range map[string]string{
		"no request's":     "--x\r\nContent-Type: application/http\r\nContent-ID: 99\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n--x--\r\n",
		"below zero":       "--x\r\nContent-Type: application/http\r\nContent-ID: -1\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n--x--\r\n",
		"twice":            strings.Repeat("--x\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n", 2) + "--x--\r\n",
		"without a number": strings.Repeat("--x\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n", 2) + "--x--\r\n",
		"of one":           "--x\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n--x--\r\n",
		"no batch":         "hello",
		"no such error":    "--x\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n--x\r\n\r\nHTTP/1.1 404 Not Found\r\n\r\n--x--\r\n",
	} {
		p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
			w.Header().Set("Content-Type", "multipart/mixed; boundary=x")
			w.WriteHeader(http.StatusAccepted)
			_, _ = io.WriteString(w, text)
			return true
		})
		if errs, err := c.Delete(t.Context(), []string{"a", "b"}); err == nil || errs != nil {
			t.Errorf("batch, %s: %v, %v; want a failure of all", name, errs, err)
		}
	}
	// Another kind of server altogether.
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		_, _ = io.WriteString(w, "<html><body>It works!</body></html>")
		return true
	})
	if err := c.Check(t.Context()); err == nil {
		t.Error("a web page is taken for a list")
	}
	if _, err := c.Head(t.Context(), "a"); err == nil {
		t.Error("a web page is taken for an object")
	}
	if _, err := c.Put(t.Context(), "a", src, c.Sum(src), false); err == nil {
		t.Error("a web page is taken for an object that was made")
	}
	// Explanations without end.
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		w.Header().Set("x-ms-error-code", "ServerBusy")
		w.WriteHeader(http.StatusServiceUnavailable)
		for {
			if _, err := w.Write(make([]byte, 32<<10)); err != nil {
				return true
			}
		}
	})
	_, err = c.Get(t.Context(), "a", 0, blank(t, 100), false)
	wantClass(t, err, object.ClassThrottled)
	p.behave()
	if mustRead(t, c, "a", 1000) != flat(src) {
		t.Error("other bytes")
	}
}

// TestSlow: each call ends with its context, whatever is slow.
func TestSlow(t *testing.T) {
	p, url := behind(t)
	c, err := azure.Open(url, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	src := memory(t, 1<<20)
	mustPut(t, c, "a", src)
	drip := func(w http.ResponseWriter, r *http.Request, b []byte) {
		for i := range b {
			if _, err := w.Write(b[i : i+1]); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	for name, fault := range map[string]func(w http.ResponseWriter, r *http.Request, n int64) bool{
		"no answer": func(w http.ResponseWriter, r *http.Request, n int64) bool {
			_, _ = io.Copy(io.Discard, r.Body) // else the server does not see the end of the connection
			<-r.Context().Done()
			return true
		},
		"slow body": func(w http.ResponseWriter, r *http.Request, n int64) bool {
			resp, body := p.ask(r)
			if resp == nil {
				panic(http.ErrAbortHandler)
			}
			for name, values := range resp.Header {
				w.Header()[name] = values
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			w.WriteHeader(resp.StatusCode)
			drip(w, r, body)
			return true
		},
		"slow explanation": func(w http.ResponseWriter, r *http.Request, n int64) bool {
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(http.StatusInternalServerError)
			drip(w, r, make([]byte, 5000))
			return true
		},
	} {
		p.misbehave(fault)
		for what, call := range map[string]func(ctx context.Context) error{
			"get":    func(ctx context.Context) error { _, err := c.Get(ctx, "a", 0, blank(t, 1<<20), true); return err },
			"list":   func(ctx context.Context) error { _, err := c.List(ctx, "", "", 0); return err },
			"delete": func(ctx context.Context) error { _, err := c.Delete(ctx, []string{"x", "y"}); return err },
			"put": func(ctx context.Context) error {
				if name != "no answer" { // a put has an empty answer
					<-ctx.Done()
				}
				_, err := c.Put(ctx, "b", src, c.Sum(src), false)
				return err
			},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			err := call(ctx)
			cancel()
			if object.ClassOf(err) != object.ClassCanceled || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, xfer.ErrCanceled) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
	}
	p.behave()
	if mustRead(t, c, "a", 1<<20) != flat(src) {
		t.Error("other bytes")
	}
}

// TestQuiet: when a put was cancelled nothing reads its memory any more.
func TestQuiet(t *testing.T) {
	p, url := behind(t)
	c, err := azure.Open(url, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	src := blank(t, 8<<20)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	poisoned, rest := make(chan struct{}), make(chan []byte)
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		_, _ = io.CopyN(io.Discard, r.Body, 100_000)
		cancel()
		<-poisoned
		b, _ := io.ReadAll(r.Body) // breaks off
		rest <- b
		panic(http.ErrAbortHandler)
	})
	_, err = c.Put(ctx, "a", src, c.Sum(src), false)
	for _, b := range src {
		for i := range b {
			b[i] = 0xff
		}
	}
	close(poisoned)
	if b := <-rest; strings.IndexByte(string(b), 0xff) >= 0 {
		t.Error("bytes went out that were written after the put had ended")
	}
	wantClass(t, err, object.ClassCanceled)
}

// TestThrottled: a service that serves few at once is asked by few at once, and all is
// served in the end.
func TestThrottled(t *testing.T) {
	for _, said := range []struct {
		status int
		code   string
	}{{503, "ServerBusy"}, {500, "OperationTimedOut"}, {429, "TooManyRequests"}} {
		t.Run(said.code, func(t *testing.T) {
			p, url := behind(t)
			b := newBackend(t, url, object.Options{})
			src := memory(t, 5000)
			var inside, refused atomic.Int64
			p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
				defer inside.Add(-1)
				if inside.Add(1) > 3 {
					refused.Add(1)
					refuse(w, said.status, said.code)
					return true
				}
				resp, body := p.ask(r)
				if resp == nil {
					panic(http.ErrAbortHandler)
				}
				answer(w, resp, body, len(body))
				return true
			})
			const useful = 100
			var wg sync.WaitGroup
			for i := range useful {
				wg.Go(func() {
					if _, err := b.Put(t.Context(), fmt.Sprint(i), src, false); err != nil {
						t.Errorf("put %d: %v", i, err)
					}
				})
			}
			wg.Wait()
			s := b.Stats()
			if s.Throttled != uint64(refused.Load()) || s.Throttled == 0 || s.Shrunk == 0 || s.Limit >= 8 {
				t.Errorf("%d were refused, stats %+v", refused.Load(), s)
			}
			if n := p.requests.Load(); n > useful*13/10 {
				t.Errorf("%d requests for %d that were of use", n, useful)
			}
		})
	}
}

// TestRefused: what an operator has to change is in the error.
func TestRefused(t *testing.T) {
	l := newContainer(t)
	for _, tt := range []struct {
		name  string
		env   map[string]string
		url   string
		class object.Class
		want  string
	}{
		{"wrong key", map[string]string{"AZURE_STORAGE_KEY": "d3Jvbmcga2V5"}, at(l, ""), object.ClassDenied, "AZURE_STORAGE_KEY"},
		{"no such container", nil, strings.Replace(at(l, ""), l.Container, "no-such", 1), object.ClassNoBucket, "make the container"},
		{"nobody there", nil, at(l, "127.0.0.1:1"), object.ClassNetwork, "endpoint"},
		{"no such host", nil, at(l, "no-such-host.invalid:80"), object.ClassNetwork, "endpoint"},
		{"no TLS", nil, strings.Replace(at(l, ""), "http%3A", "https%3A", 1), object.ClassOther, "endpoint"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for name, value := range tt.env {
				t.Setenv(name, value)
			}
			c, err := azure.Open(tt.url, "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			err = c.Check(t.Context())
			e := wantClass(t, err, tt.class)
			if !strings.Contains(e.Hint, tt.want) || !strings.Contains(err.Error(), e.Hint) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want a hint with %q, in a line", err, tt.want)
			}
			if e.Status != 0 && (e.Code == "" || e.Request == "") {
				t.Errorf("%v, want code and request id", err)
			}
		})
	}
}

// TestRedirect: nobody gets our signature but whom it is for.
func TestRedirect(t *testing.T) {
	p, url := behind(t)
	var strange atomic.Int64
	stranger := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { strange.Add(1) }))
	defer stranger.Close()
	c, err := azure.Open(url, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.misbehave(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		http.Redirect(w, r, stranger.URL, http.StatusTemporaryRedirect)
		return true
	})
	src := memory(t, 100)
	_, err = c.Put(t.Context(), "a", src, c.Sum(src), false)
	wantClass(t, err, object.ClassOther)
	wantClass(t, c.Check(t.Context()), object.ClassOther)
	if strange.Load() != 0 {
		t.Error("a redirect was followed")
	}
}

// TestConnections: calls in a row use one connection, whatever they do, and Close closes it.
func TestConnections(t *testing.T) {
	p, url := behind(t)
	c, err := azure.Open(url, "")
	if err != nil {
		t.Fatal(err)
	}
	src := memory(t, 100_000)
	for range 5 {
		mustPut(t, c, "a", src)
		mustRead(t, c, "a", 100_000)
		if _, err := c.Get(t.Context(), "a", 10, blank(t, 100), false); err != nil {
			t.Fatal(err)
		}
		_, err := c.Get(t.Context(), "absent", 0, blank(t, 100), false)
		wantClass(t, err, object.ClassNotFound)
		if _, err := c.List(t.Context(), "", "", 0); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Delete(t.Context(), []string{"x", "y", "z"}); err != nil {
			t.Fatal(err)
		}
		if _, err := upload(t.Context(), c, "b", src, 60_000, false); err != nil {
			t.Fatal(err)
		}
	}
	if n := p.open(); n != 1 {
		t.Errorf("%d connections are open, want 1", n)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	for p.open() != 0 { // the proxy sees it in its own time
		time.Sleep(time.Millisecond)
	}
}

// TestCA: a certificate is believed when its authority is.
func TestCA(t *testing.T) {
	l := newContainer(t)
	p := newProxy(t)
	s := httptest.NewUnstartedServer(p)
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // it is told of what the test is about
	s.StartTLS()
	defer s.Close()
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	url := strings.Replace(at(l, s.Listener.Addr().String()), "http%3A", "https%3A", 1)
	for _, caFile := range []string{"", file} {
		c, err := azure.Open(url, caFile)
		if err != nil {
			t.Fatal(err)
		}
		err = c.Check(t.Context())
		if caFile != "" && err != nil {
			t.Error(err)
		}
		if caFile == "" {
			if e := wantClass(t, err, object.ClassOther); !strings.Contains(e.Hint, "CA file") {
				t.Errorf("%v, want a hint at the CA file", err)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{filepath.Join(t.TempDir(), "absent"), os.Args[0]} {
		if _, err := azure.Open(url, bad); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("CA file %s: %v", bad, err)
		}
	}
}
