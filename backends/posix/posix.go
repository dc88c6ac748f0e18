package posix

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/xfer"
)

// Kind is the backend's name.
const Kind = "posix"

// The engines, as Options.Engine and Caps.Engine name them.
const (
	EngineAuto       = "auto"
	EngineURing      = "io_uring"
	EngineGoroutines = "goroutines"
)

// Options says how a backend is made. The zero value is right for one NVMe disk
// per device.
type Options struct {
	Engine     string       // EngineAuto when empty: io_uring where it works, else goroutines
	Depth      int          // operations in flight per device; 32 when 0
	DepthBytes int64        // bytes in flight per device; 12 MiB when 0: eight large blocks with their headers, and more only adds latency
	Logger     *slog.Logger // warnings at construction and registration; nowhere when nil
}

// Backend moves bytes between memory and files or block devices. It is an
// xfer.Backend and an xfer.Querier.
type Backend struct {
	opt    Options
	engine engine
	note   string // why the engine is not the better one
	log    *slog.Logger

	flights sync.Pool // of *prepared
	count   counters

	background sync.WaitGroup // memory that is being registered
	closing    atomic.Bool
	inFlight   sync.WaitGroup
	mu         struct {
		sync.Mutex
		closed  bool
		devices map[uint64]*device
		files   map[fileKey]*file
	}
}

// engine performs pieces. start and await are called by the goroutine that owns
// the flight, deliver is called back from any.
type engine interface {
	name() string
	// start begins pieces of f. They may not begin before f waits.
	start(f *flight, ps []piece)
	// await blocks until a piece was delivered to f, f was woken, or cancel is
	// closed. It may return for no reason.
	await(f *flight, cancel <-chan struct{})
	// register makes memory known to the kernel, as far as it can.
	register(addr, n uint64) (*registered, error)
	deregister(*registered) error
	// close is called when nothing is in flight.
	close() error
}

// New makes the backend and finds out which engine works. Errors: ErrInvalid
// for an option, ErrUnavailable when the engine asked for by name does not work
// here.
func New(o *Options) (*Backend, error) {
	b := &Backend{}
	if o != nil {
		b.opt = *o
	}
	if b.opt.Engine == "" {
		b.opt.Engine = EngineAuto
	}
	if b.opt.Depth == 0 {
		b.opt.Depth = 32
	}
	if b.opt.DepthBytes == 0 {
		b.opt.DepthBytes = 12 << 20
	}
	if b.opt.Depth < 0 || b.opt.Depth > 4096 {
		return nil, fmt.Errorf("posix depth %d: %w: want 1 to 4096", b.opt.Depth, xfer.ErrInvalid)
	}
	if b.opt.DepthBytes < 0 {
		return nil, fmt.Errorf("posix depth in bytes %d: %w: want a positive number", b.opt.DepthBytes, xfer.ErrInvalid)
	}
	b.log = b.opt.Logger
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	switch b.opt.Engine {
	case EngineAuto, EngineURing:
		u, err := newURing()
		if err == nil {
			b.engine = u
			break
		}
		if b.opt.Engine == EngineURing {
			return nil, fmt.Errorf("posix engine %s: %w: %w", EngineURing, xfer.ErrUnavailable, err)
		}
		b.note = err.Error()
		b.log.Warn("posix: io_uring does not work, goroutines do the I/O", "err", err)
		b.engine = newPool()
	case EngineGoroutines:
		b.engine = newPool()
	default:
		return nil, fmt.Errorf("posix engine %q: %w: want %s, %s or %s", b.opt.Engine, xfer.ErrInvalid, EngineAuto, EngineURing, EngineGoroutines)
	}
	b.mu.devices = map[uint64]*device{}
	b.mu.files = map[fileKey]*file{}
	return b, nil
}

// Name is "posix".
func (b *Backend) Name() string { return Kind }

// Caps says what the backend can do and which engine was chosen.
func (b *Backend) Caps() xfer.Caps {
	return xfer.Caps{
		Pairs:  []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.FILE}, {Local: xfer.DRAM, Remote: xfer.BLK}},
		Local:  true,
		Align:  pageBytes,
		Engine: b.engine.name(),
	}
}

// begin admits a call; the caller ends it by b.inFlight.Done.
func (b *Backend) begin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.closed {
		return fmt.Errorf("posix: %w", xfer.ErrClosed)
	}
	b.inFlight.Add(1)
	return nil
}

// Close waits for what is in flight and closes files that are still registered.
func (b *Backend) Close() error {
	b.mu.Lock()
	again := b.mu.closed
	b.mu.closed = true
	b.mu.Unlock()
	b.closing.Store(true)
	b.inFlight.Wait()
	b.background.Wait()
	if again {
		return nil
	}
	var errs []error
	for _, f := range b.mu.files { // nobody else is left: no lock
		errs = append(errs, f.close())
	}
	for _, d := range b.mu.devices {
		errs = append(errs, d.close())
	}
	errs = append(errs, b.engine.close())
	return errors.Join(errs...)
}

// counters is what Stats reports, as it is counted.
type counters struct {
	reads, writes, readBytes, writeBytes atomic.Uint64
	joined, bounced, buffered            atomic.Uint64
	waits, failed, canceled              atomic.Uint64
	registered, unregistered             atomic.Int64
}

// Stats is what a backend has done since it was made.
type Stats struct {
	Engine string // as in Caps
	Note   string // why it is not io_uring, when that was tried

	Reads, Writes         uint64 // operations that ended
	ReadBytes, WriteBytes uint64 // described bytes that they moved
	Joined                uint64 // descriptors that Prepare joined to another one's operation
	Bounced               uint64 // operations that took an aligned copy
	Buffered              uint64 // operations through the page cache
	Waits                 uint64 // times that a transfer found its device's queue full
	Failed, Canceled      uint64 // operations

	InFlightOps, InFlightBytes int64 // on all devices, now
	// Memory that the kernel knows, and memory that it would not take, so that
	// every operation on it pays for pinning pages.
	RegisteredBytes, UnregisteredBytes int64
}

// Stats gives a snapshot.
func (b *Backend) Stats() Stats {
	c := &b.count
	s := Stats{
		Engine: b.engine.name(), Note: b.note,
		Reads: c.reads.Load(), Writes: c.writes.Load(), ReadBytes: c.readBytes.Load(), WriteBytes: c.writeBytes.Load(),
		Joined: c.joined.Load(), Bounced: c.bounced.Load(), Buffered: c.buffered.Load(),
		Waits: c.waits.Load(), Failed: c.failed.Load(), Canceled: c.canceled.Load(),
		RegisteredBytes: c.registered.Load(), UnregisteredBytes: c.unregistered.Load(),
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range b.mu.devices {
		ops, bytes := d.load()
		s.InFlightOps += int64(ops)
		s.InFlightBytes += bytes
	}
	return s
}
