package main

import (
	"strings"

	"github.com/kvtier/kvtier/index/block"
)

// parseHashes reads hashes written in hex. All must have one length, which it
// returns in bytes.
func parseHashes(args []string) (hashes []block.Hash, hashLen int, err error) {
	hashes = make([]block.Hash, 0, len(args))
	for i, arg := range args {
		h, n, err := block.ParseHash(arg)
		if err != nil {
			return nil, 0, &exitError{exitUsage, err}
		}
		if i > 0 && n != hashLen {
			return nil, 0, usageErrorf("hash %q: length %d bytes, the ones before it have %d", arg, n, hashLen)
		}
		hashes, hashLen = append(hashes, h), n
	}
	return hashes, hashLen, nil
}

// parseRange reads OFF:LEN, both numbers of bytes as parseSize reads them. LEN
// may be absent, which asks for all from OFF on.
func parseRange(s string) (off, length int64, err error) {
	from, upTo, ok := strings.Cut(s, ":")
	if !ok {
		return 0, 0, usageErrorf("range %q: want OFF:LEN", s)
	}
	if off, err = parseSize(from); err != nil {
		return 0, 0, usageErrorf("range %q: %w", s, err)
	}
	if upTo == "" {
		return off, 0, nil
	}
	if length, err = parseSize(upTo); err != nil {
		return 0, 0, usageErrorf("range %q: %w", s, err)
	}
	if length == 0 {
		return 0, 0, usageErrorf("range %q: length 0", s)
	}
	return off, length, nil
}
