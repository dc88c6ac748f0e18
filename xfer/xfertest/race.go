//go:build race

package xfertest

// raceEnabled says that the race detector watches, which makes all slower.
const raceEnabled = true
