package azure_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/kvtier/kvtier/backends/azure"
	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// store is the service without the backend. It keeps no connection, which the suite would
// take for one that the backend left.
type store struct{ url string }

func (s store) Put(key string, b []byte) error {
	return s.do(func(c *azure.Client) error {
		v := object.Vector{b}
		_, err := c.Put(context.Background(), key, v, c.Sum(v), false)
		return err
	})
}

func (s store) Get(key string, off int64, b []byte) error {
	return s.do(func(c *azure.Client) error {
		_, err := c.Get(context.Background(), key, off, object.Vector{b}, false)
		return err
	})
}

func (s store) do(f func(c *azure.Client) error) error {
	c, err := azure.Open(s.url, "")
	if err != nil {
		return err
	}
	return errors.Join(f(c), c.Close())
}

func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("short: Azurite takes a minute for it")
	}
	l := newContainer(t)
	s := store{at(l, "")}
	var absent atomic.Uint64
	// Few bytes, and parts of few: each request takes Azurite milliseconds.
	o := object.Options{PartBytes: 100_000, MultipartBytes: 150_000}
	xfertest.Run(t, xfertest.Harness{
		New: func(t testing.TB) xfer.Backend {
			b, err := azure.New(&azure.Options{URL: at(l, ""), Object: o})
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Memory: map[xfer.MemType]func(testing.TB, int64) xfertest.Memory{
			xfer.OBJ: func(t testing.TB, size int64) xfertest.Memory { return xfertest.Objects(t, size, s) },
		},
		Absent: map[xfer.MemType]func(testing.TB) xfer.Desc{
			xfer.OBJ: func(testing.TB) xfer.Desc {
				n := absent.Add(1)
				return xfer.Desc{Dev: 1<<40 + n, Meta: fmt.Sprintf("absent-%d", n)}
			},
		},
		MaxBytes: 2 << 20, // the least that the suite can do with
		Dear:     true,
	})
}
