package block_test

import (
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/index/block"
)

func TestParseHash(t *testing.T) {
	for _, n := range []int{8, 16, 20, 32} {
		text := strings.Repeat("a5", n)
		h, got, err := block.ParseHash(text)
		if err != nil || got != n || h.Hex(n) != text {
			t.Errorf("%d bytes: %v, %d, %v", n, h, got, err)
		}
		raw, _ := hex.DecodeString(text)
		if same, err := block.HashFromBytes(raw); err != nil || same != h {
			t.Errorf("%d bytes: from bytes %v, from text %v", n, same, h)
		}
		for _, rest := range h[n:] {
			if rest != 0 {
				t.Errorf("%d bytes: %v is not zero behind them", n, h)
			}
		}
	}
	for _, bad := range []string{"", "a5", strings.Repeat("a5", 9), strings.Repeat("a5", 33), strings.Repeat("a5", 8) + "a", "zz" + strings.Repeat("a5", 7)} {
		_, _, err := block.ParseHash(bad)
		if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), bad) {
			t.Errorf("ParseHash(%q): %v, want an ErrInvalid that names it", bad, err)
		}
	}
	if _, err := block.HashFromBytes(make([]byte, 12)); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("12 bytes: %v", err)
	}
}

func FuzzParseHash(f *testing.F) {
	for _, s := range []string{"", "00", strings.Repeat("0", 16), strings.Repeat("fE", 32), "g" + strings.Repeat("0", 15)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, n, err := block.ParseHash(s)
		if err == nil && (!block.ValidHashLen(n) || h.Hex(n) != strings.ToLower(s)) {
			t.Errorf("ParseHash(%q) = %v, %d", s, h, n)
		}
	})
}

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		device uint8
		offset int64
	}{{0, 0}, {0, 512}, {7, 64 << 20}, {255, 1<<57 - 512}} {
		p := block.PlaceAt(c.device, c.offset)
		if p.Device() != c.device || p.Offset() != c.offset {
			t.Errorf("PlaceAt(%d, %d) = %v", c.device, c.offset, p)
		}
	}
	for _, bad := range []int64{-512, 1, 511, 1 << 57} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("PlaceAt(0, %d) did not panic", bad)
				}
			}()
			block.PlaceAt(0, bad)
		}()
	}
}

func TestTier(t *testing.T) {
	for _, tier := range []block.TierID{block.G1, block.G2, block.G3, block.G4} {
		if got, err := block.ParseTier(tier.String()); err != nil || got != tier {
			t.Errorf("ParseTier(%q) = %v, %v", tier, got, err)
		}
	}
	if _, err := block.ParseTier("nvme"); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), "nvme") {
		t.Errorf("ParseTier(nvme): %v", err)
	}
}

// descriptor has a value of its own in every field.
func descriptor() block.Descriptor {
	return block.Descriptor{
		Name: "ns", Model: "model", Revision: "rev", DType: "bf16", Layout: "nhd", TokensPerBlock: 16, BlockBytes: 65536,
		HashAlgorithm: "sha256", HashSeed: "seed", RankLayout: "tp2", KVGroup: "full", Tenant: "tenant",
	}
}

// TestDigest holds the digest, which is on the media: slots and object names
// carry it.
func TestDigest(t *testing.T) {
	const want = "06f7da977047ddcf48ffd8e079236d12da9858b70f3d5d0ba26ddcae40f6cf78"
	d := descriptor().Digest()
	if got := hex.EncodeToString(d[:]); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
}

// TestDiffers changes each field in turn: each is found, by name and values, and
// changes the digest.
func TestDiffers(t *testing.T) {
	have := descriptor()
	if m := have.Differs(have); m != nil {
		t.Errorf("differs from itself: %v", m)
	}
	seen := map[string]bool{}
	typ := reflect.TypeOf(have)
	for i := range typ.NumField() {
		want := have
		switch f := reflect.ValueOf(&want).Elem().Field(i); f.Kind() {
		case reflect.String:
			f.SetString("other")
		case reflect.Int64:
			f.SetInt(12345)
		case reflect.Uint32:
			f.SetUint(12345)
		default:
			t.Fatalf("field %s has a kind that this test does not know", typ.Field(i).Name)
		}
		m := have.Differs(want)
		if m == nil {
			t.Errorf("%s: no difference found", typ.Field(i).Name)
			continue
		}
		if strings.ReplaceAll(m.Field, "_", "") != strings.ToLower(typ.Field(i).Name) || m.Have == m.Want {
			t.Errorf("%s: found %+v", typ.Field(i).Name, m)
		}
		if have.Digest() == want.Digest() {
			t.Errorf("%s does not count in the digest", m.Field)
		}
		if !errors.Is(m, block.ErrMismatch) || !strings.Contains(m.Error(), m.Field) || !strings.Contains(m.Error(), m.Want) {
			t.Errorf("%s: error %v", m.Field, m)
		}
		seen[m.Field] = true
	}
	if len(seen) != typ.NumField() {
		t.Errorf("%d names for %d fields", len(seen), typ.NumField())
	}
}

func TestValidate(t *testing.T) {
	if err := descriptor().Validate(); err != nil {
		t.Errorf("a good one: %v", err)
	}
	for what, c := range map[string]struct {
		change func(d *block.Descriptor)
		names  string
	}{
		"no name":         {func(d *block.Descriptor) { d.Name = "" }, "name"},
		"long name":       {func(d *block.Descriptor) { d.Name = strings.Repeat("n", 256) }, "name"},
		"slash":           {func(d *block.Descriptor) { d.Name = "a/b" }, "name"},
		"space":           {func(d *block.Descriptor) { d.Name = "a b" }, "name"},
		"long model":      {func(d *block.Descriptor) { d.Model = strings.Repeat("m", 1025) }, "model"},
		"no length":       {func(d *block.Descriptor) { d.BlockBytes = 0 }, "block_bytes"},
		"negative length": {func(d *block.Descriptor) { d.BlockBytes = -1 }, "block_bytes"},
		"too long":        {func(d *block.Descriptor) { d.BlockBytes = block.MaxBlockBytes + 1 }, "block_bytes"},
		"both lengths":    {func(d *block.Descriptor) { d.MaxBlockBytes = 1 }, "max_block_bytes"},
		"max too long":    {func(d *block.Descriptor) { d.BlockBytes, d.MaxBlockBytes = 0, block.MaxBlockBytes+1 }, "max_block_bytes"},
	} {
		d := descriptor()
		c.change(&d)
		if err := d.Validate(); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s: %v, want an ErrInvalid that names %s", what, err, c.names)
		}
	}
}

func TestCheckLen(t *testing.T) {
	exact, most := descriptor(), descriptor()
	most.BlockBytes, most.MaxBlockBytes = 0, 1000
	for _, c := range []struct {
		d  block.Descriptor
		n  int64
		ok bool
	}{
		{exact, 65536, true},
		{exact, 65535, false},
		{exact, 0, false},
		{most, 1, true},
		{most, 1000, true},
		{most, 1001, false},
		{most, 0, false},
	} {
		if err := c.d.CheckLen(c.n); (err == nil) != c.ok || err != nil && !errors.Is(err, block.ErrInvalid) {
			t.Errorf("CheckLen(%d) of %d/%d: %v", c.n, c.d.BlockBytes, c.d.MaxBlockBytes, err)
		}
	}
}

func TestCheckHashLen(t *testing.T) {
	ns := block.Namespace{Desc: descriptor(), TTL: time.Minute}
	for n, ok := range map[int]bool{0: false, 7: false, 8: true, 16: true, 20: true, 24: false, 32: true, -1: false} {
		if err := ns.CheckHashLen(n); (err == nil) != ok {
			t.Errorf("no length yet, %d: %v", n, err)
		}
	}
	ns.HashLen = 16
	for n, ok := range map[int]bool{8: false, 16: true, 32: false} {
		if err := ns.CheckHashLen(n); (err == nil) != ok {
			t.Errorf("length 16, %d: %v", n, err)
		}
	}
}

// TestNames holds the names that metrics, JSON and scripts use.
func TestNames(t *testing.T) {
	var got []string
	for r := block.Hit; r <= block.MissUnavailable; r++ {
		got = append(got, r.String())
	}
	for r := block.NoReason; r <= block.Discarded; r++ {
		got = append(got, r.String())
	}
	for k := block.EventStored; k <= block.EventLost; k++ {
		got = append(got, k.String())
	}
	want := "hit absent pending expired corrupt no_room deadline unavailable " +
		"none evicted expired deleted moved damaged discarded stored removed cleared lost"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("names\n%s, want\n%s", s, want)
	}
}

// TestDescriptorSet shows that Set is the inverse of Fields.
func TestDescriptorSet(t *testing.T) {
	want := block.Descriptor{
		Name: "n", Model: "m", Revision: "r", DType: "d", Layout: "l", TokensPerBlock: 16, BlockBytes: 1 << 20, MaxBlockBytes: 2 << 20,
		HashAlgorithm: "a", HashSeed: "0", RankLayout: "tp", KVGroup: "g", Tenant: "t",
	}
	var got block.Descriptor
	for _, f := range want.Fields() {
		if f.Value == "" {
			t.Errorf("%s is not tested", f.Name)
		}
		if err := got.Set(f); err != nil {
			t.Error(err)
		}
	}
	if got != want {
		t.Errorf("set %+v, want %+v", got, want)
	}
	for _, f := range []block.Field{
		{Name: "block_bytes", Value: "1e6"},
		{Name: "max_block_bytes", Value: "+1"},
		{Name: "tokens_per_block", Value: "4294967296"},
		{Name: "Name", Value: "n"},
		{Value: "n"},
	} {
		if err := got.Set(f); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), f.Name) {
			t.Errorf("%+v: error %v, want ErrInvalid with the name", f, err)
		}
	}
}
