package xfer

import (
	"context"
	"fmt"
	"slices"
)

// RegisterOptions narrows a registration.
type RegisterOptions struct {
	Backends []string // only these; all that serve the memory type when empty
}

// Register makes memory usable in transfers. Each backend that serves the
// memory type (or is named in the options) is asked; within one backend all
// pieces are registered or none. It succeeds when at least one backend
// accepts, and otherwise returns all their reasons. The same piece may be
// registered more than once, and then lives until it was deregistered as often.
// The memory must stay until then. Errors: ErrInvalid, ErrNotFound (no backend
// of that name), ErrNoBackend (none serves the type), ErrClosed, and what the
// backends return.
func (a *Agent) Register(ctx context.Context, l DescList, o *RegisterOptions) error {
	if err := checkRegistration(l); err != nil {
		return err
	}
	candidates, err := a.candidates(l.Type, o)
	if err != nil {
		return err
	}
	defer a.ops.Done()
	var refusals []error
	for _, b := range candidates {
		regs, err := b.registerAll(ctx, l)
		if err != nil {
			refusals = append(refusals, err)
			continue
		}
		a.mu.Lock()
		b.sections[l.Type].insert(regs)
		a.mu.Unlock()
	}
	if len(refusals) == len(candidates) {
		return joined(refusals)
	}
	return nil
}

// candidates gives the backends to ask for a registration. On success it has
// entered a.ops.
func (a *Agent) candidates(t MemType, o *RegisterOptions) ([]*adopted, error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.mu.closed {
		return nil, &Error{Layer: LayerRegister, Index: -1, Err: a.errClosed()}
	}
	var named []string
	if o != nil {
		named = o.Backends
	}
	for _, name := range named {
		if a.find(name) == nil {
			return nil, &Error{Layer: LayerRegister, Index: -1, Err: fmt.Errorf("%w: agent %s has no backend %q", ErrNotFound, a.id.Name, name)}
		}
	}
	var found []*adopted
	for _, b := range a.mu.backends {
		if b.serves(t) && (len(named) == 0 || slices.Contains(named, b.name)) {
			found = append(found, b)
		}
	}
	if len(found) == 0 {
		among := ""
		if len(named) > 0 {
			among = fmt.Sprintf(" among %q", named)
		}
		return nil, &Error{Layer: LayerRegister, Index: -1, Err: fmt.Errorf("%w: none serves %s%s", ErrNoBackend, t, among)}
	}
	a.ops.Add(1)
	return found, nil
}

// registerAll registers every piece with one backend, or none.
func (b *adopted) registerAll(ctx context.Context, l DescList) ([]*registration, error) {
	regs := make([]*registration, 0, len(l.Descs))
	for i, d := range l.Descs {
		region, err := b.Register(ctx, l.Type, d)
		if err != nil {
			err = &Error{Layer: LayerRegister, Backend: b.name, Index: i, Desc: d, Err: err}
			return nil, joined([]error{err, b.deregisterAll(regs)})
		}
		reg := newRegistration(l.Type, d, region)
		regs = append(regs, reg)
		if !b.exposes(l.Type) {
			continue
		}
		if reg.info, err = b.remote.RegionInfo(region); err != nil {
			err = &Error{Layer: LayerRegister, Backend: b.name, Index: i, Desc: d, Err: fmt.Errorf("region info: %w", err)}
			return nil, joined([]error{err, b.deregisterAll(regs)})
		}
	}
	return regs, nil
}

// deregisterAll tells the backend to forget pieces, in reverse order.
func (b *adopted) deregisterAll(regs []*registration) error {
	var failures []error
	for i, r := range slices.Backward(regs) {
		if err := b.Deregister(r.region); err != nil {
			failures = append(failures, &Error{
				Layer: LayerRegister, Backend: b.name, Index: i, Desc: r.desc,
				Err: fmt.Errorf("deregister: %w", err),
			})
		}
	}
	return joined(failures)
}

// Deregister undoes one registration of each piece in every backend that knows
// it; the pieces are those that were registered, exactly. When one of them is
// unknown to all backends (ErrNotFound) or still referred to by a request or a
// prepared list (ErrActive), nothing is deregistered. What peers do with it does not
// hold it up. After it returned, no backend and no peer touches the memory again.
func (a *Agent) Deregister(ctx context.Context, l DescList) error {
	if err := checkRegistration(l); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return &Error{Layer: LayerRegister, Index: -1, Err: fmt.Errorf("deregister: %w: %w", ErrCanceled, err)}
	}
	type removal struct {
		b    *adopted
		regs []*registration
	}
	var removals []removal
	err := func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.mu.closed {
			return &Error{Layer: LayerRegister, Index: -1, Err: a.errClosed()}
		}
		known := make([]bool, len(l.Descs))
		for _, b := range a.mu.backends {
			regs, err := b.removable(l, known)
			if err != nil {
				return err
			}
			if len(regs) > 0 {
				removals = append(removals, removal{b, regs})
			}
		}
		if i := slices.Index(known, false); i >= 0 {
			return &Error{
				Layer: LayerRegister, Index: i, Desc: l.Descs[i],
				Err: fmt.Errorf("deregister: %w: no such registration in %s", ErrNotFound, l.Type),
			}
		}
		for _, m := range removals {
			gone := make(map[*registration]bool, len(m.regs))
			for _, r := range m.regs {
				gone[r] = true
			}
			m.b.sections[l.Type].remove(gone)
		}
		a.ops.Add(1)
		return nil
	}()
	if err != nil {
		return err
	}
	defer a.ops.Done()
	var failures []error
	for _, m := range removals {
		failures = append(failures, m.b.deregisterAll(m.regs))
	}
	return joined(failures)
}

// removable gives one registration for each piece that the backend knows and
// marks it in known.
func (b *adopted) removable(l DescList, known []bool) ([]*registration, error) {
	var regs []*registration
	taken := make(map[*registration]bool, len(l.Descs))
	for i, d := range l.Descs {
		exact := b.sections[l.Type].exact(l.Type, d)
		exact = slices.DeleteFunc(exact, func(r *registration) bool { return taken[r] })
		if len(exact) == 0 {
			continue
		}
		known[i] = true
		idle := slices.IndexFunc(exact, func(r *registration) bool { return r.refs.Load() == 0 })
		if idle < 0 {
			return nil, &Error{
				Layer: LayerRegister, Backend: b.name, Index: i, Desc: d,
				Err: fmt.Errorf("deregister: %w: a request or prepared list refers to it", ErrActive),
			}
		}
		taken[exact[idle]] = true
		regs = append(regs, exact[idle])
	}
	return regs, nil
}

// checkRegistration refuses what no backend could register.
func checkRegistration(l DescList) error {
	if l.Type >= memTypes {
		return &Error{Layer: LayerRegister, Index: -1, Err: fmt.Errorf("%w: memory type %s", ErrInvalid, l.Type)}
	}
	if len(l.Descs) == 0 {
		return &Error{Layer: LayerRegister, Index: -1, Err: fmt.Errorf("%w: no descriptors", ErrInvalid)}
	}
	for i, d := range l.Descs {
		var reason string
		switch {
		case d.Len == 0 && !l.Type.Unbounded():
			reason = "length is 0"
		case d.Addr+d.Len < d.Addr:
			reason = "address and length wrap around"
		default:
			continue
		}
		return &Error{Layer: LayerRegister, Index: i, Desc: d, Err: fmt.Errorf("%w: %s", ErrInvalid, reason)}
	}
	return nil
}
