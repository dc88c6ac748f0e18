// Package tcp is the backend that moves bytes between two agents over TCP, or TLS
// with certificates on both sides. It needs nothing at run time but a network.
//
// Each agent dials connections of its own to a peer and starts everything on them;
// the peer serves. Frames are those of xfer/frame. On a connection, after the hellos:
//
//   - A write is Data frames to a token of the peer's, or Scatter frames where pieces
//     are small, and a Flush. Its Done says what was refused.
//   - A read is a list of pieces. The peer answers with Data frames to the call, or
//     Gather frames where pieces are small, and a Done.
//   - A Note is a notification, answered by Done when it is in the queue.
//
// ID of all these is the number of the call in the upper 32 bits, and in the lower 32
// the index of a piece in the call. Bytes for a call that is over are skipped, so
// nothing arrives late. A transfer that ends early waits a moment for the peer to say
// that its bytes have landed, else gives the connection up; the next transfer begins
// when the peer has closed that connection's other end, so old bytes never overtake new.
//
// With TLS a peer is who holds a certificate of the authorities; the name that it says
// it has is not compared with the certificate. Without TLS a token of 64 random bits for
// each registration is all that guards memory, and whoever sees the traffic sees it.
//
// Writes are not durable, and no time passes in Deregister but that of a frame: a
// peer that stalls in the middle of one loses its connection.
package tcp
