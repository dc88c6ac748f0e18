//go:build race

package e2e

// raceEnabled says that the tests run with the race detector; the daemon is
// built with it then too, and work is cut to what it can do in reasonable time.
const raceEnabled = true
