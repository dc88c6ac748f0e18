package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/kvtier/kvtier/index/block"
)

// Tombstone says that the slots of a key are dead up to a generation, whatever
// their headers say.
type Tombstone struct {
	Key block.Key
	Gen uint64
}

// Floor says the same of all slots of a slab, for when there are too many keys.
type Floor struct {
	Slab [16]byte
	Gen  uint64
}

// Tombstones are for a repair: they tell it which headers on the media are of dead
// blocks and could not be erased. They lie in a file beside the catalog and say
// nothing that is not true for ever, since generations only grow: who loses the
// removal of the file loses nothing. That there is one the catalog knows and its
// manifest, so that its loss is noticed. One goroutine at a time may use them.
type Tombstones struct {
	path   string
	disk   vfs.FS
	store  [16]byte
	keys   map[block.Key]uint64
	floors map[[16]byte]uint64

	known bool                   // to the catalog
	tell  func(there bool) error // has the catalog know; nil: there is no catalog

	file  vfs.File // has all of the above, and is appended to; nil: it is to be written anew
	pages int      // of file
}

// MaxTombstones is how many keys Tombstones may have.
const MaxTombstones = 1 << 18

// TombstonesPath is where the tombstones of the catalog in a directory lie.
func TombstonesPath(catalogDir string) string { return filepath.Clean(catalogDir) + ".tombstones" }

// The file of tombstones is made of pages of 512 bytes, which a disk writes whole
// or not at all. All numbers are little-endian.
//
//	offset bytes
//	     0     8  magic "KVTTOMB\n"
//	     8     2  version, 1
//	    10     2  how many entries follow
//	    12     4  number of the page
//	    16     4  number of the page with which its write began
//	    20     4  how many pages its write has
//	    24    16  identity of the store
//	    40    45  for each entry, of at most 10:
//	                kind(1): 1 = Tombstone, 2 = Floor
//	                generation(8)
//	                namespace(4), zero in a Floor
//	                hash(32), or identity of the slab(16) and zeros
//	       504     xxhash64 of the 504 bytes before; between are zeros
//
// Magic, version and checksum stay where they are in every version. The first
// write has made the file and is whole. A later one is answered when all its pages
// are synced, and none follows one that failed: pages of the last write that are
// wanting or zero were never answered. Anything else is damage.
const (
	tombMagic   = "KVTTOMB\n"
	tombVersion = 1
	tombPage    = 512
	tombSumAt   = tombPage - checksumBytes
	tombHead    = 40
	tombEntry   = 1 + 8 + 4 + block.HashBytes
	tombPerPage = (tombSumAt - tombHead) / tombEntry

	tombKindKey   = 1
	tombKindFloor = 2

	// tombSlack is how many pages more than twice what is needed the file may have.
	tombSlack = 4096
	// maxTombBytes is more than a file comes to have, with a floor for every slab.
	maxTombBytes = (2*((MaxTombstones+1<<16)/tombPerPage+1) + tombSlack) * tombPage
)

// tombRecord is an entry of a page.
type tombRecord struct {
	kind byte
	gen  uint64
	ns   block.NamespaceID
	hash [block.HashBytes]byte
}

func (s *Tombstone) record() tombRecord {
	return tombRecord{kind: tombKindKey, gen: s.Gen, ns: s.Key.NS, hash: s.Key.Hash}
}

func (f *Floor) record() (r tombRecord) {
	r.kind, r.gen = tombKindFloor, f.Gen
	copy(r.hash[:], f.Slab[:])
	return r
}

// encodeTombs writes the pages of one write, of which the first has a number.
func encodeTombs(store [16]byte, first int, records []tombRecord) []byte {
	n := (len(records) + tombPerPage - 1) / tombPerPage
	b := make([]byte, n*tombPage)
	le := binary.LittleEndian
	for i := range n {
		p := b[i*tombPage:][:tombPage]
		part := records[i*tombPerPage : min((i+1)*tombPerPage, len(records))]
		copy(p, tombMagic)
		le.PutUint16(p[8:], tombVersion)
		le.PutUint16(p[10:], uint16(len(part)))
		le.PutUint32(p[12:], uint32(first+i))
		le.PutUint32(p[16:], uint32(first))
		le.PutUint32(p[20:], uint32(n))
		copy(p[24:], store[:])
		for j := range part {
			r, e := &part[j], p[tombHead+j*tombEntry:]
			e[0] = r.kind
			le.PutUint64(e[1:], r.gen)
			le.PutUint32(e[9:], uint32(r.ns))
			copy(e[13:], r.hash[:])
		}
		le.PutUint64(p[tombSumAt:], xxhash.Sum64(p[:tombSumAt]))
	}
	return b
}

// decode takes what a file holds. It fails with ErrVersion or block.ErrCorrupt.
func (t *Tombstones) decode(b []byte) error {
	if len(b) < tombPage {
		return fmt.Errorf("%w: %d bytes", block.ErrCorrupt, len(b))
	}
	n, whole, gap := len(b)/tombPage, 0, -1
	for i := range n {
		p := b[i*tombPage:][:tombPage]
		if zeros(p) {
			if gap < 0 {
				gap = i
			}
			continue
		}
		begin, size, err := t.decodePage(i, p)
		if err != nil {
			return fmt.Errorf("page %d: %w", i, err)
		}
		if gap >= 0 && (gap < begin || begin == 0) {
			return fmt.Errorf("page %d: %w: it is zero", gap, block.ErrCorrupt)
		}
		if begin == 0 {
			whole = size
		}
	}
	if gap >= 0 {
		n = gap
	}
	if n == 0 || n < whole {
		return fmt.Errorf("%w: %d pages of the first %d", block.ErrCorrupt, n, whole)
	}
	return nil
}

// decodePage takes a page, and says with which one its write began and how many
// that has.
func (t *Tombstones) decodePage(no int, p []byte) (begin, size int, err error) {
	le := binary.LittleEndian
	if string(p[:len(tombMagic)]) != tombMagic || le.Uint64(p[tombSumAt:]) != xxhash.Sum64(p[:tombSumAt]) {
		return 0, 0, fmt.Errorf("%w: magic or checksum does not match", block.ErrCorrupt)
	}
	if v := le.Uint16(p[8:]); v != tombVersion {
		return 0, 0, fmt.Errorf("%w: %d, this program knows %d", ErrVersion, v, tombVersion)
	}
	n := int(le.Uint16(p[10:]))
	begin, size = int(le.Uint32(p[16:])), int(le.Uint32(p[20:]))
	switch {
	case [16]byte(p[24:40]) != t.store:
		return 0, 0, fmt.Errorf("%w: another store's", block.ErrCorrupt)
	case int(le.Uint32(p[12:])) != no || begin > no || no-begin >= size || n > tombPerPage:
		return 0, 0, fmt.Errorf("%w: its head contradicts itself", block.ErrCorrupt)
	case !zeros(p[tombHead+n*tombEntry : tombSumAt]):
		return 0, 0, fmt.Errorf("%w: unused bytes are not zero", block.ErrCorrupt)
	}
	for j := range n {
		e := p[tombHead+j*tombEntry:][:tombEntry]
		r := tombRecord{kind: e[0], gen: le.Uint64(e[1:]), ns: block.NamespaceID(le.Uint32(e[9:])), hash: [block.HashBytes]byte(e[13:])}
		if !t.take(&r) {
			return 0, 0, fmt.Errorf("%w: entry %d", block.ErrCorrupt, j)
		}
	}
	return begin, size, nil
}

// take adds what a record says; false: no encoder has written it.
func (t *Tombstones) take(r *tombRecord) bool {
	switch {
	case r.kind == tombKindKey:
		k := block.Key{NS: r.ns, Hash: r.hash}
		t.keys[k] = max(t.keys[k], r.gen)
	case r.kind == tombKindFloor && r.ns == 0 && zeros(r.hash[16:]):
		id := [16]byte(r.hash[:16])
		t.floors[id] = max(t.floors[id], r.gen)
	default:
		return false
	}
	return true
}

func zeros(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// ReadTombstones reads the tombstones of the store that a manifest is of, for who
// does not write them, from a file of the host's file system. There are none when
// there is no file and the manifest knows of none. It fails with ErrVersion when a
// newer program wrote it, and with block.ErrCorrupt when it is damaged, another
// store's, or lost.
func ReadTombstones(path string, m *Manifest) (*Tombstones, error) {
	return readTombstones(vfs.Default, path, m.Store, m.Tombstones)
}

func newTombstones(disk vfs.FS, path string, store [16]byte) *Tombstones {
	return &Tombstones{path: path, disk: disk, store: store, keys: map[block.Key]uint64{}, floors: map[[16]byte]uint64{}}
}

func readTombstones(disk vfs.FS, path string, store [16]byte, known bool) (*Tombstones, error) {
	t := newTombstones(disk, path, store)
	t.known = known
	f, err := disk.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && known:
		return nil, fmt.Errorf("read tombstones %s: %w: the file is lost", path, block.ErrCorrupt)
	case errors.Is(err, fs.ErrNotExist):
		return t, nil
	case err != nil:
		return nil, fmt.Errorf("read tombstones %s: %w: %w", path, block.ErrUnavailable, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxTombBytes+1))
	if e := f.Close(); err == nil {
		err = e
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("read tombstones %s: %w: %w", path, block.ErrUnavailable, err)
	case len(b) > maxTombBytes:
		return nil, fmt.Errorf("read tombstones %s: %w: more than %d bytes", path, block.ErrCorrupt, maxTombBytes)
	}
	if err := t.decode(b); err != nil {
		return nil, fmt.Errorf("read tombstones %s: %w", path, err)
	}
	return t, nil
}

// Tombstones reads the catalog's tombstones, with the errors of ReadTombstones.
// They may be written as long as the catalog is open.
func (c *Catalog) Tombstones() (*Tombstones, error) {
	known, err := c.knowsTombstones()
	if err != nil {
		return nil, err
	}
	t, err := readTombstones(c.opts.FS, TombstonesPath(c.dir), c.store, known)
	if err != nil {
		return nil, err
	}
	t.tell = c.putTombstones
	return t, nil
}

// NewTombstones makes tombstones that stand for those that cannot be read. The old
// file is lost when Raise is called.
func (c *Catalog) NewTombstones() *Tombstones {
	t := newTombstones(c.opts.FS, TombstonesPath(c.dir), c.store)
	t.tell = c.putTombstones
	return t
}

// knowsTombstones reports whether the catalog knows that there are tombstones.
func (c *Catalog) knowsTombstones() (bool, error) {
	var m Manifest
	err := c.walk("look for tombstones", []byte{kindTombs}, []byte{kindTombs + 1}, m.add)
	return m.Tombstones, err
}

// putTombstones notes in the catalog, synced, whether there are tombstones.
func (c *Catalog) putTombstones(there bool) error {
	if err := c.enterWrite(); err != nil {
		return err
	}
	defer c.leave()
	c.admin.Lock()
	defer c.admin.Unlock()
	if there {
		return c.putAdmin(tombsKey, encodeTombsRecord())
	}
	b := c.now().db.NewBatch()
	err := b.Delete(tombsKey, nil)
	if err == nil {
		err = c.commitAdmin(b)
	}
	return err
}

// Dead reports whether a slot is dead by the tombstone of its key.
func (t *Tombstones) Dead(k block.Key, gen uint64) bool {
	until, ok := t.keys[k]
	return ok && gen <= until
}

// Below reports whether a slot is dead by the floor of its slab.
func (t *Tombstones) Below(slab [16]byte, gen uint64) bool {
	until, ok := t.floors[slab]
	return ok && gen <= until
}

// Len is how many keys and floors there are.
func (t *Tombstones) Len() int { return len(t.keys) + len(t.floors) }

// Reached reports whether each of some slabs has a floor as high as is said of it.
func (t *Tombstones) Reached(floors []Floor) bool {
	for _, f := range floors {
		if !t.Below(f.Slab, f.Gen) {
			return false
		}
	}
	return true
}

// Add adds tombstones, synced; or, when there would be too many, calls Raise with
// floors that stand for all of them, and says so. After an error they may be in the
// file or not, and the next call that writes writes them again. Errors:
// block.ErrNoSpace when the disk is full, block.ErrUnavailable.
func (t *Tombstones) Add(stones []Tombstone, instead []Floor) (raised bool, err error) {
	var fresh []tombRecord
	for i := range stones {
		s := &stones[i]
		if until, ok := t.keys[s.Key]; !ok || until < s.Gen {
			t.keys[s.Key] = s.Gen
			fresh = append(fresh, s.record())
		}
	}
	switch {
	case len(t.keys) > MaxTombstones:
		return true, t.Raise(instead)
	case t.file != nil && len(fresh) == 0:
		return false, nil // the file has them
	}
	return false, t.write(fresh)
}

// Raise puts floors into the place of all keys, synced, with the errors of Add.
func (t *Tombstones) Raise(floors []Floor) error {
	clear(t.keys)
	for _, f := range floors {
		t.floors[f.Slab] = max(t.floors[f.Slab], f.Gen)
	}
	return t.rewrite()
}

// Keep removes the floors of all other slabs than some, when no dead slot is left on
// those, with the errors of Add.
func (t *Tombstones) Keep(slabs []Floor) error {
	was := len(t.floors)
	maps.DeleteFunc(t.floors, func(id [16]byte, _ uint64) bool {
		return !slices.ContainsFunc(slabs, func(f Floor) bool { return f.Slab == id })
	})
	if len(t.floors) == was {
		return nil
	}
	return t.rewrite()
}

// Clear removes the tombstones and their file, when no dead slot is left anywhere.
// After an error the file may be there still.
func (t *Tombstones) Clear() error {
	clear(t.keys)
	clear(t.floors)
	t.drop()
	// The catalog first: a crash then leaves a file too many, and none that is missed.
	if err := t.note(false); err != nil {
		return fmt.Errorf("remove tombstones %s: %w", t.path, err)
	}
	if err := t.disk.Remove(t.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove tombstones %s: %w", t.path, diskErr(err))
	}
	return nil
}

// Close closes the file. Nothing may be added afterwards.
func (t *Tombstones) Close() { t.drop() }

// drop lets go of the file: the next write makes a new one.
func (t *Tombstones) drop() {
	if t.file != nil {
		_ = t.file.Close() // all that counts is synced
		t.file = nil
	}
}

// write appends records, or writes the file anew when it has become too long.
func (t *Tombstones) write(fresh []tombRecord) error {
	needed := t.Len()/tombPerPage + 1
	more := (len(fresh) + tombPerPage - 1) / tombPerPage
	if t.file == nil || t.pages+more > 2*needed+tombSlack {
		return t.rewrite()
	}
	_, err := t.file.Write(encodeTombs(t.store, t.pages, fresh))
	if err == nil {
		err = t.file.Sync()
	}
	if err != nil {
		// Nothing may follow a write that is not whole, nor a sync that has failed.
		t.drop()
		return fmt.Errorf("write tombstones %s: %w", t.path, diskErr(err))
	}
	t.pages += more
	return nil
}

// rewrite puts a file with all there is into the place of the old one, and goes on
// with it. It has no file for nothing.
func (t *Tombstones) rewrite() error {
	if t.Len() == 0 {
		return t.Clear()
	}
	t.drop()
	all := make([]tombRecord, 0, t.Len())
	for id, gen := range t.floors {
		all = append(all, (&Floor{id, gen}).record())
	}
	for k, gen := range t.keys {
		all = append(all, (&Tombstone{k, gen}).record())
	}
	data := encodeTombs(t.store, 0, all)
	f, err := replaceFile(t.disk, t.path, data)
	if err != nil {
		return fmt.Errorf("write tombstones %s: %w", t.path, diskErr(err))
	}
	t.file, t.pages = f, len(data)/tombPage
	// The file first, for the same reason as in Clear. What is in it counts when the
	// catalog knows of it.
	if err := t.note(true); err != nil {
		t.drop()
		return fmt.Errorf("write tombstones %s: %w", t.path, err)
	}
	return nil
}

// note has the catalog know whether there is a file.
func (t *Tombstones) note(there bool) error {
	if t.tell == nil || t.known == there {
		return nil
	}
	if err := t.tell(there); err != nil {
		return err
	}
	t.known = there
	return nil
}
