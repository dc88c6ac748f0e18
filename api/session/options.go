package session

import (
	"log/slog"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/xfer/frame"
)

// ServerOptions are what a server may be told. What is 0 takes the default in
// brackets.
type ServerOptions struct {
	Logger *slog.Logger // nil: silent
	Token  string       // that a hello must have; empty: none
	Access *access.List // instead of Token: who may connect, and what each may do; nil: all of them everything
	Name   string       // program and version, told to clients

	Timeout      time.Duration // ends calls that come without a deadline, watches excepted [1 min]
	HelloTimeout time.Duration // in which a connection must have said hello [5 s]
	MaxPending   int           // connections that have not said it yet; more are closed [128]
	MaxSessions  int           // more are refused [1024]

	// Limits of one session. A client may ask for fewer calls and bytes, and smaller
	// messages.
	Message    int           // bytes of one message [1 MiB, which is the most; 64 KiB is the least]
	Keys       int           // keys, leases or grants of one message that are served [8192, which is the most, and what Message has room for]
	Calls      int           // in flight, beside those that are answered at once [64]
	Bytes      int64         // of gets in flight; one block is served in any case [64 MiB]
	Leases     int           // [65536]
	Grants     int           // places that it may hold [64]
	GrantBytes int64         // and their bytes; one place is granted in any case [64 MiB]
	GrantTTL   time.Duration // how long a place may be held unused [30 s]
	LendFor    time.Duration // how long blocks are lent for reading in place [30 s]

	// Regions, files of clients that the server maps.
	Regions        int   // of one session [64, which is the most]
	RegionBytes    int64 // and their bytes [1 TiB]
	AllRegions     int   // of all sessions [4096]
	AllRegionBytes int64 // and their bytes [16 TiB]

	// Openings is how many hellos have their regions opened at once; more wait. Those
	// whose file system does not answer take one each, until it does [16].
	Openings int

	Frame frame.Options // keep-alive, and when a client that takes nothing loses its session
}

func setDefault[T int | int64 | time.Duration](v *T, to T) {
	if *v <= 0 {
		*v = to
	}
}

func (o *ServerOptions) withDefaults() ServerOptions {
	var v ServerOptions
	if o != nil {
		v = *o
	}
	if v.Logger == nil {
		v.Logger = slog.New(slog.DiscardHandler)
	}
	if v.Access == nil && v.Token != "" {
		v.Access = access.Single(v.Token)
	}
	setDefault(&v.Timeout, time.Minute)
	setDefault(&v.HelloTimeout, 5*time.Second)
	setDefault(&v.MaxPending, 128)
	setDefault(&v.MaxSessions, 1024)
	setDefault(&v.Message, frame.MaxMessage)
	v.Message = min(max(v.Message, MinMessage), frame.MaxMessage)
	setDefault(&v.Keys, MaxKeys)
	setDefault(&v.Calls, 64)
	setDefault(&v.Bytes, 64<<20)
	setDefault(&v.Leases, 65536)
	setDefault(&v.Grants, 64)
	setDefault(&v.GrantBytes, 64<<20)
	setDefault(&v.GrantTTL, 30*time.Second)
	setDefault(&v.LendFor, 30*time.Second)
	setDefault(&v.Regions, MaxRegions)
	setDefault(&v.RegionBytes, 1<<40)
	v.RegionBytes = min(v.RegionBytes, 1<<46) // of addresses there are not many more, and sums do not overflow
	setDefault(&v.AllRegions, 4096)
	setDefault(&v.AllRegionBytes, 16<<40)
	setDefault(&v.Openings, 16)
	return v
}
