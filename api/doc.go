// Package api is kvtier's gRPC interface: the server, the Go client and the
// table of errors between them. The interface itself is kvtier.proto; kvtierpb
// holds the code generated from it.
//
// The server serves a Store, the small interface stated here, and knows nothing
// of tiers or media. The client speaks in the same values as the Store (package
// index/block), and its errors are block's sentinels again, so a program can
// work on a store in its own process or on a remote one in the same way.
//
// Control belongs here. Where the server tells of sessions (package session) the
// client moves blocks by one, which it opens and opens again by itself. Block bytes
// can travel here too, for clients that have no other way: a copy on each side and
// HTTP/2 framing make that a fraction of what shared memory or a bare socket carries.
package api
