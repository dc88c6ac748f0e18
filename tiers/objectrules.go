package tiers

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// ObjectMode says when blocks go into G4.
type ObjectMode uint8

// The modes.
const (
	WriteBack    ObjectMode = iota // when they leave the lowest local tier
	WriteThrough                   // soon after they were put, too
	NoObjects                      // never: they leave as if there were no G4
)

// ObjectRule says what becomes of a namespace's blocks in G4. The zero value is for those of
// which nothing is said.
type ObjectRule struct {
	Mode ObjectMode
	// Keep is how long a block is found in G4 after it was written there; a copy that comes
	// from there has the same end. 0: as long as its own time to live.
	Keep time.Duration
}

func (r ObjectRule) check(namespace string) error {
	switch {
	case r.Mode > NoObjects:
		return fmt.Errorf("%w: object mode of %q: %d", block.ErrInvalid, namespace, r.Mode)
	case r.Keep < 0 || r.Keep%time.Second != 0:
		return fmt.Errorf("%w: time to keep objects of %q: %v, want whole seconds", block.ErrInvalid, namespace, r.Keep)
	}
	return nil
}

// objectRules are what is known of Options.ObjectRules.
type objectRules struct{ known sync.Map } // of ObjectRule, by NamespaceID

// rule is that of a namespace.
func (o *objects) rule(ns block.NamespaceID) ObjectRule {
	if o.s.opts.ObjectRule == nil {
		return ObjectRule{}
	}
	if r, ok := o.rules.known.Load(ns); ok {
		return r.(ObjectRule)
	}
	n, err := o.s.names.byID(ns)
	if err != nil {
		return ObjectRule{}
	}
	name := n.state.Load().Desc.Name
	r := o.s.opts.ObjectRule(name)
	if err := r.check(name); err != nil {
		o.s.log.Error("no rule for the objects of a namespace", "namespace", name, "err", err)
		r = ObjectRule{}
	}
	o.rules.known.Store(ns, r)
	return r
}

// takesOf reports whether blocks of a namespace go into G4 now. o may be nil.
func (o *objects) takesOf(ns block.NamespaceID) bool {
	return o.takes() && o.rule(ns).Mode != NoObjects
}

// expires is when a block is found no more in G4 that is written there now.
func (o *objects) expires(e *index.Entry) int64 {
	own := int64(e.Expires)
	keep := o.rule(e.NS).Keep
	if keep == 0 {
		return own
	}
	if end := int64(expiry(keep)); own == 0 || end < own {
		return end
	}
	return own
}

// lasts reports whether a record is good enough for a block: it does not end before the block
// does, or only since G4 keeps blocks no longer.
func (o *objects) lasts(r *index.PackedRecord, e *index.Entry) bool {
	own := int64(e.Expires)
	return r.Expires == own || o.rule(e.NS).Keep > 0 && r.Expires != 0 && (own == 0 || r.Expires < own)
}

// writeThrough queues blocks that were just stored, of namespaces that ask for it. What the
// queue has no room for goes up when it is evicted.
func (s *Store) writeThrough(rs []*reservation, res []block.CommitResult) {
	if s.objects == nil || s.opts.ObjectRule == nil || !s.objects.takes() {
		return
	}
	var held []block.Handle
	for i, r := range rs {
		if r == nil || res[i].Err != nil || res[i].Status == block.Exists || s.objects.rule(r.key.NS).Mode != WriteThrough {
			continue
		}
		s.table.UpdateKey(r.key, func(h block.Handle, e *index.Entry) {
			if live(e, ixG2) && e.Flags&flagPacked == 0 {
				e.Refs++
				held = append(held, h)
			}
		})
	}
	if len(held) > 0 {
		s.objects.uploads.addThrough(held)
	}
}
