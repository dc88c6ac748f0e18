package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// progress shows how far long work is: on a terminal one line that is written
// over, elsewhere a line now and then. It is not safe for concurrent use.
type progress struct {
	w        io.Writer
	terminal bool
	every    time.Duration
	last     time.Time
	shown    bool // the terminal's line is not empty
}

// newProgress shows on w, which is usually standard error. The first line
// appears after one period.
func newProgress(w io.Writer) *progress {
	p := &progress{w: w, every: 10 * time.Second, last: time.Now()}
	if f, ok := w.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			p.terminal, p.every = true, 200*time.Millisecond
		}
	}
	return p
}

// update shows line if it is time to.
func (p *progress) update(line func() string) {
	now := time.Now()
	if now.Sub(p.last) < p.every {
		return
	}
	p.last = now
	if p.terminal {
		p.shown = true
		fmt.Fprintf(p.w, "\r\x1b[K%s", line())
		return
	}
	fmt.Fprintln(p.w, line())
}

// done clears the terminal's line, so that what follows begins a new one.
func (p *progress) done() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}
