// Package bucket keeps packed objects in a service of objects: it claims a prefix for a
// cluster, writes objects and tombstones, reads members, and finds again what is there.
// What it knows is in the bucket alone; what is where is its caller's to remember. Its
// format is package packed's.
package bucket

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers/packed"
	"github.com/kvtier/kvtier/xfer"
)

var (
	// ErrExists: there is an object of this key, and the call was to make a new one.
	ErrExists = errors.New("object exists")
	// ErrNoAnswer: the service did not answer, or refused because of its load: the same call
	// may succeed later. Its failures have it where that is so.
	ErrNoAnswer = errors.New("no answer")
	// ErrNoWrites: the service takes no object now: the bucket is full, or the credentials
	// may not write. It says nothing of reads. Put fails with it.
	ErrNoWrites = errors.New("bucket takes no objects")
)

// Service is the part of a bucket below a prefix. Its calls wait no longer than ctx
// lasts, and make requests again as far as that is of use. It may be used by many
// goroutines at once.
type Service interface {
	// String writes bucket and prefix as a URL without secrets.
	String() string
	// Check looks whether the bucket may be used. Its error says which setting to change.
	Check(ctx context.Context) error
	// Answers asks for something small, ahead of calls that wait for their turn, until there
	// is an answer, and reports whether there was one before ctx ended. One that refuses is
	// an answer, too.
	Answers(ctx context.Context) bool
	// Get reads all of dst from off on. xfer.ErrNotFound when the object is gone, not when
	// the bucket is, and xfer.ErrShort when the object ends before.
	Get(ctx context.Context, key string, off int64, dst [][]byte) error
	// Put makes an object, whole; with ifAbsent only where there is none: ErrExists.
	Put(ctx context.Context, key string, src [][]byte, ifAbsent bool) error
	// Delete removes objects; those that never were are gone too.
	Delete(ctx context.Context, keys []string) error
	// List gives objects in the order of their keys, from where cursor says: empty at the
	// beginning, then next, which is empty at the end.
	List(ctx context.Context, prefix, cursor string) (objects []Object, next string, err error)
}

// Object is an entry of a list.
type Object struct {
	Key      string
	Bytes    int64
	Modified time.Time // by the service's clock; zero where it does not say
}

// Bucket is a prefix that this store's cluster owns. It is safe for concurrent use.
type Bucket struct {
	service Service
	cluster string
	store   [16]byte
	writer  packed.Writer
	clock   *packed.Clock
}

// Open claims the prefix for a cluster, unless it is the cluster's already. It fails with
// block.ErrInvalid when another cluster owns it, naming both.
func Open(ctx context.Context, s Service, cluster string, store [16]byte, writer packed.Writer) (*Bucket, error) {
	b, err := New(s, cluster, store, writer)
	if err != nil {
		return nil, err
	}
	return b, b.Claim(ctx)
}

// New is Open for a bucket that may not answer now: nothing may be written or read before
// Claim has succeeded.
func New(s Service, cluster string, store [16]byte, writer packed.Writer) (*Bucket, error) {
	if err := packed.CheckCluster(cluster); err != nil {
		return nil, err
	}
	return &Bucket{service: s, cluster: cluster, store: store, writer: writer, clock: new(packed.Clock)}, nil
}

// Through is the same bucket by way of a service that stands before its own.
func (b *Bucket) Through(s Service) *Bucket {
	c := *b
	c.service = s
	return &c
}

// Claim claims the prefix for the cluster, unless it is the cluster's already. It fails
// with block.ErrInvalid when another cluster owns it, naming both.
func (b *Bucket) Claim(ctx context.Context) error {
	s := b.service
	if err := s.Check(ctx); err != nil {
		return err
	}
	fail := func(err error) error { return fmt.Errorf("claim %s: %w", s, err) }
	have, err := readRecord(ctx, s, packed.ClusterKey)
	if errors.Is(err, xfer.ErrNotFound) {
		mine := packed.Cluster{Name: b.cluster, Store: b.store, Created: time.Now()}
		if err := s.Put(ctx, packed.ClusterKey, [][]byte{mine.Encode()}, true); err != nil && !errors.Is(err, ErrExists) {
			return fail(err)
		}
		have, err = readRecord(ctx, s, packed.ClusterKey) // another store may have been first
	}
	if err != nil {
		return fail(err)
	}
	return b.admit(have)
}

// admit says whether a cluster record is that of the bucket's cluster.
func (b *Bucket) admit(record []byte) error {
	owner, err := packed.DecodeCluster(record)
	if err != nil {
		return fmt.Errorf("claim %s: %w", b.service, err)
	}
	return owner.Admit(b.cluster, b.service.String())
}

// Claimed looks whether the prefix is the cluster's, and claims nothing: xfer.ErrNotFound
// when it is nobody's.
func (b *Bucket) Claimed(ctx context.Context) error {
	have, err := readRecord(ctx, b.service, packed.ClusterKey)
	if err != nil {
		return fmt.Errorf("read the cluster record of %s: %w", b.service, err)
	}
	return b.admit(have)
}

// Probe writes a small object and reads it back: whether the bucket does all that is asked
// of it. With ErrNoWrites it answers reads, and does not write.
func (b *Bucket) Probe(ctx context.Context) error {
	var want [32]byte
	_, _ = rand.Read(want[:]) // does not fail
	key := packed.ProbeKey(b.cluster, b.store)
	err := b.service.Put(ctx, key, [][]byte{want[:]}, false)
	if errors.Is(err, ErrNoWrites) {
		if _, e := readRecord(ctx, b.service, packed.ClusterKey); e != nil {
			err = e
		}
	}
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	var have [32]byte
	if err := b.service.Get(ctx, key, 0, [][]byte{have[:]}); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	if have != want {
		return fmt.Errorf("probe %s: %w: it does not read what was written", b.service, block.ErrCorrupt)
	}
	return nil
}

// readRecord reads a small object whose length is not known: a list says it.
func readRecord(ctx context.Context, s Service, key string) ([]byte, error) {
	for cursor := ""; ; {
		objects, next, err := s.List(ctx, key, cursor)
		if err != nil {
			return nil, err
		}
		for _, o := range objects {
			if o.Key != key {
				continue
			}
			return readWhole(ctx, s, o, packed.MaxRecordBytes)
		}
		if cursor = next; cursor == "" {
			return nil, fmt.Errorf("object %q: %w", key, xfer.ErrNotFound)
		}
	}
}

func readWhole(ctx context.Context, s Service, o Object, most int64) ([]byte, error) {
	if o.Bytes > most {
		return nil, fmt.Errorf("object %q: %w: %d bytes, at most %d", o.Key, block.ErrCorrupt, o.Bytes, most)
	}
	b := make([]byte, o.Bytes)
	if err := s.Get(ctx, o.Key, 0, [][]byte{b}); err != nil {
		return nil, err
	}
	return b, nil
}

// New begins an object, with a number that no other object of this writer has: Add its
// members, write their slot headers, then Write it. What is deleted from now on is deleted
// in it, too.
func (b *Bucket) New(number uint64, digest [32]byte, hashLen uint8, epoch uint32) *packed.Footer {
	return &packed.Footer{
		ID: packed.NewID(b.writer, number), Store: b.store, Digest: digest, HashLen: hashLen, Epoch: epoch, Stamp: b.clock.Next(time.Now()),
	}
}

// Wrote reports whether this bucket's writer wrote an object.
func (b *Bucket) Wrote(id packed.ID) bool { return id.Writer() == b.writer }

func newID() (id packed.ID) {
	_, _ = rand.Read(id[:]) // does not fail
	return id
}

// Write makes the object of a footer. parts are its members one behind the other: slot
// header, payload. When it returns without an error the object is there, whole.
func (b *Bucket) Write(ctx context.Context, f *packed.Footer, parts [][]byte) (packed.Name, error) {
	name := packed.NameOf(b.cluster, f)
	if len(parts) != 2*len(f.Members) {
		return name, fmt.Errorf("write %s: %w: %d parts for %d blocks", name, block.ErrInvalid, len(parts), len(f.Members))
	}
	for i := range f.Members {
		if len(parts[2*i]) != packed.HeaderBytes || len(parts[2*i+1]) != int(f.Members[i].Len) {
			return name, fmt.Errorf("write %s: %w: block %d in parts of %d and %d bytes", name, block.ErrInvalid, i, len(parts[2*i]), len(parts[2*i+1]))
		}
	}
	if err := b.service.Put(ctx, name.String(), append(slices.Clip(parts), f.Append(nil)), true); err != nil {
		return name, fmt.Errorf("write %s: %w", name, err)
	}
	return name, nil
}

// Read reads from an object what begins at off, into parts one behind the other: of a
// member its slot header and its payload, and those of the members behind it. Nothing is
// verified. xfer.ErrNotFound when the object is gone.
func (b *Bucket) Read(ctx context.Context, n packed.Name, off int64, parts [][]byte) error {
	if err := b.service.Get(ctx, n.String(), off, parts); err != nil {
		return fmt.Errorf("read %s at %d: %w", n, off, err)
	}
	return nil
}

// Has reports whether a list of the bucket has an object.
func (b *Bucket) Has(ctx context.Context, n packed.Name) (bool, error) {
	key := n.String()
	for cursor := ""; ; {
		page, next, err := b.service.List(ctx, key, cursor)
		if err != nil {
			return false, fmt.Errorf("list %s: %w", n, err)
		}
		if slices.ContainsFunc(page, func(o Object) bool { return o.Key == key }) {
			return true, nil
		}
		if cursor = next; cursor == "" {
			return false, nil
		}
	}
}

// Remove removes objects.
func (b *Bucket) Remove(ctx context.Context, names []packed.Name) error {
	keys := make([]string, len(names))
	for i, n := range names {
		keys[i] = n.String()
	}
	if err := b.service.Delete(ctx, keys); err != nil {
		return fmt.Errorf("remove %d objects: %w", len(keys), err)
	}
	return nil
}

// Stamp is when something is deleted that happens now: see packed.Deleted.
func (b *Bucket) Stamp() uint64 { return b.clock.Next(time.Now()) }

// Bury writes tombstones. When it returns without an error no import raises what they are
// about.
func (b *Bucket) Bury(ctx context.Context, deleted []packed.Deleted, cleared []packed.Cleared) error {
	for len(deleted)+len(cleared) > 0 {
		t := packed.Tombstones{ID: newID(), Store: b.store}
		n := min(len(cleared), packed.MaxTombstones)
		t.Cleared, cleared = cleared[:n], cleared[n:]
		n = min(len(deleted), packed.MaxTombstones-n)
		t.Deleted, deleted = deleted[:n], deleted[n:]
		key := packed.TombstonesKey(b.cluster, b.Stamp(), t.ID)
		if err := b.service.Put(ctx, key, [][]byte{t.Append(nil)}, true); err != nil {
			return fmt.Errorf("write tombstones: %w", err)
		}
	}
	return nil
}

// Describe records what a namespace's digest stands for, unless that is recorded.
func (b *Bucket) Describe(ctx context.Context, n *packed.Namespace) error {
	err := b.service.Put(ctx, packed.NamespaceKey(b.cluster, n.Desc.Digest()), [][]byte{n.Encode()}, true)
	if err != nil && !errors.Is(err, ErrExists) {
		return fmt.Errorf("record namespace %q: %w", n.Desc.Name, err)
	}
	return nil
}

// Namespace reads what Describe recorded. xfer.ErrNotFound.
func (b *Bucket) Namespace(ctx context.Context, digest [32]byte) (packed.Namespace, error) {
	have, err := readRecord(ctx, b.service, packed.NamespaceKey(b.cluster, digest))
	if err == nil {
		var n packed.Namespace
		if n, err = packed.DecodeNamespace(have, digest); err == nil {
			return n, nil
		}
	}
	return packed.Namespace{}, fmt.Errorf("namespace %x: %w", digest[:8], err)
}
