package api_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// methods are those of the interface in the order of its file, to the end of which
// new ones come: the seeds name them by number.
var methods = pb.File_kvtier_proto.Services().ByName("Kvtier").Methods()

// changing methods may change the namespace that they name: add is true when
// what was there must still be there. All others may change nothing.
var changing = map[protoreflect.Name]struct{ add bool }{
	"OpenNamespace": {true}, "Put": {true}, "Reserve": {true}, "Commit": {true}, "Abort": {true}, "Pin": {true}, "Unpin": {true},
	"Delete": {}, "Clear": {},
}

// FuzzRequest has the server answer any bytes as a request of any method. It must
// neither fall over nor hang, must say what is wrong with what it refuses, and
// must change nothing but what the request names.
func FuzzRequest(f *testing.F) {
	f.Fuzz(func(t *testing.T, method uint8, body []byte) {
		m := methods.Get(int(method) % methods.Len())
		s := memstore.New(&memstore.Options{Capacity: 1 << 16, Durable: true})
		spaces := someBlocks(t, s)
		held := s.Stats()
		before := contents(t, s)

		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		ctx, end := api.Connection(ctx, s)
		c := &fuzzCall{ctx: ctx, cancel: cancel, method: m, body: body}
		done := make(chan error, 1)
		go func() { done <- c.handle(api.NewService(s)) }()
		select {
		case err := <-done:
			c.checkEnd(t, err)
		case <-time.After(20 * time.Second):
			t.Fatalf("%s of %x hangs", m.Name(), body)
		}
		end()
		if st := s.Stats(); st.Leases != held.Leases || st.Reservations != held.Reservations {
			t.Fatalf("%s of %x: the end of the connection leaves %d leases and %d reservations, want %d and %d",
				m.Name(), body, st.Leases, st.Reservations, held.Leases, held.Reservations)
		}
		named := spaces[c.namespace]
		for name, was := range before {
			is := contents(t, s)[name]
			may, changes := changing[m.Name()]
			switch {
			case !changes || name != named:
				if !slices.Equal(is.blocks, was.blocks) || is.Namespace != was.Namespace {
					t.Fatalf("%s of %x changed namespace %q:\n%+v\n%+v", m.Name(), body, name, was, is)
				}
			case may.add:
				for _, b := range was.blocks {
					if !slices.ContainsFunc(is.blocks, func(x storedBlock) bool { return x.hash == b.hash && x.data == b.data }) {
						t.Fatalf("%s of %x changed or dropped block %s", m.Name(), body, b.hash)
					}
				}
			default:
				for _, b := range is.blocks {
					if !slices.Contains(was.blocks, b) {
						t.Fatalf("%s of %x made block %+v", m.Name(), body, b)
					}
				}
			}
		}
		if len(contents(t, s)) != len(before) && m.Name() != "OpenNamespace" {
			t.Fatalf("%s of %x made or dropped a namespace", m.Name(), body)
		}
	})
}

// TestRequestSeeds wants the seeds of FuzzRequest, which name methods by number, to be
// requests of the methods that their files are named after, and one of each.
func TestRequestSeeds(t *testing.T) {
	dir := filepath.Join("testdata", "fuzz", "FuzzRequest")
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	seeded := make(map[string]bool)
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		line := strings.Split(string(text), "\n")[1]
		number, err := strconv.Unquote(strings.TrimSuffix(strings.TrimPrefix(line, "byte("), ")"))
		if err != nil || len([]rune(number)) != 1 {
			t.Fatalf("%s: %q is no number of a method", f.Name(), line)
		}
		method := strings.ToLower(string(methods.Get(int([]rune(number)[0])).Name()))
		if name, _, _ := strings.Cut(f.Name(), "_"); name != method {
			t.Errorf("%s is a request of %s", f.Name(), method)
		}
		seeded[method] = true
	}
	for i := range methods.Len() {
		if name := methods.Get(i).Name(); !seeded[strings.ToLower(string(name))] {
			t.Errorf("no seed of %s", name)
		}
	}
}

// someBlocks fills a store: two namespaces with three blocks of 8, 16 and 24 bytes
// each, of which the first is pinned, and somebody's lease and reservation. It
// returns the namespaces' names.
func someBlocks(t *testing.T, s *memstore.Store) map[block.NamespaceID]string {
	t.Helper()
	names := make(map[block.NamespaceID]string)
	for _, name := range []string{"a", "b"} {
		ns, err := s.OpenNamespace(t.Context(), block.Descriptor{Name: name, MaxBlockBytes: 100}, 0)
		if err != nil {
			t.Fatal(err)
		}
		names[ns.ID] = name
		for i := range 4 {
			h := block.Hash{byte(i)}
			r, _, err := s.Reserve(t.Context(), ns.ID, 8, h, int64(8*(i+1)), block.PutOptions{Durable: block.G2, Session: 1})
			if err != nil {
				t.Fatal(err)
			}
			if i == 3 {
				continue // it stays a reservation
			}
			if err := s.Fill(t.Context(), r.ID, 0, bytes.Repeat([]byte{name[0]}, 8*(i+1))); err != nil {
				t.Fatal(err)
			}
			if res := s.Commit(t.Context(), []uint64{r.ID}); res[0].Err != nil {
				t.Fatal(res[0].Err)
			}
		}
		var found block.MatchResult
		if err := s.Match(t.Context(), ns.ID, 8, make([]byte, 8), block.MatchOptions{Lease: time.Hour, Session: 1}, &found); err != nil {
			t.Fatal(err)
		}
		if errs, err := s.Pin(t.Context(), ns.ID, 8, make([]byte, 8)); err != nil || errs[0] != nil {
			t.Fatal(errs, err)
		}
	}
	return names
}

type storedSpace struct {
	block.Namespace
	blocks []storedBlock
}

type storedBlock struct {
	hash, parent block.Hash
	data         string
	rest         string // all else that is listed of it
}

// contents is all that a store holds, by namespace.
func contents(t *testing.T, s *memstore.Store) map[string]storedSpace {
	t.Helper()
	out := make(map[string]storedSpace)
	for _, n := range s.Namespaces() {
		sp := storedSpace{Namespace: n.Namespace}
		entries, _, err := s.List(t.Context(), n.ID, "", 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			b := storedBlock{hash: e.Hash, parent: e.Parent, rest: fmt.Sprint(e.HasPar, e.Len, e.Sum, e.Tiers, e.Expires, e.Pinned)}
			err := s.Get(t.Context(), n.ID, n.HashLen, []block.Wanted{{Hash: e.Hash}}, block.GetOptions{}, func(_ int, p block.Payload) error {
				b.data = string(p.Bytes)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			sp.blocks = append(sp.blocks, b)
		}
		out[n.Desc.Name] = sp
	}
	return out
}

// fuzzCall is one call. As a stream it hands the handler the requests of body,
// each with its length before it, and takes all answers.
type fuzzCall struct {
	ctx    context.Context
	cancel context.CancelFunc
	method protoreflect.MethodDescriptor
	body   []byte
	read   int // of body, by a stream

	namespace block.NamespaceID // that the request names
	broken    bool              // a request could not be decoded
	sendErr   error             // an answer could not be encoded
}

// handle calls the method's handler and returns how the call ends.
func (c *fuzzCall) handle(srv pb.KvtierServer) error {
	name := string(c.method.Name())
	for _, m := range pb.Kvtier_ServiceDesc.Methods {
		if m.MethodName == name {
			resp, err := m.Handler(srv, c.ctx, func(v any) error { return c.decode(c.body, v) }, nil)
			if err == nil {
				c.sendErr = api.Encode(resp)
			}
			return err
		}
	}
	for _, m := range pb.Kvtier_ServiceDesc.Streams {
		if m.StreamName == name {
			return m.Handler(srv, c)
		}
	}
	return fmt.Errorf("method %s is not in the service", name)
}

func (c *fuzzCall) decode(b []byte, v any) error {
	if err := api.Decode(b, v); err != nil {
		c.broken = true
		return err
	}
	if c.namespace == 0 { // only the first message of a put has it
		c.namespace = api.NamespaceOf(v)
	}
	return nil
}

func (c *fuzzCall) checkEnd(t *testing.T, err error) {
	t.Helper()
	if c.sendErr != nil {
		t.Fatalf("%s of %x: the answer cannot be told: %v", c.method.Name(), c.body, c.sendErr)
	}
	if err == nil || c.broken {
		return
	}
	st := status.Convert(api.ToStatus(err))
	if _, err := proto.Marshal(st.Proto()); err != nil {
		t.Fatalf("%s of %x: the error %q cannot be told: %v", c.method.Name(), c.body, st.Message(), err)
	}
	if st.Code() == codes.Internal || st.Code() == codes.Unknown || st.Message() == "" {
		t.Fatalf("%s of %x: %v", c.method.Name(), c.body, st)
	}
}

// RecvMsg is the client's next request.
func (c *fuzzCall) RecvMsg(v any) error {
	if !c.method.IsStreamingClient() {
		return c.decode(c.body, v)
	}
	rest := c.body[c.read:]
	if len(rest) == 0 {
		return io.EOF
	}
	b, n := protowire.ConsumeBytes(rest)
	if n < 0 {
		b, n = rest, len(rest)
	}
	c.read += n
	return c.decode(b, v)
}

// SendMsg takes an answer. A watch ends then, which has no other end.
func (c *fuzzCall) SendMsg(v any) error {
	if c.method.Name() == "Watch" {
		c.cancel()
	}
	if err := api.Encode(v); err != nil {
		c.sendErr = err
		return err
	}
	return nil
}

func (c *fuzzCall) Context() context.Context     { return c.ctx }
func (c *fuzzCall) SetHeader(metadata.MD) error  { return nil }
func (c *fuzzCall) SendHeader(metadata.MD) error { return nil }
func (c *fuzzCall) SetTrailer(metadata.MD)       {}

var _ grpc.ServerStream = (*fuzzCall)(nil)
