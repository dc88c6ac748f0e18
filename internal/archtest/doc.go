// Package archtest holds the shape of the module as a test: which package may
// import what, and that nothing is registered or kept behind the callers' backs.
// A change that moves a boundary changes the table in the same commit.
package archtest
