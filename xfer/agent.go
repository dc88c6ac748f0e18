package xfer

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// defaultMaxInFlight bounds the goroutines behind Post.
const defaultMaxInFlight = 1024

// Agent owns backends, registered memory and the requests made from them. It
// is safe for use by many goroutines.
type Agent struct {
	name      string
	telemetry bool
	slots     chan struct{} // one per posted request
	waits     atomic.Uint64 // posts that found no free slot
	posts     sync.WaitGroup
	ops       sync.WaitGroup // calls that Close waits for

	mu struct {
		sync.RWMutex
		closed   bool
		backends []*adopted // in configured order; guards their sections too
	}
	live struct {
		sync.Mutex
		head  *Request // requests that are not released
		count int
		empty chan struct{} // made by Close, closed when count is 0
	}
	closed struct {
		sync.Mutex // held by the first Close until it is through
		done       bool
		err        error
	}
}

// adopted is a backend of an agent with what was found out about it once.
type adopted struct {
	Backend
	name      string
	caps      Caps
	querier   Querier
	estimator Estimator
	remote    Remote
	notifier  Notifier
	sections  [memTypes]section // guarded by the agent's mu
	counts    counters
}

// AgentOptions configures an agent.
type AgentOptions struct {
	// Telemetry makes each request measure its times: two clock readings a
	// transfer.
	Telemetry bool
	// MaxInFlight bounds the requests that are posted at once (1024 when 0);
	// further posts wait. Run is not counted: it uses its caller's goroutine.
	MaxInFlight int
}

// NewAgent makes an agent without backends. Errors: ErrInvalid.
func NewAgent(name string, o *AgentOptions) (*Agent, error) {
	if o == nil {
		o = &AgentOptions{}
	}
	if name == "" {
		return nil, createError("", fmt.Errorf("%w: agent name is empty", ErrInvalid))
	}
	if o.MaxInFlight < 0 {
		return nil, createError("", fmt.Errorf("%w: MaxInFlight %d is negative", ErrInvalid, o.MaxInFlight))
	}
	limit := o.MaxInFlight
	if limit == 0 {
		limit = defaultMaxInFlight
	}
	return &Agent{name: name, telemetry: o.Telemetry, slots: make(chan struct{}, limit)}, nil
}

// Name gives the agent's name.
func (a *Agent) Name() string { return a.name }

// AddBackend adopts a backend: from now on the agent closes it. The order of
// adding is the order of preference. On error the backend stays the caller's.
// Errors: ErrInvalid (the name is taken, or what Caps says does not fit the
// methods that the backend has), ErrClosed.
func (a *Agent) AddBackend(b Backend) error {
	if b == nil {
		return createError("", fmt.Errorf("%w: backend is nil", ErrInvalid))
	}
	n := &adopted{Backend: b, name: b.Name(), caps: b.Caps()}
	n.caps.Pairs = slices.Clone(n.caps.Pairs)
	n.querier, _ = b.(Querier)
	n.estimator, _ = b.(Estimator)
	n.remote, _ = b.(Remote)
	n.notifier, _ = b.(Notifier)
	if err := n.check(); err != nil {
		return createError(n.name, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return createError(n.name, a.errClosed())
	}
	if a.find(n.name) != nil {
		return createError(n.name, fmt.Errorf("%w: agent %s has a backend of this name", ErrInvalid, a.name))
	}
	a.mu.backends = append(a.mu.backends, n)
	return nil
}

// check compares what the backend says with what it has.
func (b *adopted) check() error {
	switch {
	case b.name == "":
		return fmt.Errorf("%w: backend name is empty", ErrInvalid)
	case len(b.caps.Pairs) == 0:
		return fmt.Errorf("%w: Caps.Pairs is empty", ErrInvalid)
	case b.caps.Align == 0:
		return fmt.Errorf("%w: Caps.Align is 0", ErrInvalid)
	case !b.caps.Local && !b.caps.Remote:
		return fmt.Errorf("%w: Caps has neither Local nor Remote", ErrInvalid)
	case b.caps.Remote && b.remote == nil:
		return fmt.Errorf("%w: Caps.Remote without the Remote role", ErrInvalid)
	case b.caps.Notify && b.notifier == nil:
		return fmt.Errorf("%w: Caps.Notify without the Notifier role", ErrInvalid)
	case b.caps.Remote && !b.caps.Notify:
		return fmt.Errorf("%w: Caps.Remote without Caps.Notify", ErrInvalid)
	}
	for _, p := range b.caps.Pairs {
		if p.Local >= memTypes || p.Remote >= memTypes {
			return fmt.Errorf("%w: Caps.Pairs has %s to %s", ErrInvalid, p.Local, p.Remote)
		}
	}
	return nil
}

// serves says whether memory of this type is of use to the backend.
func (b *adopted) serves(t MemType) bool {
	return slices.ContainsFunc(b.caps.Pairs, func(p Pair) bool { return p.Local == t || p.Remote == t })
}

// BackendInfo describes a backend of an agent: its capabilities and which
// optional roles it has.
type BackendInfo struct {
	Name                                 string
	Caps                                 Caps
	Querier, Estimator, Remote, Notifier bool
}

// Backends lists the backends in configured order.
func (a *Agent) Backends() []BackendInfo {
	a.mu.RLock()
	defer a.mu.RUnlock()
	infos := make([]BackendInfo, len(a.mu.backends))
	for i, b := range a.mu.backends {
		infos[i] = BackendInfo{
			Name: b.name, Caps: b.caps,
			Querier: b.querier != nil, Estimator: b.estimator != nil,
			Remote: b.remote != nil, Notifier: b.notifier != nil,
		}
		infos[i].Caps.Pairs = slices.Clone(b.caps.Pairs)
	}
	return infos
}

// Query says which of the described files, devices or objects exist. Errors:
// ErrNotFound (no backend of that name), ErrNotSupported (it has no Querier
// role), ErrClosed, and what the backend returns.
func (a *Agent) Query(ctx context.Context, backend string, l DescList) ([]QueryResult, error) {
	b, err := a.enter(backend)
	if err != nil {
		return nil, fmt.Errorf("query %s: %w", backend, err)
	}
	defer a.ops.Done()
	if b.querier == nil {
		return nil, fmt.Errorf("query %s: %w: it has no Querier role", backend, ErrNotSupported)
	}
	if !b.serves(l.Type) {
		return nil, fmt.Errorf("query %s: %w: it does not serve %s", backend, ErrInvalid, l.Type)
	}
	results, err := b.querier.Query(ctx, l.Type, l.Descs)
	if err != nil {
		return nil, fmt.Errorf("query %s: %w", backend, err)
	}
	if len(results) != len(l.Descs) {
		return nil, fmt.Errorf("query %s: %w: %d results for %d descriptors", backend, ErrShort, len(results), len(l.Descs))
	}
	return results, nil
}

// Estimate predicts how long a post of the request takes. Errors:
// ErrNotSupported (its backend has no Estimator role), ErrInvalid (a request of
// another agent), ErrClosed, and what the backend returns.
func (a *Agent) Estimate(r *Request) (Cost, error) {
	if r == nil || r.a != a {
		return Cost{}, fmt.Errorf("estimate: %w: the request is not of agent %s", ErrInvalid, a.name)
	}
	if r.b.estimator == nil {
		return Cost{}, fmt.Errorf("estimate %s: %w: it has no Estimator role", r.b.name, ErrNotSupported)
	}
	r.mu.Lock()
	if r.mu.status == Released {
		r.mu.Unlock()
		return Cost{}, fmt.Errorf("estimate %s: %w: request was released", r.b.name, ErrClosed)
	}
	r.mu.users++ // keeps prepared, without a lock held in the backend
	r.mu.Unlock()
	cost, err := r.b.estimator.Estimate(r.prepared)
	r.mu.Lock()
	r.mu.users--
	r.mu.Unlock()
	if err != nil {
		return Cost{}, fmt.Errorf("estimate %s: %w", r.b.name, err)
	}
	return cost, nil
}

// enter finds a backend by name and holds Close off until a.ops.Done.
func (a *Agent) enter(backend string) (*adopted, error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.mu.closed {
		return nil, a.errClosed()
	}
	b := a.find(backend)
	if b == nil {
		return nil, fmt.Errorf("%w: agent %s has no backend %q", ErrNotFound, a.name, backend)
	}
	a.ops.Add(1)
	return b, nil
}

// find needs a.mu.
func (a *Agent) find(name string) *adopted {
	for _, b := range a.mu.backends {
		if b.name == name {
			return b
		}
	}
	return nil
}

// Close cancels what is in flight and returns when all memory is quiet, every
// registration is undone and every backend is closed, the last added first.
// Later calls, and calls on requests of the agent, fail with ErrClosed. It is
// safe to call twice.
func (a *Agent) Close() error {
	a.closed.Lock()
	defer a.closed.Unlock()
	if !a.closed.done {
		a.closed.done, a.closed.err = true, a.close()
	}
	return a.closed.err
}

func (a *Agent) close() error {
	a.mu.Lock()
	a.mu.closed = true // nothing enters a.ops or a.live's list any more
	a.mu.Unlock()
	a.ops.Wait()

	a.live.Lock()
	requests := make([]*Request, 0, a.live.count)
	for r := a.live.head; r != nil; r = r.next {
		requests = append(requests, r)
	}
	a.live.empty = make(chan struct{})
	if a.live.count == 0 {
		close(a.live.empty)
	}
	a.live.Unlock()
	for _, r := range requests {
		r.interrupt() // all of them first, so that they end side by side
	}
	for _, r := range requests {
		r.shut()
	}
	<-a.live.empty // a Release of the user's may still be under way
	a.posts.Wait()

	var failures []error
	for _, b := range slices.Backward(a.mu.backends) {
		a.mu.Lock()
		sections := b.sections
		b.sections = [memTypes]section{}
		a.mu.Unlock()
		for _, s := range sections {
			failures = append(failures, b.deregisterAll(s.regs))
		}
		if err := b.Close(); err != nil {
			failures = append(failures, fmt.Errorf("close backend %s: %w", b.name, err))
		}
	}
	return joined(failures)
}

func (a *Agent) errClosed() error { return fmt.Errorf("%w: agent %s", ErrClosed, a.name) }

func createError(backend string, err error) error {
	return &Error{Layer: LayerCreate, Backend: backend, Index: -1, Err: err}
}

func (a *Agent) link(r *Request) {
	a.live.Lock()
	r.next = a.live.head
	if r.next != nil {
		r.next.prev = r
	}
	a.live.head = r
	a.live.count++
	a.live.Unlock()
}

func (a *Agent) unlink(r *Request) {
	a.live.Lock()
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		a.live.head = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	}
	r.prev, r.next = nil, nil
	a.live.count--
	if a.live.count == 0 && a.live.empty != nil {
		close(a.live.empty)
	}
	a.live.Unlock()
}
