package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// Bytes that do not have their checksum are refused by the service, and nothing is there.
func TestWrongChecksumIsRefused(t *testing.T) {
	s := newServer(t)
	c := newBare(t, s.Endpoint)
	b := random(100_000)
	wrong := c.Sum(object.Vector{b})
	wrong.Value ^= 1
	_, err := c.Put(t.Context(), "x", object.Vector{b}, wrong, false)
	if e := wantError(t, err, object.ClassCorrupt, ""); e.Request == "" || !errors.Is(err, object.ErrCorrupt) {
		t.Errorf("no request id, or no ErrCorrupt: %v", err)
	}
	_, err = c.Head(t.Context(), "x")
	wantError(t, err, object.ClassNotFound, "")

	u, err := c.Begin(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.PutPart(t.Context(), u, 1, object.Vector{b}, wrong)
	wantError(t, err, object.ClassCorrupt, "")
	for range 2 {
		if err := c.Abort(t.Context(), u); err != nil {
			t.Error(err)
		}
	}
}

// Of many who make one object, if there is none, one does.
func TestIfAbsentHasOneWinner(t *testing.T) {
	s := newServer(t)
	b := newBackend(t, s.Endpoint, object.Options{})
	for round := range 5 {
		key := fmt.Sprintf("race-%d", round)
		var won atomic.Int32
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				_, err := b.Put(t.Context(), key, object.Vector{[]byte{byte(i)}}, true)
				switch {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, object.ErrExists):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Errorf("%d of 16 made the object", won.Load())
		}
	}
}

// An object of many parts is whole, has the checksum of all its bytes, and its parts came
// from scattered memory.
func TestMultipart(t *testing.T) {
	const size = 13<<20 + 77
	s := newServer(t)
	o := object.Options{MultipartBytes: 5 << 20, PartBytes: 5 << 20}
	b := newBackend(t, s.Endpoint, o)
	agent, err := xfer.NewAgent("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.AddBackend(b); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := agent.Close(); err != nil {
			t.Error(err)
		}
	})
	mem := xfertest.DRAM(t, size)
	want := random(size)
	if _, err := mem.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	obj := xfer.Desc{Len: size, Dev: 1, Meta: "large"}
	for typ, d := range map[xfer.MemType]xfer.Desc{xfer.DRAM: mem.Desc, xfer.OBJ: obj} {
		if err := agent.Register(t.Context(), xfer.DescList{Type: typ, Descs: []xfer.Desc{d}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	// Pieces of odd lengths, each second one first in memory.
	local, remote := xfer.DescList{Type: xfer.DRAM}, xfer.DescList{Type: xfer.OBJ}
	content := make([]byte, 0, size)
	const pieces, length = 101, size / 101
	for i := range pieces {
		n := length
		if i == pieces-1 {
			n = size - i*length
		}
		at := i * length
		if i < pieces-1 && i^1 < pieces-1 {
			at = (i ^ 1) * length
		}
		local.Descs = append(local.Descs, xfer.Desc{Addr: mem.Desc.Addr + uint64(at), Len: uint64(n)})
		remote.Descs = append(remote.Descs, xfer.Desc{Addr: uint64(len(content)), Len: uint64(n), Dev: 1})
		content = append(content, want[at:at+n]...)
	}
	slices.Reverse(local.Descs)
	slices.Reverse(remote.Descs)
	run := func(op xfer.Op) {
		t.Helper()
		r, err := agent.NewRequest(op, local, remote, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
	}
	run(xfer.Write)
	st := b.Stats()
	if st.Requests[object.KindPart] != 3 || st.Requests[object.KindBegin] != 1 || st.Requests[object.KindComplete] != 1 || st.Total() != 5 {
		t.Errorf("requests: %v", st.Requests)
	}
	bare := newBare(t, s.Endpoint)
	info, err := bare.Head(t.Context(), "large")
	if err != nil {
		t.Fatal(err)
	}
	if info.Bytes != size || info.Sum != sum(object.Vector{content}) {
		t.Errorf("head: %+v, want CRC32C %08x", info, sum(object.Vector{content}).Value)
	}
	if _, err := mem.WriteAt(make([]byte, size), 0); err != nil {
		t.Fatal(err)
	}
	run(xfer.Read)
	got := make([]byte, size)
	if _, err := mem.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes came back")
	}
	if n := b.Stats().Requests[object.KindGet]; n != 3 {
		t.Errorf("%d gets for %d bytes", n, size)
	}
	if _, err := b.Put(t.Context(), "large", object.Vector{want}, true); !errors.Is(err, object.ErrExists) {
		t.Errorf("an upload in parts where there is an object: %v", err)
	}

	// What is cancelled leaves neither object nor parts.
	ctx, cancel := context.WithCancel(t.Context())
	o.Concurrency = 1
	narrow := newBackend(t, s.Endpoint, o)
	go func() {
		for narrow.Stats().BytesOut == 0 && t.Context().Err() == nil {
			runtime.Gosched()
		}
		cancel()
	}()
	if _, err := narrow.Put(ctx, "given-up", object.Vector{want}, false); !errors.Is(err, xfer.ErrCanceled) {
		t.Errorf("cancelled put: %v", err)
	}
	if err := narrow.Close(); err != nil { // waits for the abort
		t.Error(err)
	}
	uploads, err := bare.api.ListMultipartUploads(t.Context(), &s3.ListMultipartUploadsInput{Bucket: &bare.loc.Bucket})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(uploads.Uploads); n > 0 {
		t.Errorf("%d uploads remain", n)
	}
	if _, err := bare.Head(t.Context(), "given-up"); object.ClassOf(err) != object.ClassNotFound {
		t.Errorf("head of what was given up: %v", err)
	}
}

// A write makes an object whole, or is refused before anything is asked.
func TestPartialWritesAreRefused(t *testing.T) {
	s := newServer(t)
	b := newBackend(t, s.Endpoint, object.Options{})
	mem := xfertest.DRAM(t, 8192)
	m, err := b.Register(t.Context(), xfer.DRAM, mem.Desc)
	if err != nil {
		t.Fatal(err)
	}
	fixed, err := b.Register(t.Context(), xfer.OBJ, xfer.Desc{Len: 4096, Meta: "fixed"})
	if err != nil {
		t.Fatal(err)
	}
	open, err := b.Register(t.Context(), xfer.OBJ, xfer.Desc{Meta: "open"})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		region xfer.Region
		pieces [][2]uint64
		ok     bool
	}{
		"not from 0":         {open, [][2]uint64{{1, 10}}, false},
		"a gap":              {open, [][2]uint64{{0, 10}, {11, 10}}, false},
		"twice":              {open, [][2]uint64{{0, 10}, {0, 10}}, false},
		"less than all":      {fixed, [][2]uint64{{0, 4095}}, false},
		"all, in any order":  {fixed, [][2]uint64{{4000, 96}, {0, 4000}}, true},
		"as long as it gets": {open, [][2]uint64{{0, 10}, {10, 20}}, true},
	} {
		var local, remote []xfer.Bound
		for _, p := range c.pieces {
			local = append(local, xfer.Bound{Desc: xfer.Desc{Addr: mem.Desc.Addr, Len: p[1]}, Region: m})
			remote = append(remote, xfer.Bound{Desc: xfer.Desc{Addr: p[0], Len: p[1]}, Type: xfer.OBJ, Region: c.region})
		}
		_, err := b.Prepare(xfer.Write, local, remote)
		if c.ok && err != nil || !c.ok && !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestListAndDelete(t *testing.T) {
	const n = 1105
	s := newServer(t)
	b := newBackend(t, s.Endpoint, object.Options{})
	var wg sync.WaitGroup
	var want []string
	next := make(chan string)
	for range 8 {
		wg.Go(func() {
			for key := range next {
				if _, err := b.Put(t.Context(), key, object.Vector{[]byte(key)}, false); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range n {
		key := fmt.Sprintf("d%d/k%04d", i%2, i)
		want = append(want, key)
		next <- key
	}
	close(next)
	wg.Wait()
	slices.Sort(want)
	list := func(prefix string, limit int) (got []string, pages int) {
		t.Helper()
		for cursor := ""; ; {
			p, err := b.List(t.Context(), prefix, cursor, limit)
			if err != nil {
				t.Fatal(err)
			}
			pages++
			for _, o := range p.Objects {
				if o.Bytes != int64(len(o.Key)) || o.Modified.IsZero() {
					t.Errorf("%+v", o)
				}
				got = append(got, o.Key)
			}
			if cursor = p.Next; cursor == "" {
				return got, pages
			}
		}
	}
	if got, pages := list("", 0); !slices.Equal(got, want) || pages != 2 {
		t.Errorf("%d of %d keys in %d pages", len(got), n, pages)
	}
	if got, pages := list("d1/", 100); len(got) != n/2 || pages != 6 || !strings.HasPrefix(got[0], "d1/") {
		t.Errorf("%d keys below d1 in %d pages", len(got), pages)
	}
	keys := append([]string{"d0/never-was"}, want[1:]...)
	errs, err := b.Delete(t.Context(), keys)
	if err != nil || len(errs) != len(keys) {
		t.Errorf("delete: %d of %d answers, %v", len(errs), len(keys), err)
	}
	if got, _ := list("", 0); !slices.Equal(got, want[:1]) {
		t.Errorf("after delete: %q", got)
	}
	if errs, err := b.Delete(t.Context(), nil); err != nil || len(errs) > 0 {
		t.Errorf("delete of nothing: %v, %v", errs, err)
	}
}

// Errors say what to change, and carry code and request id.
func TestErrorsSayWhatToChange(t *testing.T) {
	s := newServer(t)
	good := newBackend(t, s.Endpoint, object.Options{})
	if err := good.Check(t.Context()); err != nil {
		t.Error(err)
	}
	_, err := good.Get(t.Context(), "none", 0, object.Vector{make([]byte, 10)}, false)
	if e := wantError(t, err, object.ClassNotFound, "NoSuchKey"); e.Request == "" || e.Key != "none" || !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("%+v", e)
	}
	says := func(b *object.Backend, class object.Class, words ...string) {
		t.Helper()
		err := b.Check(t.Context())
		e := wantError(t, err, class, "")
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("the error does not say %q: %v", w, e)
			}
		}
	}
	open := func(url string) *object.Backend {
		t.Helper()
		b, err := New(t.Context(), &Options{URL: url})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		return b
	}
	says(open("s3://no-such-bucket/?path_style=true&endpoint="+s.Endpoint), object.ClassNoBucket, "BUCKET", "no-such-bucket", "NoSuchBucket")
	says(open("s3://kvtier/?path_style=true&endpoint=http://127.0.0.1:1"), object.ClassNetwork, "endpoint")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "wrong")
	says(open("s3://kvtier/?path_style=true&endpoint="+s.Endpoint), object.ClassDenied, "AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	says(open("s3://kvtier/?path_style=true&endpoint="+s.Endpoint), object.ClassDenied, "AWS_ACCESS_KEY_ID", "no usable credentials")
}

func TestParseURL(t *testing.T) {
	l, err := ParseURL("s3://bkt/a/b?endpoint=https://host:1/&path_style=true&region=eu-1")
	if want := (Location{"bkt", "a/b/", "https://host:1", "eu-1", true}); err != nil || l != want {
		t.Errorf("%+v, %v", l, err)
	}
	if l, err := ParseURL("s3://bkt"); err != nil || l != (Location{Bucket: "bkt"}) {
		t.Errorf("%+v, %v", l, err)
	}
	for url, says := range map[string]string{
		"http://bkt":                   "scheme",
		"s3:///prefix":                 "bucket",
		"s3://bkt:9000/x":              "port",
		"s3://bkt:/x":                  "port",
		"s3://key:geheim@bkt":          "credentials",
		"s3://bkt?endpont=http://x":    "endpont",
		"s3://bkt?endpoint=host:1":     "endpoint",
		"s3://bkt?path_style=maybe":    "path_style",
		"s3://bkt?region=a&region=b":   "region",
		"s3://bkt?region=%zz":          "parameters",
		"s3://bkt/x#y":                 "fragment",
		"s3://bkt?endpoint=ftp://host": "endpoint",
	} {
		_, err := ParseURL(url)
		if !errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "geheim") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestJoin(t *testing.T) {
	c := &client{}
	b := random(100_000)
	for _, cut := range [][]int{{}, {1}, {50_000}, {1, 2, 3, 99_999}, {4096, 8192, 65_536}} {
		var parts []object.Part
		at := 0
		for _, end := range append(slices.Clone(cut), len(b)) {
			v := object.Vector{b[at:end]}
			parts = append(parts, object.Part{Bytes: v.Len(), Sum: sum(v)})
			at = end
		}
		if got, want := c.Join(parts), sum(object.Vector{b}); got != want {
			t.Errorf("cut at %v: %08x, want %08x", cut, got.Value, want.Value)
		}
	}
}
