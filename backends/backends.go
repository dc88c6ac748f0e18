// Package backends is the table of the transfer backends that are built in. A
// program picks kinds from it and hands what it makes to an xfer.Agent; the
// backends themselves know nothing of each other.
package backends

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/kvtier/kvtier/backends/mem"
	"github.com/kvtier/kvtier/backends/posix"
	"github.com/kvtier/kvtier/backends/shm"
	"github.com/kvtier/kvtier/backends/tcp"
	"github.com/kvtier/kvtier/xfer"
)

// Options are the settings of all kinds; each looks at its own. The zero value
// is right for most.
type Options struct {
	Posix  posix.Options
	Shm    shm.Options
	TCP    tcp.Options
	Logger *slog.Logger // for kinds whose own options name none
}

// table lists the kinds in the order in which an agent should try them.
var table = [...]struct {
	kind string
	open func(*Options) (xfer.Backend, error)
}{
	{mem.Kind, func(*Options) (xfer.Backend, error) { return mem.New(), nil }},
	{posix.Kind, func(o *Options) (xfer.Backend, error) {
		p := o.Posix
		if p.Logger == nil {
			p.Logger = o.Logger
		}
		b, err := posix.New(&p)
		if err != nil {
			return nil, err // not the nil *Backend: that is no nil Backend
		}
		return b, nil
	}},
	{shm.Kind, func(o *Options) (xfer.Backend, error) {
		s := o.Shm
		if s.Logger == nil {
			s.Logger = o.Logger
		}
		b, err := shm.New(&s)
		if err != nil {
			return nil, err
		}
		return b, nil
	}},
	{tcp.Kind, func(o *Options) (xfer.Backend, error) {
		t := o.TCP
		if t.Logger == nil {
			t.Logger = o.Logger
		}
		b, err := tcp.New(&t)
		if err != nil {
			return nil, err
		}
		return b, nil
	}},
}

// Kinds lists what can be opened, in the order in which an agent should try
// them.
func Kinds() []string {
	kinds := make([]string, len(table))
	for i, e := range table {
		kinds[i] = e.kind
	}
	return kinds
}

// Open makes a backend of a kind. Nil options are the zero value. Errors:
// xfer.ErrNotFound for an unknown kind, xfer.ErrUnavailable when what it needs
// is missing here, xfer.ErrInvalid for an option.
func Open(kind string, o *Options) (xfer.Backend, error) {
	if o == nil {
		o = &Options{}
	}
	for _, e := range table {
		if e.kind != kind {
			continue
		}
		b, err := e.open(o)
		if err != nil {
			return nil, fmt.Errorf("open backend %s: %w", kind, err)
		}
		return b, nil
	}
	return nil, fmt.Errorf("open backend %q: %w: the kinds are %s", kind, xfer.ErrNotFound, strings.Join(Kinds(), ", "))
}

// Info is what was found out about a kind on this machine.
type Info struct {
	Kind   string
	Usable bool
	Engine string      // which mechanism was chosen
	Pairs  []xfer.Pair // what it moves
	Why    string      // why it is not usable, or not by its best engine
}

// Probe opens each kind, asks it what it can do, and closes it again. It ends
// early, with the kinds that it came to, when ctx does.
func Probe(ctx context.Context, o *Options) []Info {
	var infos []Info
	for _, kind := range Kinds() {
		if ctx.Err() != nil {
			return infos
		}
		infos = append(infos, probe(kind, o))
	}
	return infos
}

func probe(kind string, o *Options) Info {
	info := Info{Kind: kind}
	b, err := Open(kind, o)
	if err != nil {
		info.Why = err.Error()
		return info
	}
	c := b.Caps()
	info.Usable, info.Engine, info.Pairs = true, c.Engine, c.Pairs
	switch b := b.(type) {
	case *posix.Backend:
		info.Why = b.Stats().Note
	case *shm.Backend:
		info.Why = b.Note()
	}
	if err := b.Close(); err != nil {
		info.Usable, info.Why = false, fmt.Sprintf("close backend %s: %v", kind, err)
	}
	return info
}
