package xfertest

import (
	"fmt"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// Store is a service of objects, reached without the backend under test.
type Store interface {
	// Put makes an object.
	Put(key string, b []byte) error
	// Get reads len(b) bytes at off.
	Get(key string, off int64, b []byte) error
}

// Objects makes memory of objects, which are written whole: reads go to one object that is
// all of the memory, and each piece that is written is an object of its own. Looked at, the
// memory is the one object with what the model says was written laid over it.
//
// A piece whose write was cancelled is not looked at: such a write may arrive later.
func Objects(t testing.TB, size int64, s Store) Memory {
	t.Helper()
	dev := files.Add(1)
	key := fmt.Sprintf("memory-%d", dev)
	if err := s.Put(key, make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	o := &objects{store: s, key: key, size: size, pieces: map[objectPiece]xfer.Desc{}}
	return Memory{
		Desc:     xfer.Desc{Len: uint64(size), Dev: dev, Meta: key},
		ReaderAt: o, WriterAt: o, pieces: o,
	}
}

// objectPiece is a piece of the memory.
type objectPiece struct{ off, n int64 }

// objects is memory of objects.
type objects struct {
	store  Store
	key    string
	size   int64
	mu     sync.Mutex
	pieces map[objectPiece]xfer.Desc
	wrote  []objectPiece // since the one object was written, in order
}

// desc describes the object that a write to a piece makes, as it is registered.
func (o *objects) desc(off, n int64) xfer.Desc {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := objectPiece{off, n}
	d, ok := o.pieces[p]
	if !ok {
		d = xfer.Desc{Len: uint64(n), Dev: files.Add(1), Meta: fmt.Sprintf("%s-%d+%d", o.key, off, n)}
		o.pieces[p] = d
	}
	return d
}

// moved says that the piece was written.
func (o *objects) moved(off, n int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.wrote = append(o.wrote, objectPiece{off, n})
}

// ReadAt is io.ReaderAt's.
func (o *objects) ReadAt(b []byte, off int64) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.read(b, off); err != nil {
		return 0, err
	}
	if off == 0 && int64(len(b)) == o.size && len(o.wrote) > 0 {
		if err := o.store.Put(o.key, b); err != nil {
			return 0, err
		}
		o.wrote = nil
	}
	return len(b), nil
}

// read needs o.mu.
func (o *objects) read(b []byte, off int64) error {
	if err := o.store.Get(o.key, off, b); err != nil {
		return err
	}
	for _, p := range o.wrote {
		from, to := max(p.off, off), min(p.off+p.n, off+int64(len(b)))
		if from >= to {
			continue
		}
		if err := o.store.Get(o.pieces[p].Meta, from-p.off, b[from-off:to-off]); err != nil {
			return fmt.Errorf("piece [%d,+%d), which was written: %w", p.off, p.n, err)
		}
	}
	return nil
}

// WriteAt is io.WriterAt's.
func (o *objects) WriteAt(b []byte, off int64) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make([]byte, o.size)
	if int64(len(b)) < o.size {
		if err := o.read(all, 0); err != nil {
			return 0, err
		}
	}
	copy(all[off:], b)
	if err := o.store.Put(o.key, all); err != nil {
		return 0, err
	}
	o.wrote = nil
	return len(b), nil
}
