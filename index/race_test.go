//go:build race

package index

// raceEnabled says that the race detector watches, which makes all slower: what a test
// does many times in other places or orders it does less often then, since the run
// without the detector does it all.
const raceEnabled = true
