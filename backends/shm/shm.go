package shm

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/frame"
)

// Kind is the backend's name.
const Kind = "shm"

const (
	// notesQueued bounds the notifications that wait to be taken here.
	notesQueued = 256

	// maxServed bounds the connections that peers hold to this process, those that
	// have not said hello included.
	maxServed = 1024
)

// Options are the settings. The zero value is right where all memory may be
// reached by process_vm.
type Options struct {
	// Socket is the path of the backend's socket, at most 107 bytes. A file that a
	// killed process left there is replaced. Empty: a name of its own in a private
	// directory, in XDG_RUNTIME_DIR or else in the directory for temporary files.
	Socket string

	// FileOf finds the memory file behind memory that is being registered, as
	// (*arena.Arena).FileOf does. Files that are not sealed against shrinking are as
	// good as none. The backend keeps a descriptor of its own for as long as memory
	// of the file is registered. Nil: there are no files.
	FileOf func(addr, n uint64) (fd int, off int64, ok bool)

	// AllowPtrace lets every process of this user reach this one's memory where
	// Yama's ptrace_scope 1 forbids it, by prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY),
	// for the whole process and its life. Memory files need no such thing.
	AllowPtrace bool

	// Logger hears of peers that come and go, at debug level, and of what the system
	// refuses. Nil: nobody does.
	Logger *slog.Logger
}

// Backend moves bytes between the DRAM of processes.
type Backend struct {
	o      Options
	log    *slog.Logger
	vm     string      // how good process_vm is here
	self   xfer.PeerID // set by Bind
	notes  chan xfer.Notification
	frames frame.Options
	wg     sync.WaitGroup // of everything that serves or receives
	mu     struct {
		sync.Mutex
		socket   string
		listener *net.UnixListener
		peers    map[xfer.PeerID]*peer
		links    map[*link]struct{} // that peers hold the other end of
		served   map[*served]struct{}
		greeting map[*net.UnixConn]struct{} // connections before their hello
		regions  map[uint64]*region
		files    map[fileKey]*file
		fileIDs  uint64
		closed   bool
	}
	closing sync.Once
}

// New makes a backend. It opens nothing before Bind. Nil options are the zero
// value. Errors: xfer.ErrInvalid for a socket's path that is too long.
func New(o *Options) (*Backend, error) {
	b := &Backend{notes: make(chan xfer.Notification, notesQueued)}
	if o != nil {
		b.o = *o
	}
	if n := len(b.o.Socket); n > maxSocketPath {
		return nil, fmt.Errorf("%w: socket %q: a path of %d bytes, at most %d", xfer.ErrInvalid, b.o.Socket, n, maxSocketPath)
	}
	if b.log = b.o.Logger; b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	b.vm = processVM()
	b.mu.peers = map[xfer.PeerID]*peer{}
	b.mu.links = map[*link]struct{}{}
	b.mu.served = map[*served]struct{}{}
	b.mu.greeting = map[*net.UnixConn]struct{}{}
	b.mu.regions = map[uint64]*region{}
	b.mu.files = map[fileKey]*file{}
	return b, nil
}

// Name is "shm".
func (b *Backend) Name() string { return Kind }

// Caps says that it moves DRAM to and from the DRAM of peers.
func (b *Backend) Caps() xfer.Caps {
	engine := "memory files, process_vm"
	if b.vm != "" {
		engine = "memory files"
	}
	return xfer.Caps{
		Pairs:  []xfer.Pair{{Local: xfer.DRAM, Remote: xfer.DRAM}},
		Remote: true,
		Notify: true,
		Align:  1,
		Engine: engine,
	}
}

// Note says what keeps the backend from reaching all memory, empty when nothing
// does.
func (b *Backend) Note() string { return b.vm }

// processVM says why process_vm does not work here, or not everywhere.
func processVM() string {
	var from, to [1]byte
	local := []unix.Iovec{{Base: &to[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(arena.Addr(from[:])), Len: 1}}
	if _, err := unix.ProcessVMReadv(os.Getpid(), local, remote, 0); err != nil && !errors.Is(err, unix.EFAULT) {
		return fmt.Sprintf("process_vm_readv: %v: only memory files can be reached", err)
	}
	scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if s := strings.TrimSpace(string(scope)); err == nil && s != "0" && os.Geteuid() != 0 {
		return "kernel.yama.ptrace_scope is " + s + ": only memory files can be reached, and processes that allow it"
	}
	return ""
}

// Bind opens the socket.
func (b *Backend) Bind(self xfer.PeerID) error {
	if self.Incarnation == 0 || len(self.Name) > maxName {
		return fmt.Errorf("%w: agent %s: want an incarnation, and a name of at most %d bytes", xfer.ErrInvalid, self, maxName)
	}
	if b.o.AllowPtrace {
		// EINVAL: a kernel without Yama, where it is not needed.
		if err := unix.Prctl(unix.PR_SET_PTRACER, ptracerAny, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("%w: prctl(PR_SET_PTRACER): %w", xfer.ErrUnavailable, err)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.closed:
		return fmt.Errorf("%w: backend shm", xfer.ErrClosed)
	case b.mu.listener != nil:
		return fmt.Errorf("%w: it belongs to agent %s", xfer.ErrInvalid, b.self)
	}
	ln, path, err := listen(b.o.Socket)
	if err != nil {
		return fmt.Errorf("%w: %w", xfer.ErrUnavailable, err)
	}
	b.self, b.mu.listener, b.mu.socket = self, ln, path
	b.wg.Go(func() { b.accept(ln) })
	return nil
}

// ptracerAny is PR_SET_PTRACER_ANY.
const ptracerAny = ^uintptr(0)

// Notifications gives what peers send.
func (b *Backend) Notifications() <-chan xfer.Notification { return b.notes }

// Close ends the backend. Where memory is still registered it waits for peers as
// Deregister does.
func (b *Backend) Close() error {
	var err error
	b.closing.Do(func() { err = b.close() })
	return err
}

func (b *Backend) close() error {
	var errs []error
	b.mu.Lock()
	b.mu.closed = true
	if b.mu.listener != nil {
		errs = append(errs, b.mu.listener.Close()) // and removes the file
	}
	for c := range b.mu.greeting {
		errs = append(errs, c.Close())
	}
	for s := range b.mu.served {
		s.cut()
	}
	for l := range b.mu.links {
		l.end(fmt.Errorf("%w: backend shm", xfer.ErrClosed))
	}
	b.mu.Unlock()
	b.wg.Wait()
	close(b.notes)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.mu.files {
		errs = append(errs, unix.Close(f.fd))
	}
	clear(b.mu.files)
	clear(b.mu.regions)
	return errors.Join(errs...)
}
