//go:build invariants

package invariants

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
)

func TestPoison(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 4095, 4096, 4097} {
		b := make([]byte, n)
		if n > 0 && Poisoned(b) {
			t.Errorf("%d zeros are poisoned", n)
		}
		Poison(b)
		if !Poisoned(b) {
			t.Errorf("%d poisoned bytes are not", n)
		}
		for _, i := range []int{0, n / 2, n - 1} {
			if i >= 0 && i < n {
				b[i]++
				if Poisoned(b) {
					t.Errorf("%d bytes with a change at %d are poisoned", n, i)
				}
				b[i]--
			}
		}
	}
}

// TestCrashAt runs itself as another process, which passes two points by turns
// and prints how often.
func TestCrashAt(t *testing.T) {
	if os.Getenv("KVTIER_CRASH_CHILD") != "" {
		for i := range 3 {
			CrashAt("here")
			CrashAt("there")
			os.Stdout.WriteString(strconv.Itoa(i))
		}
		os.Exit(0)
	}
	for _, tt := range []struct {
		env    string
		passed string // what it printed
		killed bool
	}{
		{"", "012", false},
		{"elsewhere", "012", false},
		{"here", "", true},
		{"there:1", "", true},
		{"here:3", "01", true},
		{"here:4", "012", false},
	} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestCrashAt$")
		cmd.Env = append(os.Environ(), "KVTIER_CRASH_CHILD=1", "KVTIER_CRASH="+tt.env)
		out, err := cmd.Output()
		var exit *exec.ExitError
		killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
		if string(out) != tt.passed || killed != tt.killed || !killed && err != nil {
			t.Errorf("KVTIER_CRASH=%q: printed %q, killed %v, %v; want %q, %v", tt.env, out, killed, err, tt.passed, tt.killed)
		}
	}
}

func TestParseCrash(t *testing.T) {
	for _, bad := range []string{"here:", "here:0", "here:-1", "here:x", "here:1:2"} {
		if _, err := parseCrash(bad); err == nil {
			t.Errorf("KVTIER_CRASH=%q is accepted", bad)
		}
	}
}
