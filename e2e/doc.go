// Package e2e tests real kvtier processes: it builds the program once, runs
// daemons and commands on the loopback, kills some of them, and judges by what
// they print, by their exit codes and by what a Go client sees.
package e2e
