package packed

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

func TestNames(t *testing.T) {
	f := sampleFooter(20)
	want := NameOf("west-1", f)
	key := want.String()
	if got, err := ParseName(key); err != nil || got != want {
		t.Errorf("%s: %+v, %v, want %+v", key, got, err, want)
	}
	if !strings.HasPrefix(key, want.Prefix()) || !strings.HasPrefix(want.Prefix(), NamespaceBlocks("west-1", f.Digest)) {
		t.Errorf("%s does not begin with %s", key, want.Prefix())
	}
	for _, bad := range []string{
		"", ClusterKey, "blocks/", key[1:], key + "0", key[:len(key)-1], key + "/", strings.ToUpper(key), "/" + key,
		strings.Replace(key, "-", "_", 2), strings.Replace(key, "west-1", "", 1), strings.Replace(key, "west-1", "a/b", 1),
		strings.Replace(key, "c0c1", "C0C1", 1), strings.Replace(key, "d0d1", "d0", 1), strings.Replace(key, "1011", "10", 1),
	} {
		if n, err := ParseName(bad); !errors.Is(err, block.ErrInvalid) || n != (Name{}) {
			t.Errorf("%q: %+v, %v", bad, n, err)
		}
	}
	key = TombstonesKey("a", 77, f.ID)
	cluster, stamp, id, err := ParseTombstonesKey(key)
	if cluster != "a" || stamp != 77 || id != f.ID || err != nil {
		t.Errorf("%s: %q, %d, %x, %v", key, cluster, stamp, id, err)
	}
	for _, bad := range []string{"", "tombstones/", key[1:], key + "0", key[:len(key)-1], strings.ToUpper(key), strings.Replace(key, "/0", "/+", 1), strings.Replace(key, "a", "", 1)} {
		if _, _, _, err := ParseTombstonesKey(bad); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if a, b := TombstonesKey("a", 1<<60, f.ID), TombstonesKey("a", 1<<63, ID{}); a >= b {
		t.Errorf("%s does not sort before %s", a, b)
	}
	for _, good := range []string{"default", "a", "0", "A-b_c.9", strings.Repeat("x", 64)} {
		if err := CheckCluster(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "-a", ".", "..", "a/b", "a b", "ä", "a\x00", strings.Repeat("x", 65)} {
		if err := CheckCluster(bad); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestRecords(t *testing.T) {
	c := sampleCluster()
	if got, err := DecodeCluster(c.Encode()); err != nil || got != *c {
		t.Errorf("got %+v, %v, want %+v", got, err, c)
	}
	if err := c.Admit("west-1", "s3://b/p"); err != nil {
		t.Error(err)
	}
	err := c.Admit("east", "s3://b/p")
	if !errors.Is(err, block.ErrInvalid) {
		t.Errorf("another cluster: %v", err)
	}
	for _, part := range []string{`"east"`, `"west-1"`, "s3://b/p"} {
		if err != nil && !strings.Contains(err.Error(), part) {
			t.Errorf("%v: %s is not named", err, part)
		}
	}
	n := sampleNamespace()
	digest := n.Desc.Digest()
	if got, err := DecodeNamespace(n.Encode(), digest); err != nil || got != *n {
		t.Errorf("got %+v, %v, want %+v", got, err, n)
	}
	if _, err := DecodeNamespace(n.Encode(), [32]byte{1}); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("under another digest: %v", err)
	}
	namespace := func(b []byte) error { _, err := DecodeNamespace(b, digest); return err }
	cluster := func(b []byte) error { _, err := DecodeCluster(b); return err }
	for _, r := range []struct {
		name   string
		bytes  []byte
		decode func([]byte) error
		other  []byte
	}{
		{"cluster", c.Encode(), cluster, n.Encode()},
		{"namespace", n.Encode(), namespace, c.Encode()},
	} {
		newer := bytes.Replace(r.bytes, []byte(`"version": 1`), []byte(`"version": 2, "more": []`), 1)
		if err := r.decode(newer); !errors.Is(err, index.ErrVersion) {
			t.Errorf("newer %s: %v", r.name, err)
		}
		for name, b := range map[string][]byte{
			"empty": nil, "other": r.other, "no object": []byte("[]"), "twice": append(bytes.Clone(r.bytes), r.bytes...),
			"more":     bytes.Replace(r.bytes, []byte(`"version": 1`), []byte(`"version": 1, "more": []`), 1),
			"too long": append(bytes.Repeat([]byte(" "), MaxRecordBytes), r.bytes...),
		} {
			if err := r.decode(b); !errors.Is(err, block.ErrCorrupt) {
				t.Errorf("%s, %s: %v", r.name, name, err)
			}
		}
		for at := range len(r.bytes) - 1 {
			if err := r.decode(r.bytes[:at]); !errors.Is(err, block.ErrCorrupt) {
				t.Errorf("%s cut to %d bytes: %v", r.name, at, err)
			}
		}
	}
	for what, change := range map[string][2]string{
		"hash length": {`"hash_len": 32`, `"hash_len": 31`}, "ttl": {`"ttl_ns": 3`, `"ttl_ns": -3`},
		"number": {`"block_bytes": "65536"`, `"block_bytes": "x"`}, "field": {`"layout"`, `"layuot"`}, "size": {`"block_bytes": "65536"`, `"block_bytes": "0"`},
	} {
		b := bytes.Replace(n.Encode(), []byte(change[0]), []byte(change[1]), 1)
		if err := namespace(b); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, change := range map[string][2]string{"name": {`"west-1"`, `"/"`}, "store": {`"8081`, `"80`}} {
		b := bytes.Replace(c.Encode(), []byte(change[0]), []byte(change[1]), 1)
		if err := cluster(b); !errors.Is(err, block.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// FuzzRecords decodes anything; what is accepted says the same when encoded again.
func FuzzRecords(f *testing.F) {
	c, n := sampleCluster(), sampleNamespace()
	f.Add(c.Encode())
	f.Add(n.Encode())
	digest := n.Desc.Digest()
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := DecodeCluster(b); err == nil {
			if again, err := DecodeCluster(c.Encode()); err != nil || again != c {
				t.Errorf("%+v comes back as %+v, %v", c, again, err)
			}
		}
		if n, err := DecodeNamespace(b, digest); err == nil {
			if again, err := DecodeNamespace(n.Encode(), digest); err != nil || again != n {
				t.Errorf("%+v comes back as %+v, %v", n, again, err)
			}
		}
	})
}

// FuzzNames parses any key of an object; what is accepted is written again as it came.
func FuzzNames(f *testing.F) {
	f.Add(NameOf("c-1", sampleFooter(16)).String())
	f.Add(TombstonesKey("c-1", 1<<60, ID{1, 15: 2}))
	f.Add(NamespaceKey("c-1", [32]byte{1}))
	f.Fuzz(func(t *testing.T, key string) {
		if n, err := ParseName(key); err == nil && n.String() != key || err != nil && !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%q is parsed as %v, %v", key, n, err)
		}
		if cluster, stamp, id, err := ParseTombstonesKey(key); err == nil && TombstonesKey(cluster, stamp, id) != key || err != nil && !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%q is parsed as tombstones of %q, %v", key, cluster, err)
		}
	})
}
