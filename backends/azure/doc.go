// Package azure moves bytes between memory and objects of Azure Blob Storage. It is
// Microsoft's SDK behind the interface of package object, which says how objects are read
// and written; here is what is Azure's own: the URL, credentials, checksums and errors.
//
// Credentials come from the environment, as for Microsoft's own tools: a connection string
// (AZURE_STORAGE_CONNECTION_STRING), an account with its key or a shared access signature
// (AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN), else whatever
// identity the SDK's default chain finds: a service principal, a workload's or a managed
// identity, the one that az is logged in with.
//
// What the service does otherwise than S3:
//
//   - It verifies a CRC64 of what is uploaded, and gives none for what is downloaded. Put
//     and Complete store that of the whole object in its metadata, so a Get of a whole
//     object is verified here, and one of a range is not: whoever stores blocks verifies
//     those.
//   - A part of an upload cannot be taken back. Abort makes no request: the service drops
//     what was not committed after a week, or when the object is next written. That also
//     ends other uploads of the same object: Complete is ClassNotFound then.
package azure
