package xfer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
)

// The defaults of AgentOptions.
const (
	defaultMaxInFlight      = 1024
	defaultMaxNotifications = 256
)

// Agent owns backends, registered memory, what it knows of peers, and the requests
// made from them. It is safe for use by many goroutines.
type Agent struct {
	id        PeerID
	telemetry bool
	slots     chan struct{} // one per posted request
	waits     atomic.Uint64 // posts that found no free slot
	posts     sync.WaitGroup
	ops       sync.WaitGroup // calls that Close waits for
	notes     chan Notification
	pumps     sync.WaitGroup // what fills notes, one for each Notifier

	ctx context.Context // ends when Close begins: nothing waits for a peer any more
	end context.CancelCauseFunc

	// peering is held while a backend is adopted or a peer loaded or ended: each of
	// these calls backends between two looks at mu.
	peering sync.Mutex

	mu struct {
		sync.RWMutex
		closed      bool
		backends    []*adopted       // in configured order; guards their sections too
		peers       map[string]*peer // by name; guards their backends and sections too
		generations uint64           // lives of peers seen so far
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
	remote    Remote            // nil without Caps.Remote
	notifier  Notifier          // nil without Caps.Notify
	conn      []byte            // what the Remote role says about reaching it
	gone      chan struct{}     // closed when it is
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
	// MaxNotifications bounds the notifications that wait to be taken (256 when 0).
	// Beyond them the backends' queues fill, and then the senders wait.
	MaxNotifications int
	// Incarnation says which life of the name this is; random when 0.
	Incarnation uint64
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
	if o.MaxNotifications < 0 {
		return nil, createError("", fmt.Errorf("%w: MaxNotifications %d is negative", ErrInvalid, o.MaxNotifications))
	}
	limit, notes, life := o.MaxInFlight, o.MaxNotifications, o.Incarnation
	if limit == 0 {
		limit = defaultMaxInFlight
	}
	if notes == 0 {
		notes = defaultMaxNotifications
	}
	for life == 0 {
		life = rand.Uint64()
	}
	a := &Agent{
		id: PeerID{name, life}, telemetry: o.Telemetry,
		slots: make(chan struct{}, limit), notes: make(chan Notification, notes),
	}
	a.ctx, a.end = context.WithCancelCause(context.Background())
	a.mu.peers = make(map[string]*peer)
	return a, nil
}

// Name gives the agent's name.
func (a *Agent) Name() string { return a.id.Name }

// ID is what peers know the agent by: its name and which life of it this is.
func (a *Agent) ID() PeerID { return a.id }

// AddBackend adopts a backend: from now on the agent closes it. The order of
// adding is the order of preference. A backend with the Remote role is bound to the
// agent, and peers can reach it. On error the backend stays the caller's.
// Errors: ErrInvalid (the name is taken, or what Caps says does not fit the
// methods that the backend has), ErrClosed, and what Bind returns.
func (a *Agent) AddBackend(b Backend) error {
	if b == nil {
		return createError("", fmt.Errorf("%w: backend is nil", ErrInvalid))
	}
	n := &adopted{Backend: b, name: b.Name(), caps: b.Caps(), gone: make(chan struct{})}
	n.caps.Pairs = slices.Clone(n.caps.Pairs)
	n.querier, _ = b.(Querier)
	n.estimator, _ = b.(Estimator)
	n.remote, _ = b.(Remote)
	n.notifier, _ = b.(Notifier)
	if err := n.check(); err != nil {
		return createError(n.name, err)
	}
	a.peering.Lock() // the name stays free while the backend is bound
	defer a.peering.Unlock()
	a.mu.RLock()
	closed, taken := a.mu.closed, a.find(n.name) != nil
	a.mu.RUnlock()
	if closed {
		return createError(n.name, a.errClosed())
	}
	if taken {
		return createError(n.name, fmt.Errorf("%w: agent %s has a backend of this name", ErrInvalid, a.id.Name))
	}
	if err := n.bind(a.id); err != nil {
		return createError(n.name, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return createError(n.name, a.errClosed())
	}
	a.mu.backends = append(a.mu.backends, n)
	if n.notifier != nil {
		a.pumps.Add(1)
		go a.pump(n)
	}
	return nil
}

// bind tells a backend with the Remote role whose it is.
func (b *adopted) bind(self PeerID) error {
	if b.remote == nil {
		return nil
	}
	if err := b.remote.Bind(self); err != nil {
		return fmt.Errorf("bind to %s: %w", self, err)
	}
	conn, err := b.remote.ConnInfo()
	if err != nil {
		return fmt.Errorf("connection info: %w", err)
	}
	if len(conn) == 0 {
		return fmt.Errorf("%w: connection info is empty", ErrInvalid)
	}
	b.conn = conn
	return nil
}

// check compares what the backend says with what it has, and forgets the roles that
// it has but does not say.
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
	if !b.caps.Remote {
		b.remote = nil
	}
	if !b.caps.Notify {
		b.notifier = nil
	}
	return nil
}

// exposes says whether peers can reach memory of this type through the backend.
func (b *adopted) exposes(t MemType) bool {
	return b.remote != nil && slices.ContainsFunc(b.caps.Pairs, func(p Pair) bool { return p.Remote == t })
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
// another agent), ErrDisconnected (its peer's life is over), ErrClosed, and what the
// backend returns.
func (a *Agent) Estimate(r *Request) (Cost, error) {
	if r == nil || r.a != a {
		return Cost{}, fmt.Errorf("estimate: %w: the request is not of agent %s", ErrInvalid, a.id.Name)
	}
	if r.b.estimator == nil {
		return Cost{}, fmt.Errorf("estimate %s: %w: it has no Estimator role", r.b.name, ErrNotSupported)
	}
	r.mu.Lock()
	if r.mu.status == Released {
		r.mu.Unlock()
		return Cost{}, fmt.Errorf("estimate %s: %w: request was released", r.b.name, ErrClosed)
	}
	if err := r.mu.stale; err != nil {
		r.mu.Unlock()
		return Cost{}, fmt.Errorf("estimate %s: %w", r.b.name, err)
	}
	r.mu.users++ // keeps prepared, without a lock held in the backend
	r.mu.Unlock()
	cost, err := r.b.estimator.Estimate(r.prepared)
	r.mu.Lock()
	if r.mu.users--; r.mu.users == 0 && r.mu.status != Active {
		r.quiet()
	}
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
		return nil, fmt.Errorf("%w: agent %s has no backend %q", ErrNotFound, a.id.Name, backend)
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

// Close cancels what is in flight and returns when all memory is quiet, every peer
// forgotten, every registration undone and every backend closed, the last added
// first. Notifications that nobody took are dropped. Later calls, and calls on
// requests of the agent, fail with ErrClosed. It is safe to call twice.
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
	a.end(a.errClosed())
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
	for _, p := range a.mu.peers { // nobody is left to change them
		a.endPeer(p, a.errClosed())
	}
	a.mu.Lock()
	clear(a.mu.peers)
	a.mu.Unlock()

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
		close(b.gone)
	}
	a.pumps.Wait()
	close(a.notes)
	return joined(failures)
}

func (a *Agent) errClosed() error { return fmt.Errorf("%w: agent %s", ErrClosed, a.id.Name) }

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
