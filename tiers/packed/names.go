package packed

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/index/block"
)

// ClusterKey is the object that says whose prefix it is.
const ClusterKey = "kvtier-cluster.json"

// The folders below the prefix.
const (
	blocksDir     = "blocks/"
	tombstonesDir = "tombstones/"
	namespacesDir = "namespaces/"
	probesDir     = "probes/"
)

// Name is that of a packed object. Who looks for a sequence that another node wrote,
// lists what begins with Name.Prefix of its first block.
type Name struct {
	Cluster string
	Digest  [32]byte // of the namespace's descriptor
	Hash    block.Hash
	HashLen uint8
	ID      ID
}

// NameOf is the name of an object that has members.
func NameOf(cluster string, f *Footer) Name {
	return Name{Cluster: cluster, Digest: f.Digest, Hash: f.Members[0].Hash, HashLen: f.HashLen, ID: f.ID}
}

// Prefix is what the names of all objects begin with whose first block is this one.
func (n Name) Prefix() string {
	return NamespaceBlocks(n.Cluster, n.Digest) + n.Hash.Hex(int(n.HashLen)) + "-"
}

// String is the object's key.
func (n Name) String() string { return n.Prefix() + hex.EncodeToString(n.ID[:]) }

// Blocks is what the keys of all packed objects of a cluster begin with.
func Blocks(cluster string) string { return blocksDir + cluster + "/" }

// NamespaceBlocks is what the keys of a namespace's packed objects begin with.
func NamespaceBlocks(cluster string, digest [32]byte) string {
	return Blocks(cluster) + hex.EncodeToString(digest[:]) + "/"
}

// ParseName reads the key of a packed object: block.ErrInvalid for any that String
// does not write.
func ParseName(key string) (Name, error) {
	var n Name
	bad := fmt.Errorf("%w: object %q is not named as a packed object", block.ErrInvalid, key)
	rest, ok := strings.CutPrefix(key, blocksDir)
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || CheckCluster(parts[0]) != nil {
		return n, bad
	}
	hash, id, ok := strings.Cut(parts[2], "-")
	h, hashLen, err := block.ParseHash(hash)
	if !ok || err != nil || !fromHex(n.Digest[:], parts[1]) || !fromHex(n.ID[:], id) {
		return Name{}, bad
	}
	n.Cluster, n.Hash, n.HashLen = parts[0], h, uint8(hashLen)
	if n.String() != key { // hex digits may be upper-case
		return Name{}, bad
	}
	return n, nil
}

// TombstonesKey is where a batch of tombstones goes. The keys sort by stamp.
func TombstonesKey(cluster string, stamp uint64, id ID) string {
	return fmt.Sprintf("%s%016x-%x", AllTombstones(cluster), stamp, id)
}

// AllTombstones is what the keys of all batches of a cluster begin with.
func AllTombstones(cluster string) string { return tombstonesDir + cluster + "/" }

// ParseTombstonesKey is the inverse of TombstonesKey: block.ErrInvalid for another key.
func ParseTombstonesKey(key string) (cluster string, stamp uint64, id ID, err error) {
	bad := fmt.Errorf("%w: object %q is not named as tombstones are", block.ErrInvalid, key)
	rest, ok := strings.CutPrefix(key, tombstonesDir)
	cluster, file, ok2 := strings.Cut(rest, "/")
	at, tail, ok3 := strings.Cut(file, "-")
	stamp, err = strconv.ParseUint(at, 16, 64)
	if !ok || !ok2 || !ok3 || err != nil || CheckCluster(cluster) != nil || !fromHex(id[:], tail) || TombstonesKey(cluster, stamp, id) != key {
		return "", 0, ID{}, bad
	}
	return cluster, stamp, id, nil
}

// NamespaceKey is where the record of a namespace lies.
func NamespaceKey(cluster string, digest [32]byte) string {
	return AllNamespaces(cluster) + hex.EncodeToString(digest[:]) + ".json"
}

// AllNamespaces is what the keys of all namespaces of a cluster begin with.
func AllNamespaces(cluster string) string { return namespacesDir + cluster + "/" }

// ProbeKey is where a store writes to see whether it can.
func ProbeKey(cluster string, store [16]byte) string {
	return probesDir + cluster + "/" + hex.EncodeToString(store[:])
}

// fromHex fills dst from exactly as many digits as it takes.
func fromHex(dst []byte, s string) bool {
	if len(s) != hex.EncodedLen(len(dst)) {
		return false
	}
	_, err := hex.Decode(dst, []byte(s))
	return err == nil
}

// maxCluster leaves room for the rest of a key in any service.
const maxCluster = 64

// CheckCluster fails with block.ErrInvalid unless a cluster may have this name: 1 to 64
// letters, digits, '-', '_' and '.', the first a letter or digit.
func CheckCluster(name string) error {
	if name == "" || len(name) > maxCluster {
		return fmt.Errorf("%w: cluster name %q: length %d, want 1 to %d", block.ErrInvalid, name, len(name), maxCluster)
	}
	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && (i == 0 || c != '-' && c != '_' && c != '.') {
			return fmt.Errorf("%w: cluster name %q: character %q: want letters, digits, '-', '_' and '.', the first a letter or digit", block.ErrInvalid, name, c)
		}
	}
	return nil
}
