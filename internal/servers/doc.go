// Package servers starts the real servers that tests talk to, as child processes on
// loopback, each on a free port and in a directory of its own, and stops them when the test
// ends. The programs are installed by make tools, into .bin; others are looked for in PATH.
// What a test needs of the machine and is not there, a server or another thing, it tells
// Missing.
package servers
