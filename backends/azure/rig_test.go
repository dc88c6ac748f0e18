package azure_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
	leases "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/lease"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/backends/azure"
	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/internal/servers"
)

// azurite is what the tests talk to.
var azurite servers.Azurite

func TestMain(m *testing.M) {
	code := m.Run()
	if err := azurite.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var containers atomic.Uint64 // so that each test has one of its own

// newContainer makes a container and gives the URL of a part of it.
func newContainer(t testing.TB) azure.Location {
	t.Helper()
	azurite.Start(t)
	azurite.Login(t)
	l := azure.Location{Container: fmt.Sprintf("test-%d", containers.Add(1)), Prefix: "cluster/ns/", Endpoint: azurite.Endpoint(azurite.Addr())}
	if _, err := bare(t, l).Create(t.Context(), nil); err != nil {
		t.Fatalf("create container: %v", err)
	}
	return l
}

// at writes a location as a URL, of another address if there is one.
func at(l azure.Location, addr string) string {
	if addr != "" {
		l.Endpoint = azurite.Endpoint(addr)
	}
	return l.String() + "?endpoint=" + url.QueryEscape(l.Endpoint)
}

// bare is the SDK's client of a container.
func bare(t testing.TB, l azure.Location) *container.Client {
	t.Helper()
	cred, err := container.NewSharedKeyCredential(servers.AzuriteAccount, servers.AzuriteKey)
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	t.Cleanup(web.CloseIdleConnections)
	c, err := container.NewClientWithSharedKeyCredential(l.Endpoint+"/"+l.Container, cred, &container.ClientOptions{ClientOptions: azcore.ClientOptions{Transport: web}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// open opens a client that ends with the test.
func open(t testing.TB, l azure.Location) *azure.Client {
	t.Helper()
	c, err := azure.Open(at(l, ""), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// memory makes n random bytes outside the Go heap, in pieces.
func memory(t testing.TB, n int) object.Vector {
	t.Helper()
	v := blank(t, n)
	for _, b := range v {
		rand.Read(b)
	}
	return v
}

// blank makes n bytes outside the Go heap, in pieces of odd lengths.
func blank(t testing.TB, n int) object.Vector {
	t.Helper()
	a, err := arena.New(int64(max(n, 1)), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Errorf("close arena: %v", err)
		}
	})
	var v object.Vector
	for off, k := 0, 1; off < n; k = 3*k + 1 {
		k = min(k, n-off)
		v = append(v, a.Slice(int64(off), int64(k)))
		off += k
	}
	return v
}

// flat is a copy of the bytes.
func flat(v object.Vector) string {
	var s strings.Builder
	for _, b := range v {
		s.Write(b)
	}
	return s.String()
}

// mustPut puts an object.
func mustPut(t testing.TB, c *azure.Client, key string, v object.Vector) object.Info {
	t.Helper()
	i, err := c.Put(t.Context(), key, v, c.Sum(v), false)
	if err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
	return i
}

// mustRead reads a whole object of n bytes.
func mustRead(t testing.TB, c *azure.Client, key string, n int) string {
	t.Helper()
	v := blank(t, n)
	got, err := c.Get(t.Context(), key, 0, v, true)
	if err != nil {
		t.Fatalf("get %s: %v", key, err)
	}
	if !got.Verified || got.N != int64(n) {
		t.Fatalf("get %s: %d bytes, verified %v; want %d and true", key, got.N, got.Verified, n)
	}
	return flat(v)
}

// wantClass checks the class of a failure, and that it is an *object.Error with all that
// an operator needs, when the service answered.
func wantClass(t testing.TB, err error, class object.Class) *object.Error {
	t.Helper()
	var e *object.Error
	if !errors.As(err, &e) {
		t.Fatalf("error %v, want an *object.Error of class %v", err, class)
	}
	if e.Class != class {
		t.Fatalf("class %v, want %v: %v", e.Class, class, err)
	}
	return e
}

// lease takes a lease on an object, which nobody else can delete then.
func lease(t testing.TB, l azure.Location, key string) {
	t.Helper()
	c, err := leases.NewBlobClient(bare(t, l).NewBlobClient(l.Prefix+key), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.AcquireLease(t.Context(), -1, nil); err != nil {
		t.Fatal(err)
	}
}
