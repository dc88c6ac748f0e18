package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// Manifest is what only the catalog knows and what its repair needs: all but the
// records of blocks, which can be read from the headers of their slots. It is
// kept in a file beside the catalog, which is replaced before a change of what it
// mirrors is answered, so that what was deleted by clearing or dropping a
// namespace stays deleted when the catalog is lost.
type Manifest struct {
	Store     [16]byte // identity of the store
	Boot      uint32   // as in the catalog at the last opening for writing
	NextSpace block.NamespaceID
	Spaces    []ManifestSpace
	Slabs     []SlabRecord
	// Tombstones: there are some, in a file of their own, and without it a repair
	// would not know of all that is dead.
	Tombstones bool
}

// ManifestSpace is a namespace, or one that was dropped: then its ID is the last
// it had, and Epoch the first that a namespace of the same descriptor may have.
type ManifestSpace struct {
	block.Namespace
	Dropped bool
}

// ManifestPath is where the manifest of the catalog in a directory lies.
func ManifestPath(catalogDir string) string { return filepath.Clean(catalogDir) + ".manifest" }

// The file of a manifest, numbers little-endian:
//
//	magic(8) version(4) store(16) boot(4) next namespace(4)
//	records, in the order of their keys:
//	  key length(4) key value length(4) value, both as in the catalog:
//	  namespaces that were dropped, namespaces, slabs, the one of the tombstones
//	checksum(8), the xxhash64 of all before it
//
// Version 1, which is read too, has neither the last nor SlabRecord.Unswept.
const (
	manifestMagic   = "kvtierMF"
	manifestVersion = 2
	manifestFixed   = len(manifestMagic) + 4 + 16 + 4 + 4

	// maxManifest is far more than a store comes to have, and fits into memory.
	maxManifest = 256 << 20
)

// encode writes a manifest whose records are in the order of their keys.
func (m *Manifest) encode() []byte {
	b := binary.LittleEndian.AppendUint32([]byte(manifestMagic), manifestVersion)
	b = append(b, m.Store[:]...)
	b = binary.LittleEndian.AppendUint32(b, m.Boot)
	b = binary.LittleEndian.AppendUint32(b, uint32(m.NextSpace))
	for i := range m.Spaces {
		key := m.Spaces[i].key()
		b = appendSized(b, key)
		b = appendSized(b, encodeSpace(key, &m.Spaces[i].Namespace))
	}
	for i := range m.Slabs {
		key, value := m.Slabs[i].encode()
		b = appendSized(appendSized(b, key), value)
	}
	if m.Tombstones {
		b = appendSized(appendSized(b, tombsKey), encodeTombsRecord())
	}
	return binary.LittleEndian.AppendUint64(b, xxhash.Sum64(b))
}

func (s *ManifestSpace) key() []byte {
	if s.Dropped {
		return droppedKey(s.Desc.Digest())
	}
	return spaceKey(s.ID)
}

func appendSized(b, part []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(b, uint32(len(part))), part...)
}

func cutSized(b []byte) (part, rest []byte, ok bool) {
	if len(b) < 4 {
		return nil, nil, false
	}
	n := uint64(binary.LittleEndian.Uint32(b))
	if b = b[4:]; n > uint64(len(b)) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}

// decode fails with ErrVersion or block.ErrCorrupt.
func (m *Manifest) decode(b []byte) error {
	if len(b) < len(manifestMagic)+4 || string(b[:len(manifestMagic)]) != manifestMagic {
		return fmt.Errorf("%w: not a manifest", block.ErrCorrupt)
	}
	// The version first: another one may have another checksum.
	version := binary.LittleEndian.Uint32(b[len(manifestMagic):])
	if version == 0 || version > manifestVersion {
		return fmt.Errorf("%w: %d, this program knows up to %d", ErrVersion, version, manifestVersion)
	}
	end := len(b) - checksumBytes
	if end < manifestFixed || binary.LittleEndian.Uint64(b[end:]) != xxhash.Sum64(b[:end]) {
		return fmt.Errorf("%w: checksum does not match", block.ErrCorrupt)
	}
	head := b[len(manifestMagic)+4:]
	*m = Manifest{
		Store:     [16]byte(head),
		Boot:      binary.LittleEndian.Uint32(head[16:]),
		NextSpace: block.NamespaceID(binary.LittleEndian.Uint32(head[20:])),
	}
	last := ""
	for rest := b[manifestFixed:end]; len(rest) > 0; {
		at := len(b) - len(rest)
		key, tail, ok := cutSized(rest)
		var value []byte
		if ok {
			value, rest, ok = cutSized(tail)
		}
		if !ok || string(key) <= last {
			return fmt.Errorf("%w: record at %d", block.ErrCorrupt, at)
		}
		last = string(key)
		if err := m.add(key, value); err != nil {
			return err
		}
	}
	if version == 1 && (m.Tombstones || slices.ContainsFunc(m.Slabs, func(s SlabRecord) bool { return s.Unswept })) {
		return fmt.Errorf("%w: a record that version 1 does not have", block.ErrCorrupt)
	}
	return nil
}

// add takes a record of the catalog.
func (m *Manifest) add(key, value []byte) error {
	switch {
	case len(key) > 0 && (key[0] == kindSpace || key[0] == kindDropped):
		n, err := decodeSpace(key, value)
		m.Spaces = append(m.Spaces, ManifestSpace{Namespace: n, Dropped: key[0] == kindDropped})
		return err
	case len(key) > 0 && key[0] == kindSlab:
		var s SlabRecord
		err := s.decode(key, value)
		m.Slabs = append(m.Slabs, s)
		return err
	case len(key) > 0 && key[0] == kindTombs:
		m.Tombstones = true
		return decodeTombsRecord(key, value)
	}
	return fmt.Errorf("%w: record of unknown kind %q", block.ErrCorrupt, key)
}

// ReadManifest reads the manifest in a file of the host's file system. It fails
// with block.ErrNotFound when there is none, with ErrVersion when a newer program
// wrote it, and with block.ErrCorrupt when it is damaged.
func ReadManifest(path string) (Manifest, error) { return readManifest(vfs.Default, path) }

func readManifest(disk vfs.FS, path string) (m Manifest, err error) {
	f, err := disk.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, fmt.Errorf("read manifest %s: %w: %w", path, block.ErrNotFound, err)
	}
	if err != nil {
		return m, fmt.Errorf("read manifest %s: %w: %w", path, block.ErrUnavailable, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if e := f.Close(); err == nil {
		err = e
	}
	switch {
	case err != nil:
		return m, fmt.Errorf("read manifest %s: %w: %w", path, block.ErrUnavailable, err)
	case len(b) > maxManifest:
		return m, fmt.Errorf("read manifest %s: %w: more than %d bytes", path, block.ErrCorrupt, maxManifest)
	}
	if err := m.decode(b); err != nil {
		return Manifest{}, fmt.Errorf("read manifest %s: %w", path, err)
	}
	return m, nil
}

// collect reads the records that a manifest mirrors.
func (m *Manifest) collect(e *engine) error {
	for _, kind := range []byte{kindDropped, kindSpace, kindSlab, kindTombs} {
		if err := e.each("read for the manifest", []byte{kind}, []byte{kind + 1}, m.add); err != nil {
			return err
		}
	}
	return nil
}

// writeManifest writes what the catalog has on disk. The caller holds admin, or
// is the only one who knows the catalog.
func (c *Catalog) writeManifest(e *engine) error {
	meta := &c.admin.meta
	m := Manifest{Store: meta.Store, Boot: meta.Boot, NextSpace: meta.NextSpace}
	if err := m.collect(e); err != nil {
		return err
	}
	path, data := ManifestPath(c.dir), m.encode()
	if len(data) > maxManifest {
		return fmt.Errorf("write manifest %s: %w: %d bytes, at most %d", path, block.ErrNoSpace, len(data), maxManifest)
	}
	f, err := replaceFile(c.opts.FS, path, data)
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return fmt.Errorf("write manifest %s: %w", path, diskErr(err))
	}
	return nil
}

// replaceFile puts a file in the place of another, so that after a crash one of
// the two is there, and this one once replaceFile has returned. What is written to
// the file that it returns comes behind data.
func replaceFile(disk vfs.FS, path string, data []byte) (vfs.File, error) {
	temp := path + ".tmp"
	f, err := disk.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = disk.Rename(temp, path)
	}
	if err != nil {
		_ = f.Close()
		_ = disk.Remove(temp) // takes room that may be what was short
		return nil, err
	}
	dir, err := disk.OpenDir(disk.PathDir(path))
	if err == nil {
		err = dir.Sync()
		if e := dir.Close(); err == nil {
			err = e
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
