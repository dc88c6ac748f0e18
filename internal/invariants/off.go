//go:build !invariants

package invariants

// Enabled says that the program was built with the tag invariants.
const Enabled = false

// Poison fills memory that nobody may use any more, so that who does is found
// out. Without the tag it does nothing.
func Poison([]byte) {}

// Poisoned reports whether memory is as Poison left it. Without the tag it is
// always true.
func Poisoned([]byte) bool { return true }

// CrashAt kills the process when KVTIER_CRASH names the point. Without the tag
// it does nothing.
func CrashAt(string) {}
