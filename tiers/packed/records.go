package packed

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
)

// The records that a person may want to read are JSON: an object with the fields format
// and version, and those of the version.
const (
	clusterFormat    = "kvtier cluster"
	clusterVersion   = 1
	namespaceFormat  = "kvtier namespace"
	namespaceVersion = 1

	// MaxRecordBytes is the longest record.
	MaxRecordBytes = 64 << 10
)

// Cluster says whose a prefix is. The first store that writes there makes it, where
// there is none.
type Cluster struct {
	Name    string
	Store   [16]byte // identity of the store that made it
	Created time.Time
}

type clusterRecord struct {
	Format  string    `json:"format"`
	Version int       `json:"version"`
	Cluster string    `json:"cluster"`
	Store   string    `json:"store"`
	Created time.Time `json:"created"`
}

// Encode writes the record.
func (c *Cluster) Encode() []byte {
	return encodeJSON(clusterRecord{clusterFormat, clusterVersion, c.Name, hex.EncodeToString(c.Store[:]), c.Created.UTC()})
}

// DecodeCluster reads a record. It fails with index.ErrVersion on one of a version that
// came later, and with block.ErrCorrupt on anything else that is none.
func DecodeCluster(b []byte) (Cluster, error) {
	var r clusterRecord
	if err := decodeJSON(b, clusterFormat, clusterVersion, &r); err != nil {
		return Cluster{}, err
	}
	c := Cluster{Name: r.Cluster, Created: r.Created.UTC()}
	if CheckCluster(c.Name) != nil || !fromHex(c.Store[:], r.Store) {
		return Cluster{}, fmt.Errorf("%w: %s record: cluster %q, store %q", block.ErrCorrupt, clusterFormat, r.Cluster, r.Store)
	}
	return c, nil
}

// Admit fails with block.ErrInvalid, naming both clusters, unless stores of the named
// one may use the prefix; where is the prefix as an operator knows it.
func (c *Cluster) Admit(name, where string) error {
	if c.Name == name {
		return nil
	}
	return fmt.Errorf("%w: cluster %q: %s belongs to cluster %q since %s; use its name or another prefix",
		block.ErrInvalid, name, where, c.Name, c.Created.Format(time.RFC3339))
}

// Namespace says what a digest stands for, so that an import can make the namespace.
type Namespace struct {
	Desc    block.Descriptor
	HashLen int           // bytes of a hash that count
	TTL     time.Duration // default time to live of its blocks; 0 is without end
}

type namespaceRecord struct {
	Format     string            `json:"format"`
	Version    int               `json:"version"`
	Descriptor map[string]string `json:"descriptor"`
	HashLen    int               `json:"hash_len"`
	TTL        int64             `json:"ttl_ns"`
}

// Encode writes the record.
func (n *Namespace) Encode() []byte {
	r := namespaceRecord{namespaceFormat, namespaceVersion, map[string]string{}, n.HashLen, int64(n.TTL)}
	for _, f := range n.Desc.Fields() {
		r.Descriptor[f.Name] = f.Value
	}
	return encodeJSON(r)
}

// DecodeNamespace reads the record of the namespace with this digest. Errors as those of
// DecodeCluster.
func DecodeNamespace(b []byte, digest [32]byte) (Namespace, error) {
	var n Namespace
	var r namespaceRecord
	if err := decodeJSON(b, namespaceFormat, namespaceVersion, &r); err != nil {
		return n, err
	}
	n.HashLen, n.TTL = r.HashLen, time.Duration(r.TTL)
	for name, value := range r.Descriptor {
		if err := n.Desc.Set(block.Field{Name: name, Value: value}); err != nil {
			return Namespace{}, fmt.Errorf("%w: %s record: %w", block.ErrCorrupt, namespaceFormat, err)
		}
	}
	if err := n.Desc.Validate(); err != nil {
		return Namespace{}, fmt.Errorf("%w: %s record: %w", block.ErrCorrupt, namespaceFormat, err)
	}
	switch got := n.Desc.Digest(); {
	case got != digest:
		return Namespace{}, fmt.Errorf("%w: %s record: digest %x, want %x", block.ErrCorrupt, namespaceFormat, got, digest)
	case !block.ValidHashLen(n.HashLen) || n.TTL < 0:
		return Namespace{}, fmt.Errorf("%w: %s record: hash length %d, ttl %v", block.ErrCorrupt, namespaceFormat, n.HashLen, n.TTL)
	}
	return n, nil
}

func encodeJSON(v any) []byte {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("packed: %T: %v", v, err)) // texts, numbers, and times that the clock gave
	}
	return append(b, '\n')
}

func decodeJSON(b []byte, format string, version int, v any) error {
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	bad := func(err any) error { return fmt.Errorf("%w: %s record: %v", block.ErrCorrupt, format, err) }
	if len(b) > MaxRecordBytes {
		return bad(fmt.Sprintf("%d bytes, at most %d", len(b), MaxRecordBytes))
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return bad(err)
	}
	switch {
	case head.Format != format:
		return bad(fmt.Sprintf("format %q", head.Format))
	case head.Version != version:
		return fmt.Errorf("%s record: %w %d, this program knows %d", format, index.ErrVersion, head.Version, version)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return bad(err)
	}
	if _, err := d.Token(); err != io.EOF {
		return bad("more than one")
	}
	return nil
}
