package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/index/block"
)

// pythonNeeds are the Python packages that target attach needs.
var pythonNeeds = []string{"kvtier", "xxhash"}

// needPython refuses to begin what cannot be measured: it is asked before the first
// target runs.
func needPython(ctx context.Context, b *bench) error {
	path, err := exec.LookPath(b.python)
	if err != nil {
		return fmt.Errorf("no Python: %w; give --python", err)
	}
	const probe = "import sys, importlib.util as u; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
	out, err := exec.CommandContext(ctx, path, append([]string{"-c", probe}, pythonNeeds...)...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
		}
		return fmt.Errorf("ask %s for its packages: %w", path, err)
	}
	if missing := strings.Fields(string(out)); len(missing) > 0 {
		return fmt.Errorf("%s lacks the package %s: install python/dist/*.whl, or give --python one that has it, or PYTHONPATH",
			path, strings.Join(missing, " and "))
	}
	return nil
}

// benchWorker is a Python process that does passes on command, attached to a daemon.
type benchWorker struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	stderr strings.Builder // to be read when it has ended
	ended  bool
}

// startWorker starts a worker, which gets the descriptors of memory files, and returns
// when it is attached.
func startWorker(ctx context.Context, python, socket, bare string, payload, blocks int, files ...*os.File) (_ *benchWorker, err error) {
	w := &benchWorker{cmd: exec.CommandContext(ctx, python, "-m", "kvtier._bench", socket, bare, strconv.Itoa(payload), strconv.Itoa(blocks))}
	w.cmd.Stderr, w.cmd.ExtraFiles = &w.stderr, files
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.stdout = bufio.NewReader(out)
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a worker: %w", err)
	}
	if line, err := w.stdout.ReadString('\n'); err != nil || line != "ready\n" {
		return nil, errors.Join(fmt.Errorf("the worker says %q, want ready", line), w.close())
	}
	return w, nil
}

// workerFigures are what a worker answers.
type workerFigures struct{ Value, Limit float64 }

// do has the worker do something with keys; so many calls where figure and limit are
// taken by turns, else 0. A worker that fails is ended.
func (w *benchWorker) do(what string, keys []block.Hash, calls int) (f workerFigures, err error) {
	order := struct {
		Do    string   `json:"do"`
		Keys  []string `json:"keys"`
		Calls int      `json:"calls"`
	}{what, make([]string, len(keys)), calls}
	for i := range keys {
		order.Keys[i] = hex.EncodeToString(keys[i][:benchHashBytes])
	}
	if err := json.NewEncoder(w.stdin).Encode(&order); err != nil {
		return f, errors.Join(fmt.Errorf("worker: %s: %w", what, err), w.close())
	}
	line, err := w.stdout.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &f)
	}
	if err != nil {
		return f, errors.Join(fmt.Errorf("worker: %s: %w", what, err), w.close())
	}
	return f, nil
}

// close ends the worker and waits for its end, once.
func (w *benchWorker) close() error {
	if w.ended {
		return nil
	}
	w.ended = true
	err := w.stdin.Close()
	if werr := w.cmd.Wait(); werr != nil {
		err = fmt.Errorf("the worker: %w: %s", werr, strings.TrimSpace(w.stderr.String()))
	}
	return err
}
