package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
)

// sessionOutput is what sessions prints of one as JSON.
type sessionOutput struct {
	ID           string  `json:"id"`
	Name         string  `json:"name"`
	Identity     string  `json:"identity,omitempty"`
	Peer         string  `json:"peer"`          // HOST:PORT, or unix
	PID          *int32  `json:"pid,omitempty"` // of unix
	UID          *uint32 `json:"uid,omitempty"`
	Shared       bool    `json:"shared"`
	Regions      int     `json:"regions"`
	RegionBytes  int64   `json:"region_bytes"`
	Leases       int     `json:"leases"`
	LeasesLimit  int     `json:"leases_limit"`
	LeasedBlocks int     `json:"leased_blocks"`
	Places       int     `json:"places"`
	PlaceBytes   int64   `json:"place_bytes"`
	Calls        int     `json:"calls"`      // in flight
	CallBytes    int64   `json:"call_bytes"` // of blocks that they move
	AgeMS        int64   `json:"age_ms"`

	IdentityUsage *usageOutput `json:"identity_usage,omitempty"`
}

// usageOutput is what sessions prints of the identity of one, over all of its sessions.
type usageOutput struct {
	Sessions        int   `json:"sessions"`
	SessionsLimit   int   `json:"sessions_limit"`
	SessionsRefused int64 `json:"sessions_refused"`
	Leases          int   `json:"leases"`
	LeasesLimit     int   `json:"leases_limit"`
	LeasesRefused   int64 `json:"leases_refused"`
}

func describeSession(i session.Info) sessionOutput {
	o := sessionOutput{
		ID: fmt.Sprintf("%016x", i.ID), Name: i.Name, Identity: i.Identity, Peer: i.Peer, Shared: i.Shared,
		Regions: i.Regions, RegionBytes: i.RegionBytes, Leases: i.Leases, LeasesLimit: i.LeasesLimit, LeasedBlocks: i.LeasedBlocks,
		Places: i.Places, PlaceBytes: i.PlaceBytes, Calls: i.Calls, CallBytes: i.CallBytes, AgeMS: i.Age.Milliseconds(),
	}
	if i.Local() {
		o.PID, o.UID = &i.PID, &i.UID
	}
	if u := i.IdentityUsage; i.Identity != "" {
		o.IdentityUsage = &usageOutput{
			Sessions: u.Sessions, SessionsLimit: u.SessionsLimit, SessionsRefused: u.SessionsRefused,
			Leases: u.Leases, LeasesLimit: u.LeasesLimit, LeasesRefused: u.LeasesRefused,
		}
	}
	return o
}

func newSessionsCmd() *cobra.Command {
	var f clientFlags
	c := &cobra.Command{
		Use:   "sessions",
		Short: "List the sessions of workers, and what each holds",
		Long: `List the sessions that are open at a daemon, oldest first: who it is, the process and
user of one over the unix socket, whether it has the DRAM tier mapped, the regions of
its own memory that the daemon may reach, its leases with their limit and the blocks
in them, the places that it holds for puts, its calls in flight with the bytes that
they move, and how long it has been there. All of it is given back when the session
ends, however it does; places in memory that its process maps, when that ends. With
--access, --json also says how many sessions and leases its identity has altogether,
how many it may have, and how often it was refused one more.`,
		Args: noArgs,
	}
	f.add(c, "print one JSON array")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return listSessions(c.Context(), &f, c.OutOrStdout())
	}
	return c
}

func listSessions(ctx context.Context, f *clientFlags, stdout io.Writer) error {
	return f.connect(ctx, func(client *api.Client) error {
		ctx, cancel := f.call(ctx)
		defer cancel()
		all, err := client.Sessions(ctx)
		if err != nil {
			return err
		}
		if !f.json {
			return printSessions(stdout, all)
		}
		out := make([]sessionOutput, 0, len(all))
		for _, i := range all {
			out = append(out, describeSession(i))
		}
		return writeJSON(stdout, out)
	})
}

func printSessions(w io.Writer, all []session.Info) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "ID\tNAME\tIDENTITY\tPEER\tPID\tUID\tMAPPED\tREGIONS\tLEASES\tLEASED BLOCKS\tPLACES\tCALLS\tAGE")
	for _, i := range all {
		pid, uid, mapped := "-", "-", "no"
		if i.Local() {
			pid, uid = fmt.Sprint(i.PID), fmt.Sprint(i.UID)
		}
		if i.Shared {
			mapped = "yes"
		}
		fmt.Fprintf(tw, "%016x\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d of %d\t%d\t%s\t%s\t%s\n",
			i.ID, cell(i.Name), cell(i.Identity), i.Peer, pid, uid, mapped, withBytes(i.Regions, i.RegionBytes),
			i.Leases, i.LeasesLimit, i.LeasedBlocks, withBytes(i.Places, i.PlaceBytes), withBytes(i.Calls, i.CallBytes), i.Age.Round(time.Second))
	}
	return tw.Flush()
}

// withBytes writes a number of things and how much they are together, if anything.
func withBytes(n int, bytes int64) string {
	if bytes == 0 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%d (%s)", n, formatSizeShort(bytes))
}

// cell is a text that a client chose, so that it spoils neither table nor terminal.
func cell(s string) string {
	if s == "" {
		return "-"
	}
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}
