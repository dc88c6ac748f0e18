package session

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// passing hands the files of a partitioned memory to one client, each before the first
// message that names its chunk, over a socket of packets beside the session's
// connection. So it waits for nothing: a chunk for which the socket has no room is not
// named, and its bytes are sent.
type passing struct {
	s    *session
	sock *os.File
	raw  interface{ Control(func(fd uintptr)) error }
	mu   struct {
		sync.Mutex
		told   map[uint32]struct{} // chunks whose files the client has, or will have received
		rights map[block.NamespaceID]access.Right
	}
}

// newPassing returns the client's end as well, which is to be closed once it is sent.
func newPassing(s *session) (p *passing, end int, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socket for memory files: %w", err)
	}
	p = &passing{s: s, sock: os.NewFile(uintptr(pair[0]), "memory files")}
	if p.raw, err = p.sock.SyscallConn(); err != nil {
		return nil, -1, errors.Join(fmt.Errorf("socket for memory files: %w", err), p.sock.Close(), unix.Close(pair[1]))
	}
	p.mu.told = map[uint32]struct{}{}
	p.mu.rights = map[block.NamespaceID]access.Right{}
	return p, pair[1], nil
}

// close lets go of the socket; nil is allowed.
func (p *passing) close() {
	if p != nil {
		_ = p.sock.Close() // nothing is lost that the client still needs
	}
}

// names reports whether the client has the file of a chunk, in which something of a
// namespace lies that it holds, so that it can be told the place. All blocks of a chunk
// are of namespaces with which it may do the same.
func (p *passing) names(chunk int, ns block.NamespaceID, need access.Right) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	have, ok := p.mu.rights[ns]
	if !ok {
		n, err := p.s.srv.namespace(ns, 0)
		if err != nil {
			return false
		}
		have = p.s.identity.Rights(n.name)
		p.mu.rights[ns] = have
	}
	// Who may write and not read would find what others have put.
	if need |= access.Read; have&need != need {
		return false
	}
	number := uint32(chunk)
	if _, ok := p.mu.told[number]; ok {
		return true
	}
	if err := p.pass(number, have&access.Write != 0); err != nil {
		p.s.srv.stats.unpassed.Add(1)
		p.s.srv.log.Debug("memory is not passed", "session", fmt.Sprintf("%016x", p.s.id), "chunk", number, "err", err)
		return false
	}
	p.mu.told[number] = struct{}{}
	return true
}

// pass sends a chunk's file, and names chunks that are gone. It needs the lock.
func (p *passing) pass(number uint32, write bool) error {
	store := p.s.srv.store
	f, err := store.OpenChunk(number, write)
	if err != nil {
		return err
	}
	defer unix.Close(f.Fd)
	var gone []uint32
	for n := range p.mu.told {
		if len(gone) < maxGone && store.ChunkGone(n) {
			gone = append(gone, n)
		}
	}
	b := packet(&PassedMessage{Chunk: number, Length: uint64(f.Bytes), Gone: gone})
	rights := unix.UnixRights(f.Fd)
	cerr := p.raw.Control(func(fd uintptr) {
		for {
			if err = unix.Sendmsg(int(fd), b, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	if err = errors.Join(err, cerr); err != nil {
		return fmt.Errorf("pass the file of chunk %d: %w", number, err)
	}
	for _, n := range gone {
		delete(p.mu.told, n)
	}
	return nil
}

// pass makes the socket on which the files of a partitioned memory come to a session,
// and says so in its welcome. sent is to be called when the client's end was sent.
func (s *Server) pass(sess *session, c net.Conn, w *WelcomeMessage) (fds []int, sent func()) {
	sent = func() {}
	if _, local := c.(*net.UnixConn); !local || !s.store.Partitioned() {
		return nil, sent
	}
	var err error
	var end int
	if sess.process, err = peerProcess(c); err == nil {
		if sess.passing, end, err = newPassing(sess); err != nil {
			sess.process.close()
			sess.process = nil
		}
	}
	if err != nil {
		s.log.Warn("memory is not shared with a client", "peer", c.RemoteAddr().String(), "name", sess.name, "err", err)
		return nil, sent
	}
	w.Features |= FeatureChunks
	fds = []int{end}
	return fds, func() { closeFiles(fds) }
}

// mapsChunk reports whether the client can be told of a place in the store's memory: it
// has the file that it is in.
func (s *session) mapsChunk(chunk int, ns block.NamespaceID, need access.Right) bool {
	if s.passing != nil {
		return s.passing.names(chunk, ns, need)
	}
	return s.memory&need == need
}
