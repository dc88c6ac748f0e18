package frame

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestVigil runs ticks of 1 s with Pings after 4 s, the end after 8 s of silence or
// of a send that takes nothing.
func TestVigil(t *testing.T) {
	o := &Options{PingAfter: 4 * time.Second, DeadAfter: 8 * time.Second, StallAfter: 8 * time.Second}
	for _, tt := range []struct {
		name string
		at   func(tick int64) sample
		want string // the first events of 20 ticks
	}{
		{
			"a dead peer is pinged, then given up",
			func(int64) sample { return sample{reading: true} },
			"4:ping 8:silent",
		}, {
			"a peer that answers is pinged now and then",
			func(n int64) sample { return sample{reading: true, reads: n / 5, writes: n / 5} },
			"4:ping 9:ping 14:ping 19:ping",
		}, {
			"a peer that sends all the time hears of us though the handler is busy",
			func(n int64) sample { return sample{reads: n / 10} },
			"4:ping 8:ping 12:ping 16:ping 20:ping",
		}, {
			"both ways are busy",
			func(n int64) sample { return sample{reading: true, reads: n, writes: n} },
			"",
		}, {
			"a send that takes nothing",
			func(n int64) sample { return sample{reading: true, reads: n, writing: true, queued: 1000} },
			"4:ping 8:stalled",
		}, {
			"a send that takes a byte every seven seconds, and the peer is otherwise silent",
			func(n int64) sample {
				return sample{reading: true, writes: 1, writing: true, queued: 1000 - int(n/7)}
			},
			"5:ping 9:ping 13:ping 17:ping",
		}, {
			"one that is not waited for does not stall",
			func(n int64) sample { return sample{reading: true, reads: n, writes: 1} },
			"5:ping 9:ping 13:ping 17:ping",
		},
	} {
		v := vigil{o: o}
		got := ""
		for n := int64(1); n <= 20; n++ {
			ping, err := v.tick(tt.at(n))
			event := ""
			switch {
			case errors.Is(err, ErrSilent):
				event = "silent"
			case errors.Is(err, ErrStalled):
				event = "stalled"
			case ping:
				event = "ping"
			default:
				continue
			}
			if got != "" {
				got += " "
			}
			got += fmt.Sprintf("%d:%s", n, event)
			if err != nil {
				break
			}
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}
