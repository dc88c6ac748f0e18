package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// spy is a session by hand that maps all that it is passed, keeps it, and looks for what
// is another tenant's. It has one call at a time.
type spy struct {
	t     *testing.T
	c     *net.UnixConn
	files *net.UnixConn // where those of chunks come
	write bool          // it is to be passed memory that it can write
	have  map[uint32][]byte
	gone  map[uint32]bool
	id    uint64
}

// newSpy opens a session by a token.
func newSpy(t *testing.T, socket, token string, features uint64, write bool) (*spy, session.WelcomeMessage) {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	s := &spy{t: t, c: c, write: write, have: map[uint32][]byte{}, gone: map[uint32]bool{}}
	h := session.HelloMessage{MinVersion: 1, MaxVersion: 1, Features: features, Token: token, Message: session.MinMessage}
	s.send(1, 0, h.Append(nil))
	head, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(8*4))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil || n != 1 {
		t.Fatalf("welcome: %d bytes, %v", n, err)
	}
	p := s.frame(head)
	var w session.WelcomeMessage
	if err := w.Decode(p); err != nil || w.Status != session.StatusOK {
		t.Fatalf("welcome: %v, %v %s", err, w.Status, w.Text)
	}
	if files := s.rights(oob[:oobn]); len(files) == 1 {
		f := os.NewFile(uintptr(files[0]), "files")
		conn, err := net.FileConn(f)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		s.files = conn.(*net.UnixConn)
		t.Cleanup(func() { _ = s.files.Close() })
	} else if len(files) > 0 || w.Features != 0 {
		t.Fatalf("%d files with features %#x", len(files), w.Features)
	}
	t.Cleanup(func() {
		for _, m := range s.have {
			_ = unix.Munmap(m)
		}
	})
	return s, w
}

func (s *spy) rights(oob []byte) (fds []int) {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range all {
		some, err := unix.ParseUnixRights(&all[i])
		if err != nil {
			s.t.Fatal(err)
		}
		fds = append(fds, some...)
	}
	return fds
}

func (s *spy) send(typ, code uint8, p []byte) {
	s.t.Helper()
	b := make([]byte, 32, 32+len(p))
	binary.LittleEndian.PutUint32(b, uint32(len(p)))
	b[4], b[5] = typ, code
	binary.LittleEndian.PutUint64(b[8:], s.id)
	if _, err := s.c.Write(append(b, p...)); err != nil {
		s.t.Fatal(err)
	}
}

// frame reads one, of which head has come.
func (s *spy) frame(head []byte) []byte {
	s.t.Helper()
	_ = s.c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 32)
	n := copy(b, head)
	if _, err := io.ReadFull(s.c, b[n:]); err != nil {
		s.t.Fatal(err)
	}
	p := make([]byte, binary.LittleEndian.Uint32(b))
	if _, err := io.ReadFull(s.c, p); err != nil {
		s.t.Fatal(err)
	}
	if len(head) == 0 && (b[4] != 3 || binary.LittleEndian.Uint64(b[8:]) != s.id) {
		return s.frame(nil) // no answer
	}
	if session.Code(b[5]) == session.CodeFailed {
		return nil
	}
	return p
}

// call makes one; it is false when that failed as a whole.
func (s *spy) call(code session.Code, m interface{ Append([]byte) []byte }, into interface{ Decode([]byte) error }) bool {
	s.t.Helper()
	s.id++
	s.send(3, uint8(code), m.Append(nil))
	p := s.frame(nil)
	if p == nil {
		return false
	}
	if err := into.Decode(p); err != nil {
		s.t.Fatal(err)
	}
	return true
}

// take maps what has come. The packets are there before the answer that names the chunk.
func (s *spy) take() {
	s.t.Helper()
	for {
		b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*4))
		_ = s.files.SetReadDeadline(time.Now().Add(time.Millisecond))
		n, oobn, _, _, err := s.files.ReadMsgUnix(b, oob)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		files := s.rights(oob[:oobn])
		if err != nil || n < 32+16 || len(files) != 1 {
			s.t.Fatalf("packet of %d bytes with %d files, %v", n, len(files), err)
		}
		var passed session.PassedMessage
		if err := passed.Decode(b[32:n]); err != nil {
			s.t.Fatal(err)
		}
		number, length := passed.Chunk, int(passed.Length)
		for _, g := range passed.Gone {
			s.gone[g] = true
		}
		prot := unix.PROT_READ
		if s.write {
			prot |= unix.PROT_WRITE
		} else if _, err := unix.Mmap(files[0], 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EACCES) {
			s.t.Errorf("chunk %d mapped for writing by who may only read: %v", number, err)
		}
		if err := unix.Ftruncate(files[0], 0); err == nil {
			s.t.Errorf("chunk %d was cut short", number)
		}
		m, err := unix.Mmap(files[0], 0, length, prot, unix.MAP_SHARED)
		if err := errors.Join(err, unix.Close(files[0])); err != nil {
			s.t.Fatal(err)
		}
		s.have[number] = m
	}
}

// look wants nothing of what is secret in all the memory that was passed, and writes
// over what is gone.
func (s *spy) look(secret []byte) {
	s.t.Helper()
	for n, m := range s.have {
		if bytes.Contains(m, secret) {
			s.t.Fatalf("chunk %d has bytes of another tenant", n)
		}
		if s.write && s.gone[n] {
			for i := 0; i < len(m); i += 512 {
				m[i] = 0xee
			}
		}
	}
}

// tenant puts and gets blocks of its own in place.
type tenant struct {
	t  *testing.T
	c  *session.Client
	ns session.Namespace
	of func(i int) []byte
}

func newTenant(t *testing.T, socket, token, name string, of func(i int) []byte) *tenant {
	t.Helper()
	c, err := session.Dial(timeout(t), "unix", socket, &session.ClientOptions{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	opened, err := c.OpenNamespace(timeout(t), block.Descriptor{Name: name, MaxBlockBytes: 1 << 20}, 0)
	if err != nil {
		t.Fatal(err)
	}
	x := &tenant{t: t, c: c, ns: opened.Namespace, of: of}
	x.ns.HashLen = hashBytes
	return x
}

// put puts a block, when there is room.
func (x *tenant) put(ctx context.Context, i int) bool {
	x.t.Helper()
	res, err := x.c.Put(ctx, x.ns, []session.PutBlock{{Hash: hashOf(i), Bytes: x.of(i)}}, session.PutOptions{})
	if err == nil {
		err = res[0].Err
	}
	if err != nil && !errors.Is(err, block.ErrNoSpace) {
		x.t.Errorf("put %d: %v", i, err)
	}
	return err == nil
}

// get wants a block to be right or not there, and never damaged.
func (x *tenant) get(ctx context.Context, i int) (hit bool) {
	x.t.Helper()
	want := x.of(i)
	into := make([]byte, len(want))
	res, err := x.c.Get(ctx, x.ns, []session.GetItem{{Hash: hashOf(i), Into: into}}, block.GetOptions{})
	if err == nil {
		err = res[0].Err
	}
	switch {
	case err != nil:
		x.t.Errorf("get %d: %v", i, err)
	case res[0].Reason == block.MissCorrupt || res[0].Reason == block.Hit && !bytes.Equal(into, want):
		x.t.Errorf("get %d: %v, or wrong bytes", i, res[0].Reason)
	}
	return err == nil && res[0].Reason == block.Hit
}

// TestChunksOfTenants: tenants work in place in the memory of one daemon, of which each
// is passed its own chunks only. Two of them, one of which may only read, map all that
// they are ever passed and find no byte of another's there, not even while chunks change
// hands and whoever had them writes over what he still has mapped; and who may only read
// cannot write.
func TestChunksOfTenants(t *testing.T) {
	withoutRace(t)
	dir := t.TempDir()
	sum := func(token string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(token))) }
	list := filepath.Join(dir, "access.json")
	text := fmt.Sprintf(`{"identities": [
		{"name": "a", "token_sha256": %q, "read": ["a-*"], "write": ["a-*"]},
		{"name": "reader", "token_sha256": %q, "read": ["a-*"]},
		{"name": "writer", "token_sha256": %q, "write": ["a-*"]},
		{"name": "b", "token_sha256": %q, "read": ["b-*"], "write": ["b-*"]},
		{"name": "operator", "token_sha256": %q, "read": ["*"], "write": ["*"]}]}`, sum("a"), sum("r"), sum("w"), sum("b"), sum("op"))
	if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "40MiB", "--nvme", filepath.Join(dir, "slab")+"=128MiB", "--grace", "0s",
		"--socket", socket, "--shared-memory", "on", "--access", list)

	secret := bytes.Repeat([]byte("b keeps this to itself. "), 4)
	const size = 1 << 20
	a := newTenant(t, socket, "a", "a-1", func(i int) []byte { return payload(i, size) })
	b := newTenant(t, socket, "b", "b-1", func(i int) []byte {
		p := bytes.Repeat(secret, size/len(secret)+1)[:size]
		binary.LittleEndian.PutUint64(p, uint64(i))
		return p
	})
	if !a.c.Shared() || !b.c.Shared() {
		t.Fatal("tenants are not passed memory")
	}
	op, err := api.Dial(timeout(t), d.addr, &api.ClientOptions{Token: "op"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = op.Close() })
	writer, _ := newSpy(t, socket, "a", session.FeatureChunks, true)
	reader, _ := newSpy(t, socket, "r", session.FeatureChunks, false)
	blind, _ := newSpy(t, socket, "w", session.FeatureChunks, true)
	if old, w := newSpy(t, socket, "a", session.FeatureShared, true); w.Features != 0 || old.files != nil {
		t.Errorf("who does not know of chunks has features %#x", w.Features)
	}
	spies := []*spy{writer, reader, blind}
	pry := func(i int) {
		t.Helper()
		k := session.Keys{NS: a.ns.ID, HashLen: hashBytes, Hashes: append([]byte(nil), hash(i)...)}
		for _, s := range spies {
			var g session.GrantedMessage
			if s.call(session.CodeGrant, &session.GrantMessage{NS: a.ns.ID, Size: size, Count: 1, Deadline: 100}, &g) {
				for _, p := range g.Places {
					if p.Chunk != session.NoChunk && s != writer {
						t.Errorf("a place in chunk %d for who may not read and write", p.Chunk)
					}
					s.call(session.CodeRelease, &session.ReleaseMessage{Grants: []uint64{p.Grant}}, &session.ReleasedMessage{})
				}
			}
			var got session.GotMessage
			if s.call(session.CodeGet, &session.GetMessage{Keys: k, Flags: session.FlagInPlace | session.FlagNoPromote}, &got) {
				s.call(session.CodeRelease, &session.ReleaseMessage{Leases: []uint64{got.Lease}}, &session.ReleasedMessage{})
			}
			// Nothing of another's namespace is answered, whatever it asks for.
			if s.call(session.CodeGrant, &session.GrantMessage{NS: b.ns.ID, Size: size, Count: 1, Deadline: 100}, &g) {
				t.Error("a place in another's namespace")
			}
			s.take()
			s.look(secret)
		}
	}
	ctx := timeout(t)
	hits := 0
	for round := range 4 {
		many, few, at := a, b, round*100
		if round%2 == 1 {
			many, few = b, a
		}
		for i := at; i < at+45; i++ {
			many.put(ctx, i)
			if many.get(ctx, i) {
				hits++
			}
			if i%9 == 0 {
				few.put(ctx, i)
				few.get(ctx, i)
			}
			if i%15 == 0 {
				pry(i)
			}
		}
		// Its chunks are anybody's now.
		name := map[*tenant]string{a: "a-1", b: "b-1"}[many]
		ns, err := op.Namespace(timeout(t), name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := op.Clear(timeout(t), ns); err != nil {
			t.Fatal(err)
		}
	}
	pry(1)
	if hits < 120 {
		t.Errorf("%d of 180 blocks were there", hits)
	}
	if len(writer.have) < 3 || len(writer.gone) < 1 || len(reader.have) < 2 || len(blind.have) > 0 {
		t.Errorf("passed to the writer %d chunks, of which %d are gone, to the reader %d, to who may not read %d", len(writer.have), len(writer.gone), len(reader.have), len(blind.have))
	}
	for _, x := range []*tenant{a, b} {
		if s := x.c.Stats(); s.InPlace < 50 {
			t.Errorf("%d of %d gets and %d puts were in place", s.InPlace, s.Gets, s.Puts)
		}
	}
	d.stop(0)
}

func hash(i int) []byte {
	h := hashOf(i)
	return h[:hashBytes]
}
