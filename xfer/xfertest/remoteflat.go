package xfertest

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

// census counts what a process holds.
type census struct {
	goroutines  int
	files, maps []string
}

// slack is what may come and go: connections whose end the other side has not
// noticed yet, and what the runtime keeps.
const slack = 16

func (c census) within(before census) bool {
	return c.goroutines <= before.goroutines+slack && len(c.files) <= len(before.files)+slack && len(c.maps) <= len(before.maps)+slack
}

func (c census) String() string {
	return fmt.Sprintf("%d goroutines, %d files, %d mapped files", c.goroutines, len(c.files), len(c.maps))
}

func (d *duo) census() census {
	d.t.Helper()
	a := d.order(call{Verb: "census"})
	c := census{goroutines: a.Count, files: a.Texts}
	for _, m := range a.Msgs {
		c.maps = append(c.maps, string(m))
	}
	return c
}

// testFlat: connections that come and go, in every way they can, leave nothing
// behind: no goroutine, no descriptor, no mapping.
func testFlat(t *testing.T, h RemoteHarness) {
	rounds := rounds(10_000, 1000, 100)
	d := newDuo(t, h, 64<<10)
	touch := func(i int) {
		t.Helper()
		op := ops[i%2]
		local, remote := d.lists(op, []piece{{int64(i % 7), 0, 5000}})
		r, err := d.agent.NewRequest(op, local, remote, d.options)
		if err != nil {
			t.Fatal(err)
		}
		d.eventually("transfer after a loss", func() error { return r.Run(t.Context()) })
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		d.moved(op, piece{int64(i % 7), 0, 5000})
		d.eventually("notification after a loss", func() error { return d.agent.Notify(t.Context(), farName, []byte("hello"), nil) })
		d.peer.must(call{Verb: "take", Data: []byte("hello")})
	}
	touch(0)
	var before census
	kills := 0
	for i := range rounds {
		switch {
		case i%25 == 24:
			d.peer.child.kill(t)
			kills++
			d.startPeer(false)
			d.meet()
		case i%25 == 12:
			d.reopen(false)
			d.learn()
		case i%3 == 0:
			if err := d.agent.Disconnect(farName); err != nil {
				t.Fatal(err)
			}
		case i%3 == 1:
			d.peer.must(call{Verb: "disconnect", Name: nearName, N: int64(d.me.Incarnation)})
		default:
			d.peer.must(call{Verb: "cut", Count: syscall.SHUT_RDWR})
		}
		touch(i)
		if i%100 == 0 {
			d.check()
		}
		if i == rounds/10 {
			before = d.census()
		}
	}
	var after census
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		after = d.census()
		if after.within(before) {
			break
		}
		if time.Since(began) > patience {
			t.Errorf("after %d losses and %d kills: %s; a tenth of the way: %s\nfiles:\n%s\nmappings:\n%s",
				rounds, kills, after, before, strings.Join(after.files, "\n"), strings.Join(after.maps, "\n"))
			break
		}
	}
	t.Logf("%d losses and %d kills: %s, then %s", rounds, kills, before, after)
	d.check()
}
