// Package index keeps what the store knows about its blocks: the resident
// table, which answers lookups from memory, and the catalog, which is the
// durable truth on Pebble.
//
// The table lists the blocks of the local tiers and lies outside the Go heap,
// so that ten million entries cost the garbage collector nothing. The catalog
// holds namespaces, slabs and one record for each block on a durable medium; those
// of slabs are read as a whole at start and written in batches after that. Blocks in
// objects, which may be far more, are found in the catalog one by one. Neither moves
// a payload: a block's bytes are written before its record, and its record is
// dropped before its bytes are, so that a crash can only cause a miss.
//
// A catalog that cannot be written has failed: it answers reads and refuses
// commits until Reopen makes it whole again, in place.
//
// Beside the catalog lies its Manifest, which mirrors what only the catalog knows:
// from it, and from the headers of the slots, RestoreCatalog makes a catalog that
// was lost. Pins and the state of the scrub are in the catalog alone, and what it knows
// of objects, which say themselves what is in them.
package index
