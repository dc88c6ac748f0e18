package api_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// store puts one block of a byte into s, without a connection.
func store(t *testing.T, s api.Store, ns block.NamespaceID, i int) {
	t.Helper()
	h := block.Hash{byte(i), byte(i >> 8), byte(i >> 16)}
	r, _, err := s.Reserve(t.Context(), ns, 8, h, 1, block.PutOptions{Durable: block.G2})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Fill(t.Context(), r.ID, 0, []byte{1}); err != nil {
		t.Fatal(err)
	}
	if res := s.Commit(t.Context(), []uint64{r.ID}); res[0].Err != nil {
		t.Fatal(res[0].Err)
	}
}

// A client that takes no events holds nobody up and costs no more memory than the
// store keeps for all: it is told how many it missed, and of the last ones.
func TestSlowWatcher(t *testing.T) {
	const kept, happen = 100, 10_000 // these are many times what a connection takes unread
	s := memstore.New(&memstore.Options{Events: kept})
	ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: "ns", BlockBytes: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, _ := raw(t, s, nil)
	stream, err := pb.NewKvtierClient(conn).Watch(t.Context(), &pb.WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := stream.Recv(); err != nil || !r.Ready || r.Incarnation == 0 || r.Seq != 0 || r.Resumed {
		t.Fatalf("the first message is %v, %v", r, err)
	}
	for i := range happen {
		store(t, s, ns.ID, i)
	}
	var last uint64
	var lost int64
	for last < happen {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		e := r.GetEvent()
		missed := uint64(0)
		if e.GetKind() == pb.EventKind_EVENT_KIND_LOST {
			missed = uint64(e.GetCount()) - 1
			lost += e.GetCount()
		}
		if e.GetSeq() != last+1+missed {
			t.Fatalf("after event %d comes %v", last, e)
		}
		last = e.GetSeq()
	}
	if lost == 0 || lost > happen-kept {
		t.Errorf("%d of %d events were lost to a client that took none", lost, happen)
	}
	if st := s.Stats(); st.EventsLost != lost {
		t.Errorf("%d lost events are counted, %d were told", st.EventsLost, lost)
	}
}

// stuckScrub is a store whose scrub does not stop before it may.
type stuckScrub struct {
	api.Store
	stopping, stopped atomic.Int64
	may               chan struct{}
}

func (s *stuckScrub) StopScrub() {
	s.stopping.Add(1)
	<-s.may
	s.stopped.Add(1)
}

// To stop a scrub ends by its deadline also when the scrub does not, however often
// it is tried, and a drain waits until it has ended.
func TestStopScrubEndsByItsDeadline(t *testing.T) {
	s := &stuckScrub{Store: memstore.New(nil), may: make(chan struct{})}
	conn, srv := raw(t, s, nil)
	c := pb.NewKvtierClient(conn)
	for tries := 0; tries < 3 || s.stopping.Load() == 0; tries++ {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := c.StopScrub(ctx, &pb.StopScrubRequest{}); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("stop of a scrub that hangs: %v", err)
		}
		cancel()
	}
	drained := make(chan error, 1)
	go func() { drained <- srv.Drain(context.Background()) }()
	close(s.may)
	if err := <-drained; err != nil {
		t.Error(err)
	}
	if a, b := s.stopping.Load(), s.stopped.Load(); a != 1 || b != 1 {
		t.Errorf("%d stops were begun and %d ended, want one", a, b)
	}
}

// scrubs tells of a scrub.
type scrubs struct {
	api.Store
	opts  block.ScrubOptions
	state block.ScrubState
}

func (s *scrubs) StartScrub(o block.ScrubOptions) error {
	s.opts, s.state = o, block.ScrubRunning
	return nil
}

func (s *scrubs) StopScrub() { s.state = block.ScrubStopped }

func (s *scrubs) Stats() block.Stats {
	return block.Stats{Scrub: block.ScrubStatus{State: s.state, Total: 7}}
}

func TestScrubCalls(t *testing.T) {
	s := &scrubs{Store: memstore.New(nil)}
	c := apitest.Serve(t, s, nil)()
	o := block.ScrubOptions{BytesPerSecond: 5, Restart: true}
	if st, err := c.StartScrub(t.Context(), o); err != nil || st != (block.ScrubStatus{State: block.ScrubRunning, Total: 7}) || s.opts != o {
		t.Errorf("start: %+v with %+v, %v", st, s.opts, err)
	}
	if st, err := c.StopScrub(t.Context()); err != nil || st.State != block.ScrubStopped {
		t.Errorf("stop: %+v, %v", st, err)
	}
	none := apitest.Serve(t, memstore.New(nil), nil)()
	if _, err := none.StartScrub(t.Context(), o); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("start where there is nothing to scrub: %v", err)
	}
}
