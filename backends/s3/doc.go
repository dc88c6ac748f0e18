// Package s3 moves bytes between memory and objects of a service that speaks the S3
// protocol. It is aws-sdk-go-v2 behind the interface of package object, which says how
// objects are read and written; here is what is S3's own: the URL, credentials, checksums
// and errors.
//
// Credentials come from the SDK's standard chain: environment, shared files, and what the
// host offers. Every object and part carries a CRC32C that the service verifies; a read of
// a whole object is compared with the one that the service keeps.
//
// The service must know If-None-Match on writes and CRC32C of whole objects that were
// uploaded in parts.
package s3
