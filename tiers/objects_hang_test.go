package tiers_test

import (
	"testing"

	"github.com/kvtier/kvtier/index/block"
)

// TestObjectHang: a bucket that does not answer is down as soon as a small request shows it,
// whatever its calls may take: what is to leave the local tiers does not wait for them, and
// who reads is told.
func TestObjectHang(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.StallAfter = stallAfter
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 4, 5000)
	sendDown(t, s, ns, is...)
	goOn := b.hang()
	defer goOn()
	// More than the local tiers hold.
	for i := 100; i < 160; i++ {
		mustPutDown(t, s, ns, i, 1<<20, block.PutOptions{Durable: block.G3})
	}
	wantHit(t, s, ns, 159, 1<<20)
	eventually(t, "the bucket is down", func() bool { return g4(s).Devices[0].State == block.Down })
	wantMiss(t, s, ns, 0, block.MissUnavailable)
	goOn()
	eventually(t, "the bucket is healthy", func() bool { return g4(s).Devices[0].State == block.Healthy })
	for _, i := range is {
		wantHit(t, s, ns, i, 5000)
	}
}

// TestObjectSlowCalls: a bucket that takes its time for a call, and answers what is small, is
// not down.
func TestObjectSlowCalls(t *testing.T) {
	t.Parallel()
	b := newFakeBucket()
	o := farOptions(t, b)
	o.StallAfter = stallAfter
	s := openStore(t, o)
	ns := space(t, s, "n", 1<<20)
	is := chain(t, s, ns, 4, 5000)
	b.fail(func(op, _ string) error {
		if before := b.asked("answers"); op == "put" {
			eventually(t, "the bucket was asked twice", func() bool { return b.asked("answers") >= before+2 })
		}
		return nil
	})
	sendDown(t, s, ns, is...)
	b.fail(nil)
	if st := g4(s).Devices[0]; st.State != block.Healthy {
		t.Errorf("bucket is %+v", st)
	}
	for _, i := range is {
		wantHit(t, s, ns, i, 5000)
	}
	wantEmpty(t, s)
}
