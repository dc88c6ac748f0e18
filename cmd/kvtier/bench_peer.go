package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/internal/arena"
)

// benchPeerName is the hidden command that is the other process of a measurement.
const benchPeerName = "bench-peer"

// newBenchPeerCmd makes that command. It says "ready", ends when its standard input
// does, and so never outlives who started it.
func newBenchPeerCmd() *cobra.Command {
	c := &cobra.Command{
		Use:    benchPeerName + " loop|tcp|shm",
		Short:  "The other process of a measurement of bench",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
	}
	var (
		bytes        int64
		file, socket string
		huge         bool
	)
	f := c.Flags()
	f.Int64Var(&bytes, "bytes", 0, "memory to serve")
	f.StringVar(&file, "file", "", "file of the bare loop")
	f.StringVar(&socket, "socket", "", "unix socket to serve the bare loop on, too")
	f.BoolVar(&huge, "huge", true, "take huge pages")
	c.RunE = func(c *cobra.Command, args []string) error {
		switch args[0] {
		case "loop":
			return runLoopPeer(c.Context(), bytes, huge, file, socket, c.InOrStdin(), c.OutOrStdout())
		case "tcp", "shm":
			return runAgentPeer(c.Context(), args[0], bytes, huge, c.InOrStdin(), c.OutOrStdout())
		}
		return usageErrorf("peer %q: want loop, tcp or shm", args[0])
	}
	return c
}

// runLoopPeer serves the bare loop.
func runLoopPeer(ctx context.Context, bytes int64, huge bool, file, socket string, stdin io.Reader, stdout io.Writer) (err error) {
	var all closers
	defer func() { err = errors.Join(err, all.close()) }()
	s := &loopServer{huge: huge}
	if s.mem, err = arena.New(bytes, &arena.Options{NoHugePages: !huge}); err != nil {
		return err
	}
	all.add(s.mem.Close)
	for i, c := range s.mem.Chunks() {
		fillPattern(c, benchHash(uint64(i)))
	}
	if file != "" {
		if s.file, err = openDirect(file); err != nil {
			return err
		}
		all.add(s.file.Close)
	}
	var lc net.ListenConfig
	tcp, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	listeners := []net.Listener{tcp}
	if socket != "" {
		l, err := lc.Listen(ctx, "unix", socket)
		if err != nil {
			return err
		}
		listeners = append(listeners, l)
	}
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { failed <- s.serve(l) }()
	}
	if _, err := fmt.Fprintf(stdout, "ready %s\n", tcp.Addr()); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, stdin) // until the other side ends
	for _, l := range listeners {
		err = errors.Join(err, l.Close(), <-failed)
	}
	return err
}

// benchPeer is the other process of a measurement.
type benchPeer struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	stderr strings.Builder
	ready  string // what it said behind "ready "
}

// startPeer starts the command as a peer of the given kind, and returns when it is
// ready.
func startPeer(ctx context.Context, kind string, args ...string) (_ *benchPeer, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	p := &benchPeer{cmd: exec.CommandContext(ctx, self, append([]string{benchPeerName, kind}, args...)...)}
	p.cmd.Stderr = &p.stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.stdout = bufio.NewReaderSize(out, 1<<20)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s peer: %w", kind, err)
	}
	if p.ready, err = p.line("ready"); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

// startLoop starts the server of the bare loop.
func startLoop(ctx context.Context, bytes int64, file, socket string, huge bool) (*benchPeer, error) {
	args := []string{"--bytes", strconv.FormatInt(bytes, 10), "--huge=" + strconv.FormatBool(huge)}
	if file != "" {
		args = append(args, "--file", file)
	}
	if socket != "" {
		args = append(args, "--socket", socket)
	}
	return startPeer(ctx, "loop", args...)
}

// line reads what the peer says behind a word.
func (p *benchPeer) line(word string) (string, error) {
	line, err := p.stdout.ReadString('\n')
	rest, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), word+" ")
	if err != nil || !ok {
		return "", fmt.Errorf("the %s peer says %q, want %q: %s", p.cmd.Args[2], line, word, strings.TrimSpace(p.stderr.String()))
	}
	return rest, nil
}

// say writes a line to the peer.
func (p *benchPeer) say(line string) error {
	_, err := fmt.Fprintln(p.stdin, line)
	return err
}

func (p *benchPeer) pid() int { return p.cmd.Process.Pid }

// close ends the peer and waits for its end.
func (p *benchPeer) close() error {
	err := p.stdin.Close()
	if werr := p.cmd.Wait(); werr != nil {
		err = fmt.Errorf("the %s peer: %w: %s", p.cmd.Args[2], werr, strings.TrimSpace(p.stderr.String()))
	}
	return err
}
