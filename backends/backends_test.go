package backends_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/backends"
	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/xfer"
)

func TestOpen(t *testing.T) {
	for _, kind := range backends.Kinds() {
		b, err := backends.Open(kind, nil)
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		if b.Name() != kind {
			t.Errorf("kind %s opens a backend that calls itself %s", kind, b.Name())
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	if b, err := backends.Open("tape", nil); !errors.Is(err, xfer.ErrNotFound) || b != nil || !strings.Contains(err.Error(), `"tape"`) {
		t.Errorf("unknown kind: %v, %v", b, err)
	}
	o := &backends.Options{Posix: posix.Options{Engine: "aio"}}
	if b, err := backends.Open("posix", o); !errors.Is(err, xfer.ErrInvalid) || b != nil {
		t.Errorf("bad option: %v, %v", b, err)
	}
}

func TestProbe(t *testing.T) {
	o := &backends.Options{Posix: posix.Options{Engine: posix.EngineGoroutines}}
	infos := backends.Probe(t.Context(), o)
	if len(infos) != len(backends.Kinds()) {
		t.Fatalf("%d kinds, but %+v", len(backends.Kinds()), infos)
	}
	for i, info := range infos {
		if info.Kind != backends.Kinds()[i] || !info.Usable || info.Engine == "" || len(info.Pairs) == 0 {
			t.Errorf("%+v", info)
		}
	}
	i := slices.IndexFunc(infos, func(i backends.Info) bool { return i.Kind == "posix" })
	if infos[i].Engine != posix.EngineGoroutines {
		t.Errorf("options do not reach the backend: %+v", infos[i])
	}

	o.Posix.Engine = "aio"
	if info := backends.Probe(t.Context(), o)[i]; info.Usable || !strings.Contains(info.Why, `"aio"`) {
		t.Errorf("unusable kind: %+v", info)
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if infos := backends.Probe(ended, nil); len(infos) != 0 {
		t.Errorf("after the end of its context: %+v", infos)
	}
}
