package xfertest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// fileWriter writes to one file and knows nothing else.
type fileWriter struct {
	copier
	path string
}

func (w fileWriter) Transfer(_ context.Context, p xfer.Prepared, done func(int, error)) error {
	t := p.(*copierTransfer)
	f, err := os.OpenFile(w.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for i, l := range t.local {
		_, err := f.WriteAt(arena.View(l.Addr, int(l.Len)), int64(t.remote[i].Addr))
		done(i, err)
	}
	return nil
}

// volatileFile is a file of n sectors of zeros behind a Volatile, and a function
// that fills sectors of it.
func volatileFile(t *testing.T, n int) (v *Volatile, path string, write func(first, n int, with byte) error) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, n*sector), 0o600); err != nil {
		t.Fatal(err)
	}
	v = NewVolatile(fileWriter{path: path})
	if _, err := v.Register(t.Context(), xfer.FILE, xfer.Desc{Dev: 3, Meta: path}); err != nil {
		t.Fatal(err)
	}
	mem, err := arena.New(int64(n)*sector, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	return v, path, func(first, n int, with byte) error {
		b := mem.Slice(0, int64(n)*sector)
		copy(b, bytes.Repeat([]byte{with}, len(b)))
		local := []xfer.Bound{{Type: xfer.DRAM, Desc: xfer.Desc{Addr: arena.Addr(b), Len: uint64(len(b))}}}
		remote := []xfer.Bound{{Type: xfer.FILE, Desc: xfer.Desc{Dev: 3, Addr: uint64(first) * sector, Len: uint64(len(b))}}}
		p, err := v.Prepare(xfer.Write, local, remote)
		if err != nil {
			return err
		}
		defer v.Release(p)
		var got error
		err = v.Transfer(t.Context(), p, func(_ int, err error) { got = err })
		return errors.Join(err, got)
	}
}

// TestPowerLoss: what was flushed stays; of what was written since, a sector is
// in one of the states that it had, and over many losses in each of them.
func TestPowerLoss(t *testing.T) {
	const n = 8
	seen := map[byte]bool{}
	torn, reordered := false, false
	for seed := range uint64(60) {
		v, path, write := volatileFile(t, n)
		steps := errors.Join(write(0, n, 1), v.Flush(path, func() error { return nil }), write(0, n/2, 2), write(0, n/2, 3), write(n/2, n/4, 4))
		if steps != nil {
			t.Fatal(steps)
		}
		kept, lost, err := v.PowerLoss(rand.New(rand.NewPCG(seed, 0)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range n {
			c := got[i*sector]
			if !bytes.Equal(got[i*sector:(i+1)*sector], bytes.Repeat([]byte{c}, sector)) {
				t.Fatalf("seed %d: sector %d is torn", seed, i)
			}
			ok := c == 1 || i < n/2 && (c == 2 || c == 3) || i >= n/2 && i < n/2+n/4 && c == 4
			if !ok {
				t.Fatalf("seed %d: sector %d holds %d", seed, i, c)
			}
			seen[c] = true
			torn = torn || i > 0 && i < n/2 && c != got[0]
		}
		// The write that came last is there and the one before it is not.
		reordered = reordered || got[n/2*sector] == 4 && got[0] == 1
		if kept == 0 && (got[0] != 1 || lost == 0) {
			t.Errorf("seed %d: %d kept, %d lost, first sector %d", seed, kept, lost, got[0])
		}
		if err := write(0, 1, 9); !errors.Is(err, ErrPowerLost) {
			t.Errorf("write after the loss: %v", err)
		}
		if err := v.Flush(path, func() error { return nil }); !errors.Is(err, ErrPowerLost) {
			t.Errorf("flush after the loss: %v", err)
		}
	}
	if len(seen) != 4 || !torn || !reordered {
		t.Errorf("states seen %v, torn %v, reordered %v", seen, torn, reordered)
	}
}

// TestPowerLossInAFlush: a flush that has not answered yet has not happened, and
// neither has one that failed.
func TestPowerLossInAFlush(t *testing.T) {
	v, path, write := volatileFile(t, 1)
	if err := write(0, 1, 1); err != nil {
		t.Fatal(err)
	}
	if err := v.Flush(path, func() error { return os.ErrInvalid }); !errors.Is(err, os.ErrInvalid) {
		t.Errorf("flush: %v", err)
	}
	var kept, lost int
	err := v.Flush(path, func() (err error) {
		kept, lost, err = v.PowerLoss(rand.New(rand.NewPCG(1, 0)))
		return err
	})
	if !errors.Is(err, ErrPowerLost) || kept+lost != 1 {
		t.Errorf("flush: %v, %d sectors kept, %d lost", err, kept, lost)
	}
}

// TestInjector: the rule of the moment counts.
func TestInjector(t *testing.T) {
	var in Injector
	b := in.Wrap(copier{})
	mem, err := arena.New(2*sector, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	move := func() (got error) {
		at := func(off int64) []xfer.Bound {
			return []xfer.Bound{{Type: xfer.DRAM, Desc: xfer.Desc{Addr: arena.Addr(mem.Slice(off, sector)), Len: sector}}}
		}
		p, err := b.Prepare(xfer.Write, at(0), at(sector))
		if err != nil {
			t.Fatal(err)
		}
		defer b.Release(p)
		if err := b.Transfer(t.Context(), p, func(_ int, err error) { got = err }); err != nil {
			t.Fatal(err)
		}
		return got
	}
	if err := move(); err != nil {
		t.Errorf("without a rule: %v", err)
	}
	in.Set(Rule{Fault: Fail, Call: 2})
	for i, want := range []error{nil, xfer.ErrUnavailable, nil} {
		if err := move(); !errors.Is(err, want) {
			t.Errorf("call %d: %v, want %v", i+1, err, want)
		}
	}
	in.Set(Rule{Fault: Short})
	if err := move(); !errors.Is(err, xfer.ErrShort) {
		t.Errorf("short: %v", err)
	}
	in.Clear()
	if err := move(); err != nil {
		t.Errorf("after the rule: %v", err)
	}
	if in.Injected(Fail) != 1 || in.Injected(Short) != 1 || in.Injected(Stall) != 0 {
		t.Errorf("injected: %d, %d, %d", in.Injected(Fail), in.Injected(Short), in.Injected(Stall))
	}
}
