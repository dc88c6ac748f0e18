package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvtier/kvtier/index/block"
)

// journal is a file with the hash of each block that a daemon has acknowledged,
// one a line. After a crash it says what the daemon must still have, unless the
// block was evicted since.
type journal struct {
	f   *os.File
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

// add notes a block, to be written by flush.
func (j *journal) add(h block.Hash) {
	j.buf = append(j.buf, h.Hex(traceHashBytes)...)
	j.buf = append(j.buf, '\n')
}

// flush writes what was noted, in one piece.
func (j *journal) flush() error {
	if len(j.buf) == 0 {
		return nil
	}
	_, err := j.f.Write(j.buf)
	j.buf = j.buf[:0]
	if err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	return nil
}

func (j *journal) close() error {
	return errors.Join(j.flush(), j.f.Close())
}

// readJournal reads the hashes of a journal. A last line without its end was
// being written when its writer was killed, and does not count.
func readJournal(path string) (map[block.Hash]struct{}, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	defer f.Close()
	hashes := make(map[block.Hash]struct{})
	r := bufio.NewReader(f)
	for n := 1; ; n++ {
		line, err := r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return hashes, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read journal %s: %w", path, err)
		}
		h, hashLen, err := block.ParseHash(line[:len(line)-1])
		if err == nil && hashLen != traceHashBytes {
			err = fmt.Errorf("%w: hash of %d bytes, want %d", block.ErrInvalid, hashLen, traceHashBytes)
		}
		if err != nil {
			return nil, fmt.Errorf("read journal %s: line %d: %w", path, n, err)
		}
		hashes[h] = struct{}{}
	}
}
