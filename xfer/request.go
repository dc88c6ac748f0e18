package xfer

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Status is where a request, or one descriptor of it, is in its life.
type Status uint8

// The statuses. A request that succeeded, failed or was cancelled may be
// posted again.
const (
	NotPosted Status = iota
	Active           // in flight: its memory may be touched
	Succeeded        // all bytes arrived
	Failed           // some did not; DescErr says which
	Canceled         // ended by Cancel, its context or its deadline
	Released
)

var statusNames = [...]string{"not posted", "active", "succeeded", "failed", "canceled", "released"}

// String gives the name of the status.
func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("Status(%d)", uint8(s))
}

// Request is one transfer, made by NewRequest or Select: prepared once, run or
// posted as often as wanted, one post at a time, released in the end. It is
// safe for use by many goroutines.
type Request struct {
	a             *Agent
	b             *adopted
	op            Op
	local, remote []Bound
	prepared      Prepared
	deadline      time.Time
	done          func(i int, err error) // onDone, bound once
	pins          pins
	peer          *peer            // whose the remote side is; nil when it is this agent's
	msg           []byte           // notification behind the bytes, if not nil
	lists         [2]*PreparedList // those it was selected from
	prev, next    *Request         // in the agent's list; its lock guards them

	// Room for the common case of few descriptors, so that it needs no
	// further allocation.
	one [2]Bound
	few [8]Status

	mu struct {
		sync.Mutex
		status    Status
		err       error    // of the last post
		states    []Status // by descriptor, of the last post
		errs      []error  // by descriptor; nil until one fails
		left      int      // descriptors not done yet
		moved     uint64   // bytes of those that succeeded
		posted    bool     // the post under way holds one of the agent's slots
		users     int      // calls that need prepared
		stale     error    // why the peer's life is over
		retired   bool     // prepared and what it kept were given up because of that
		cancel    context.CancelFunc
		idle      chan struct{} // made by whoever waits, closed when the post has ended
		progress  chan struct{} // tells Each that descriptor want is done
		want      int
		delivered bool      // an Each is under way
		each      *delivery // of the run under way, if it is an Each's
		telemetry Telemetry
	}
}

// RequestOptions narrows a request.
type RequestOptions struct {
	Backend  string    // only this one; the first that fits when empty
	Deadline time.Time // every post is cancelled then, if not zero

	// Peer names the agent whose memory the remote side is: this agent's when empty.
	Peer string
	// Notify, if not nil, is a notification for the peer: each post delivers it once,
	// behind all of its bytes, and succeeds only when it is delivered. At most
	// MaxNotification bytes.
	Notify []byte
}

// NewRequest makes a transfer between the two lists, pair by pair, without
// starting it. Each descriptor must lie inside one registration. The lists are
// copied. The caller releases the request. Errors: ErrInvalid, ErrNoBackend
// with each backend's reason, ErrNotFound (no backend or no peer of that name),
// ErrDisconnected (another life of the peer is being loaded), ErrClosed, and what the
// backend returns.
func (a *Agent) NewRequest(op Op, local, remote DescList, o *RequestOptions) (*Request, error) {
	if err := checkTransfer(op, local, remote); err != nil {
		return nil, err
	}
	if err := checkNotify(o, o != nil && o.Peer != ""); err != nil {
		return nil, err
	}
	r := &Request{a: a, op: op}
	n := len(local.Descs)
	bounds := r.one[:]
	if n > 1 {
		bounds = make([]Bound, 2*n)
	}
	r.local, r.remote = bounds[:n:n], bounds[n:]
	b, err := r.choose(local, remote, bounds, o)
	if err != nil {
		return nil, err
	}
	defer a.ops.Done()
	return r.prepare(b, o)
}

// choose finds the request's peer and backend. On success it has entered a.ops.
func (r *Request) choose(local, remote DescList, bounds []Bound, o *RequestOptions) (*adopted, error) {
	a, hint, name := r.a, "", ""
	if o != nil {
		hint, name = o.Backend, o.Peer
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	var p *peer
	if name != "" && !a.mu.closed {
		var err error
		if p, err = a.peer(name); err != nil {
			return nil, prepareError("", err)
		}
	}
	b, err := a.choose(hint, p, local, remote, bounds, &r.pins)
	if err != nil {
		return nil, err
	}
	a.ops.Add(1)
	r.use(p)
	return b, nil
}

// use holds the end of the peer's life off until drop. It needs the agent's mu, so
// that it does not begin when that end has.
func (r *Request) use(p *peer) {
	if p != nil {
		r.peer = p
		p.uses.Add(1)
	}
}

// prepare hands the bound request to its backend and to the agent's list.
func (r *Request) prepare(b *adopted, o *RequestOptions) (*Request, error) {
	p, err := b.Prepare(r.op, r.local, r.remote)
	if err != nil {
		r.drop()
		return nil, prepareError(b.name, err)
	}
	r.b, r.prepared = b, p
	if o != nil {
		r.deadline = o.Deadline
		if o.Notify != nil {
			r.msg = append([]byte{}, o.Notify...)
		}
	}
	r.done = r.onDone
	n := len(r.local)
	if n <= len(r.few) {
		r.mu.states = r.few[:n]
	} else {
		r.mu.states = make([]Status, n)
	}
	r.mu.telemetry.Descs = n
	r.a.link(r)
	if r.peer != nil {
		// From here on the end of the peer's life finds the request. One that began
		// before does not.
		if err := r.peer.over(); err != nil {
			_ = r.Release() // nobody else has it
			return nil, prepareError(b.name, err)
		}
	}
	return r, nil
}

// Backend names the backend that was chosen.
func (r *Request) Backend() string { return r.b.name }

// Len is the number of descriptors.
func (r *Request) Len() int { return len(r.local) }

// Run performs the transfer on the caller's goroutine and returns when its
// memory is quiet: the shortest way. The end of ctx, Cancel and the request's
// deadline end it early. Errors: see Wait; ErrActive, ErrDisconnected and ErrClosed as
// in Post.
func (r *Request) Run(ctx context.Context) error {
	var began time.Time
	if r.a.telemetry {
		began = time.Now()
	}
	ctx, err := r.begin(ctx, began, false, nil)
	if err != nil {
		return err
	}
	return r.transfer(ctx, began)
}

// Post starts the transfer and returns. The end of ctx cancels it, as do
// Cancel and the request's deadline. When the agent's MaxInFlight requests are
// posted, Post first waits for one to end. Errors: ErrActive (it is in flight),
// ErrDisconnected (the life of its peer that it was made for is over), ErrClosed (it
// was released), ErrCanceled (ctx ended while waiting).
func (r *Request) Post(ctx context.Context) error {
	var began time.Time
	if r.a.telemetry {
		began = time.Now()
	}
	select {
	case r.a.slots <- struct{}{}:
	default:
		r.a.waits.Add(1)
		select {
		case r.a.slots <- struct{}{}:
		case <-ctx.Done():
			return r.fail(-1, fmt.Errorf("%w: %w", ErrCanceled, context.Cause(ctx)))
		}
	}
	ctx, err := r.begin(ctx, began, true, nil)
	if err != nil {
		<-r.a.slots
		return err
	}
	r.a.posts.Add(1) // before the post can end, so that Close sees it
	go func() {
		defer r.a.posts.Done()
		_ = r.transfer(ctx, began) // kept for Wait
	}()
	return nil
}

// begin makes the request active and gives the context of this post.
func (r *Request) begin(ctx context.Context, began time.Time, posted bool, each *delivery) (context.Context, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch r.mu.status {
	case Active:
		return nil, r.fail(-1, ErrActive)
	case Released:
		return nil, r.fail(-1, fmt.Errorf("%w: request was released", ErrClosed))
	}
	if r.mu.stale != nil {
		return nil, r.fail(-1, r.mu.stale)
	}
	if r.deadline.IsZero() {
		ctx, r.mu.cancel = context.WithCancel(ctx)
	} else {
		ctx, r.mu.cancel = context.WithDeadline(ctx, r.deadline)
	}
	r.mu.status, r.mu.err, r.mu.errs = Active, nil, nil
	for i := range r.mu.states {
		r.mu.states[i] = Active
	}
	r.mu.left, r.mu.moved, r.mu.posted, r.mu.each = len(r.mu.states), 0, posted, each
	r.mu.telemetry.Posts++
	r.mu.telemetry.Started = began
	return ctx, nil
}

// transfer performs one post and records how it ended.
func (r *Request) transfer(ctx context.Context, began time.Time) error {
	var start, end time.Time
	if r.a.telemetry {
		start = time.Now()
	}
	var err error
	if ctx.Err() == nil { // else finish calls every descriptor cancelled
		err = r.b.Transfer(ctx, r.prepared, r.done)
	}
	var unnotified error
	if r.msg != nil && err == nil && r.arrived() {
		unnotified = r.b.notify(ctx, r.peer, r.msg)
	}
	if r.a.telemetry {
		end = time.Now()
	}

	r.mu.Lock()
	if r.mu.left > 0 {
		r.settle(ctx, err)
	}
	r.mu.status, r.mu.err = r.outcome(ctx, err)
	if unnotified != nil {
		r.mu.status, r.mu.err = r.unnotified(ctx, unnotified)
	}
	r.mu.telemetry.Bytes = r.mu.moved
	if r.a.telemetry {
		r.mu.telemetry.PostTime, r.mu.telemetry.TransferTime = start.Sub(began), end.Sub(start)
	}
	r.count()
	cancel, result := r.mu.cancel, r.mu.err
	r.mu.cancel, r.mu.each = nil, nil
	if r.mu.posted {
		<-r.a.slots
	}
	r.quiet()
	r.wake()
	r.mu.Unlock()
	cancel()
	return result
}

// fail names the place of a failure of this request.
func (r *Request) fail(i int, err error) error {
	e := &Error{Layer: LayerPost, Backend: r.b.name, Index: i, Err: err}
	if i >= 0 {
		e.Desc = r.remote[i].Desc
	}
	return e
}

// Wait waits until the request is not in flight and says how its last post
// ended: nil, or an *Error that names the first descriptor that failed. The end
// of ctx ends only the wait. Errors: ErrNotPosted, ErrCanceled (with the cause:
// context.DeadlineExceeded at the deadline), ErrShort, ErrDisconnected (also when the
// life of its peer ended), ErrClosed (released), what the backend returns, and ctx's
// when the wait ended. When only the notification failed the text says that the bytes
// arrived, and no descriptor has an error.
func (r *Request) Wait(ctx context.Context) error {
	for {
		r.mu.Lock()
		switch r.mu.status {
		case NotPosted:
			r.mu.Unlock()
			return r.fail(-1, ErrNotPosted)
		case Released:
			r.mu.Unlock()
			return r.fail(-1, fmt.Errorf("%w: request was released", ErrClosed))
		case Active:
		default:
			err := r.mu.err
			r.mu.Unlock()
			return err
		}
		idle := r.idle()
		r.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s %s: %w", r.b.name, r.op, context.Cause(ctx))
		}
	}
}

// idle gives the channel that closes when the post under way ends. It needs
// r.mu.
func (r *Request) idle() chan struct{} {
	if r.mu.idle == nil {
		r.mu.idle = make(chan struct{})
	}
	return r.mu.idle
}

// quiet wakes those who wait for idle. It needs r.mu.
func (r *Request) quiet() {
	if r.mu.idle != nil {
		close(r.mu.idle)
		r.mu.idle = nil
	}
}

// Status polls.
func (r *Request) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.status
}

// DescStatus polls one descriptor of the last post. It panics when there is no
// descriptor i.
func (r *Request) DescStatus(i int) Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.states[i]
}

// DescErr says why descriptor i failed in the last post: nil when it succeeded
// or is not done. It panics when there is no descriptor i.
func (r *Request) DescErr(i int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.mu.states[i]; s != Failed && s != Canceled {
		return nil
	}
	return r.fail(i, r.mu.errs[i])
}

// Cancel ends a post early and returns when its memory is quiet. Descriptors
// that are done stay done. It does nothing when the request is not in flight.
func (r *Request) Cancel() {
	if idle := r.interrupt(); idle != nil {
		<-idle
	}
}

// interrupt asks the post under way to end. The channel closes when it has;
// nil when there is none.
func (r *Request) interrupt() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.status != Active {
		return nil
	}
	r.mu.cancel()
	return r.idle()
}

// Release gives the request up; it cannot be used any more. It is safe to call
// twice. Errors: ErrActive: it is in flight (Cancel it first).
func (r *Request) Release() error {
	r.mu.Lock()
	if r.mu.status == Released {
		r.mu.Unlock()
		return nil
	}
	if r.mu.status == Active || r.mu.users > 0 {
		r.mu.Unlock()
		return r.fail(-1, ErrActive)
	}
	r.mu.status = Released
	retired := r.mu.retired
	r.mu.Unlock()
	if !retired {
		r.b.Release(r.prepared)
		r.drop()
	}
	r.a.unlink(r) // last: Close goes on when the list is empty
	return nil
}

// shut releases the request for the agent's Close, whatever it is doing.
func (r *Request) shut() {
	for r.Release() != nil {
		r.Cancel()
	}
}

// drop gives up what keeps registrations and the peer in place.
func (r *Request) drop() {
	r.pins.drop()
	for _, l := range r.lists {
		if l != nil {
			l.unref()
		}
	}
	if r.peer != nil {
		r.peer.uses.Done() // last: then the peer is forgotten
	}
}

// Telemetry says what the request did; see AgentOptions.Telemetry.
func (r *Request) Telemetry() Telemetry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.telemetry
}
