package object

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvtier/kvtier/xfer"
)

// Options says how a backend works. The zero value is right for most.
type Options struct {
	Concurrency    int           // most requests at once; 32 when 0
	PartBytes      int64         // longest range of one get, and part of an upload; 8 MiB when 0
	MultipartBytes int64         // objects longer than this are uploaded in parts; 32 MiB when 0: one request is the cheapest
	TryTimeout     time.Duration // of one try, beside a second for each MiB; 10 s when 0
	RetryBudget    int           // retries that may be saved up; 16 when 0
	Logger         *slog.Logger  // uploads that could not be given up; nowhere when nil
}

func (o *Options) withDefaults(l Limits) (Options, error) {
	var d Options
	if o != nil {
		d = *o
	}
	if d.Concurrency == 0 {
		d.Concurrency = 32
	}
	if d.PartBytes == 0 {
		d.PartBytes = 8 << 20
	}
	if d.MultipartBytes == 0 {
		d.MultipartBytes = min(32<<20, l.PutBytes)
	}
	if d.TryTimeout == 0 {
		d.TryTimeout = 10 * time.Second
	}
	if d.RetryBudget == 0 {
		d.RetryBudget = 16
	}
	if d.Logger == nil {
		d.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case d.Concurrency < 1 || d.Concurrency > 1024:
		return d, fmt.Errorf("concurrency %d: %w: want 1 to 1024", d.Concurrency, xfer.ErrInvalid)
	case d.PartBytes < l.MinPart || d.PartBytes > l.PartBytes:
		return d, fmt.Errorf("part of %d bytes: %w: want %d to %d", d.PartBytes, xfer.ErrInvalid, l.MinPart, l.PartBytes)
	case d.MultipartBytes < 1 || d.MultipartBytes > l.PutBytes:
		return d, fmt.Errorf("multipart above %d bytes: %w: want 1 to %d", d.MultipartBytes, xfer.ErrInvalid, l.PutBytes)
	case d.TryTimeout < 0:
		return d, fmt.Errorf("try timeout %v: %w: want a positive one", d.TryTimeout, xfer.ErrInvalid)
	case d.RetryBudget < 0:
		return d, fmt.Errorf("retry budget %d: %w: want a positive one", d.RetryBudget, xfer.ErrInvalid)
	}
	return d, nil
}

// Backend moves bytes between memory and objects. It is an xfer.Backend and an
// xfer.Querier, and makes the other requests of the service under the same limit, budget
// and counters.
type Backend struct {
	client Client
	limits Limits
	opt    Options
	limit  *limiter
	budget *budget
	count  counters

	aborting sync.WaitGroup // uploads that are given up, in the background
	inFlight sync.WaitGroup
	mu       struct {
		sync.Mutex
		closed bool
	}
}

// New makes a backend of a client, which is the backend's to close from here on, and which
// New closes when it fails. It does no I/O: see Check. Errors: xfer.ErrInvalid for an option.
func New(c Client, o *Options) (*Backend, error) {
	b := &Backend{client: c, limits: c.Limits()}
	var err error
	if b.opt, err = o.withDefaults(b.limits); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", c.Name(), err), c.Close())
	}
	b.limit, b.budget = newLimiter(b.opt.Concurrency), newBudget(b.opt.RetryBudget)
	return b, nil
}

// Name is the service's.
func (b *Backend) Name() string { return b.client.Name() }

// String writes the bucket as a URL without secrets.
func (b *Backend) String() string { return b.client.String() }

// Caps says what the backend can do.
func (b *Backend) Caps() xfer.Caps {
	return xfer.Caps{
		Pairs:  []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.OBJ}},
		Local:  true,
		Align:  1,
		Engine: "http",
	}
}

// memory is the Region of DRAM. There is nothing to know of it.
type memory struct{}

// thing is the Region of an object.
type thing struct {
	key string
	len int64 // 0: as long as it is
}

// Register makes memory or an object usable. It asks the service nothing.
func (b *Backend) Register(ctx context.Context, t xfer.MemType, d xfer.Desc) (xfer.Region, error) {
	fail := func(err error) (xfer.Region, error) {
		return nil, fmt.Errorf("%s register %s %v: %w", b.Name(), t, d, err)
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	if err := b.begin(); err != nil {
		return nil, err
	}
	defer b.inFlight.Done()
	switch t {
	case xfer.DRAM:
		if err := xfer.CheckDRAM(t, d); err != nil {
			return fail(err)
		}
		if d.Len == 0 || d.End()-d.Addr != d.Len {
			return fail(fmt.Errorf("%w: no such memory", xfer.ErrInvalid))
		}
		return memory{}, nil
	case xfer.OBJ:
		if err := b.checkKey(d.Meta); err != nil {
			return fail(err)
		}
		if d.End() > 1<<63-1 {
			return fail(fmt.Errorf("%w: no object is that long", xfer.ErrInvalid))
		}
		th := &thing{key: d.Meta}
		if d.Addr == 0 {
			th.len = int64(d.Len)
		}
		return th, nil
	}
	return fail(fmt.Errorf("%w: memory type %s", xfer.ErrInvalid, t))
}

func (b *Backend) checkKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("%w: Meta is empty, want a key", xfer.ErrInvalid)
	case len(key) > b.limits.KeyBytes:
		return fmt.Errorf("%w: key of %d bytes, want at most %d", xfer.ErrInvalid, len(key), b.limits.KeyBytes)
	}
	return nil
}

// Deregister undoes one Register.
func (b *Backend) Deregister(r xfer.Region) error {
	switch r.(type) {
	case memory, *thing:
		return nil
	}
	return fmt.Errorf("%s deregister: %w: a region of type %T is not ours", b.Name(), xfer.ErrInvalid, r)
}

// begin admits a call; the caller ends it by b.inFlight.Done.
func (b *Backend) begin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		return fmt.Errorf("%s: %w", b.Name(), xfer.ErrClosed)
	}
	b.inFlight.Add(1)
	return nil
}

// Close waits for what is in flight and closes the client.
func (b *Backend) Close() error {
	b.mu.Lock()
	again := b.mu.closed
	b.mu.closed = true
	b.mu.Unlock()
	b.inFlight.Wait()
	b.aborting.Wait()
	if again {
		return nil
	}
	if err := b.client.Close(); err != nil {
		return fmt.Errorf("close %s: %w", b.Name(), err)
	}
	return nil
}
