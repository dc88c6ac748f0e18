package api_test

import (
	"context"
	"fmt"
	"log"
	"net"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/api/apitest/memstore"
	"github.com/kvtier/kvtier/index/block"
)

// A worker opens its namespace, puts what it has computed, and asks how much of
// its next request is there already.
func Example() {
	ctx := context.Background()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	srv := api.NewServer(memstore.New(nil), nil) // kvtier serve does this
	served := make(chan error, 1)
	go func() { served <- srv.Serve(lis) }()

	c, err := api.Dial(ctx, lis.Addr().String(), nil)
	if err != nil {
		log.Fatal(err)
	}
	ns, err := c.OpenNamespace(ctx, block.Descriptor{Name: "llama-tp1", Model: "llama", DType: "bf16", BlockBytes: 5}, 0)
	if err != nil {
		log.Fatal(err)
	}
	ns.HashLen = 8
	root, child, next := block.Hash{1}, block.Hash{2}, block.Hash{3}
	results, err := c.Put(ctx, ns, []api.PutItem{
		{Hash: root, Data: []byte("first")},
		{Hash: child, Parent: root, HasParent: true, Data: []byte("other")},
	}, api.PutOptions{Durable: block.G2})
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range results {
		if r.Err != nil {
			log.Fatal(r.Err)
		}
	}
	m, err := c.Match(ctx, ns, []block.Hash{root, child, next}, block.MatchOptions{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("blocks of the prefix that are there:", m.Prefix)
	err = c.Get(ctx, ns, []block.Wanted{{Hash: root}, {Hash: child}, {Hash: next}}, block.GetOptions{}, func(i int, p block.Payload) error {
		fmt.Printf("%d %v %q\n", i, p.Reason, p.Bytes)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}

	if err := c.Close(); err != nil {
		log.Fatal(err)
	}
	if err := srv.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	if err := <-served; err != nil {
		log.Fatal(err)
	}
	// Output:
	// blocks of the prefix that are there: 2
	// 0 hit "first"
	// 1 hit "other"
	// 2 absent ""
}
