package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// noArgs accepts no arguments. Unlike cobra's it does not take one for a command.
func noArgs(c *cobra.Command, args []string) error { return noArgsWith("")(c, args) }

// noArgsWith accepts no arguments beside a flag that stands in their place.
func noArgsWith(flag string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		name := c.CommandPath()
		if flag != "" {
			name += " " + flag
		}
		return usageErrorf("%s takes no arguments: %q", name, args[0])
	}
}

// enumValue is a flag that holds one of a few words.
type enumValue struct {
	p     *string
	words []string
}

// enumVar adds a flag that holds one of words.
func enumVar(fs *pflag.FlagSet, p *string, name, value, usage string, words ...string) {
	*p = value
	fs.Var(&enumValue{p: p, words: words}, name, usage)
}

// String gives the word.
func (v *enumValue) String() string {
	if v.p == nil {
		return ""
	}
	return *v.p
}

// Set takes a word.
func (v *enumValue) Set(s string) error {
	if !slices.Contains(v.words, s) {
		return fmt.Errorf("%q: want %s", s, strings.Join(v.words, ", "))
	}
	*v.p = s
	return nil
}

// Type is the name that help shows.
func (v *enumValue) Type() string { return "word" }

// shareValue is a flag that holds a share, from 0 to 1.
type shareValue struct{ p *float64 }

// shareVar adds a flag that holds a share, from 0 to 1.
func shareVar(fs *pflag.FlagSet, p *float64, name string, value float64, usage string) {
	*p = value
	fs.Var(&shareValue{p: p}, name, usage)
}

// String gives the share.
func (v *shareValue) String() string {
	if v.p == nil {
		return ""
	}
	return strconv.FormatFloat(*v.p, 'g', -1, 64)
}

// Set reads a share.
func (v *shareValue) Set(s string) error {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f >= 0 && f <= 1) {
		return fmt.Errorf("%q: want a number from 0 to 1", s)
	}
	*v.p = f
	return nil
}

// Type is the name that help shows.
func (v *shareValue) Type() string { return "share" }

// listValue is a flag that may be repeated. check, which may be nil, refuses a
// value. The first use replaces the default.
type listValue struct {
	p     *[]string
	kind  string
	check func(string) error
	set   bool
}

// String gives the values with commas between them.
func (v *listValue) String() string {
	if v.p == nil || len(*v.p) == 0 {
		return ""
	}
	return strings.Join(*v.p, ",")
}

// Set adds a value.
func (v *listValue) Set(s string) error {
	if v.check != nil {
		if err := v.check(s); err != nil {
			return err
		}
	}
	if !v.set {
		*v.p = nil
		v.set = true
	}
	*v.p = append(*v.p, s)
	return nil
}

// Type is the name that help shows.
func (v *listValue) Type() string { return v.kind }

// Replace puts values in the place of those there.
func (v *listValue) Replace(values []string) error {
	if v.check != nil {
		for _, s := range values {
			if err := v.check(s); err != nil {
				return err
			}
		}
	}
	*v.p = slices.Clone(values)
	return nil
}

// GetSlice gives the values.
func (v *listValue) GetSlice() []string { return *v.p }

// addrValue is a flag that holds HOST:PORT, or "" for off.
type addrValue struct{ p *string }

// String gives the address.
func (v *addrValue) String() string {
	if v.p == nil {
		return ""
	}
	return *v.p
}

// Set takes an address.
func (v *addrValue) Set(s string) error {
	if err := checkTCP(s); err != nil {
		return err
	}
	*v.p = s
	return nil
}

// Type is the name that help shows.
func (v *addrValue) Type() string { return "address" }
