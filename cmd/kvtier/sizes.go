package main

import (
	"fmt"
	"math"
	"math/big"
	"strings"

	"github.com/spf13/pflag"
)

// sizeUnits are the suffixes of a size, in lower case. A unit of one letter is
// binary, as in coreutils; KB, MB and so on are the decimal ones.
var sizeUnits = map[string]int64{
	"": 1, "b": 1,
	"k": 1 << 10, "ki": 1 << 10, "kib": 1 << 10, "kb": 1e3,
	"m": 1 << 20, "mi": 1 << 20, "mib": 1 << 20, "mb": 1e6,
	"g": 1 << 30, "gi": 1 << 30, "gib": 1 << 30, "gb": 1e9,
	"t": 1 << 40, "ti": 1 << 40, "tib": 1 << 40, "tb": 1e12,
}

// parseSize reads a number of bytes such as 4GiB, 1.5G, 64KiB, 10MB or 1048576.
// It fails, naming the value, on anything that is not a whole number of bytes
// between 0 and the largest int64.
func parseSize(s string) (int64, error) {
	if len(s) > 1 && s[0] == '-' && '0' <= s[1] && s[1] <= '9' {
		return 0, fmt.Errorf("size %q: negative", s)
	}
	digits := strings.TrimLeft(s, "0123456789.")
	number, unit := s[:len(s)-len(digits)], digits
	scale, ok := sizeUnits[strings.ToLower(unit)]
	if !ok {
		return 0, fmt.Errorf("size %q: unknown unit %q, want B, KiB, MiB, GiB or TiB", s, unit)
	}
	if number == "" || strings.HasPrefix(number, ".") || strings.HasSuffix(number, ".") || strings.Count(number, ".") > 1 {
		return 0, fmt.Errorf("size %q: not a number of bytes such as 4GiB", s)
	}
	if len(number) > 32 {
		return 0, fmt.Errorf("size %q: too large", s)
	}
	r, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, fmt.Errorf("size %q: not a number of bytes such as 4GiB", s)
	}
	r.Mul(r, new(big.Rat).SetInt64(scale))
	switch {
	case !r.IsInt():
		return 0, fmt.Errorf("size %q: not a whole number of bytes", s)
	case !r.Num().IsInt64():
		return 0, fmt.Errorf("size %q: too large, at most %d bytes", s, int64(math.MaxInt64))
	}
	return r.Num().Int64(), nil
}

// formatSize writes a number of bytes exactly, in the largest unit of which it
// is a multiple, so that parseSize reads the same number again.
func formatSize(n int64) string {
	for _, u := range []struct {
		scale int64
		name  string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n != 0 && n%u.scale == 0 {
			return fmt.Sprintf("%d%s", n/u.scale, u.name)
		}
	}
	return fmt.Sprintf("%d", n)
}

// formatSizeShort writes a number of bytes for people, with at most one digit
// behind the point: 3.7 GiB.
func formatSizeShort(n int64) string {
	const units = "KMGTPE"
	if n > -1024 && n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f := float64(n)
	i := -1
	for math.Abs(f) >= 1024 && i < len(units)-1 {
		f /= 1024
		i++
	}
	// 1023.96 KiB would print as 1024.0 KiB.
	if math.Abs(f) >= 1023.95 && i < len(units)-1 {
		f /= 1024
		i++
	}
	return fmt.Sprintf("%.1f %ciB", f, units[i])
}

// sizeValue is a flag that holds a number of bytes. If it has a word it also takes
// that, which is kept as wordSize.
type sizeValue struct {
	n    *int64
	word string
}

// wordSize stands for the word that a flag takes in the place of a size.
const wordSize int64 = -1

// sizeVar adds a flag that holds a number of bytes.
func sizeVar(fs *pflag.FlagSet, p *int64, name string, value int64, usage string) {
	*p = value
	fs.Var(&sizeValue{n: p}, name, usage)
}

// String gives the size as formatSize writes it.
func (v *sizeValue) String() string {
	if v.n == nil {
		return ""
	}
	if *v.n == wordSize && v.word != "" {
		return v.word
	}
	return formatSize(*v.n)
}

// Set reads a size.
func (v *sizeValue) Set(s string) error {
	if v.word != "" && s == v.word {
		*v.n = wordSize
		return nil
	}
	n, err := parseSize(s)
	if err != nil {
		return err
	}
	*v.n = n
	return nil
}

// Type is the name that help shows.
func (v *sizeValue) Type() string { return "size" }
