// Package block is the vocabulary that every room of kvtier shares: hashes,
// keys, namespaces, tiers, places, sums, the values that calls return, and the
// sentinels that classify failures.
//
// It imports the standard library only, holds no state and does no I/O, so a
// Go client can import it without pulling in the store.
package block
