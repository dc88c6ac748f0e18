package main

import (
	"encoding/json"
	"testing"

	"github.com/kvtier/kvtier/api/apitest/memstore"
)

func TestPin(t *testing.T) {
	addr, _ := startServer(t, memstore.New(&memstore.Options{Durable: true, Capacity: 60}), nil)
	putDemo(t, addr) // A of 10 bytes, B of 30 behind it; 30 may be pinned
	pin, unpin := []string{"pin", "--namespace", "demo"}, []string{"unpin", "--namespace", "demo"}
	ls := []string{"ls", "--namespace", "demo"}

	kvtier(t, addr, "", append(pin, hashA)...).want(t, 0, "pinned "+hashA+"\n", "")
	kvtier(t, addr, "", ls...).want(t, 0, hashA+"        10  g2,g3  pinned\n"+hashB+"        30  g2,g3  parent "+hashA+"\n", "")
	r := kvtier(t, addr, "", append(pin, hashA, hashC)...)
	r.want(t, 1, "pinned "+hashA+"\nfailed "+hashC+": pin "+hashC+": not found\n", "pin: 1 of 2 blocks could not be pinned\n")

	r = kvtier(t, addr, "", append(pin, "--json", hashB, hashA)...)
	var got pinOutput
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if r.code != 1 || got.Asked != 2 || got.Pinned != 1 || len(got.Blocks) != 2 || got.Blocks[0].Pinned || got.Blocks[0].Error == "" || got.Blocks[1] != (pinnedBlock{hashA, true, ""}) {
		t.Errorf("pin beyond the limit: %+v, exit %d", got, r.code)
	}
	r = kvtier(t, addr, "", append(ls, "--json", "--limit", "1")...)
	var listed listedBlock
	if err := json.Unmarshal([]byte(r.stdout), &listed); err != nil || !listed.Pinned {
		t.Errorf("ls --json: %+v, %v", r, err)
	}

	kvtier(t, addr, "", append(unpin, hashA, hashB)...).want(t, 0, "unpinned 1 of 2\n", "")
	kvtier(t, addr, "", append(unpin, "--json", hashA)...).want(t, 0, "{\n  \"namespace\": \"demo\",\n  \"asked\": 1,\n  \"unpinned\": 0\n}\n", "")
	kvtier(t, addr, "", append(pin, hashA, "0011223344556677")...).want(t, 2, "", "length 8 bytes")
	kvtier(t, addr, "", pin...).want(t, 2, "", "1 arg")
	kvtier(t, addr, "", "unpin", hashA).want(t, 2, "", "namespace")
}
