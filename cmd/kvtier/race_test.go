//go:build race

package main

// raceEnabled says that the race detector watches, which makes all slower.
const raceEnabled = true
