// Package packed is the format of what a store keeps in object storage: objects that
// hold many blocks and say themselves what is in them, the tombstones of blocks that
// were deleted, and the records by which a prefix says whose it is. It does no I/O.
//
// Below the prefix of a bucket lie
//
//	kvtier-cluster.json                             Cluster: whose prefix it is
//	namespaces/CLUSTER/DIGEST.json                  Namespace: what a digest stands for
//	blocks/CLUSTER/DIGEST/HASH-ID                   a packed object: see Footer and Name
//	tombstones/CLUSTER/STAMP-ID                     Tombstones
//	probes/CLUSTER/STORE                            what a store writes to see whether it can
//
// DIGEST is that of the namespace's descriptor, HASH that of the first block in the
// object, ID says who wrote it and is of no other object. All but the probes are written once: a request that
// arrives late changes nothing. So a catalog can be made anew from a listing: read the
// tombstones, then the footers, and take the members that are not Graves.Dead.
//
// What happened before what is told by stamps: see Clock.
package packed
