package xfer_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/kvtier/kvtier/backends/mem"
	"github.com/kvtier/kvtier/internal/arena"
	"github.com/kvtier/kvtier/xfer"
)

// Two pieces are copied from one part of an arena to another.
func Example() {
	ctx := context.Background()

	memory, err := arena.New(1<<20, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()
	from, to := memory.Slice(0, 4096), memory.Slice(8192, 4096)
	copy(from, "hello, ")
	copy(from[100:], "world")

	agent, err := xfer.NewAgent("example", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer agent.Close()
	if err := agent.AddBackend(mem.New()); err != nil {
		log.Fatal(err)
	}
	all := xfer.Desc{Addr: arena.Addr(memory.Slice(0, 1<<20)), Len: 1 << 20}
	if err := agent.Register(ctx, xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{all}}, nil); err != nil {
		log.Fatal(err)
	}

	at := func(b []byte) xfer.Desc { return xfer.Desc{Addr: arena.Addr(b), Len: uint64(len(b))} }
	source := xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{at(from[:7]), at(from[100:105])}}
	sink := xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{at(to[:7]), at(to[7:12])}}
	r, err := agent.NewRequest(xfer.Write, source, sink, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	if err := r.Run(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s by %s: %s\n", r.Status(), r.Backend(), to[:12])

	// What is in use stays registered.
	err = agent.Deregister(ctx, xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{all}})
	fmt.Println(errors.Is(err, xfer.ErrActive))

	// Output:
	// succeeded by mem: hello, world
	// true
}

// One agent writes into another's memory and tells it so. The backend is a network
// within this process.
func Example_peers() {
	ctx := context.Background()
	memory, err := arena.New(1<<20, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()
	from, to := memory.Slice(0, 4096), memory.Slice(8192, 4096)
	list := func(b []byte) xfer.DescList {
		return xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{{Addr: arena.Addr(b), Len: uint64(len(b))}}}
	}

	network := newNetwork(nil)
	start := func(name string, memory []byte) *xfer.Agent {
		agent, err := xfer.NewAgent(name, nil)
		if err != nil {
			log.Fatal(err)
		}
		if err := agent.AddBackend(network.node("net", 8)); err != nil {
			log.Fatal(err)
		}
		if err := agent.Register(ctx, list(memory), nil); err != nil {
			log.Fatal(err)
		}
		return agent
	}
	writer, reader := start("writer", from), start("reader", to)
	defer reader.Close()
	defer writer.Close()

	metadata, err := reader.Metadata() // travels however the processes like
	if err != nil {
		log.Fatal(err)
	}
	peer, err := writer.LoadMetadata(metadata)
	if err != nil {
		log.Fatal(err)
	}
	copy(from, "hello")
	r, err := writer.NewRequest(xfer.Write, list(from[:5]), list(to[100:105]), &xfer.RequestOptions{
		Peer: peer.Name, Notify: []byte("at 100"),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	if err := r.Run(ctx); err != nil {
		log.Fatal(err)
	}
	n := <-reader.Notifications()
	fmt.Printf("%s says %q: %s\n", n.Peer.Name, n.Msg, to[100:105])

	// Output:
	// writer says "at 100": hello
}
