package trace_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy/trace"
)

// readAll reads until the end or the first error.
func readAll(r *trace.Reader) ([]*trace.Request, error) {
	var all []*trace.Request
	for {
		req, err := r.Next()
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, req)
	}
}

// The numbers are those of testdata/README.md.
func TestRealTraces(t *testing.T) {
	for _, c := range []struct {
		file                   string
		requests, refs, unique int
		span                   time.Duration
		longest                int
		firstSession           string
	}{
		{"mooncake_conversation_h1.jsonl.gz", 5606, 144280, 95189, 1767 * time.Second, 241, ""},
		{"agent_tau_airline.jsonl.gz", 2454, 480034, 29706, 574665 * time.Millisecond, 628, "0"},
	} {
		t.Run(c.file, func(t *testing.T) {
			r, err := trace.Open(filepath.Join("testdata", c.file))
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			all, err := readAll(r)
			if err != nil {
				t.Fatal(err)
			}
			refs, longest, unique := 0, 0, make(map[uint64]bool)
			for _, req := range all {
				refs += len(req.HashIDs)
				longest = max(longest, len(req.HashIDs))
				for _, id := range req.HashIDs {
					unique[id] = true
				}
			}
			if len(all) != c.requests || refs != c.refs || len(unique) != c.unique || longest != c.longest {
				t.Errorf("%d requests, %d references, %d unique, longest %d; want %d, %d, %d, %d",
					len(all), refs, len(unique), longest, c.requests, c.refs, c.unique, c.longest)
			}
			if span := all[len(all)-1].Time; span != c.span {
				t.Errorf("span %v, want %v", span, c.span)
			}
			if all[0].Session != c.firstSession {
				t.Errorf("session of the first request %q, want %q", all[0].Session, c.firstSession)
			}
		})
	}
}

func TestFields(t *testing.T) {
	const text = `{"timestamp":1500.25,"input_length":6758,"output_length":0,"hash_ids":[0, 18446744073709551615 ,7],"session_id":"a\"b","more":[{}]}` + "\r\n" +
		`{"hash_ids":[],"output_length":1,"input_length":1,"timestamp":1767000,"session_id":12}` + "\n" +
		`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[5],"session_id":null}`
	want := []*trace.Request{
		{Time: 1500250 * time.Microsecond, InputLength: 6758, HashIDs: []uint64{0, 1<<64 - 1, 7}, Session: `a"b`},
		{Time: 1767 * time.Second, InputLength: 1, OutputLength: 1, HashIDs: []uint64{}, Session: "12"},
		{InputLength: 1, OutputLength: 1, HashIDs: []uint64{5}},
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, text)
	z.Close()
	for _, c := range []struct{ name, data string }{{"plain", text}, {"gzip", packed.String()}} {
		t.Run(c.name, func(t *testing.T) {
			r, err := trace.NewReader("t", strings.NewReader(c.data))
			if err != nil {
				t.Fatal(err)
			}
			got, err := readAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, want %+v", got, want)
			}
			if _, err := r.Next(); err != io.EOF {
				t.Errorf("Next after the end = %v, want io.EOF", err)
			}
		})
	}
}

func TestBrokenLine(t *testing.T) {
	const good = `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}` + "\n"
	for _, c := range []struct{ name, line, want string }{
		{"empty", "", "empty"},
		{"blank", "  ", "empty"},
		{"not JSON", "timestamp,input_length", "not JSON"},
		{"cut", `{"timestamp":0,"input_length":1,"output_len`, "unexpected end"},
		{"two objects", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}{}`, "byte 66"},
		{"array", `[1,2]`, "want an object"},
		{"string", `"x"`, "want an object"},
		{"null", `null`, "timestamp is missing"},
		{"no timestamp", `{"input_length":1,"output_length":1,"hash_ids":[1]}`, "timestamp is missing"},
		{"no input_length", `{"timestamp":0,"output_length":1,"hash_ids":[1]}`, "input_length is missing"},
		{"no output_length", `{"timestamp":0,"input_length":1,"hash_ids":[1]}`, "output_length is missing"},
		{"no hash_ids", `{"timestamp":0,"input_length":1,"output_length":1}`, "hash_ids is missing"},
		{"null hash_ids", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":null}`, "hash_ids is missing"},
		{"negative timestamp", `{"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[1]}`, "timestamp -1"},
		{"huge timestamp", `{"timestamp":1e300,"input_length":1,"output_length":1,"hash_ids":[1]}`, "timestamp 1e300"},
		{"word for a timestamp", `{"timestamp":"NaN","input_length":1,"output_length":1,"hash_ids":[1]}`, `timestamp "NaN"`},
		{"negative length", `{"timestamp":0,"input_length":-1,"output_length":1,"hash_ids":[1]}`, "input_length -1"},
		{"broken length", `{"timestamp":0,"input_length":1,"output_length":1.5,"hash_ids":[1]}`, "output_length 1.5"},
		{"huge length", `{"timestamp":0,"input_length":1,"output_length":99999999999999999999,"hash_ids":[1]}`, "output_length 99999999999999999999"},
		{"hash_ids no array", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":"1"}`, "want an array"},
		{"negative id", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1,-2]}`, "hash_ids[1] is -2"},
		{"broken id", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0.5]}`, "hash_ids[0] is 0.5"},
		{"null id", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[null]}`, "hash_ids[0] is null"},
		{"string id", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1,2,"a,b"]}`, "hash_ids[2]"},
		{"nested ids", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[[1]]}`, "hash_ids[0]"},
		{"id of 65 bits", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[18446744073709551616]}`, "hash_ids[0] is 18446744073709551616"},
		{"session of another kind", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1],"session_id":[1]}`, "session_id [1]"},
		{"too long", `{"more":"` + strings.Repeat("x", trace.MaxLineBytes) + `"}`, "longer than 16777216 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := trace.NewReader("some.jsonl", strings.NewReader(good+good+c.line+"\n"+good))
			if err != nil {
				t.Fatal(err)
			}
			all, err := readAll(r)
			if len(all) != 2 {
				t.Errorf("%d requests before the broken line, want 2", len(all))
			}
			if !errors.Is(err, block.ErrInvalid) {
				t.Fatalf("error %v, want ErrInvalid", err)
			}
			for _, want := range []string{"some.jsonl", "line 3", c.want} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			if _, again := r.Next(); again != err {
				t.Errorf("Next after the error = %v, want the same again", again)
			}
		})
	}
}

// A line of the greatest length is read.
func TestLongestLine(t *testing.T) {
	head, tail := `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1],"more":"`, "\"}\n"
	line := head + strings.Repeat("x", trace.MaxLineBytes-len(head)-len(tail)) + tail
	r, err := trace.NewReader("t", strings.NewReader(line))
	if err != nil {
		t.Fatal(err)
	}
	if all, err := readAll(r); err != nil || len(all) != 1 {
		t.Errorf("%d requests, error %v", len(all), err)
	}
}

func TestCutGzip(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "mooncake_conversation_h1.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cut.jsonl.gz")
	if err := os.WriteFile(path, data[:len(data)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := trace.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	all, err := readAll(r)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("error %v after %d requests, want io.ErrUnexpectedEOF", err, len(all))
	}
	if want := fmt.Sprintf("line %d:", len(all)+1); !strings.Contains(err.Error(), want) {
		t.Errorf("error %q does not say %q", err, want)
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	if _, err := trace.Open(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open of no file = %v, want os.ErrNotExist", err)
	}
	if _, err := trace.Open(dir); err == nil {
		t.Error("Open of a directory worked")
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := trace.Open(empty)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("Next of an empty trace = %v, want io.EOF", err)
	}
	for range 2 {
		if err := r.Close(); err != nil {
			t.Errorf("Close = %v", err)
		}
	}
	r, err = trace.Open(empty)
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	if _, err := r.Next(); !errors.Is(err, block.ErrClosed) {
		t.Errorf("Next after Close = %v, want ErrClosed", err)
	}
}

// FuzzReader checks that any input ends in the end of file or an error with a
// line number, and that what was read can be written and read again.
func FuzzReader(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := trace.NewReader("fuzz", bytes.NewReader(data))
		if err != nil {
			return
		}
		all, err := readAll(r)
		if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("line %d:", len(all)+1)) {
			t.Errorf("error %q after %d requests names another line", err, len(all))
		}
		if packed := bytes.HasPrefix(data, []byte{0x1f, 0x8b}); err != nil && !packed && !errors.Is(err, block.ErrInvalid) {
			t.Errorf("error %q of a plain trace has no class", err)
		}
		var text bytes.Buffer
		for _, req := range all {
			line, err := json.Marshal(map[string]any{
				"timestamp":     json.Number(fmt.Sprintf("%d.%06d", req.Time/time.Millisecond, req.Time%time.Millisecond)),
				"input_length":  req.InputLength,
				"output_length": req.OutputLength,
				"hash_ids":      req.HashIDs,
				"session_id":    req.Session,
			})
			if err != nil {
				t.Fatal(err)
			}
			text.Write(append(line, '\n'))
		}
		r, err = trace.NewReader("again", &text)
		if err != nil {
			t.Fatal(err)
		}
		again, err := readAll(r)
		if err != nil || len(again) != len(all) {
			t.Fatalf("%d requests were written, %d read: %v", len(all), len(again), err)
		}
		for i, a := range all {
			b := again[i]
			// The fraction of a millisecond passes through a float64.
			if d := a.Time - b.Time; d < -time.Millisecond || d > time.Millisecond {
				t.Errorf("time %v, read again %v", a.Time, b.Time)
			}
			b.Time = a.Time
			if !reflect.DeepEqual(a, b) {
				t.Errorf("request %+v, read again %+v", a, b)
			}
		}
	})
}
