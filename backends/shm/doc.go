// Package shm is the backend between processes of one host. The initiator of a
// transfer moves the bytes itself, and the owner of the other memory does nothing:
//
//   - Memory in a memory file that is sealed against shrinking, such as a memfd
//     arena's, is mapped by the initiator, once per file, and copied directly.
//     Options.FileOf says which memory that is.
//   - Any other memory is reached by process_vm_readv and process_vm_writev, about as
//     fast for large pieces. What its owner unmaps or cuts short during a transfer is
//     an error at the initiator and ends no process.
//
// A unix socket per backend carries what processes must tell each other: who they
// are, which memory may be used, notifications, that a side has gone. It needs Linux.
//
// # Fencing
//
// With each connection goes a memory file of counters, the gate: for each region that
// the initiator may use one word, which it raises for each piece of at most 1 MiB that
// it copies. Deregister closes the region's words and waits until they are 0 or
// their process is gone (which closes its socket, later than its memory). So a peer
// that is stopped between two pieces delays nobody and finds the gate closed when
// it wakes; one that is stopped in the middle of a piece keeps Deregister, and a
// Close with the region registered, waiting until it runs again or is killed:
// nothing less makes the memory safe to use.
//
// # Trust
//
// Only processes of the same user, or of root, are talked to: the kernel says who
// they are. Such a process could read and write this one's memory anyway, so a peer
// is trusted to keep to the gate and to what it was given. It is not trusted to stay
// alive, to answer, to speak the protocol, or to leave its files as long as they
// are: none of that harms this process.
//
// process_vm_readv and process_vm_writev name a process by its number. That the
// number still means the peer is checked before and behind each piece by its socket
// and its pidfd. Between a check and the call it could die and its number be given to
// another process of this user, in theory: within microseconds, and after the kernel
// has used up all other numbers. Memory files have no such gap.
package shm
