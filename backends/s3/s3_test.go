package s3

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const bucket = "kvtier"

// newServer starts a server with a bucket, whose credentials the SDK finds.
func newServer(t testing.TB) *servers.VersityGW {
	t.Helper()
	s := servers.StartVersityGW(t)
	s.Bucket(t, bucket)
	s.Login(t)
	return s
}

// objectURL is the bucket at an endpoint.
func objectURL(endpoint string) string {
	return fmt.Sprintf("s3://%s/some/prefix?endpoint=%s&path_style=true&region=us-east-1", bucket, endpoint)
}

func newBackend(t testing.TB, endpoint string, o object.Options) *object.Backend {
	t.Helper()
	b, err := New(t.Context(), &Options{URL: objectURL(endpoint), Object: o})
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

func newBare(t testing.TB, endpoint string) *client {
	t.Helper()
	c, err := newClient(t.Context(), &Options{URL: objectURL(endpoint)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// store is the service without the backend.
type store struct{ c *client }

func (s store) Put(key string, b []byte) error {
	v := object.Vector{b}
	_, err := s.c.Put(context.Background(), key, v, s.c.Sum(v), false)
	return err
}

func (s store) Get(key string, off int64, b []byte) error {
	_, err := s.c.Get(context.Background(), key, off, object.Vector{b}, false)
	return err
}

func TestConformance(t *testing.T) {
	s := newServer(t)
	bare := newBare(t, s.Endpoint)
	bare.transport.DisableKeepAlives = true // its connections are no leaks of the backend's
	st := store{bare}
	var absent atomic.Uint64
	xfertest.Run(t, xfertest.Harness{
		New: func(t testing.TB) xfer.Backend {
			b, err := New(t.Context(), &Options{URL: objectURL(s.Endpoint)})
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Memory: map[xfer.MemType]func(testing.TB, int64) xfertest.Memory{
			xfer.OBJ: func(t testing.TB, size int64) xfertest.Memory { return xfertest.Objects(t, size, st) },
		},
		Absent: map[xfer.MemType]func(testing.TB) xfer.Desc{
			xfer.OBJ: func(testing.TB) xfer.Desc {
				n := absent.Add(1)
				return xfer.Desc{Dev: 1<<40 + n, Meta: fmt.Sprintf("absent-%d", n)}
			},
		},
		MaxBytes: 2 << 20,
		Dear:     true,
	})
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)}).Read(b)
	return b
}

func wantError(t testing.TB, err error, class object.Class, code string) *object.Error {
	t.Helper()
	var e *object.Error
	if !errors.As(err, &e) {
		t.Fatalf("%v: no *object.Error", err)
	}
	if e.Class != class || code != "" && e.Code != code {
		t.Errorf("class %s, code %q, want %s, %q: %v", e.Class, e.Code, class, code, err)
	}
	return e
}
