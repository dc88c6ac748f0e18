//go:build race

package session_test

// raceEnabled says that the race detector watches, which makes all slower.
const raceEnabled = true
