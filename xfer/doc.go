// Package xfer moves bytes between described places: memory of this process,
// files, block devices, objects, devices and peers. It does what NIXL's agent
// does, knows nothing of blocks or tiers, and starts nothing that its owner did
// not ask for.
//
// # The life of a transfer
//
// An [Agent] adopts backends, in order of preference. Memory is registered
// with it once, in large pieces; each backend that serves the memory type
// resolves what it needs (pins pages, opens files).
//
// A transfer is one operation, [Read] (remote to local) or [Write] (local to
// remote), between two lists of descriptors, pair by pair. For storage the
// remote side is the file or device. Every descriptor lies inside one
// registration; the agent chooses the first backend that serves the two memory
// types and has both sides registered. The result is a [Request]:
//
//	NewRequest ──> not posted ──Run, Post──> active ──> succeeded, failed, canceled
//	                   │                       ▲                    │
//	                   │                       └────Run, Post───────┤
//	                   └──────────Release──────────────> released <─┘
//
// [Request.Run] does the transfer on the caller's goroutine: the shortest way.
// [Request.Post] starts it, and [Request.Wait] waits with a context;
// [Request.Each] hands over the pieces as they arrive; [Request.Status] polls.
// A request may be posted again as often as wanted, and costs less than a new
// one. [Agent.Prepare] and [Agent.Select] make requests by index from lists that
// were resolved once.
//
// # Peers
//
// The remote side may be another agent's memory, as a rule in another process, by
// backends with the roles [Remote] and [Notifier]. [Agent.Metadata] says what peers
// need, in bytes that the program carries over by its own means; [Agent.LoadMetadata]
// makes the peer known, and [RequestOptions] names it. A peer takes no part in
// transfers: reads and writes are one-sided. It learns of them by notifications, with a
// request, behind its bytes, or alone ([Agent.Notify], [Agent.Notifications]).
//
// A peer is one life of an agent ([PeerID]). When it is loaded as another life, or
// invalidated, what was made for the old one fails with [ErrDisconnected]. A lost
// connection is no such end: the next transfer connects again.
//
// # Memory
//
// Registered memory is not Go heap and stays mapped until it is deregistered.
// While a request is active its memory belongs to the transfer: the source must
// not change and the sink must not be looked at, descriptors that are done
// excepted. A request that is no longer active is quiet: no device, kernel or
// peer touches its memory, whatever its end was. That is why [Request.Cancel],
// the end of a context and a deadline only ask for the end, and the calls return
// when it has come; and why memory cannot be deregistered while a request or
// prepared list refers to it ([ErrActive]). Peers do not hold it: after Deregister they
// are refused.
//
// # Failure
//
// Errors are sentinels ([ErrShort], [ErrNoBackend], ...) inside an [Error] that
// says which layer, backend and descriptor failed. One descriptor's failure does
// not stop the others: [Request.DescErr] tells them apart. Nothing is retried.
//
// Backends implement [Backend], whose text is the contract, and prove it with
// package xfertest.
package xfer
