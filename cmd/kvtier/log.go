package main

import (
	"io"
	"log/slog"
)

// newLogger makes the daemon's logger. level is one of debug, info, warn and
// error, format text or json; both were checked by their flags.
func newLogger(w io.Writer, level, format string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		panic("kvtier: log level " + level)
	}
	o := &slog.HandlerOptions{Level: l}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
