package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/kvtier/kvtier/index/block"
)

// journal is a file with the hash of each block that a daemon has acknowledged,
// one a line. After a crash it says what the daemon must still have, unless the
// block was evicted since.
type journal struct {
	f *os.File

	mu  sync.Mutex
	buf []byte
}

// openJournal appends to the file at path, which is made when absent.
func openJournal(path string) (*journal, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	return &journal{f: f}, nil
}

// write adds blocks, all in one piece. It is safe for concurrent use.
func (j *journal) write(hashes []block.Hash) error {
	if len(hashes) == 0 {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.buf = j.buf[:0]
	for _, h := range hashes {
		j.buf = append(j.buf, h.Hex(traceHashBytes)...)
		j.buf = append(j.buf, '\n')
	}
	if _, err := j.f.Write(j.buf); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	return nil
}

func (j *journal) close() error { return j.f.Close() }

// readJournal reads the hashes of a journal.
func readJournal(path string) (map[block.Hash]struct{}, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	defer f.Close()
	hashes, err := parseJournal(f)
	if err != nil {
		return nil, fmt.Errorf("read journal %s: %w", path, err)
	}
	return hashes, nil
}

// parseJournal reads what journal.write has written; anything else fails with
// block.ErrInvalid. A last line without its end was being written when its
// writer was killed, and does not count.
func parseJournal(src io.Reader) (map[block.Hash]struct{}, error) {
	hashes := make(map[block.Hash]struct{})
	r := bufio.NewReader(src)
	for n := 1; ; n++ {
		line, err := r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return hashes, nil
		}
		if err != nil {
			return nil, err
		}
		line = line[:len(line)-1]
		h, hashLen, err := block.ParseHash(line)
		switch {
		case err != nil:
		case hashLen != traceHashBytes:
			err = fmt.Errorf("%w: hash of %d bytes, want %d", block.ErrInvalid, hashLen, traceHashBytes)
		case h.Hex(hashLen) != line:
			err = fmt.Errorf("%w: hash %s: upper case", block.ErrInvalid, line)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		hashes[h] = struct{}{}
	}
}
