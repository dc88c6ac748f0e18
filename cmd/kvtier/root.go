package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// newRootCmd builds the command tree. started becomes true when a command's own
// code begins to run, that is when its flags and arguments have been accepted.
func newRootCmd() (root *cobra.Command, started *bool) {
	root = &cobra.Command{
		Use:   "kvtier",
		Short: "A tiered store of LLM KV-cache blocks",
		Long: `kvtier keeps the KV-cache blocks of LLM inference in DRAM and on NVMe, finds the
longest prefix that is there, and gives back the right bytes or a miss.

Exit codes: 0 done, 1 failed, 2 bad command line or configuration, 3 a miss, a
stop that could not keep every block, or a scrub that found damage beyond repair.`,
		SilenceErrors: true, // run prints them, once
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageErrorf("%w; see '%s --help'", err, c.CommandPath())
	})
	root.AddCommand(
		newServeCmd(),
		newPutCmd(),
		newGetCmd(),
		newMatchCmd(),
		newLocateCmd(),
		newPrefetchCmd(),
		newLsCmd(),
		newRmCmd(),
		newPinCmd(),
		newUnpinCmd(),
		newNsCmd(),
		newSessionsCmd(),
		newStatCmd(),
		newPolicyCmd(),
		newObjectCmd(),
		newWatchCmd(),
		newReplayCmd(),
		newSimCmd(),
		newBenchCmd(),
		newBenchPeerCmd(),
		newBackendsCmd(),
		newVerifyCmd(),
		newScrubCmd(),
		newRepairCmd(),
		newVersionCmd(),
	)
	started = new(bool)
	markStart(root, started)
	return root, started
}

// markStart makes each command of the tree set started before its own code.
func markStart(c *cobra.Command, started *bool) {
	if inner := c.RunE; inner != nil {
		c.RunE = func(c *cobra.Command, args []string) error {
			*started = true
			return inner(c, args)
		}
	}
	if c.Run != nil {
		panic(fmt.Sprintf("kvtier: command %s has Run, want RunE", c.Name()))
	}
	for _, sub := range c.Commands() {
		markStart(sub, started)
	}
}
