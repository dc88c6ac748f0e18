//go:build race

package tiers_test

// raceEnabled says that the race detector watches, which makes all slower.
const raceEnabled = true
