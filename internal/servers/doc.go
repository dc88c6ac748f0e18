// Package servers starts the real servers that tests talk to, as child processes on
// loopback, each on a free port and in a directory of its own, and stops them when the test
// ends. The programs are installed by make tools, into .bin; others are looked for in PATH.
// A test whose server is not there is skipped, or fails where KVTIER_REQUIRE names it.
package servers
