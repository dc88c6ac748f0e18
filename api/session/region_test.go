package session_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/xfer/frame"
)

// unsealed makes a memory file that its owner can cut short, as those of engines are,
// and maps it.
func unsealed(t testing.TB, n int64) (*os.File, []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "region")
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return f, mem
}

// inMemory is a directory of a memory file system.
func inMemory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvtier-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// withRegions opens a session over the unix socket with regions, or returns why not.
func (c *client) withRegions(files []int, list ...session.HelloRegion) error {
	c.t.Helper()
	h := session.HelloMessage{MinVersion: 1, MaxVersion: 1, Features: session.FeatureRegions, Regions: list, Message: frame.MaxMessage}
	if err := frame.SendHello(c.c, h.Append(nil), files); err != nil {
		c.t.Fatal(err)
	}
	err := c.welcomed()
	if err == nil && c.welcome.Features != session.FeatureRegions {
		c.t.Fatalf("welcome %+v", c.welcome)
	}
	return err
}

func segment(region, length, offset int) session.Segment {
	return session.Segment{Region: uint16(region), Length: uint32(length), Offset: uint64(offset)}
}

// segments are those of several keys.
func segments(keys ...[]session.Segment) (s session.Segments) {
	for _, one := range keys {
		s.Counts, s.All = append(s.Counts, uint16(len(one))), append(s.All, one...)
	}
	return s
}

func (c *client) regionGet(k session.Keys, keys ...[]session.Segment) (m session.GotMessage, err error) {
	c.t.Helper()
	err = c.answer(c.send(session.CodeRegionGet, &session.RegionGetMessage{Keys: k, Segments: segments(keys...)}), session.CodeGot, &m)
	return m, err
}

func (c *client) regionPut(k session.Keys, keys ...[]session.Segment) (m session.PutDoneMessage, err error) {
	c.t.Helper()
	p := &session.RegionPutMessage{Keys: k, HasParent: make([]bool, len(keys)), Segments: segments(keys...)}
	err = c.answer(c.send(session.CodeRegionPut, p), session.CodePutDone, &m)
	return m, err
}

// TestRegion moves blocks between regions, in pieces, and the store: a client as the
// document describes it.
func TestRegion(t *testing.T) {
	r := newRig(t, &memstore.Options{Durable: true}, nil)
	f, mem := unsealed(t, 4<<20)
	path := filepath.Join(inMemory(t), "rows")
	rows := pattern(2<<20+77, 5)
	if err := os.WriteFile(path, rows, 0o600); err != nil {
		t.Fatal(err)
	}
	c := dial(t, "unix", r.unix)
	if err := c.withRegions([]int{int(f.Fd())}, session.HelloRegion{Length: 4 << 20}, session.HelloRegion{Length: uint64(len(rows)), ReadOnly: true, Path: path}); err != nil {
		t.Fatal(err)
	}
	if st := r.server.Stats(); st.Regions != 2 || st.RegionBytes != 4<<20+int64(len(rows)) {
		t.Errorf("%d regions of %d bytes", st.Regions, st.RegionBytes)
	}
	// The blocks: one byte; less and more than a step of copying; one in many pieces.
	blocks := [][]byte{rows[5:6], rows[100:1300], rows[4096:][:256<<10], rows[1:][:1<<20+3], rows[77:][:300_000]}
	pieces := [][]session.Segment{
		{segment(1, 1, 5)}, {segment(1, 1200, 100)}, {segment(1, 256<<10, 4096)}, {segment(1, 1<<20, 1), segment(1, 3, 1<<20+1)}, nil,
	}
	for at := 0; at < 300_000; at += 1000 {
		pieces[4] = append(pieces[4], segment(1, 1000, 77+at))
	}
	put := &session.RegionPutMessage{
		Keys: r.keys("abcde"), Flags: session.FlagParents, Durable: block.G3, Segments: segments(pieces...),
		HasParent: []bool{false, true, true, true, true}, Parents: r.keys("xabcd").Hashes,
	}
	var done session.PutDoneMessage
	if err := c.answer(c.send(session.CodeRegionPut, put), session.CodePutDone, &done); err != nil {
		t.Fatal(err)
	}
	for i, res := range done.Results {
		if res != (session.PutResult{}) {
			t.Errorf("put %d: %+v", i, res)
		}
	}
	if len(done.Grants.Places) != 0 {
		t.Errorf("places %+v", done.Grants.Places)
	}
	if again, err := c.regionPut(r.keys("b"), pieces[1]); err != nil || again.Results[0] != (session.PutResult{Put: block.Exists}) {
		t.Errorf("put again: %+v, error %v", again.Results, err)
	}
	if other, err := c.regionPut(r.keys("b"), []session.Segment{segment(1, 1200, 101)}); err != nil || other.Results[0].Status != session.StatusConflict || other.Results[0].Text == "" {
		t.Errorf("put of other bytes: %+v, error %v", other.Results, err)
	}
	// Back into the other region: whole, in pieces that are cut elsewhere, with room left.
	for i := range mem {
		mem[i] = 0xee
	}
	into := [][]session.Segment{
		{segment(0, 1, 0)}, {segment(0, 7, 200), segment(0, 0, 10), segment(0, 1193, 1000)}, {segment(0, 512<<10, 4096)}, {segment(0, 1<<20+3, 1<<20+9)}, nil, {segment(0, 10, 3<<20)},
	}
	for at := 0; at < 300_001; at += 777 {
		into[4] = append(into[4], segment(0, 777, 3<<20+at*2))
	}
	got, err := c.regionGet(r.keys("abcdeX"), into...)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range got.Blocks {
		want := session.GotBlock{Reason: block.MissAbsent, Chunk: session.NoChunk}
		if i < len(blocks) {
			n := uint32(len(blocks[i]))
			want = session.GotBlock{Tier: block.G2, Len: n, Total: n, Chunk: session.NoChunk, Sum: sumOfBlock(blocks[i])}
		}
		if g != want {
			t.Errorf("got %d: %+v, want %+v", i, g, want)
		}
		var there []byte
		var room int
		for _, s := range into[i] {
			there = append(there, mem[s.Offset:][:s.Length]...)
			room += int(s.Length)
		}
		if want.Reason != block.Hit {
			continue
		}
		if !bytes.Equal(there[:len(blocks[i])], blocks[i]) {
			t.Errorf("block %d came with other bytes", i)
		}
		if rest := there[len(blocks[i]):]; bytes.Count(rest, []byte{0xee}) != room-len(blocks[i]) {
			t.Errorf("block %d: what is behind it was written to", i)
		}
	}
	st := r.server.Stats()
	if in, out := st.RegionIn, st.RegionOut; out != 1+1200+256<<10+1<<20+3+300_000 || in != out+2*1200 {
		t.Errorf("%d bytes came out of regions, %d went in", in, out)
	}
	if st.BytesIn > 1<<20 || st.BytesOut > 1<<10 || st.Calls[session.CodeRegionGet] != 1 || st.Calls[session.CodeRegionPut] != 3 {
		t.Errorf("%+v", st)
	}
	_ = c.c.Close()
	r.quiet()
	if st := r.server.Stats(); st.Regions != 0 || st.RegionBytes != 0 {
		t.Errorf("%d regions of %d bytes are left", st.Regions, st.RegionBytes)
	}
}

// TestRegionMisuse shows that a key whose segments are wrong fails by itself.
func TestRegionMisuse(t *testing.T) {
	r := newRig(t, nil, nil)
	f, mem := unsealed(t, 8<<20+1<<20)
	c := dial(t, "unix", r.unix)
	if err := c.withRegions([]int{int(f.Fd()), int(f.Fd())}, session.HelloRegion{Length: 9 << 20}, session.HelloRegion{Length: 1 << 20, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	p := pattern(1000, 1)
	c.store(r.keys("a"), p)
	good := []session.Segment{segment(0, 1000, 0)}
	for _, tt := range []struct {
		name     string
		segs     []session.Segment
		get, put session.Status
		text     string // of the put
	}{
		{"no such region", []session.Segment{{Region: 2, Length: 1000}}, session.StatusInvalid, session.StatusInvalid, "segment 0: region 2, of 2"},
		{"largest region", []session.Segment{{Region: math.MaxUint16, Length: 1000}}, session.StatusInvalid, session.StatusInvalid, "region 65535"},
		{"past the end", []session.Segment{segment(0, 1000, 9<<20-999)}, session.StatusInvalid, session.StatusInvalid, "1000 bytes at 9436185 of region 0, which has 9437184"},
		{"second one past the end", []session.Segment{segment(0, 1000, 0), segment(0, 1, 9<<20)}, session.StatusInvalid, session.StatusInvalid, "segment 1"},
		{"offset beyond", []session.Segment{{Length: 1, Offset: math.MaxUint64}}, session.StatusInvalid, session.StatusInvalid, "region 0"},
		{"end overflows", []session.Segment{{Length: math.MaxUint32, Offset: math.MaxUint64 - 10}}, session.StatusInvalid, session.StatusInvalid, "region 0"},
		{"longest", []session.Segment{{Length: math.MaxUint32}}, session.StatusInvalid, session.StatusInvalid, "region 0"},
		{"no bytes", []session.Segment{segment(0, 0, 9<<20)}, session.StatusInvalid, session.StatusInvalid, "segments of 0 bytes"},
		{"too short", []session.Segment{segment(0, 500, 0), segment(0, 499, 500)}, session.StatusInvalid, session.StatusOK, ""},
		{"too long for a block", []session.Segment{segment(0, 8<<20+1, 0)}, session.StatusOK, session.StatusInvalid, "segments of 8388609 bytes"},
		{"sum over 32 bits", slices.Repeat([]session.Segment{segment(0, 9<<20, 0)}, 500), session.StatusOK, session.StatusInvalid, "segments of 4718592000 bytes"},
		{"for reading only", []session.Segment{segment(1, 1000, 0)}, session.StatusInvalid, session.StatusOK, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := c.regionGet(r.keys("aa"), tt.segs, good)
			if err != nil {
				t.Fatal(err)
			}
			if g := got.Blocks[0]; g.Status != tt.get || tt.name == "too short" && g.Total != 1000 || g.Status != session.StatusOK && g.Len != 0 {
				t.Errorf("get: %+v", g)
			}
			if g := got.Blocks[1]; g.Status != session.StatusOK || g.Reason != block.Hit || !bytes.Equal(mem[:1000], p) {
				t.Errorf("the other key: %+v", g)
			}
			k := r.keys("Aa")
			binary.LittleEndian.PutUint64(k.Hashes, uint64(len(tt.name))<<8|uint64(tt.name[0]))
			done, err := c.regionPut(k, tt.segs, good)
			if err != nil {
				t.Fatal(err)
			}
			if d := done.Results[0]; d.Status != tt.put || !strings.Contains(d.Text, tt.text) || d.Status != session.StatusOK && d.Text == "" {
				t.Errorf("put: %+v", d)
			}
			if d := done.Results[1]; d.Status != session.StatusOK || d.Put != block.Exists {
				t.Errorf("the other key: %+v", d)
			}
		})
	}
	// What fails as a whole.
	for _, tt := range []struct {
		name string
		code session.Code
		m    message
		want string
	}{
		{"ranges", session.CodeRegionGet, &session.RegionGetMessage{Keys: r.keys("a"), Flags: session.FlagRanges, Segments: segments(good)}, "flags"},
		{"in place", session.CodeRegionGet, &session.RegionGetMessage{Keys: r.keys("a"), Flags: session.FlagInPlace, Segments: segments(good)}, "flags"},
		{"regrant", session.CodeRegionPut, &session.RegionPutMessage{Keys: r.keys("a"), Flags: session.FlagRegrant, HasParent: []bool{false}, Segments: segments(good)}, "flags"},
		{"no segments", session.CodeRegionGet, &session.RegionGetMessage{Keys: r.keys("a"), Segments: segments(nil)}, "segments: 0 of them"},
		{"too many", session.CodeRegionPut, &session.RegionPutMessage{Keys: r.keys("a"), HasParent: []bool{false}, Segments: segments(slices.Repeat(good, 4097))}, "segments: 4097 of them"},
		{"no namespace", session.CodeRegionGet, &session.RegionGetMessage{Keys: session.Keys{HashLen: 8, Hashes: make([]byte, 8)}, Segments: segments(good)}, "namespace: 0"},
		{"tier", session.CodeRegionPut, &session.RegionPutMessage{Keys: r.keys("a"), Durable: block.G4, HasParent: []bool{false}, Segments: segments(good)}, "durable"},
		{"ttl", session.CodeRegionPut, &session.RegionPutMessage{Keys: r.keys("a"), TTLMS: math.MaxUint64, HasParent: []bool{false}, Segments: segments(good)}, "ttl_ms"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := c.answer(c.send(tt.code, tt.m), 0, nil)
			if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want ErrInvalid with %q", err, tt.want)
			}
		})
	}
	// A session without regions, over TCP for one.
	plain := r.client()
	if got, err := plain.regionGet(r.keys("a"), good); err != nil || got.Blocks[0].Status != session.StatusInvalid {
		t.Errorf("without regions: %+v, error %v", got, err)
	}
	_, _ = c.c.Close(), plain.c.Close()
	r.quiet()
}

// TestRegionRefused shows which regions are none, and what their client is told.
func TestRegionRefused(t *testing.T) {
	r := newRig(t, nil, &session.ServerOptions{RegionBytes: 1 << 30, AllRegionBytes: 3 << 29, Regions: 3, AllRegions: 4})
	dir := inMemory(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	f, _ := unsealed(t, 1<<20)
	fd := int(f.Fd())
	if err := os.WriteFile(in("file"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, make := range map[string]func(string) error{
		"fifo":   func(p string) error { return unix.Mkfifo(p, 0o600) },
		"link":   func(p string) error { return os.Symlink(in("file"), p) },
		"dir":    func(p string) error { return os.Mkdir(p, 0o700) },
		"socket": func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o600, 0) },
	} {
		if err := make(in(name)); err != nil {
			t.Fatal(err)
		}
	}
	disk := filepath.Join(t.TempDir(), "disk")
	var fs unix.Statfs_t
	if err := errors.Join(os.WriteFile(disk, []byte("disk"), 0o600), unix.Statfs(disk, &fs)); err != nil {
		t.Fatal(err)
	}
	if fs.Type == unix.TMPFS_MAGIC {
		disk = "/proc/self/status" // no bytes, and no memory file either
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	ro, err := os.Open(in("file"))
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	type regions = []session.HelloRegion
	path := func(name string) regions { return regions{{Length: 4096, Path: in(name)}} }
	one := regions{{Length: 4096}}
	type test struct {
		name  string
		list  regions
		files []int
		want  error
		text  string
	}
	none := fmt.Sprintf("region 0: denied: no file of user %d, who the client is", os.Getuid())
	tests := []test{
		{"nothing", regions{{}}, []int{fd}, block.ErrInvalid, "region 0: invalid: length: 0 bytes"},
		{"longer than the file", regions{{Length: 4096}, {Length: 1<<20 + 1}}, []int{fd, fd}, block.ErrInvalid, "region 1: invalid: 1048577 bytes of a file of 1048576"},
		{"longer than may be", regions{{Length: 1<<30 + 1}}, []int{fd}, block.ErrInvalid, "region 0"},
		{"longest", regions{{Length: math.MaxUint64}}, []int{fd}, block.ErrInvalid, "region 0"},
		{"longer than may be together", regions{{Length: 1 << 29}, {Length: 1<<29 + 1}}, []int{fd, fd}, block.ErrInvalid, "1073741825 bytes together"},
		{"too many", slices.Repeat(one, 4), []int{fd, fd, fd, fd}, block.ErrInvalid, "4 of them, at most 3"},
		{"no file", one, nil, block.ErrInvalid, "0 files came, for 1 regions"},
		{"a file too many", one, []int{fd, fd}, block.ErrInvalid, "2 files came, for 1 regions"},
		{"open for reading only", one, []int{int(ro.Fd())}, block.ErrInvalid, "permission denied"},
		{"path of nothing", path("nobody"), nil, block.ErrDenied, none},
		{"path of a fifo", path("fifo"), nil, block.ErrInvalid, "region 0: invalid: file of mode 010600"},
		{"path of a link", path("link"), nil, block.ErrInvalid, "region 0: invalid: file of mode 0120777"},
		{"path of a directory", path("dir"), nil, block.ErrInvalid, "file of mode 040700"},
		{"path of a socket", path("socket"), nil, block.ErrInvalid, "file of mode 0140600"},
		{"path from nowhere", regions{{Length: 4096, Path: "file"}}, nil, block.ErrInvalid, `path: "file"`},
		{"path through a file", path("file/x"), nil, block.ErrDenied, none},
		{"path with a zero", regions{{Length: 4096, Path: in("file\x00")}}, nil, block.ErrInvalid, "region 0"},
		{"path that is too long", regions{{Length: 4096, Path: "/" + strings.Repeat("x/", 2000)}}, nil, block.ErrDenied, none},
		{"file of no memory", regions{{Length: 4, Path: disk}}, nil, block.ErrInvalid, "want one in memory"},
		{"none", nil, []int{fd}, block.ErrInvalid, "1 files came, for 0 regions"},
	}
	if os.Geteuid() == 0 {
		tests = append(tests, []test{
			{"device", one, []int{int(null.Fd())}, block.ErrInvalid, "region 0: invalid: file of mode 020666"},
			{"path of a device", regions{{Length: 4096, Path: "/dev/zero"}}, nil, block.ErrInvalid, "file of mode"},
		}...)
		other, _ := unsealed(t, 4096)
		if err := other.Chown(1, 1); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(in("other"), make([]byte, 4096), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(in("other"), 1, 1); err != nil {
			t.Fatal(err)
		}
		tests = append(tests, test{"another's file", one, []int{int(other.Fd())}, block.ErrDenied, none}, test{"path of another's", path("other"), nil, block.ErrDenied, none})
	}
	maps := len(mapped(t))
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := dial(t, "unix", r.unix)
			err := c.withRegions(tt.files, tt.list...)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v, want %v with %q", err, tt.want, tt.text)
			}
			_ = c.c.Close()
		})
	}
	t.Run("over TCP", func(t *testing.T) {
		c := dial(t, "tcp", r.tcp)
		if err := c.withRegions(nil, path("file")...); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "unix socket") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("more than all may have", func(t *testing.T) {
		a, b := dial(t, "unix", r.unix), dial(t, "unix", r.unix)
		if err := f.Truncate(1 << 30); err != nil {
			t.Fatal(err)
		}
		if err := a.withRegions([]int{fd}, session.HelloRegion{Length: 1 << 30}); err != nil {
			t.Fatal(err)
		}
		if err := b.withRegions([]int{fd}, session.HelloRegion{Length: 1<<29 + 1}); !errors.Is(err, block.ErrNoSpace) || errors.Is(err, session.ErrBusy) {
			t.Errorf("bytes: error %v", err)
		}
		b = dial(t, "unix", r.unix)
		if err := b.withRegions([]int{fd, fd, fd}, slices.Repeat(one, 3)...); err != nil {
			t.Fatal(err)
		}
		if err := dial(t, "unix", r.unix).withRegions([]int{fd}, one...); !errors.Is(err, block.ErrNoSpace) {
			t.Errorf("number: error %v", err)
		}
		_, _ = a.c.Close(), b.c.Close()
	})
	r.quiet()
	if st := r.server.Stats(); st.Regions != 0 || st.RegionBytes != 0 {
		t.Errorf("%d regions of %d bytes are left", st.Regions, st.RegionBytes)
	}
	if n := len(mapped(t)) - maps; n != 0 {
		t.Errorf("%d mappings are left", n)
	}
}

// TestRegionUsers shows that a region is one only for the user who owns the file, also
// where the server could open it for anybody.
func TestRegionUsers(t *testing.T) {
	const somebody = 12345
	r := newRig(t, nil, nil)
	c := dialAs(t, somebody, r.unix) // which needs root, as does what follows
	mine, _ := unsealed(t, 4096)     // root's
	theirs, _ := unsealed(t, 4096)
	path := filepath.Join(inMemory(t), "theirs")
	if err := errors.Join(os.WriteFile(path, make([]byte, 4096), 0o600), os.Chown(path, somebody, 0), theirs.Chown(somebody, 0)); err != nil {
		t.Fatal(err)
	}
	if err := c.withRegions([]int{int(mine.Fd())}, session.HelloRegion{Length: 4096}); !errors.Is(err, block.ErrDenied) {
		t.Errorf("a file of root's: error %v", err)
	}
	_ = c.c.Close()
	// What the client cannot see the server does not tell it either.
	hidden := inMemory(t)
	if err := os.WriteFile(filepath.Join(hidden, "there"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"there", "nowhere", "there/below"} {
		c := dialAs(t, somebody, r.unix)
		err := c.withRegions(nil, session.HelloRegion{Length: 4096, Path: filepath.Join(hidden, name)})
		if err == nil || err.Error() != "hello: region 0: denied: no file of user 12345, who the client is" {
			t.Errorf("%s: error %v", name, err)
		}
		_ = c.c.Close()
	}
	c = dialAs(t, somebody, r.unix)
	if err := c.withRegions([]int{int(theirs.Fd())}, session.HelloRegion{Length: 4096}, session.HelloRegion{Length: 4096, Path: path}); err != nil {
		t.Fatal(err)
	}
	if put, err := c.regionPut(r.keys("a"), []session.Segment{segment(1, 4096, 0)}); err != nil || put.Results[0].Status != session.StatusOK {
		t.Errorf("put: %+v, error %v", put, err)
	}
	_ = c.c.Close()
	r.quiet()
}

// mapped lists this process's mappings of regions.
func mapped(t *testing.T) (lines []string) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:region") || strings.Contains(line, "/kvtier-test-") {
			lines = append(lines, line)
		}
	}
	return lines
}
