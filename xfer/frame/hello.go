package frame

import (
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// maxFiles bounds the open files that come with a hello: what one message of a unix
// socket can carry.
const maxFiles = 253

// SendHello sends the first frame of a side, before the connection becomes a Conn.
// files are passed along on a unix socket; the caller keeps its own. It waits for as
// long as the connection's deadline allows, which is the caller's to set and NewConn
// clears.
func SendHello(c net.Conn, payload []byte, files []int) error {
	if len(payload) > MaxHello || len(files) > maxFiles {
		return fmt.Errorf("send hello: %w: %d bytes and %d files, at most %d and %d", ErrFrame, len(payload), len(files), MaxHello, maxFiles)
	}
	h := Header{Length: uint32(len(payload)), Type: Hello}
	b := append(h.Append(nil), payload...)
	if len(files) > 0 {
		u, ok := c.(*net.UnixConn)
		if !ok {
			return fmt.Errorf("send hello: %w: files over %T", ErrFrame, c)
		}
		n, _, err := u.WriteMsgUnix(b, unix.UnixRights(files...), nil)
		if err != nil {
			return fmt.Errorf("send hello: %w", err)
		}
		if b = b[n:]; len(b) == 0 { // the files went with the first byte
			return nil
		}
	}
	if _, err := c.Write(b); err != nil {
		return fmt.Errorf("send hello: %w", err)
	}
	return nil
}

// RecvHello receives what SendHello sent, and not a byte more. The files, of which
// there may be more than wanted, are the caller's to close; on error there are none.
// It is an ErrFrame when something else arrives, ErrBye when the peer refuses. It
// waits for as long as the connection's deadline allows, which is the caller's to set
// and NewConn clears: a stranger may say nothing for ever.
func RecvHello(c net.Conn) (payload []byte, files []int, err error) {
	head := make([]byte, HeaderBytes)
	read := 0
	if u, ok := c.(*net.UnixConn); ok {
		read, files, err = recvFiles(u, head)
	}
	if err == nil {
		payload, err = recvHello(c, head, read)
	}
	if err != nil {
		for _, fd := range files {
			_ = unix.Close(fd) // of no use without the rest
		}
		return nil, nil, fmt.Errorf("receive hello: %w", err)
	}
	return payload, files, nil
}

// recvHello receives what is missing of the header, and the payload.
func recvHello(c net.Conn, head []byte, read int) ([]byte, error) {
	if _, err := io.ReadFull(c, head[read:]); err != nil {
		if read > 0 {
			err = torn(err)
		}
		return nil, err
	}
	h, err := ParseHeader(head)
	switch {
	case err != nil:
		return nil, err
	case h.Type != Hello && h.Type != Bye:
		return nil, fmt.Errorf("%w: type %d in place of the hello", ErrFrame, h.Type)
	case h.Length > MaxHello:
		return nil, fmt.Errorf("%w: hello of %d bytes, at most %d", ErrFrame, h.Length, MaxHello)
	}
	payload := make([]byte, h.Length)
	if _, err := io.ReadFull(c, payload); err != nil {
		return nil, torn(err)
	}
	if h.Type == Bye {
		return nil, fmt.Errorf("%w: %q", ErrBye, payload[:min(len(payload), byeBytes)])
	}
	return payload, nil
}

// recvFiles receives at least one byte of the header, and the files that came with it:
// later reads take none.
func recvFiles(c *net.UnixConn, head []byte) (n int, files []int, err error) {
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	n, oobn, flags, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return n, nil, err
	}
	files, err = parseRights(oob[:oobn])
	switch {
	case err != nil:
	case flags&unix.MSG_CTRUNC != 0:
		err = fmt.Errorf("%w: files were cut off", ErrFrame)
	case n == 0:
		err = io.EOF
	}
	return n, files, err
}

func parseRights(oob []byte) (files []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if errors.Is(err, unix.EINVAL) {
			continue // not of files
		}
		if err != nil {
			return files, fmt.Errorf("control message: %w", err)
		}
		files = append(files, fds...)
	}
	return files, nil
}
