package session_test

// The client of this file is written from docs/protocol.md, with nothing of the
// package's codec and nothing of its frames: it shows that the document is enough.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvtier/kvtier/api/apitest/memstore"
)

// plainFrame is a frame of section 2.
type plainFrame struct {
	kind, code        byte
	id, token, offset uint64
	payload           []byte
}

// plainClient is one session.
type plainClient struct {
	c       net.Conn
	id      uint64 // of the last call
	message int    // bytes that a message has at most
	ns      []byte // handle and tag of the namespace
}

func le16(b []byte, v uint16) []byte { return binary.LittleEndian.AppendUint16(b, v) }
func le32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func le64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func plainText(b []byte, s string) []byte { return append(le16(b, uint16(len(s))), s...) }

// plainFields takes fields off a payload. Those that are not there are 0, and missing says so.
type plainFields struct {
	b       []byte
	missing bool
}

func (f *plainFields) bytes(n int) []byte {
	if n > len(f.b) {
		f.missing, f.b = true, nil
		return make([]byte, n)
	}
	b := f.b[:n]
	f.b = f.b[n:]
	return b
}

func (f *plainFields) u8() byte     { return f.bytes(1)[0] }
func (f *plainFields) u16() uint16  { return binary.LittleEndian.Uint16(f.bytes(2)) }
func (f *plainFields) u32() uint32  { return binary.LittleEndian.Uint32(f.bytes(4)) }
func (f *plainFields) u64() uint64  { return binary.LittleEndian.Uint64(f.bytes(8)) }
func (f *plainFields) text() string { return string(f.bytes(int(f.u16()))) }

// end is an error unless the payload had these fields and no others.
func (f *plainFields) end(what string) error {
	if f.missing || len(f.b) > 0 {
		return fmt.Errorf("%s: fields are missing: %v, bytes left: %d", what, f.missing, len(f.b))
	}
	return nil
}

func (p *plainClient) send(f plainFrame) error {
	b := le32(nil, uint32(len(f.payload)))
	b = append(b, f.kind, f.code, 0, 0)
	b = le64(le64(le64(b, f.id), f.token), f.offset)
	_, err := p.c.Write(append(b, f.payload...))
	return err
}

// recv receives the next frame that is not the connection's own.
func (p *plainClient) recv() (f plainFrame, err error) {
	for {
		head := make([]byte, 32)
		if _, err := io.ReadFull(p.c, head); err != nil {
			return f, err
		}
		h := plainFields{b: head}
		n := h.u32()
		f = plainFrame{kind: h.u8(), code: h.u8()}
		h.u16() // status
		f.id, f.token, f.offset = h.u64(), h.u64(), h.u64()
		if f.kind == 0 || n > 1<<24 {
			return f, fmt.Errorf("no frame: %x", head)
		}
		f.payload = make([]byte, n)
		if _, err := io.ReadFull(p.c, f.payload); err != nil {
			return f, err
		}
		switch f.kind {
		case 1, 2, 3, 5:
			return f, nil
		case 4:
			if err := p.send(plainFrame{kind: 5, id: f.id}); err != nil {
				return f, err
			}
		case 6:
			return f, fmt.Errorf("bye: %s", f.payload)
		}
	}
}

// plainDial makes a session: section 3.
func plainDial(network, address string, limit time.Time) (*plainClient, error) {
	c, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	p := &plainClient{c: c}
	if err := c.SetDeadline(limit); err != nil {
		return nil, err
	}
	hello := le16(le16([]byte("KVTS"), 1), 1)
	hello = le64(le32(le64(hello, 0), 0), 0) // features, calls, bytes
	hello = plainText(plainText(hello, ""), "plain")
	hello = le32(hello, 65536)
	if err := p.send(plainFrame{kind: 1, payload: hello}); err != nil {
		return nil, err
	}
	f, err := p.recv()
	if err != nil {
		return nil, err
	}
	w := plainFields{b: f.payload}
	magic, status, version := string(w.bytes(4)), w.u16(), w.u16()
	w.bytes(8 + 8 + 8 + 4 + 8 + 4 + 4 + 8) // features to grant_bytes
	why := w.text()
	w.text() // name
	if n := w.u32(); n > 0 {
		return nil, fmt.Errorf("%d files that nobody wanted", n)
	}
	p.message = int(w.u32())
	if f.kind != 1 || magic != "KVTS" || w.missing {
		return nil, fmt.Errorf("no hello: %+v", f)
	}
	if status != 0 || version != 1 {
		return nil, fmt.Errorf("refused with status %d, version %d: %s", status, version, why)
	}
	return p, nil
}

// request sends a request with a new id: section 4.
func (p *plainClient) request(code byte, payload []byte) error {
	p.id++
	return p.send(plainFrame{kind: 3, code: code, id: p.id, payload: payload})
}

// plainFailed is a call that failed as a whole.
type plainFailed struct {
	status uint16
	text   string
}

func (e *plainFailed) Error() string { return fmt.Sprintf("status %d: %s", e.status, e.text) }

// reply receives the final reply of the last call, and gives data that comes before it to
// land.
func (p *plainClient) reply(code byte, land func(f plainFrame) error) (*plainFields, error) {
	for {
		f, err := p.recv()
		switch {
		case err != nil:
			return nil, err
		case f.id != p.id:
			return nil, fmt.Errorf("frame of call %d, want %d", f.id, p.id)
		case f.kind == 2 && land != nil:
			if err := land(f); err != nil {
				return nil, err
			}
		case f.kind != 3:
			return nil, fmt.Errorf("frame of type %d", f.kind)
		case f.code == 21:
			w := plainFields{b: f.payload}
			e := &plainFailed{w.u16(), w.text()}
			if err := w.end("failed"); err != nil {
				return nil, err
			}
			return nil, e
		case f.code != code:
			return nil, fmt.Errorf("reply with code %d, want %d", f.code, code)
		default:
			return &plainFields{b: f.payload}, nil
		}
	}
}

// open opens a namespace, which is made when it is not there.
func (p *plainClient) open(name, most string) error {
	b := le16(le64(le16(le32(nil, 0), 1), 0), 2)
	b = plainText(plainText(b, "name"), name)
	b = plainText(plainText(b, "max_block_bytes"), most)
	if err := p.request(22, b); err != nil {
		return err
	}
	f, err := p.reply(23, nil)
	if err != nil {
		return err
	}
	p.ns = f.bytes(12)
	f.bytes(1 + 4 + 8 + 8 + 8)
	return f.end("opened")
}

// keyHead is that of section 4, for keys of 8 bytes.
func (p *plainClient) keyHead(keys int, flags uint16) []byte {
	b := append([]byte(nil), p.ns[:4]...)
	b = append(le32(b, uint32(keys)), p.ns[4:]...)
	b = append(b, 8, 0)
	return le32(le16(b, flags), 0)
}

// places reads places that were granted: section 7.
func (p *plainClient) places(f *plainFields) (grants []uint64) {
	f.u32() // ttl_ms
	for range f.u32() {
		grants = append(grants, f.u64())
		f.bytes(4 + 4 + 8)
	}
	return grants
}

func (p *plainClient) grant(size, count uint32) ([]uint64, error) {
	b := le32(le32(append([]byte(nil), p.ns...), size), count)
	if err := p.request(5, le32(b, 0)); err != nil {
		return nil, err
	}
	f, err := p.reply(6, nil)
	if err != nil {
		return nil, err
	}
	grants := p.places(f)
	return grants, f.end("granted")
}

// canonical is xxh3-128 with the high eight bytes first.
func canonical(b []byte) []byte {
	sum := xxh3.Hash128(b)
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, sum.Hi), sum.Lo)
}

// plainPut is what came of one key.
type plainPut struct {
	status uint16
	put    byte
	text   string
}

// put fills places and makes blocks of them, and returns as many new places.
func (p *plainClient) put(keys []string, grants []uint64, blocks [][]byte) (done []plainPut, next []uint64, err error) {
	b := append(p.keyHead(len(keys), 64), 2)
	b = le64(b, 0)
	for i, data := range blocks {
		for off := 0; off < len(data); off += 262144 {
			part := data[off:min(len(data), off+262144)]
			if err := p.send(plainFrame{kind: 2, token: grants[i], offset: uint64(off), payload: part}); err != nil {
				return nil, nil, err
			}
		}
		b = append(le32(le64(b, grants[i]), uint32(len(data))), 0)
		b = append(b, canonical(data)...)
	}
	for _, k := range keys {
		b = append(b, k...)
	}
	if err := p.request(7, b); err != nil {
		return nil, nil, err
	}
	f, err := p.reply(8, nil)
	if err != nil {
		return nil, nil, err
	}
	for range f.u32() {
		one := plainPut{status: f.u16(), put: f.u8()}
		one.text = string(f.bytes(int(f.u8())))
		done = append(done, one)
	}
	next = p.places(f)
	return done, next, f.end("put done")
}

// match says how many keys from the first on are there, and the state of each: section 5.
func (p *plainClient) match(keys ...string) (prefix uint32, states []byte, err error) {
	b := le32(p.keyHead(len(keys), 1), 0)
	for _, k := range keys {
		b = append(b, k...)
	}
	if err := p.request(1, b); err != nil {
		return 0, nil, err
	}
	f, err := p.reply(2, nil)
	if err != nil {
		return 0, nil, err
	}
	prefix = f.u32()
	f.bytes(8 + 4 + 4)
	for range f.u32() {
		states = append(states, f.u8())
		f.bytes(1 + 4)
	}
	return prefix, states, f.end("matched")
}

// get gets blocks, nil for what is no hit: section 6.
func (p *plainClient) get(keys ...string) ([][]byte, error) {
	b := p.keyHead(len(keys), 0)
	for _, k := range keys {
		b = append(b, k...)
	}
	if err := p.request(3, b); err != nil {
		return nil, err
	}
	blocks := make([][]byte, len(keys))
	f, err := p.reply(4, func(d plainFrame) error {
		if d.token >= uint64(len(keys)) || d.offset != uint64(len(blocks[d.token])) || len(d.payload) > 262144 {
			return fmt.Errorf("data for key %d at %d", d.token, d.offset)
		}
		blocks[d.token] = append(blocks[d.token], d.payload...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	f.bytes(8 + 4)
	for i := range f.u32() {
		status, reason := f.u16(), f.u8()
		f.u8() // tier
		length, total, chunk := f.u32(), f.u32(), f.u32()
		f.u64() // offset
		sum := f.bytes(16)
		if status != 0 || reason != 0 {
			blocks[i] = nil
			continue
		}
		if chunk != 0xffffffff || length != total || int(length) != len(blocks[i]) || !bytes.Equal(sum, canonical(blocks[i])) {
			return nil, fmt.Errorf("key %d: %d of %d bytes came, %d are told", i, len(blocks[i]), total, length)
		}
	}
	return blocks, f.end("got")
}

// TestPlainClient shows that a client written from the document is understood.
func TestPlainClient(t *testing.T) {
	r := newRig(t, &memstore.Options{Capacity: 32 << 20}, nil)
	for _, at := range [][2]string{{"tcp", r.tcp}, {"unix", r.unix}} {
		t.Run(at[0], func(t *testing.T) {
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			p, err := plainDial(at[0], at[1], time.Now().Add(patience))
			must(err)
			defer p.c.Close()
			if p.message != 65536 {
				t.Errorf("messages of %d bytes, want the 65536 that this side has said", p.message)
			}
			must(p.open("plain-"+at[0], "1048576"))

			keys := []string{"block000", "block111"}
			blocks := [][]byte{pattern(5, 1), pattern(262144+1000, 2)} // of one frame, and of two
			grants, err := p.grant(uint32(len(blocks[1])), 2)
			must(err)
			if len(grants) != 2 {
				t.Fatalf("%d places, want 2", len(grants))
			}
			used := grants[0]
			for _, want := range []byte{0, 1} { // stored, and there already
				done, next, err := p.put(keys, grants, blocks)
				must(err)
				if len(done) != 2 || done[0] != (plainPut{put: want}) || done[1] != (plainPut{put: want}) || len(next) != 2 {
					t.Fatalf("put: %+v and %d new places, want put %d", done, len(next), want)
				}
				grants = next
			}
			done, _, err := p.put(keys[:1], []uint64{used}, blocks[:1])
			must(err)
			if len(done) != 1 || done[0].status != 3 || done[0].text == "" {
				t.Errorf("put by a place that was used: %+v, want status 3", done)
			}

			prefix, states, err := p.match("block000", "block111", "blockXXX", "block000")
			must(err)
			if prefix != 2 || !bytes.Equal(states, []byte{2, 2, 0, 2}) {
				t.Errorf("match: a prefix of %d, states %v", prefix, states)
			}
			got, err := p.get("block111", "blockXXX", "block000")
			must(err)
			if !bytes.Equal(got[0], blocks[1]) || got[1] != nil || !bytes.Equal(got[2], blocks[0]) {
				t.Errorf("get: %d, %d and %d bytes", len(got[0]), len(got[1]), len(got[2]))
			}

			// What the server does not know costs the call, and not the session.
			must(p.request(200, nil))
			var failed *plainFailed
			if _, err := p.reply(200, nil); !errors.As(err, &failed) || failed.status != 5 {
				t.Errorf("code 200: %v, want status 5", err)
			}
			must(p.send(plainFrame{kind: 99, payload: []byte("skipped")}))
			must(p.send(plainFrame{kind: 4, id: 7}))
			if f, err := p.recv(); err != nil || f.kind != 5 || f.id != 7 {
				t.Errorf("ping: answered by %+v, error %v", f, err)
			}
			if prefix, _, err := p.match("block000"); err != nil || prefix != 1 {
				t.Errorf("match at the end: a prefix of %d, error %v", prefix, err)
			}
		})
	}
	r.quiet()
}
