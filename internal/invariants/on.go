//go:build invariants

package invariants

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// Enabled says that the program was built with the tag invariants.
const Enabled = true

// poison is odd, large, no letter and no small number: whoever takes it for a
// length, an offset or a text notices.
const poison = 0xdb

// Poison fills memory that nobody may use any more, so that who does is found out.
func Poison(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = poison
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// Poisoned reports whether memory is as Poison left it.
func Poisoned(b []byte) bool {
	return len(b) == 0 || b[0] == poison && bytes.Equal(b[1:], b[:len(b)-1])
}

// CrashAt kills the process as kill -9 does when the environment variable
// KVTIER_CRASH is "point", or, at the n-th passage, "point:n". It panics when the
// variable cannot be read.
func CrashAt(point string) {
	c := planned()
	if c.point != point || c.left.Add(-1) != 0 {
		return
	}
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL) // cannot fail for the own process
	select {}                                           // nothing more happens here until the signal arrives
}

// crash is where the process is to end.
type crash struct {
	point string
	left  atomic.Int64 // passages until then
}

// planned reads the environment once. An environment belongs to the process, and
// so does its end: this is no state that callers share.
var planned = sync.OnceValue(func() *crash {
	c, err := parseCrash(os.Getenv("KVTIER_CRASH"))
	if err != nil {
		panic(err)
	}
	return c
})

func parseCrash(s string) (*crash, error) {
	c := &crash{}
	name, times, counted := strings.Cut(s, ":")
	n := int64(1)
	if counted {
		var err error
		if n, err = strconv.ParseInt(times, 10, 64); err != nil || n < 1 {
			return nil, fmt.Errorf("KVTIER_CRASH=%q: want point or point:n, n from 1 on", s)
		}
	}
	c.point = name
	c.left.Store(n)
	return c, nil
}
