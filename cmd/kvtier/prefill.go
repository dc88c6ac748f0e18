package main

import (
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

// parsePrefill reads TOKEN[,POSITION]: what a token at the beginning of a prompt costs,
// and how many ns more one does for each token before it.
func parsePrefill(s string) (p block.Prefill, err error) {
	token, position, more := strings.Cut(s, ",")
	if p.Token, err = time.ParseDuration(token); err != nil {
		return p, fmt.Errorf("prefill cost %q: %q is no duration such as 33us", s, token)
	}
	if more {
		if p.Position, err = strconv.ParseFloat(position, 64); err != nil {
			return p, fmt.Errorf("prefill cost %q: %q is no number of ns", s, position)
		}
	}
	if err := p.Check(); err != nil {
		return p, fmt.Errorf("prefill cost %q: %w", s, err)
	}
	if p == (block.Prefill{}) {
		return p, fmt.Errorf("prefill cost %q: want more than 0", s)
	}
	return p, nil
}

// namedPrefill is the prefill cost of the namespaces that a glob matches.
type namedPrefill struct {
	glob string
	cost block.Prefill
}

// parseNamedPrefill reads GLOB=TOKEN[,POSITION].
func parseNamedPrefill(s string) (n namedPrefill, err error) {
	i := strings.LastIndexByte(s, '=')
	if i < 1 {
		return n, fmt.Errorf("prefill %q: want GLOB=TOKEN[,POSITION]", s)
	}
	n.glob = s[:i]
	if _, err := path.Match(n.glob, ""); err != nil {
		return n, fmt.Errorf("prefill %q: glob %q: %w", s, n.glob, err)
	}
	n.cost, err = parsePrefill(s[i+1:])
	return n, err
}

// checkPrefill is parseNamedPrefill for a flag's check.
func checkPrefill(s string) error {
	_, err := parseNamedPrefill(s)
	return err
}

// prefills finds the cost of a namespace by its name: the first that matches.
type prefills []namedPrefill

func (all prefills) of(name string) block.Prefill {
	for _, n := range all {
		if ok, err := path.Match(n.glob, name); ok && err == nil {
			return n.cost
		}
	}
	return block.Prefill{}
}

// prefillValue is a flag that holds a prefill cost.
type prefillValue struct{ p *block.Prefill }

// String gives the cost as it is read.
func (v *prefillValue) String() string {
	if v.p == nil || *v.p == (block.Prefill{}) {
		return ""
	}
	return fmt.Sprintf("%v,%v", v.p.Token, v.p.Position)
}

// formatPrefill writes a cost as it is read, with no more digits than are known.
func formatPrefill(p block.Prefill) string {
	return fmt.Sprintf("%v,%.3g", p.Token, p.Position)
}

// Set reads a cost.
func (v *prefillValue) Set(s string) (err error) {
	*v.p, err = parsePrefill(s)
	return err
}

// Type is the name that help shows.
func (v *prefillValue) Type() string { return "TOKEN[,POSITION]" }
