package azure_test

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvtier/kvtier/backends/azure"
	"github.com/kvtier/kvtier/backends/object"
)

// proxy stands before Azurite and misbehaves.
type proxy struct {
	*httptest.Server
	forward  *http.Transport
	requests atomic.Int64
	conns    sync.Map // of net.Conn that are open
	// fault answers a request, or returns false, and then it is forwarded. n counts from 1.
	fault atomic.Pointer[func(w http.ResponseWriter, r *http.Request, n int64) bool]
}

func newProxy(t testing.TB) *proxy {
	t.Helper()
	azurite.Start(t)
	p := &proxy{forward: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}}
	p.Server = httptest.NewUnstartedServer(p)
	p.Config.ConnState = func(c net.Conn, s http.ConnState) {
		if s == http.StateClosed || s == http.StateHijacked {
			p.conns.Delete(c)
		} else {
			p.conns.Store(c, s)
		}
	}
	p.Start()
	t.Cleanup(func() {
		p.Close()
		p.forward.CloseIdleConnections()
	})
	return p
}

// addr is host and port.
func (p *proxy) addr() string { return p.Listener.Addr().String() }

// misbehave makes it answer requests by f.
func (p *proxy) misbehave(f func(w http.ResponseWriter, r *http.Request, n int64) bool) {
	p.requests.Store(0)
	p.fault.Store(&f)
}

// behave ends that.
func (p *proxy) behave() { p.fault.Store(nil); p.requests.Store(0) }

// open counts connections.
func (p *proxy) open() int {
	n := 0
	p.conns.Range(func(any, any) bool { n++; return true })
	return n
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := p.requests.Add(1)
	if f := p.fault.Load(); f != nil && (*f)(w, r, n) {
		return
	}
	resp, body := p.ask(r)
	if resp == nil {
		panic(http.ErrAbortHandler)
	}
	answer(w, resp, body, len(body))
}

// ask forwards a request and gives the answer; nil when the client is gone.
func (p *proxy) ask(r *http.Request) (*http.Response, []byte) {
	sent, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil
	}
	return p.askWith(r, sent)
}

// askWith forwards a request with another body.
func (p *proxy) askWith(r *http.Request, sent []byte) (*http.Response, []byte) {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host, out.RequestURI = "http", azurite.Addr(), ""
	out.Body = io.NopCloser(bytes.NewReader(sent))
	if len(sent) == 0 {
		out.Body = http.NoBody
	}
	resp, err := p.forward.RoundTrip(out)
	if err != nil {
		return nil, nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, nil
	}
	return resp, body
}

// answer passes an answer on, of its body only the first n bytes.
func answer(w http.ResponseWriter, resp *http.Response, body []byte, n int) {
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = w.Write(body[:n]) // the client may be gone
	if n < len(body) {
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler) // which closes the connection
	}
}

// refuse answers as the service does.
func refuse(w http.ResponseWriter, status int, code string) {
	w.Header().Set("x-ms-error-code", code)
	w.Header().Set("x-ms-request-id", "of-the-proxy")
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, "<?xml version=\"1.0\"?><Error><Code>"+code+"</Code><Message>The proxy says so.\nTime:now</Message></Error>")
}

// behind makes a container and a proxy, and the URL of the one behind the other.
func behind(t testing.TB) (*proxy, string) {
	t.Helper()
	l := newContainer(t)
	p := newProxy(t)
	return p, at(l, p.addr())
}

// newBackend makes a backend that ends with the test.
func newBackend(t testing.TB, url string, o object.Options) *object.Backend {
	t.Helper()
	b, err := azure.New(&azure.Options{URL: url, Object: o})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}
