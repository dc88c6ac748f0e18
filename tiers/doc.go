// Package tiers is the places that blocks lie in, and the Store over them.
//
// G2 is memory: an arena of slots. G3 is NVMe: one slab, a preallocated file or
// a block device, per device. Both are cut into extents, each given to a slot
// size when first needed, and a slot holds a header block and a payload, the
// same bytes in memory and on the device, so that a block moves in one write.
//
// The life of a copy in a tier:
//
//	none -> filling -> resident -> leaving -> none
//	         |            |            |
//	         |            |            record dropped and synced (G3), slot free
//	         |            chosen by the evictor, or deleted
//	         bytes there, verified, flushed and recorded (G3)
//
// Bytes come first, the catalog second; a block leaves the catalog first, and
// its bytes second. A crash can then only cause a miss. Reads verify whatever
// crossed a tier or a restart, so that a damaged, torn or misdirected slot is a
// miss too.
//
// What is looked up is the resident table in memory (index.Table); what is
// durable is in the catalog (index.Catalog). A Store needs an xfer.Agent with
// backends for DRAM to DRAM and DRAM to FILE or BLK. Its goroutines end with
// Close:
//
//   - one evictor per tier alone decides what leaves it. A pinned block stays in
//     the lowest tier there is, and its policy is not told of it;
//   - the committer writes records to the catalog, in the order of the
//     transitions, and erases slot headers behind them;
//   - the keeper of the catalog opens it again after it has failed. Meanwhile
//     nothing new is recorded, and what must not be forgotten waits;
//   - each device of G3 is attended to: one that fails or stalls is degraded or
//     down, is left alone, and is probed until it is well again;
//   - what is to go into objects waits in a queue, from which it is written; so does
//     each bucket have somebody who probes it, and a reaper of objects that are dead;
//   - after a stop out of order a sweep erases headers in free room;
//   - a scrub, when one is started, reads and compares all that is on G3.
//
// A slot's header is erased before the slot may be another block's, and is valid
// only where it was written; for a header that cannot be erased, since its slab is
// not here or a crash has left it where nobody knows, a deleted key has a tombstone.
// So Repair, which makes a lost catalog anew from its manifest and from the slabs,
// brings back what was committed and nothing that was deleted. Verify reads all and changes nothing. Both need the store closed.
package tiers
