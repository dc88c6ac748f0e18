// Package invariants is for checks that are too dear to be made always, and for
// breaking off a process at a named point. All of it exists only in programs that
// are built with the tag invariants; in others it compiles to nothing.
package invariants
