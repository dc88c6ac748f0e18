package main

import (
	"encoding/json"
	"io"
)

// writeJSON writes v as one indented JSON value and a newline.
func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
