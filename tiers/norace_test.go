//go:build !race

package tiers_test

const raceEnabled = false
