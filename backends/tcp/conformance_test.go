package tcp

import (
	"testing"

	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

func remoteHarness(o func() Options) xfertest.RemoteHarness {
	return xfertest.RemoteHarness{
		New: func(t testing.TB, _ xfertest.Side) xfer.Backend { return newBackend(t, o()) },
		Again: func(t testing.TB, _ xfertest.Side, info []byte) xfer.Backend {
			addrs, err := parseConnInfo(info)
			if err != nil {
				t.Fatal(err)
			}
			o := o()
			o.Listen = addrs[0]
			return newBackend(t, o)
		},
	}
}

func TestConformance(t *testing.T) {
	h := remoteHarness(func() Options { return Options{} })
	h.Several = true
	xfertest.RunRemote(t, h)
}

// TestConformanceTLS runs the narrow suite over TLS, and with room for one call on each
// connection, so that everything waits for the answer before.
func TestConformanceTLS(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: the suite runs without TLS")
	}
	cfg := sharedTLS(t)
	h := remoteHarness(func() Options { return Options{TLS: cfg, Conns: 2, Calls: 1} })
	h.MaxBytes, h.Narrow = 2<<20, true
	xfertest.RunRemote(t, h)
}
