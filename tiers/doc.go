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
// backends for DRAM to DRAM and DRAM to FILE or BLK, and starts one evictor per
// tier, which alone decides what leaves.
package tiers
