package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// A configuration file is one YAML mapping whose keys are the names of flags.
// It is strict: what is not a flag, or not of the flag's type, is an error, and
// one error lists all of them. Flags given on the command line win.

// notInConfig are the flags that make no sense in a configuration file.
var notInConfig = map[string]bool{"config": true, "print-config": true, "help": true}

// configList is what a flag that may be repeated implements.
type configList interface {
	Replace([]string) error
	GetSlice() []string
}

// loadConfig reads the file at path into fs.
func loadConfig(path string, fs *pflag.FlagSet) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read config: %w", err)
	}
	if err := applyConfig(data, fs); err != nil {
		return fmt.Errorf("config %s: %w", path, err)
	}
	return nil
}

// applyConfig sets the flags of fs that data names and that the command line
// has not set. The error lists everything that is wrong, with its line.
func applyConfig(data []byte, fs *pflag.FlagSet) error {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("more than one YAML document")
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return nil
	}
	if top.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: want a mapping of flag names to values", top.Line)
	}
	var unknown, wrong []string
	seen := map[string]int{}
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		f := fs.Lookup(key.Value)
		if f == nil || notInConfig[key.Value] {
			unknown = append(unknown, fmt.Sprintf("%q (line %d)", key.Value, key.Line))
			continue
		}
		if line, ok := seen[key.Value]; ok {
			wrong = append(wrong, fmt.Sprintf("line %d: %s: given already on line %d", key.Line, key.Value, line))
			continue
		}
		seen[key.Value] = key.Line
		if err := setFromNode(f, value); err != nil {
			wrong = append(wrong, fmt.Sprintf("line %d: %s: %v", value.Line, key.Value, err))
		}
	}
	var parts []string
	switch len(unknown) {
	case 0:
	case 1:
		parts = append(parts, "unknown key "+unknown[0])
	default:
		parts = append(parts, "unknown keys "+strings.Join(unknown, ", "))
	}
	parts = append(parts, wrong...)
	if len(parts) > 0 {
		return errors.New(strings.Join(parts, "; "))
	}
	return nil
}

// setFromNode gives a flag the value of a YAML node. The value is checked even
// when the command line wins, so that a file is right or wrong by itself.
func setFromNode(f *pflag.Flag, n *yaml.Node) error {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	given := f.Changed
	if list, ok := f.Value.(configList); ok {
		values, err := stringsOf(n)
		if err != nil {
			return err
		}
		was := list.GetSlice()
		if err := list.Replace(values); err != nil {
			return err
		}
		if given {
			return list.Replace(was)
		}
		return nil
	}
	if err := checkTag(f.Value.Type(), n); err != nil {
		return err
	}
	was := f.Value.String()
	if err := f.Value.Set(n.Value); err != nil {
		return err
	}
	if given {
		return f.Value.Set(was)
	}
	return nil
}

// stringsOf reads a list of strings; one string alone is a list of one.
func stringsOf(n *yaml.Node) ([]string, error) {
	if n.Kind == yaml.ScalarNode {
		if n.Tag != "!!str" {
			return nil, fmt.Errorf("want a list of strings, have %s", describe(n))
		}
		return []string{n.Value}, nil
	}
	if n.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("want a list of strings, have %s", describe(n))
	}
	values := []string{}
	for _, e := range n.Content {
		if e.Kind == yaml.AliasNode {
			e = e.Alias
		}
		if e.Kind != yaml.ScalarNode || e.Tag != "!!str" {
			return nil, fmt.Errorf("want a list of strings, have %s in it on line %d", describe(e), e.Line)
		}
		values = append(values, e.Value)
	}
	return values, nil
}

// checkTag checks a scalar against the type of a flag.
func checkTag(flagType string, n *yaml.Node) error {
	var tags []string
	want := ""
	switch flagType {
	case "bool":
		want, tags = "true or false", []string{"!!bool"}
	case "size":
		want, tags = "a size such as 4GiB", []string{"!!str", "!!int"}
	case "share":
		want, tags = "a number from 0 to 1", []string{"!!float", "!!int"}
	case "duration":
		want, tags = "a duration such as 30s", []string{"!!str"}
	default:
		want, tags = "a string", []string{"!!str"}
	}
	if n.Kind == yaml.ScalarNode {
		for _, t := range tags {
			if n.Tag == t {
				return nil
			}
		}
	}
	return fmt.Errorf("want %s, have %s", want, describe(n))
}

// describe says what a YAML node is.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if n.Tag == "!!null" {
		return "nothing"
	}
	return fmt.Sprintf("%s %q", strings.TrimPrefix(n.Tag, "!!"), n.Value)
}

// formatConfig writes the flags of fs as a configuration file, in the order in
// which they were defined. note gives the comment behind a key, or "".
func formatConfig(w io.Writer, fs *pflag.FlagSet, note func(name string) string) error {
	top := &yaml.Node{Kind: yaml.MappingNode}
	fs.VisitAll(func(f *pflag.Flag) {
		if notInConfig[f.Name] {
			return
		}
		key := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: f.Name}
		var value *yaml.Node
		comment := strings.Join(strings.Fields(note(f.Name)), " ") // one line
		if list, ok := f.Value.(configList); ok {
			value = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
			for _, s := range list.GetSlice() {
				value.Content = append(value.Content, scalarNode("!!str", s))
			}
			if len(value.Content) == 0 {
				value.Style = yaml.FlowStyle
				value.LineComment = comment
			} else {
				key.HeadComment = comment
			}
		} else {
			tag := "!!str"
			switch f.Value.Type() {
			case "bool":
				tag = "!!bool"
			case "share":
				tag = "!!float"
				if !strings.ContainsAny(f.Value.String(), ".e") {
					tag = "!!int"
				}
			}
			value = scalarNode(tag, f.Value.String())
			value.LineComment = comment
		}
		top.Content = append(top.Content, key, value)
	})
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(top); err != nil {
		return err
	}
	return enc.Close()
}

// scalarNode makes a scalar. What the encoder would write as a block, which
// cannot hold every text, it quotes.
func scalarNode(tag, s string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: s}
	if tag == "!!str" && (s == "" || strings.ContainsFunc(s, unicode.IsControl)) {
		n.Style = yaml.DoubleQuotedStyle
	}
	return n
}
