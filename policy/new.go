package policy

import (
	"fmt"
	"strings"

	"github.com/kvtier/kvtier/index/block"
)

// Default is the name of the policy that a tier has if nothing else is said: none of
// the others is good at every capacity.
const Default = "switch"

// table lists the policies by the names that flags know.
func table() []entry {
	return []entry{
		{"lru-leaf", func() Policy { return NewLRULeaf() }},
		{"s3-ghost", func() Policy { return NewS3Ghost() }},
		{"arc", func() Policy { return NewARC() }},
		{"gdsf", func() Policy { return NewGDSF() }},
		{"switch", func() Policy { return NewSwitch() }},
	}
}

type entry struct {
	name string
	make func() Policy
}

// Names lists the policies that New knows.
func Names() []string {
	var names []string
	for _, e := range table() {
		names = append(names, e.name)
	}
	return names
}

// New returns an empty policy by name. It fails with block.ErrInvalid and lists
// the names there are when the name is none of them.
func New(name string) (Policy, error) {
	for _, e := range table() {
		if e.name == name {
			return e.make(), nil
		}
	}
	return nil, fmt.Errorf("%w: policy %q: want one of %s", block.ErrInvalid, name, strings.Join(Names(), ", "))
}
