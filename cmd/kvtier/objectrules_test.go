package main

import (
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/tiers"
)

const someBucket = "s3://b/p?region=r"

func TestObjectRules(t *testing.T) {
	f, _ := newServeFlags(t, "--object", someBucket, "--object-mode", "docs-*=through,720h", "--object-mode", "chat=back", "--object-mode", "*=off")
	p, err := f.plan(t.Context(), fakeEnv(nil))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]tiers.ObjectRule{
		"docs-1": {Mode: tiers.WriteThrough, Keep: 720 * time.Hour},
		"chat":   {},
		"other":  {Mode: tiers.NoObjects},
	} {
		if got := p.objectRules.of(name); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	if got := (objectRules{}).of("x"); got != (tiers.ObjectRule{}) {
		t.Errorf("without a rule: %+v", got)
	}
}

// TestObjectRulesThatAreNone: what contradicts itself, or would have no effect, is refused.
func TestObjectRulesThatAreNone(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"no mode":        {[]string{"--object", someBucket, "--object-mode", "a=sometimes"}, "want back, through or off"},
		"no glob":        {[]string{"--object", someBucket, "--object-mode", "back"}, "want GLOB=MODE"},
		"bad glob":       {[]string{"--object", someBucket, "--object-mode", "[=back"}, "glob"},
		"bad time":       {[]string{"--object", someBucket, "--object-mode", "a=back,month"}, "no duration"},
		"no time":        {[]string{"--object", someBucket, "--object-mode", "a=back,0s"}, "at least one"},
		"off and kept":   {[]string{"--object", someBucket, "--object-mode", "a=off,1h"}, "exclude each other"},
		"no bucket":      {[]string{"--object-mode", "a=back"}, "without --object"},
		"twice":          {[]string{"--object", someBucket, "--object-mode", "a=back", "--object-mode", "a=off"}, "no effect"},
		"behind all":     {[]string{"--object", someBucket, "--object-mode", "*=back", "--object-mode", "a=off"}, "no effect"},
		"nothing at all": {[]string{"--object", someBucket, "--object-mode", "*=off"}, "nothing would be written"},
		"no queue":       {[]string{"--object", someBucket, "--upload-bytes", "0"}, "--upload-bytes 0"},
		"no wait":        {[]string{"--object", someBucket, "--upload-age", "0s"}, "--upload-age"},
	} {
		f, fs := newServeFlags(t)
		err := fs.Parse(c.args)
		if err == nil {
			_, err = f.plan(t.Context(), fakeEnv(nil))
		}
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}
