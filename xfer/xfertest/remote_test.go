package xfertest

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

func referenceHarness(fault string) RemoteHarness {
	return RemoteHarness{
		New: func(t testing.TB, _ Side) xfer.Backend { return newReference(t, fault, "") },
		Again: func(t testing.TB, _ Side, info []byte) xfer.Backend {
			return newReference(t, fault, string(info))
		},
		MaxBytes: 2 << 20, // it copies through Go memory, which the race detector slows down
	}
}

func TestRemoteConformance(t *testing.T) {
	h := referenceHarness("")
	h.Narrow = raceEnabled // real backends run the whole with the detector
	RunRemote(t, h)
}

// remoteFaults are ways to break the contract, with a case that finds each.
var remoteFaults = map[string]string{
	"acknowledges early":      "one process/notification after data/write",
	"lands after Deregister":  "one process/deregister in flight/write",
	"believes anyone":         "bare/who answers",
	"ignores bounds":          "bare/bounds",
	"delivers twice":          "one process/notifications",
	"lands late":              "two processes/cut/write",
	"ignores its context":     "two processes/stopped/read",
	"leaves connections open": "two processes/flat",

	"notifies when the first connection is done": wideIn + "/notification with a request/write",
	"takes a lost connection for the end":        "two processes/notification cut off/write",
}

// wideIn is where the wide cases run when there is little time.
var wideIn = map[bool]string{true: "one process", false: "two processes"}[raceEnabled]

// TestRemoteBroken runs the suite over a broken backend, for
// TestSuiteFindsRemoteFaults.
func TestRemoteBroken(t *testing.T) {
	name := os.Getenv(brokenEnv)
	if remoteFaults[name] == "" {
		return
	}
	RunRemote(t, referenceHarness(name))
}

// TestSuiteFindsRemoteFaults: no backend that breaks the contract passes.
func TestSuiteFindsRemoteFaults(t *testing.T) {
	for name, where := range remoteFaults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test := "^TestRemoteBroken$"
			for e := range strings.SplitSeq(where, "/") {
				test += "/^" + strings.ReplaceAll(e, " ", "_") + "$"
			}
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run="+test, "-test.short", "-test.timeout=2m")
			cmd.Env = append(os.Environ(), brokenEnv+"="+name)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || !bytes.Contains(out, []byte("--- FAIL: TestRemoteBroken/")) {
				t.Errorf("the suite passes a backend with the fault %q (%v):\n%s", name, err, out)
			}
		})
	}
}
