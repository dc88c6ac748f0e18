// Package access says who a client is and what it may do: a list of identities, each
// known by the digest of a token or by its user on this host, with the namespaces that
// it may read and write, and how many sessions and leases it may have.
package access

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"path"
	"slices"

	"github.com/kvtier/kvtier/index/block"
)

// Right is what an identity may do with a namespace.
type Right uint8

// The rights. An identity may have both.
const (
	Read  Right = 1 << iota // look blocks up, get them, watch them
	Write                   // put, pin and delete blocks, and make the namespace
)

// String says it as denials do.
func (r Right) String() string {
	switch r {
	case Read:
		return "read"
	case Write:
		return "write"
	case Read | Write:
		return "read and write"
	}
	return fmt.Sprintf("right(%d)", uint8(r))
}

// everything is the glob of all namespaces.
const everything = "*"

// Identity is who a client is. A nil one stands for any client of a server without a
// list, and may do everything.
type Identity struct {
	name        string
	digest      *[sha256.Size]byte // of its token; nil: none
	uid         *uint32            // its user on this host; nil: none
	read, write []string           // globs over names of namespaces
	usage       usage
}

// Name is what the list calls it, "" for a nil one and for that of a single token.
func (i *Identity) Name() string {
	if i == nil {
		return ""
	}
	return i.name
}

// Rights is what it may do with the namespace of that name.
func (i *Identity) Rights(namespace string) (r Right) {
	if i == nil {
		return Read | Write
	}
	if matches(i.read, namespace) {
		r |= Read
	}
	if matches(i.write, namespace) {
		r |= Write
	}
	return r
}

func matches(globs []string, name string) bool {
	return slices.ContainsFunc(globs, func(g string) bool {
		ok, err := path.Match(g, name)
		return ok && err == nil // it was checked
	})
}

// All is what it may do with every namespace, those to come included.
func (i *Identity) All() (r Right) {
	if i == nil {
		return Read | Write
	}
	if slices.Contains(i.read, everything) {
		r |= Read
	}
	if slices.Contains(i.write, everything) {
		r |= Write
	}
	return r
}

// Check fails with ErrDenied when it has none of the rights for the namespace.
func (i *Identity) Check(right Right, namespace string) error {
	if i.Rights(namespace)&right == 0 {
		return i.denied(right, fmt.Sprintf("namespace %q", namespace))
	}
	return nil
}

// CheckHandle is Check for a namespace that the client knows by its handle. It is told
// the name only when it may do something there: handles are easily guessed.
func (i *Identity) CheckHandle(right Right, id block.NamespaceID, namespace string) error {
	switch have := i.Rights(namespace); {
	case have&right != 0:
		return nil
	case have == 0:
		return i.denied(right, fmt.Sprintf("namespace %d", id))
	}
	return i.denied(right, fmt.Sprintf("namespace %q", namespace))
}

// CheckAll fails with ErrDenied when it lacks one of the rights for every namespace.
// what names the call.
func (i *Identity) CheckAll(all Right, what string) error {
	if i.All()&all != all {
		return fmt.Errorf("%w: identity %q may not %s all namespaces, which %s needs", block.ErrDenied, i.name, all, what)
	}
	return nil
}

// denied is the ErrDenied of a right that it does not have.
func (i *Identity) denied(right Right, what string) error {
	verb := right.String()
	if right == Read|Write {
		verb = "read or write"
	}
	return fmt.Errorf("%w: identity %q may not %s %s", block.ErrDenied, i.Name(), verb, what)
}

// List is who may connect.
type List struct{ all []*Identity }

// Single is the list of the one token that every client gives, and that may do all.
func Single(token string) *List {
	sum := sha256.Sum256([]byte(token))
	return &List{all: []*Identity{{
		digest: &sum, read: []string{everything}, write: []string{everything},
		usage: usage{leases: NewLeases(0)}, // everybody's: the servers' limits do
	}}}
}

// ByToken finds who gives the token; nil: nobody. Digests are compared, all of them, so
// that neither a token's content nor whose it is shows in the time that it takes.
func (l *List) ByToken(token string) *Identity {
	sum := sha256.Sum256([]byte(token))
	at := -1
	for i, id := range l.all {
		if id.digest != nil {
			at = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum[:], id.digest[:]), i, at)
		}
	}
	if at < 0 {
		return nil
	}
	return l.all[at]
}

// ByUID finds who a user of this host is; nil: nobody.
func (l *List) ByUID(uid uint32) *Identity {
	for _, id := range l.all {
		if id.uid != nil && *id.uid == uid {
			return id
		}
	}
	return nil
}

// Share is the same for two namespaces whose readers and writers are the same.
func (l *List) Share(namespace string) string {
	b := make([]byte, len(l.all))
	for i, id := range l.all {
		b[i] = byte(id.Rights(namespace))
	}
	return string(b)
}

// Divides reports whether there can be namespaces that do not have the same readers and
// writers: somebody's rights depend on the name.
func (l *List) Divides() bool {
	return slices.ContainsFunc(l.all, func(i *Identity) bool {
		return len(i.read) > 0 && !slices.Contains(i.read, everything) || len(i.write) > 0 && !slices.Contains(i.write, everything)
	})
}

// Users reports whether somebody is known by a user of this host.
func (l *List) Users() bool {
	return slices.ContainsFunc(l.all, func(i *Identity) bool { return i.uid != nil })
}
