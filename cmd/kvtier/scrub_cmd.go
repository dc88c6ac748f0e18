package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// scrubPoll is how often a command that waits for a scrub asks how far it is.
const scrubPoll = 200 * time.Millisecond

// scrubFlags are the flags of scrub.
type scrubFlags struct {
	clientFlags
	rate    int64
	restart bool
	stop    bool
	wait    bool
}

// scrubOutput is what scrub and stat print of a scrub as JSON. The counters are of
// the whole scrub, also when it was stopped and continued.
type scrubOutput struct {
	State      string `json:"state"` // never, running, stopped, done or failed
	Started    string `json:"started,omitempty"`
	Ended      string `json:"ended,omitempty"`
	DoneBytes  int64  `json:"done_bytes"`
	TotalBytes int64  `json:"total_bytes"`
	Blocks     int64  `json:"blocks"`   // read and compared
	Damaged    int64  `json:"damaged"`  // of those, whose header or payload was wrong or could not be read
	Repaired   int64  `json:"repaired"` // of the damaged, written anew from another tier
	Dropped    int64  `json:"dropped"`  // of the damaged, those that no other tier had
	Stale      int64  `json:"stale"`    // headers of blocks that are gone, invalidated
	Error      string `json:"error,omitempty"`
}

func describeScrub(s block.ScrubStatus) scrubOutput {
	return scrubOutput{
		State: s.State.String(), Started: rfc3339(s.Started), Ended: rfc3339(s.Ended), DoneBytes: s.Done, TotalBytes: s.Total,
		Blocks: s.Blocks, Damaged: s.Damaged, Repaired: s.Repaired, Dropped: s.Dropped, Stale: s.Stale, Error: s.Error,
	}
}

// line writes a scrub for people.
func (o *scrubOutput) line() string {
	if o.State == block.ScrubNever.String() {
		return o.State
	}
	s := fmt.Sprintf("%s: %s of %s, %s: %d damaged, %d repaired, %d dropped, %s", o.State, formatSizeShort(o.DoneBytes), formatSizeShort(o.TotalBytes),
		counted(o.Blocks, "block"), o.Damaged, o.Repaired, o.Dropped, counted(o.Stale, "stale header"))
	if o.Error != "" {
		s += ": " + o.Error
	}
	return s
}

func newScrubCmd() *cobra.Command {
	f := &scrubFlags{}
	c := &cobra.Command{
		Use:   "scrub",
		Short: "Read and compare everything on NVMe, while the daemon runs",
		Long: `Read every block on NVMe in the background and check it: the slot's header, the
length and the checksum. A damaged block is written anew from another tier that
has it, or else dropped, so that it is a miss and not wrong bytes. A scrub that
was stopped, also by a restart of the daemon, goes on where it was.

The command waits until the scrub is done, and joins one that is running. When it
is interrupted the scrub goes on.

The exit code is 0 when the scrub is done, and 3 when it found damage that nothing
could repair, so that blocks were dropped.`,
		Example: `  kvtier scrub --rate 256MiB
  kvtier scrub --stop`,
		Args: noArgs,
	}
	f.add(c, "print one JSON object")
	fs := c.Flags()
	sizeVar(fs, &f.rate, "rate", 0, "most bytes to read a second, a `size`; 0 is 64MiB")
	fs.BoolVar(&f.restart, "restart", false, "begin anew, also when an earlier scrub was not finished")
	fs.BoolVar(&f.wait, "wait", true, "wait until it is done; --wait=false only starts it")
	fs.BoolVar(&f.stop, "stop", false, "stop a running scrub instead")
	for _, other := range []string{"rate", "restart", "wait"} {
		c.MarkFlagsMutuallyExclusive("stop", other)
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		return f.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
	}
	return c
}

func (f *scrubFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	return f.connect(ctx, func(client *api.Client) error {
		if f.stop {
			cctx, cancel := f.call(ctx)
			defer cancel()
			s, err := client.StopScrub(cctx)
			if err != nil {
				return err
			}
			return f.print(stdout, s)
		}
		s, err := f.start(ctx, client)
		if err != nil {
			return err
		}
		if !f.wait {
			return f.print(stdout, s)
		}
		if s, err = f.await(ctx, client, s, stderr); err != nil {
			return err
		}
		if err := f.print(stdout, s); err != nil {
			return err
		}
		return scrubEnd(s)
	})
}

// start starts a scrub, or finds the one that is running when nothing is said of
// how to scrub.
func (f *scrubFlags) start(ctx context.Context, client *api.Client) (block.ScrubStatus, error) {
	ctx, cancel := f.call(ctx)
	defer cancel()
	if f.rate == 0 && !f.restart {
		st, err := client.Stats(ctx)
		if err != nil || st.Scrub.State == block.ScrubRunning {
			return st.Scrub, err
		}
	}
	return client.StartScrub(ctx, block.ScrubOptions{BytesPerSecond: f.rate, Restart: f.restart})
}

// await returns how a scrub that is in state s has ended.
func (f *scrubFlags) await(ctx context.Context, client *api.Client, s block.ScrubStatus, stderr io.Writer) (block.ScrubStatus, error) {
	prog := newProgress(stderr)
	defer prog.done()
	tick := time.NewTicker(scrubPoll)
	defer tick.Stop()
	for s.State == block.ScrubRunning {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return s, scrubGoesOn(ctx)
		}
		cctx, cancel := f.call(ctx)
		st, err := client.Stats(cctx)
		cancel()
		switch {
		case ctx.Err() != nil:
			return s, scrubGoesOn(ctx)
		case err != nil:
			return s, err
		}
		s = st.Scrub
		prog.update(func() string {
			o := describeScrub(s)
			return "scrub " + o.line()
		})
	}
	return s, nil
}

func scrubGoesOn(ctx context.Context) error {
	return fmt.Errorf("scrub: it goes on in the daemon, 'kvtier scrub --stop' stops it: %w", ctx.Err())
}

func (f *scrubFlags) print(w io.Writer, s block.ScrubStatus) error {
	o := describeScrub(s)
	if f.json {
		return writeJSON(w, o)
	}
	_, err := fmt.Fprintln(w, o.line())
	return err
}

// scrubEnd is nil when a scrub has ended well.
func scrubEnd(s block.ScrubStatus) error {
	switch {
	case s.State != block.ScrubDone:
		return fmt.Errorf("scrub: it has %s before its end", s.State)
	case s.Dropped > 0:
		return &exitError{exitMiss, fmt.Errorf("scrub: %s damaged in every tier, and dropped", counted(s.Dropped, "block"))}
	}
	return nil
}
