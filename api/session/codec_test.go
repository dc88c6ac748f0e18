package session_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

var update = flag.Bool("update", false, "write the golden files anew")

// message is what every message can do.
type message interface {
	Append(b []byte) []byte
	Decode(p []byte) error
}

// example is a frame that docs/protocol.md shows.
type example struct {
	name    string
	header  frame.Header
	message message // nil: the payload is empty, or bytes
	bytes   []byte
}

func keys(hashes string) session.Keys {
	return session.Keys{NS: 1, Tag: 0x1122334455667788, HashLen: 8, Hashes: []byte(hashes)}
}

func hash(s string) (h block.Hash) {
	copy(h[:], s)
	return h
}

// examples are the golden frames: one conversation, in order, and then what is rarer.
func examples() []example {
	msg := func(name string, c session.Code, id uint64, m message) example {
		return example{name: name, header: frame.Header{Type: frame.Message, Flags: uint8(c), ID: id}, message: m}
	}
	hello := frame.Header{Type: frame.Hello}
	return []example{
		{name: "hello", header: hello, message: &session.HelloMessage{
			MinVersion: 1, MaxVersion: 1, Features: session.FeatureShared, Calls: 64, Bytes: 64 << 20, Token: "secret", Name: "worker-0",
			Message: 1 << 20,
		}},
		{name: "hello_chunks", header: hello, message: &session.HelloMessage{
			MinVersion: 1, MaxVersion: 1, Features: session.FeatureShared | session.FeatureChunks, Token: "secret", Name: "worker-0", Message: 1 << 20,
		}},
		msg("passed", session.CodePassed, 0, &session.PassedMessage{Chunk: 9, Length: 66 << 20, Gone: []uint32{4, 7}}),
		{name: "hello_regions", header: hello, message: &session.HelloMessage{
			MinVersion: 1, MaxVersion: 1, Features: session.FeatureRegions, Calls: 64, Bytes: 64 << 20, Name: "worker-0",
			Regions: []session.HelloRegion{{Length: 1 << 30}, {Length: 4096, ReadOnly: true, Path: "/dev/shm/kv"}},
			Message: 1 << 20,
		}},
		{name: "welcome", header: hello, message: &session.WelcomeMessage{
			Version: 1, Features: session.FeatureShared, Session: 7, Incarnation: 0x0102030405060708,
			Calls: 64, Bytes: 64 << 20, Keys: 8192, Grants: 64, GrantBytes: 64 << 20, Name: "kvtier", Chunks: []uint64{1 << 30},
			Message: 1 << 20,
		}},
		{name: "refused", header: hello, message: &session.WelcomeMessage{Status: session.StatusDenied, Text: "denied: wrong token", Version: 1}},
		msg("match", session.CodeMatch, 1, &session.MatchMessage{Keys: keys("blockAAAblockBBB"), Flags: session.FlagAll, LeaseMS: 1000, Deadline: 500}),
		msg("matched", session.CodeMatched, 1, &session.MatchedMessage{
			Prefix: 1, Lease: 0x55, LeaseMS: 1000, Leased: 1, Blocks: []block.Found{{State: block.Resident, Tier: block.G2, Len: 5}, {}},
		}),
		msg("match_plan", session.CodeMatch, 17, &session.MatchMessage{
			Keys: keys("blockAAAblockBBB"), Flags: session.FlagPlan, Deadline: 500,
			Plan: block.PlanOptions{Prefill: block.Prefill{Token: 33 * time.Microsecond, Position: 1.5}, Overlap: true, Deadline: 200 * time.Millisecond},
		}),
		msg("matched_plan", session.CodeMatched, 17, &session.MatchedMessage{
			Prefix: 1, Blocks: []block.Found{{State: block.Resident, Tier: block.G2, Len: 5}, {}},
			Plan: &block.Plan{To: 1, Load: 2 * time.Millisecond, Total: 2 * time.Millisecond, Recompute: 8 * time.Millisecond},
		}),
		msg("match_conversation", session.CodeMatch, 18, &session.MatchMessage{
			Keys: keys("blockAAA"), Flags: session.FlagConversation, LeaseMS: 60000, Deadline: 500, Conversation: "agent 7",
		}),
		msg("report_prefill", session.CodeReportPrefill, 19, &session.ReportPrefillMessage{
			NS: 1, Tag: 0x1122334455667788, Position: 4096, Tokens: 512, Micros: 20000,
		}),
		msg("reported", session.CodeReported, 19, &session.ReportedMessage{}),
		msg("get", session.CodeGet, 2, &session.GetMessage{Keys: keys("blockAAAblockBBB"), Deadline: 500}),
		{name: "get_data", header: frame.Header{Type: frame.Data, ID: 2}, bytes: []byte("hello")},
		msg("got", session.CodeGot, 2, &session.GotMessage{Blocks: []session.GotBlock{
			{Tier: block.G2, Len: 5, Total: 5, Chunk: session.NoChunk, Sum: item(0, []byte("hello")).Sum},
			{Reason: block.MissAbsent, Chunk: session.NoChunk},
		}}),
		msg("get_range", session.CodeGet, 3, &session.GetMessage{Keys: keys("blockAAA"), Flags: session.FlagRanges, Ranges: []session.Range{{Offset: 1, Length: 3}}}),
		msg("get_in_place", session.CodeGet, 4, &session.GetMessage{Keys: keys("blockAAA"), Flags: session.FlagInPlace}),
		msg("got_in_place", session.CodeGot, 4, &session.GotMessage{Lease: 0x77, LeaseMS: 30000, Blocks: []session.GotBlock{
			{Tier: block.G2, Len: 5, Total: 5, Chunk: 0, Offset: 4096, Sum: item(0, []byte("hello")).Sum},
		}}),
		msg("grant", session.CodeGrant, 5, &session.GrantMessage{NS: 1, Tag: 0x1122334455667788, Size: 5, Count: 2, Deadline: 500}),
		msg("granted", session.CodeGranted, 5, &session.GrantedMessage{TTLMS: 30000, Places: []session.GrantedPlace{
			{Grant: 0xa1, Size: 5, Chunk: session.NoChunk}, {Grant: 0xa2, Size: 5, Chunk: session.NoChunk},
		}}),
		{name: "put_data", header: frame.Header{Type: frame.Data, ID: 6, Token: 0xa1}, bytes: []byte("hello")},
		msg("put", session.CodePut, 6, &session.PutMessage{
			Keys: keys("blockAAA"), Flags: session.FlagRegrant | session.FlagParents, Durable: block.G2, Deadline: 500,
			Items: []session.PutItem{{Grant: 0xa1, Len: 5, HasParent: true, Sum: item(0, []byte("hello")).Sum}}, Parents: []byte("block000"),
		}),
		msg("put_done", session.CodePutDone, 6, &session.PutDoneMessage{
			Results: []session.PutResult{{}},
			Grants:  session.GrantedMessage{TTLMS: 30000, Places: []session.GrantedPlace{{Grant: 0xa3, Size: 5, Chunk: session.NoChunk}}},
		}),
		msg("put_refused", session.CodePutDone, 7, &session.PutDoneMessage{
			Results: []session.PutResult{{Status: session.StatusLeaseExpired, Text: "lease expired: no such grant"}},
		}),
		msg("region_get", session.CodeRegionGet, 13, &session.RegionGetMessage{
			Keys: keys("blockAAAblockBBB"), Flags: session.FlagQuiet, Deadline: 500, Segments: session.Segments{
				Counts: []uint16{1, 2},
				All:    []session.Segment{{Region: 0, Length: 5, Offset: 4096}, {Region: 0, Length: 3, Offset: 8192}, {Region: 0, Length: 2, Offset: 12288}},
			},
		}),
		msg("region_put", session.CodeRegionPut, 14, &session.RegionPutMessage{
			Keys: keys("blockAAA"), Flags: session.FlagParents, Durable: block.G3, TTLMS: 60000, Deadline: 500, HasParent: []bool{true},
			Segments: session.Segments{Counts: []uint16{2}, All: []session.Segment{{Region: 0, Length: 3, Offset: 4096}, {Region: 1, Length: 2, Offset: 16}}},
			Parents:  []byte("block000"),
		}),
		msg("release", session.CodeRelease, 8, &session.ReleaseMessage{Leases: []uint64{0x55}, Grants: []uint64{0xa2}}),
		msg("released", session.CodeReleased, 8, &session.ReleasedMessage{Results: []session.Status{session.StatusOK, session.StatusOK}}),
		msg("renew", session.CodeRenew, 9, &session.RenewMessage{LeaseMS: 1000, Leases: []uint64{0x55}}),
		msg("renewed", session.CodeRenewed, 9, &session.RenewedMessage{Results: []session.Status{session.StatusLeaseExpired}}),
		msg("prefetch", session.CodePrefetch, 10, &session.PrefetchMessage{Keys: keys("blockAAAblockBBB"), Deadline: 2000}),
		msg("prefetch_urgent", session.CodePrefetch, 20, &session.PrefetchMessage{
			Keys: keys("blockAAA"), Flags: session.FlagUrgency, Deadline: 2000, Priority: block.MaxPriority, WithinMS: 250,
		}),
		msg("prefetched", session.CodePrefetched, 10, &session.PrefetchedMessage{
			Results: []session.PrefetchResult{{Tier: block.G2}, {Reason: block.MissAbsent}},
		}),
		msg("locate", session.CodeLocate, 11, &session.LocateMessage{Keys: keys("blockAAA")}),
		msg("located", session.CodeLocated, 11, &session.LocatedMessage{Places: [][]block.Located{{{Tier: block.G2, Place: 8, Len: 5}}}}),
		msg("watch", session.CodeWatch, 12, &session.WatchMessage{NS: 1, Tag: 0x1122334455667788, Snapshot: true}),
		msg("events_start", session.CodeEvents, 12, &session.EventsMessage{
			Start: &block.WatchStart{Incarnation: 0x0102030405060708, Seq: 40},
		}),
		msg("events", session.CodeEvents, 12, &session.EventsMessage{Events: []block.Event{
			{Seq: 41, Kind: block.EventStored, NS: "llama", Hash: hash("blockAAA"), Hlen: 8, Parent: hash("block000"), HasPar: true, Tier: block.G2, Len: 5},
			{Seq: 42, Kind: block.EventRemoved, NS: "llama", Hash: hash("blockAAA"), Hlen: 8, Tier: block.G2, Reason: block.Deleted, Len: 5, Last: true},
		}}),
		msg("open", session.CodeOpen, 13, &session.OpenMessage{
			Deadline: 500, Flags: session.FlagCreate, TTLMS: 60000,
			Fields: []block.Field{{Name: "name", Value: "llama"}, {Name: "dtype", Value: "bf16"}, {Name: "block_bytes", Value: "2097152"}},
		}),
		msg("opened", session.CodeOpened, 13, &session.OpenedMessage{
			NS: 1, Tag: 0x1122334455667788, HashLen: 8, Epoch: 1, TTLMS: 60000, BlockBytes: 2 << 20,
		}),
		msg("open_known", session.CodeOpen, 14, &session.OpenMessage{Fields: []block.Field{{Name: "name", Value: "llama"}}}),
		msg("open_refused", session.CodeFailed, 13, &session.FailedMessage{
			Status: session.StatusMismatch, Text: (&block.Mismatch{Name: "llama", Field: "dtype", Have: "fp8", Want: "bf16"}).Error(),
		}),
		msg("pin", session.CodePin, 15, &session.PinMessage{Keys: keys("blockAAAblockBBB"), Deadline: 500}),
		msg("unpin", session.CodePin, 16, &session.PinMessage{Keys: keys("blockAAA"), Flags: session.FlagUnpin}),
		msg("pinned", session.CodePinned, 15, &session.PinnedMessage{Results: []session.Status{session.StatusOK, session.StatusNotFound}}),
		msg("cancel", session.CodeCancel, 12, nil),
		msg("revoke", session.CodeRevoke, 0, &session.RevokeMessage{Grants: []uint64{0xa3}}),
		msg("failed", session.CodeFailed, 12, &session.FailedMessage{Status: session.StatusCanceled, Text: "canceled"}),
		{name: "ping", header: frame.Header{Type: frame.Ping, ID: 7}},
		{name: "pong", header: frame.Header{Type: frame.Pong, ID: 7}},
		{name: "bye", header: frame.Header{Type: frame.Bye}, bytes: []byte("the server is closing")},
	}
}

func (e *example) frame() []byte {
	p := e.bytes
	if e.message != nil {
		p = e.message.Append(nil)
	}
	e.header.Length = uint32(len(p))
	return append(e.header.Append(nil), p...)
}

// dump writes a frame as the document shows it: the header's fields in a line of
// their own, then the payload, sixteen bytes in a line.
func dump(b []byte) string {
	var s strings.Builder
	line := func(p []byte) {
		for i, c := range p {
			if i > 0 {
				s.WriteByte(' ')
			}
			s.WriteString(hex.EncodeToString([]byte{c}))
		}
		s.WriteByte('\n')
	}
	for len(b) > 0 {
		n := min(16, len(b))
		line(b[:n])
		b = b[n:]
	}
	return s.String()
}

func goldenPath(name string) string { return filepath.Join("testdata", "golden", name+".hex") }

func TestGolden(t *testing.T) {
	for _, e := range examples() {
		t.Run(e.name, func(t *testing.T) {
			b := e.frame()
			if *update {
				if err := os.WriteFile(goldenPath(e.name), []byte(dump(b)), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			text, err := os.ReadFile(goldenPath(e.name))
			if err != nil {
				t.Fatal(err)
			}
			if got := dump(b); got != string(text) {
				t.Errorf("frame is\n%swant\n%s", got, text)
			}
			want, err := hex.DecodeString(strings.NewReplacer(" ", "", "\n", "").Replace(string(text)))
			if err != nil {
				t.Fatal(err)
			}
			h, err := frame.ParseHeader(want)
			if err != nil {
				t.Fatal(err)
			}
			if e.message == nil {
				return
			}
			got := reflect.New(reflect.TypeOf(e.message).Elem()).Interface().(message)
			if err := got.Decode(want[frame.HeaderBytes:][:h.Length]); err != nil {
				t.Fatal(err)
			}
			if m, ok := got.(*session.GetMessage); ok && len(m.Ranges) == 0 {
				m.Ranges = nil
			}
			if !reflect.DeepEqual(got, e.message) {
				t.Errorf("decoded is\n%+v, want\n%+v", got, e.message)
			}
		})
	}
}

// TestCutOff shows that every message is refused when bytes are missing, and every
// one but the hellos when there are too many. A hello may lack its last field, and Matched
// its plan.
func TestCutOff(t *testing.T) {
	for _, e := range examples() {
		if e.message == nil {
			continue
		}
		p := e.message.Append(nil)
		m := reflect.New(reflect.TypeOf(e.message).Elem()).Interface().(message)
		older := -1
		if e.header.Type == frame.Hello {
			older = len(p) - 4
		}
		if r, ok := e.message.(*session.MatchedMessage); ok && r.Plan != nil {
			older = len(p) - 40 // the answer to a match that wants no plan, which is for who wants one to notice
		}
		for n := range p {
			if n == older {
				continue
			}
			if err := m.Decode(p[:n]); !errors.Is(err, session.ErrMessage) {
				t.Errorf("%s: the first %d of %d bytes: error %v, want ErrMessage", e.name, n, len(p), err)
			}
		}
		err := m.Decode(append(p, 0))
		if hello := e.header.Type == frame.Hello; hello != (err == nil) {
			t.Errorf("%s: one byte too many: error %v", e.name, err)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	const named = frame.MaxMessage / 8
	long := make([]uint64, named+1)
	pieces := func(n int) session.Segments {
		return session.Segments{Counts: []uint16{uint16(n)}, All: make([]session.Segment, n)}
	}
	hello := func(regions ...session.HelloRegion) *session.HelloMessage {
		return &session.HelloMessage{Features: session.FeatureRegions, Regions: regions}
	}
	for _, tt := range []struct {
		name string
		m    interface{ Append([]byte) []byte }
		into message
		want string
	}{
		{"hash length", &session.MatchMessage{Keys: session.Keys{NS: 1, HashLen: 7, Hashes: make([]byte, 7)}}, &session.MatchMessage{}, "hash_len: 7 bytes"},
		{"no keys", &session.GetMessage{Keys: session.Keys{NS: 1, HashLen: 8}}, &session.GetMessage{}, "keys: 0"},
		{"too many keys", &session.GetMessage{Keys: session.Keys{NS: 1, HashLen: 8, Hashes: make([]byte, 8*(named+1))}}, &session.GetMessage{}, "keys: 131073 of them"},
		{"too many leases", &session.RenewMessage{Leases: long}, &session.RenewMessage{}, "leases: 131073 of them"},
		{"too many grants", &session.ReleaseMessage{Grants: long}, &session.ReleaseMessage{}, "grants: 131073 of them"},
		{"flags of a prefetch", &session.MatchMessage{Keys: keys("blockAAA"), Flags: 1}, &session.PrefetchMessage{}, "class, flags"},
		{"class of an urgent prefetch", &session.MatchMessage{Keys: keys("blockAAA"), Class: 1, Flags: session.FlagUrgency}, &session.PrefetchMessage{}, "class, flags"},
		{"other flags of an urgent prefetch", &session.PrefetchMessage{Keys: keys("blockAAA"), Flags: session.FlagUrgency | session.FlagConversation}, &session.PrefetchMessage{}, "class, flags"},
		{"urgency that no flag says", rawMessage(append((&session.PrefetchMessage{Keys: keys("blockAAA")}).Append(nil), 9, 0, 0, 0, 0)), &session.PrefetchMessage{}, "end: 5 bytes too many"},
		{"conversation that no flag says", rawMessage(append((&session.MatchMessage{Keys: keys("blockAAA")}).Append(nil), 1, 0, 'x')), &session.MatchMessage{}, "end: 3 bytes too many"},
		{"too many fields", &session.OpenMessage{Fields: make([]block.Field, 65)}, &session.OpenMessage{}, "fields: 65 of them"},
		{"too long a text", rawMessage(append(make([]byte, 14), 1, 0, 1, 16)), &session.OpenMessage{}, "fields: 4097 bytes"},
		{"flags of a pin", &session.PinMessage{Keys: keys("blockAAA"), Flags: session.FlagUnpin | 1}, &session.PinMessage{}, "class, flags"},
		{"too many pins", &session.PinMessage{Keys: session.Keys{NS: 1, HashLen: 8, Hashes: make([]byte, 8*(named+1))}}, &session.PinMessage{}, "keys: 131073 of them"},
		{"no segments", &session.RegionGetMessage{Keys: keys("blockAAA"), Segments: pieces(0)}, &session.RegionGetMessage{}, "segments: 0 of them for key 0"},
		{"too many segments", &session.RegionPutMessage{Keys: keys("blockAAA"), HasParent: make([]bool, 1), Segments: pieces(session.MaxSegments + 1)}, &session.RegionPutMessage{}, "segments: 4097 of them for key 0"},
		{"parent of a region without parents", &session.RegionPutMessage{Keys: keys("blockAAA"), HasParent: []bool{true}, Segments: pieces(1)}, &session.RegionPutMessage{}, "has_parent"},
		{"too many regions", hello(make([]session.HelloRegion, session.MaxRegions+1)...), &session.HelloMessage{}, "regions: 65 of them"},
		{"parent without parents", &session.PutMessage{Keys: keys("blockAAA"), Items: []session.PutItem{{HasParent: true}}}, &session.PutMessage{}, "has_parent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.into.Decode(tt.m.Append(nil))
			if !errors.Is(err, session.ErrMessage) || !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want ErrMessage with %q", err, tt.want)
			}
		})
	}
	if err := new(session.HelloMessage).Decode([]byte("KVTX----------------------------------")); !errors.Is(err, session.ErrMessage) || !strings.Contains(err.Error(), "magic") {
		t.Errorf("other magic: error %v", err)
	}
}

// TestCutText shows that a text that is too long is cut between two characters.
func TestCutText(t *testing.T) {
	long := strings.Repeat("ä", 3000) // of two bytes
	for _, tt := range []struct {
		sent string
		want int
	}{{long, 4096}, {"x" + long, 4095}, {long[:4096], 4096}, {strings.Repeat("x", 5000), 4096}} {
		var got session.FailedMessage
		if err := got.Decode((&session.FailedMessage{Text: tt.sent}).Append(nil)); err != nil || len(got.Text) != tt.want || !strings.HasPrefix(tt.sent, got.Text) {
			t.Errorf("%d bytes are sent as %d, want %d, error %v", len(tt.sent), len(got.Text), tt.want, err)
		}
	}
	m := session.PutDoneMessage{Results: []session.PutResult{{Status: session.StatusInvalid, Text: "x" + long}}}
	var got session.PutDoneMessage
	if err := got.Decode(m.Append(nil)); err != nil || len(got.Results[0].Text) != 255 {
		t.Errorf("a reason is sent as %+v, error %v", got, err)
	}
}

// TestLargest shows that the largest messages fit a frame.
func TestLargest(t *testing.T) {
	const n = session.MaxKeys
	k := session.Keys{NS: 1, HashLen: 32, Hashes: make([]byte, 32*n)}
	places := make([][]block.Located, n)
	for i := range places {
		places[i] = make([]block.Located, 9)
	}
	fields := make([]block.Field, 64)
	for i := range fields {
		fields[i] = block.Field{Name: strings.Repeat("n", session.MaxText), Value: strings.Repeat("v", session.MaxText)}
	}
	one := slices.Repeat([]uint16{1}, n)
	for _, m := range []message{
		&session.MatchMessage{Keys: k},
		&session.MatchedMessage{Blocks: make([]block.Found, n)},
		&session.GetMessage{Keys: k, Flags: session.FlagRanges, Ranges: make([]session.Range, n)},
		&session.GotMessage{Blocks: make([]session.GotBlock, n)},
		&session.PutMessage{Keys: k, Flags: session.FlagParents, Items: make([]session.PutItem, n), Parents: make([]byte, 32*n)},
		&session.PutDoneMessage{Results: make([]session.PutResult, n), Grants: session.GrantedMessage{Places: make([]session.GrantedPlace, n)}},
		&session.ReleaseMessage{Leases: make([]uint64, n), Grants: make([]uint64, n)},
		&session.LocatedMessage{Places: places},
		&session.OpenMessage{Fields: fields},
		&session.PinMessage{Keys: k},
		&session.PinnedMessage{Results: make([]session.Status, n)},
		&session.RegionGetMessage{Keys: k, Segments: session.Segments{Counts: one, All: make([]session.Segment, n)}},
		&session.RegionPutMessage{
			Keys: k, Flags: session.FlagParents, HasParent: make([]bool, n), Parents: make([]byte, 32*n),
			Segments: session.Segments{Counts: one, All: make([]session.Segment, n)},
		},
	} {
		p := m.Append(nil)
		if len(p) > frame.MaxMessage {
			t.Errorf("%T with %d keys takes %d bytes, a frame has at most %d", m, n, len(p), frame.MaxMessage)
		}
		if err := m.Decode(bytes.Clone(p)); err != nil {
			t.Errorf("%T: %v", m, err)
		}
	}
}

// TestDecodeAllocs shows that the hot messages cost no allocation when they are
// decoded into one that is there already.
func TestDecodeAllocs(t *testing.T) {
	for _, e := range examples() {
		switch e.name {
		case "match", "matched", "get", "got", "put", "put_done", "granted", "release", "released", "region_get", "region_put":
		default:
			continue
		}
		p := e.message.Append(nil)
		out := make([]byte, 0, len(p))
		m := reflect.New(reflect.TypeOf(e.message).Elem()).Interface().(message)
		if n := testing.AllocsPerRun(100, func() {
			if err := m.Decode(p); err != nil {
				t.Error(err)
			}
			out = m.Append(out[:0])
		}); n != 0 {
			t.Errorf("%s: %v allocations, want 0", e.name, n)
		}
	}
}

// all is one of each message, in a fixed order.
func all() []message {
	return []message{
		&session.HelloMessage{}, &session.WelcomeMessage{}, &session.MatchMessage{}, &session.MatchedMessage{},
		&session.GetMessage{}, &session.GotMessage{}, &session.GrantMessage{}, &session.GrantedMessage{},
		&session.PutMessage{}, &session.PutDoneMessage{}, &session.ReleaseMessage{}, &session.ReleasedMessage{},
		&session.RenewMessage{}, &session.RenewedMessage{}, &session.PrefetchMessage{}, &session.PrefetchedMessage{},
		&session.LocateMessage{}, &session.LocatedMessage{}, &session.WatchMessage{}, &session.EventsMessage{},
		&session.RevokeMessage{}, &session.FailedMessage{},
		&session.OpenMessage{}, &session.OpenedMessage{}, &session.PinMessage{}, &session.PinnedMessage{},
		&session.RegionGetMessage{}, &session.RegionPutMessage{}, &session.PassedMessage{},
		&session.ReportPrefillMessage{}, &session.ReportedMessage{},
	}
}

// FuzzDecode: no bytes make a decoder panic, and what it accepts is written again
// as it came.
func FuzzDecode(f *testing.F) {
	for _, e := range examples() {
		for i, m := range all() {
			if e.message != nil && reflect.TypeOf(m) == reflect.TypeOf(e.message) {
				f.Add(uint8(i), e.message.Append(nil))
			}
		}
	}
	f.Fuzz(func(t *testing.T, kind uint8, p []byte) {
		ms := all()
		m := ms[int(kind)%len(ms)]
		if err := m.Decode(p); err != nil {
			if !errors.Is(err, session.ErrMessage) {
				t.Fatalf("error %v, want ErrMessage", err)
			}
			return
		}
		again := m.Append(nil)
		if int(kind)%len(ms) <= 1 && !bytes.HasPrefix(p, again) { // an older hello has a field less
			again = again[:len(again)-4]
		}
		if !bytes.HasPrefix(p, again) || len(p) != len(again) && int(kind)%len(ms) > 1 {
			t.Fatalf("%T: %x was decoded, and written as %x", m, p, again)
		}
	})
}
