package tcp

import (
	"bytes"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

func FuzzHello(f *testing.F) {
	id := xfer.PeerID{Name: "agent", Incarnation: 7}
	f.Add((&hello{min: 1, max: 2, from: id, to: xfer.PeerID{Name: "b", Incarnation: 8}, line: 9}).append(nil))
	f.Add((&answer{status: 1, version: 1, calls: 64, identity: id}).append(nil))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := parseHello(b); err == nil && !bytes.HasPrefix(b, h.append(nil)) {
			t.Errorf("hello %+v is %x, not %x", h, h.append(nil), b)
		}
		if a, err := parseAnswer(b); err == nil && !bytes.HasPrefix(b, a.append(nil)) {
			t.Errorf("answer %+v is %x, not %x", a, a.append(nil), b)
		}
	})
}

func FuzzInfo(f *testing.F) {
	f.Add(appendConnInfo(nil, []string{"127.0.0.1:1", "[::1]:2", "host:65535"}))
	f.Add(regionInfo{1, 2, 3}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if addrs, err := parseConnInfo(b); err == nil && !bytes.Equal(b, appendConnInfo(nil, addrs)) {
			t.Errorf("%q is not %x", addrs, b)
		}
		if r, err := parseRegionInfo(b); err == nil && !bytes.Equal(b, r.append(nil)) {
			t.Errorf("%+v is not %x", r, b)
		}
	})
}

func FuzzPayloads(f *testing.F) {
	f.Add(entry{1, 2, 3}.append(nil))
	f.Add(append(entry{1, 2, 3}.append([]byte{1, 0, 0, 0}), "abc"...))
	f.Add((&spans{list: []span{{1, 2}, {9, 1}}}).append(nil))
	f.Add((&spans{all: true}).append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if l, err := parseRead(b); err == nil {
			var again []byte
			for i := range l.len() {
				again = l.at(i).append(again)
			}
			if !bytes.Equal(b, again) {
				t.Errorf("read %x is not %x", again, b)
			}
		}
		if l, p, err := parseScatter(b); err == nil {
			for i := range l.len() {
				p = p[l.at(i).n:] // panics when they are more
			}
			if len(p) > 0 {
				t.Errorf("%d bytes are left", len(p))
			}
		}
		if list, err := parseSpans(b); err == nil {
			if again := (&spans{list: list}).append(nil); !bytes.Equal(b, again) {
				t.Errorf("refusals %x are not %x", again, b)
			}
		}
	})
}

// TestSpans: what add is told is what covered finds.
func TestSpans(t *testing.T) {
	var s spans
	refused := map[uint32]bool{}
	for _, i := range []uint32{0, 1, 2, 2, 5, 9, 10, 100} {
		s.add(i)
		refused[i] = true
	}
	list, err := parseSpans(s.append(nil))
	if err != nil || len(list) != 4 {
		t.Fatal(list, err)
	}
	for i := range uint32(120) {
		if covered(list, i) != refused[i] {
			t.Errorf("piece %d: %v", i, covered(list, i))
		}
	}
	s.add(3) // out of order
	if list, err = parseSpans(s.append(nil)); err != nil || !covered(list, 77) {
		t.Error(list, err)
	}
}
