package main

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/kvtier/kvtier/tiers"
)

// namedRule is the rule of the namespaces that a glob matches.
type namedRule struct {
	glob string
	rule tiers.ObjectRule
}

// objectModes are the modes by their names.
var objectModes = map[string]tiers.ObjectMode{"back": tiers.WriteBack, "through": tiers.WriteThrough, "off": tiers.NoObjects}

// parseObjectRule reads GLOB=MODE[,KEEP].
func parseObjectRule(s string) (n namedRule, err error) {
	i := strings.LastIndexByte(s, '=')
	if i < 1 {
		return n, fmt.Errorf("object mode %q: want GLOB=MODE[,KEEP]", s)
	}
	n.glob = s[:i]
	if _, err := path.Match(n.glob, ""); err != nil {
		return n, fmt.Errorf("object mode %q: glob %q: %w", s, n.glob, err)
	}
	mode, keep, kept := strings.Cut(s[i+1:], ",")
	var known bool
	if n.rule.Mode, known = objectModes[mode]; !known {
		return n, fmt.Errorf("object mode %q: %q: want back, through or off", s, mode)
	}
	if !kept {
		return n, nil
	}
	n.rule.Keep, err = time.ParseDuration(keep)
	switch {
	case err != nil:
		return n, fmt.Errorf("object mode %q: %q is no duration such as 720h", s, keep)
	case n.rule.Mode == tiers.NoObjects:
		return n, fmt.Errorf("object mode %q: off and a time to keep exclude each other: nothing is written", s)
	case n.rule.Keep < time.Second || n.rule.Keep%time.Second != 0:
		return n, fmt.Errorf("object mode %q: %v: want whole seconds, at least one", s, n.rule.Keep)
	}
	return n, nil
}

// checkObjectRule is parseObjectRule for a flag's check.
func checkObjectRule(s string) error {
	_, err := parseObjectRule(s)
	return err
}

// objectRules finds the rule of a namespace by its name: the first that matches.
type objectRules []namedRule

func (all objectRules) of(name string) tiers.ObjectRule {
	for _, n := range all {
		if ok, err := path.Match(n.glob, name); ok && err == nil {
			return n.rule
		}
	}
	return tiers.ObjectRule{}
}

// planObjects checks what is said of the object tier. Where there is none it would be ignored
// in silence, and so would a rule behind one that matches every namespace.
func (p *servePlan) planObjects(f *serveFlags) error {
	switch {
	case f.uploadBytes < minUploadBytes:
		return usageErrorf("--upload-bytes %s: want at least %s, which is a large object", formatSize(f.uploadBytes), formatSize(minUploadBytes))
	case f.uploadAge <= 0:
		return usageErrorf("--upload-age %v: want more than 0", f.uploadAge)
	}
	if len(f.object) == 0 && len(f.objectMode) > 0 {
		return usageErrorf("--object-mode %s without --object: there is no bucket to write to", f.objectMode[0])
	}
	for _, s := range f.objectMode {
		n, err := parseObjectRule(s)
		if err != nil {
			return usageErrorf("--object-mode: %w", err)
		}
		for j, before := range p.objectRules {
			if before.glob == n.glob || before.glob == "*" {
				return usageErrorf("--object-mode %s has no effect: %s comes first, and matches all that it does", s, f.objectMode[j])
			}
		}
		p.objectRules = append(p.objectRules, n)
	}
	writes := func(n namedRule) bool { return n.rule.Mode != tiers.NoObjects }
	if n := len(p.objectRules); n > 0 && p.objectRules[n-1].glob == "*" && !slices.ContainsFunc(p.objectRules, writes) {
		return usageErrorf("--object and --object-mode %s exclude each other: nothing would be written to the bucket", strings.Join(f.objectMode, ", "))
	}
	return nil
}

// minUploadBytes is the least of --upload-bytes.
const minUploadBytes = 32 << 20
