package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
)

// region is a file of the client's. Nothing keeps its owner from cutting it short.
type region struct {
	mem    *arena.Foreign
	broken atomic.Bool // it was cut short while it was used: what it holds means nothing any more
}

// regions are those of a session, in the order of its hello. They are mapped from the
// hello to the end of the session, and do not change between.
type regions struct {
	srv   *Server
	all   []region
	bytes int64 // of all
}

// register maps the regions of a session's hello within the time of ctx. The files are
// not the caller's any more.
func (s *session) register(ctx context.Context, c net.Conn, m *HelloMessage, files []int) error {
	var err error
	if s.regions, err = s.srv.openRegions(ctx, s.cred, m.Regions, files); err != nil {
		return err
	}
	if s.held, err = holdSocket(c); err != nil {
		return errors.Join(fmt.Errorf("regions: %w", err), s.srv.dropRegions(&s.regions))
	}
	return nil
}

// unregister takes back what the hello of a session that does not begin has taken.
func (s *session) unregister() {
	if err := s.srv.dropRegions(&s.regions); err != nil {
		s.srv.log.Warn("regions of a session", "err", err)
	}
	s.held.close()
	s.process.close()
}

// registerRegions maps what the hello of a client lists. Nothing is mapped when it
// fails. It may be held up by the files' file systems; ctx ends it between two files.
func (s *Server) registerRegions(ctx context.Context, client *unix.Ucred, list []HelloRegion, files []int) (rs regions, err error) {
	if client == nil {
		return rs, invalid("regions: they need a unix socket")
	}
	passed := 0
	for i := range list {
		switch r := &list[i]; {
		case r.Length == 0 || r.Length > uint64(s.o.RegionBytes):
			return rs, regionError(i, invalid("length: %d bytes, want 1 to %d", r.Length, s.o.RegionBytes))
		case r.Path == "":
			passed++
		}
		rs.bytes += int64(list[i].Length) // MaxRegions of RegionBytes do not overflow, see withDefaults
	}
	switch {
	case len(list) > s.o.Regions:
		return rs, invalid("regions: %d of them, at most %d", len(list), s.o.Regions)
	case rs.bytes > s.o.RegionBytes:
		return rs, invalid("regions: %d bytes together, at most %d", rs.bytes, s.o.RegionBytes)
	case passed != len(files):
		return rs, invalid("regions: %d files came, for %d regions without a path", len(files), passed)
	}
	if err := s.takeRegions(len(list), rs.bytes); err != nil {
		return rs, err
	}
	rs.srv, rs.all = s, make([]region, len(list))
	for i := range list {
		r, fd := &list[i], -1
		if r.Path == "" {
			fd, files = files[0], files[1:]
		}
		if err = ctx.Err(); err == nil {
			rs.all[i].mem, err = mapRegion(r, fd, client.Uid)
		}
		if err != nil {
			return rs, errors.Join(regionError(i, err), s.dropRegions(&rs))
		}
	}
	return rs, nil
}

func regionError(i int, err error) error { return fmt.Errorf("region %d: %w", i, err) }

// mapRegion maps one region of a user's: fd, or the file at its path.
func mapRegion(r *HelloRegion, fd int, user uint32) (*arena.Foreign, error) {
	if r.Path != "" {
		if r.Path[0] != '/' {
			return nil, invalid("path: %q, want one from the root", r.Path)
		}
		// Only looked at: opening it could wait, or set something off.
		at, err := openFile(r.Path, unix.O_PATH|unix.O_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL):
			return nil, invalid("path: %q", r.Path)
		case errors.Is(err, block.ErrNoSpace):
			return nil, err
		case err != nil: // not what keeps it from being opened: the server may look where the client may not
			return nil, notOf(user)
		}
		defer unix.Close(at)
		fd = at
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("look at the file: %w", err)
	}
	switch {
	case st.Uid != user: // first, so that nobody is told more of another's file
		return nil, notOf(user)
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, invalid("file of mode %#o, want a regular one", st.Mode)
	}
	if r.Path != "" {
		flags := unix.O_RDWR
		if r.ReadOnly {
			flags = unix.O_RDONLY
		}
		// The very file that was looked at. Without waiting for whoever has a lease on it.
		file, err := openFile(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_NONBLOCK)
		if err != nil {
			return nil, err
		}
		defer unix.Close(file)
		fd = file
	}
	mem, err := arena.MapForeign(fd, int64(r.Length), !r.ReadOnly)
	switch {
	case errors.Is(err, unix.ENOMEM):
		return nil, fmt.Errorf("%w: %w", block.ErrNoSpace, err)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", block.ErrInvalid, err)
	}
	return mem, nil
}

// notOf is why a file that is another user's, or not there, is no region.
func notOf(user uint32) error {
	return fmt.Errorf("%w: no file of user %d, who the client is", block.ErrDenied, user)
}

func openFile(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
			return -1, fmt.Errorf("open: %w: %w", block.ErrNoSpace, err)
		case errors.Is(err, os.ErrPermission):
			return -1, fmt.Errorf("open: %w: %w", block.ErrDenied, err)
		case err != nil:
			return -1, fmt.Errorf("open: %w: %w", block.ErrInvalid, err)
		default:
			return fd, nil
		}
	}
}

// takeRegions counts regions among those of all sessions: addresses, and mappings, are
// the process's.
func (s *Server) takeRegions(n int, bytes int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.regions+n > s.o.AllRegions:
		return fmt.Errorf("regions: %w: all sessions have %d, at most %d", block.ErrNoSpace, s.mu.regions, s.o.AllRegions)
	case bytes > s.o.AllRegionBytes-s.mu.regionBytes:
		return fmt.Errorf("regions: %w: all sessions have %d bytes, at most %d", block.ErrNoSpace, s.mu.regionBytes, s.o.AllRegionBytes)
	}
	s.mu.regions += n
	s.mu.regionBytes += bytes
	return nil
}

// dropRegions unmaps the regions of a session, which nobody touches any more.
func (s *Server) dropRegions(rs *regions) error {
	var errs []error
	for i := range rs.all {
		if m := rs.all[i].mem; m != nil {
			errs = append(errs, m.Close())
		}
	}
	s.mu.Lock()
	s.mu.regions -= len(rs.all)
	s.mu.regionBytes -= rs.bytes
	*rs = regions{} // under the lock, for who counts those of a session
	s.mu.Unlock()
	return errors.Join(errs...)
}

// check says why a block cannot lie in segs, or how many bytes they have together.
func (rs *regions) check(segs []Segment, write bool) (bytes int64, err error) {
	for i := range segs {
		g := &segs[i]
		if int(g.Region) >= len(rs.all) {
			return 0, invalid("segment %d: region %d, of %d", i, g.Region, len(rs.all))
		}
		r := &rs.all[g.Region]
		switch n := uint64(r.mem.Len()); {
		case g.Offset > n || uint64(g.Length) > n-g.Offset:
			return 0, invalid("segment %d: %d bytes at %d of region %d, which has %d", i, g.Length, g.Offset, g.Region, n)
		case write && !r.mem.Writable():
			return 0, invalid("segment %d: region %d may only be read", i, g.Region)
		case r.broken.Load():
			return 0, truncated(int(g.Region))
		}
		bytes += int64(g.Length)
	}
	return bytes, nil
}

func truncated(i int) error {
	return invalid("region %d was truncated, or its file system has no memory left", i)
}

// regionStep is how much is copied before it is hashed: both find it in the nearest
// caches, which 256 KiB, the step of the socket's frames, does not (8 % of the time).
const regionStep = 64 << 10

// segmented is where one block lies in regions, as far as it was not moved yet.
type segmented struct {
	rs   *regions
	segs []Segment // which check has let through
	at   int       // bytes of the first that were moved
}

// move copies mem, or what comes next in the regions: to them when out is set, else
// into mem. It fails when a region was cut short; some bytes may have been copied then.
func (s *segmented) move(mem []byte, out bool) error {
	err := arena.Guard(func() {
		for len(mem) > 0 {
			g := &s.segs[0]
			there := s.rs.all[g.Region].mem.Bytes()[g.Offset:][s.at:g.Length]
			var n int
			if out {
				n = copy(there, mem)
			} else {
				n = copy(mem, there)
			}
			mem = mem[n:]
			if s.at += n; n == len(there) {
				s.segs, s.at = s.segs[1:], 0
			}
		}
	})
	if err == nil {
		return nil
	}
	var fault *arena.Fault
	if errors.As(err, &fault) {
		for i := range s.rs.all {
			if r := &s.rs.all[i]; r.mem.Holds(fault.Addr) {
				if !r.broken.Swap(true) {
					s.rs.srv.stats.regionFaults.Add(1)
					s.rs.srv.log.Warn("a client's region was cut short", "region", i, "bytes", r.mem.Len())
				}
				return truncated(i)
			}
		}
	}
	panic(err) // memory of the store's own
}
