// Package object moves bytes between memory and the objects of a service such as S3: DRAM
// to and from OBJ. What is the same for all services is here, once: how a transfer becomes
// requests, how many of them run, which are made again, and what is counted. Each service
// is a Client, in a package of its own that wraps its SDK.
//
// An object is registered by its key in Desc.Meta; it need not exist. Reads are ranges:
// pairs that are adjacent in the object become one request, wherever their bytes go, and
// long ones are cut into parts that are read side by side. A write makes the object whole:
// the pairs of a transfer that go to one object must together be all of it, from 0 on
// without a gap, in any order, and become one request that gathers their bytes, or an
// upload in parts above Options.MultipartBytes. An object appears at once and whole; it is
// durable, as far as the service promises that, when its pairs are done.
//
// Every write carries a checksum that the service verifies. A read is verified where the
// service gives a checksum of just the bytes that were asked for: S3 knows one of whole
// objects only, so register an object with its length and read all of it, in not more than
// one part. Stats counts the bytes of both kinds. Whoever reads ranges brings a checksum
// of its own, as blocks do.
//
// Memory is used in place, by its address: it must not be Go heap.
//
// A service that asks for less gets less: the number of requests at once is halved, all
// wait for a while that grows, then one goes ahead, and only when it is served the others
// follow. Requests that fail are made again out of a budget that is a share of those that
// succeed, so that a service in trouble is not asked more than a healthy one.
//
// A write that was cancelled, or whose answer was lost, may still arrive at the service
// later. Keys that are written once, with contents that follow from the key, take no harm.
package object
