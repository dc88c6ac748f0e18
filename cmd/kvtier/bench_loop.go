package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/kvtier/kvtier/internal/arena"
)

// The bare loop is the limit of everything that goes over a socket: a request of 24
// bytes, and what it asks for, without a store, a checksum or a second request under
// way. Its memory is on the same pages as that of what is measured.

// loopBytes is the size of a request and of the answer's head.
const loopBytes = 24

// What a request of the bare loop asks for.
const (
	loopGet  = 1 // so many bytes at an offset of the server's memory
	loopPut  = 2 // to take the bytes that follow
	loopDisk = 3 // so many bytes at an offset of its file, by O_DIRECT
)

// loopServer is the server of the bare loop, in a process of its own.
type loopServer struct {
	mem  *arena.Arena
	huge bool     // whether the buffer for what is read from disk takes huge pages
	file *os.File // nil without one
}

// serve answers connections until the listener is closed.
func (s *loopServer) serve(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		go func() {
			defer c.Close()
			if err := s.answer(c); err != nil && !errors.Is(err, io.EOF) {
				fmt.Fprintf(os.Stderr, "bare loop: %v\n", err)
			}
		}()
	}
}

// answer answers one connection, in its own part of the memory for what is read
// from disk.
func (s *loopServer) answer(c net.Conn) error {
	head := make([]byte, loopBytes)
	buf, err := arena.New(loopDiskBytes, &arena.Options{NoHugePages: !s.huge})
	if err != nil {
		return err
	}
	defer buf.Close()
	var vec net.Buffers
	for {
		if _, err := io.ReadFull(c, head); err != nil {
			return err
		}
		op, n, off := binary.LittleEndian.Uint64(head), int64(binary.LittleEndian.Uint64(head[8:])), int64(binary.LittleEndian.Uint64(head[16:]))
		var p []byte
		switch op {
		case loopGet:
			p = s.mem.Slice(off, n)
		case loopPut:
			if _, err := io.ReadFull(c, s.mem.Slice(off, n)); err != nil {
				return err
			}
		case loopDisk:
			p = buf.Slice(0, n)
			if _, err := s.file.ReadAt(p, off); err != nil {
				return err
			}
		default:
			return fmt.Errorf("request %d", op)
		}
		vec = append(vec[:0], head)
		if p != nil {
			vec = append(vec, p)
		}
		v := vec
		if _, err := v.WriteTo(c); err != nil {
			return err
		}
	}
}

// loopDiskBytes is the most that is read from disk at a time.
const loopDiskBytes = 8 << 20

// loopClient is one connection to the server of the bare loop.
type loopClient struct {
	c    net.Conn
	head [loopBytes]byte
	vec  net.Buffers
}

func dialLoop(ctx context.Context, network, addr string) (*loopClient, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("connect to the bare loop: %w", err)
	}
	return &loopClient{c: c}, nil
}

func (l *loopClient) request(op uint64, n int, off int64) []byte {
	binary.LittleEndian.PutUint64(l.head[:], op)
	binary.LittleEndian.PutUint64(l.head[8:], uint64(n))
	binary.LittleEndian.PutUint64(l.head[16:], uint64(off))
	return l.head[:]
}

// get fetches len(p) bytes, from memory or by op loopDisk from the file.
func (l *loopClient) get(op uint64, p []byte, off int64) error {
	if _, err := l.c.Write(l.request(op, len(p), off)); err != nil {
		return err
	}
	if _, err := io.ReadFull(l.c, l.head[:]); err != nil {
		return err
	}
	_, err := io.ReadFull(l.c, p)
	return err
}

// put sends bytes.
func (l *loopClient) put(p []byte, off int64) error {
	l.vec = append(l.vec[:0], l.request(loopPut, len(p), off), p)
	v := l.vec
	if _, err := v.WriteTo(l.c); err != nil {
		return err
	}
	_, err := io.ReadFull(l.c, l.head[:])
	return err
}
