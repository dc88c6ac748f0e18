package servers

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"testing"
)

// Proxy stands in front of a server of HTTP and misbehaves as a test says.
type Proxy struct {
	*httptest.Server
	Requests atomic.Int64 // that have come
	forward  http.Handler
	rule     atomic.Pointer[Rule]
}

// Rule handles a request, or forwards it.
type Rule func(w http.ResponseWriter, r *http.Request, forward http.Handler)

// NewProxy starts a proxy for the server at a URL. Until it is told otherwise it forwards.
func NewProxy(t testing.TB, endpoint string) *Proxy {
	t.Helper()
	target, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	p := &Proxy{forward: &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL.Scheme, pr.Out.URL.Host = target.Scheme, target.Host
			pr.Out.Host = pr.In.Host // which is signed
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.Requests.Add(1)
		if f := p.rule.Load(); f != nil {
			(*f)(w, r, p.forward)
			return
		}
		p.forward.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		p.CloseClientConnections() // handlers that wait see it
		p.Close()
		transport.CloseIdleConnections()
	})
	return p
}

// Behave has requests handled by a rule from now on; with nil they are forwarded.
func (p *Proxy) Behave(f Rule) {
	if f == nil {
		p.rule.Store(nil)
		return
	}
	p.rule.Store(&f)
}

// Record forwards a request and keeps the answer.
func Record(r *http.Request, forward http.Handler) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	forward.ServeHTTP(rec, r)
	return rec
}

// Answer passes an answer on with another body. One that is shorter than its header says
// is cut off.
func Answer(w http.ResponseWriter, rec *httptest.ResponseRecorder, body []byte) {
	for k, v := range rec.Header() {
		w.Header()[k] = v
	}
	w.WriteHeader(rec.Code)
	_, _ = w.Write(body) // the client may be gone
}

// FailS3 answers as a service of S3 does when it fails.
func FailS3(w http.ResponseWriter, r *http.Request, status int, code string) {
	w.Header().Set("X-Amz-Request-Id", "req-"+code)
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = io.WriteString(w, "<Error><Code>"+code+"</Code><Message>no</Message><RequestId>req-"+code+"</RequestId></Error>")
	}
}
