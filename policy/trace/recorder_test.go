package trace_test

import (
	"encoding/binary"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy/trace"
)

const keyLen = 16

func keys(ids ...uint64) (packed []byte) {
	for _, id := range ids {
		packed = binary.BigEndian.AppendUint64(packed, 0x5ec2e7)
		packed = binary.BigEndian.AppendUint64(packed, id)
	}
	return packed
}

func record(t *testing.T, path string, bytes int64) *trace.Recorder {
	t.Helper()
	r, err := trace.NewRecorder(path, bytes, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func recorded(t *testing.T, path string) (all []*trace.Request) {
	t.Helper()
	r, err := trace.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		req, err := r.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, req)
	}
}

// What is recorded is read back: the same blocks have the same ids, in one namespace,
// and nothing of the keys is in the file.
func TestRecorder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	one := block.Namespace{ID: 1, Desc: block.Descriptor{TokensPerBlock: 16}}
	other := block.Namespace{ID: 2}
	r := record(t, path, trace.MinRecordBytes)
	sent := keys(1, 2, 3)
	r.Request(one, keyLen, sent)
	copy(sent, keys(9, 9, 9)) // it is the caller's again
	r.Request(one, keyLen, keys(1, 2, 4))
	r.Request(other, keyLen, keys(1))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r.Request(one, keyLen, keys(7)) // too late
	got := recorded(t, path)
	if len(got) != 3 || len(got[0].HashIDs) != 3 || len(got[1].HashIDs) != 3 || len(got[2].HashIDs) != 1 {
		t.Fatalf("read %d requests: %+v", len(got), got)
	}
	a, b, c := got[0], got[1], got[2]
	if !slices.Equal(a.HashIDs[:2], b.HashIDs[:2]) || a.HashIDs[2] == b.HashIDs[2] || a.HashIDs[0] == c.HashIDs[0] {
		t.Errorf("ids %v, %v, %v", a.HashIDs, b.HashIDs, c.HashIDs)
	}
	if a.InputLength != 48 || c.InputLength != 0 || b.Time < a.Time {
		t.Errorf("requests %+v, %+v, %+v", a, b, c)
	}
	if s := r.Stats(); s.Requests != 3 || s.Dropped != 0 || s.Bytes == 0 {
		t.Errorf("stats %+v", s)
	}

	again := record(t, path, trace.MinRecordBytes) // what is there is kept under another name
	again.Request(one, keyLen, keys(1))
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if n := len(recorded(t, path+".1")); n != 3 {
		t.Errorf("%d requests of the recording before", n)
	}
	if id := recorded(t, path)[0].HashIDs[0]; id == a.HashIDs[0] {
		t.Error("another recording has the same salt")
	}
}

// A recording never takes more than it may, and what is left of it is its end, in whole
// lines.
func TestRecorderIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	r := record(t, path, trace.MinRecordBytes)
	var path1000 []uint64
	for i := range uint64(1000) {
		path1000 = append(path1000, i)
	}
	const requests = 200 // of more than 20 kB
	for range requests {
		r.Request(block.Namespace{ID: 1}, keyLen, keys(path1000...))
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	s := r.Stats()
	if s.Requests+s.Dropped != requests || s.Requests == 0 {
		t.Errorf("stats %+v of %d requests", s, requests)
	}
	var sum int64
	for _, p := range []string{path, path + ".1"} {
		st, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		sum += st.Size()
		for _, req := range recorded(t, p) {
			if len(req.HashIDs) != len(path1000) {
				t.Fatalf("%s: a request of %d blocks", p, len(req.HashIDs))
			}
		}
	}
	if sum > trace.MinRecordBytes || sum >= s.Bytes {
		t.Errorf("%d bytes on disk of %d written", sum, s.Bytes)
	}
}

func TestRecorderRefuses(t *testing.T) {
	dir := t.TempDir()
	for path, c := range map[string]struct {
		bytes int64
		want  string
	}{
		dir + "/a":        {trace.MinRecordBytes - 1, "at least 1048576"},
		dir:               {trace.MinRecordBytes, "is no file"},
		dir + "/absent/a": {trace.MinRecordBytes, "no such file"},
	} {
		if _, err := trace.NewRecorder(path, c.bytes, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", path, err, c.want)
		}
	}
}
