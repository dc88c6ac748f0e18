package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/session"
	"github.com/kvtier/kvtier/index/block"
)

// listedSession is what kvtier sessions --json prints of one.
type listedSession struct {
	ID           string `json:"id"`
	Name         string `json:"name"`
	Peer         string `json:"peer"`
	PID          *int   `json:"pid"`
	UID          *int   `json:"uid"`
	Shared       bool   `json:"shared"`
	Regions      *int   `json:"regions"`
	RegionBytes  *int64 `json:"region_bytes"`
	Leases       int    `json:"leases"`
	LeasesLimit  int    `json:"leases_limit"`
	LeasedBlocks int    `json:"leased_blocks"`
	Places       int    `json:"places"`
	PlaceBytes   int64  `json:"place_bytes"`
	Calls        int    `json:"calls"`
	CallBytes    *int64 `json:"call_bytes"`
	AgeMS        int64  `json:"age_ms"`
}

// listed runs kvtier sessions.
func listed(t *testing.T, d *daemon) (all []listedSession) {
	t.Helper()
	decode(t, must(t, "sessions", "--json", "--server", d.addr), &all)
	return all
}

// TestSessionsListed: kvtier sessions says who works with a daemon and what each holds,
// and nothing of whom is gone.
func TestSessionsListed(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	d := serve(t, "--data", filepath.Join(dir, "data"), "--dram", "64MiB", "--nvme", "none", "--socket", socket, "--shared-memory", "on")
	if out := must(t, "sessions", "--json", "--server", d.addr); out != "[]\n" {
		t.Errorf("without a session it prints %q", out)
	}
	local, err := session.Dial(timeout(t), "unix", socket, &session.ClientOptions{Name: "decode\n0"})
	if err != nil {
		t.Fatal(err)
	}
	remote, err := session.Dial(timeout(t), "tcp", sessionAddr(t, d, "tcp"), &session.ClientOptions{Name: "prefill-1"})
	if err != nil {
		t.Fatal(err)
	}
	opened, err := local.OpenNamespace(timeout(t), block.Descriptor{Name: "n", BlockBytes: 1000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ns := opened.Namespace
	ns.HashLen = hashBytes
	var hashes []byte
	var puts []session.PutBlock
	for i := range 3 {
		h := hashOf(i)
		hashes = append(hashes, h[:hashBytes]...)
		puts = append(puts, session.PutBlock{Hash: h, Bytes: payload(i, 1000)})
	}
	results, err := local.Put(timeout(t), ns, puts, session.PutOptions{})
	if err != nil || results[2].Err != nil {
		t.Fatalf("put: %+v, error %v", results, err)
	}
	var res block.MatchResult
	if err := remote.Match(timeout(t), ns, hashes, block.MatchOptions{Lease: time.Hour}, &res); err != nil || res.Prefix != 3 {
		t.Fatalf("matched %+v, error %v", res, err)
	}
	all := listed(t, d)
	if len(all) != 2 {
		t.Fatalf("listed %+v, want both", all)
	}
	if s := all[0]; s.Name != "decode\n0" || s.Peer != "unix" || s.PID == nil || *s.PID != os.Getpid() || s.UID == nil || *s.UID != os.Getuid() ||
		!s.Shared || s.Leases != 0 || s.AgeMS <= 0 || len(s.ID) != 16 {
		t.Errorf("the local one: %+v", s)
	}
	if s := all[1]; s.Name != "prefill-1" || !strings.HasPrefix(s.Peer, "127.0.0.1:") || s.PID != nil || s.UID != nil || s.Shared ||
		s.Leases != 1 || s.LeasesLimit != 65536 || s.LeasedBlocks != 3 || s.Calls != 0 || s.CallBytes == nil || s.Regions == nil || s.RegionBytes == nil {
		t.Errorf("the remote one: %+v", s)
	}
	table := strings.Split(must(t, "sessions", "--server", d.addr), "\n")
	if len(table) != 4 || !strings.HasPrefix(table[0], "ID ") || !strings.Contains(table[1], `"decode\n0"`) || !strings.Contains(table[2], "1 of 65536") {
		t.Errorf("the table is\n%s", strings.Join(table, "\n"))
	}
	if err := remote.Close(); err != nil {
		t.Error(err)
	}
	until(t, "the remote one is gone", func() bool { return len(listed(t, d)) == 1 })
	if err := local.Close(); err != nil {
		t.Error(err)
	}
	until(t, "nobody is there", func() bool { return len(listed(t, d)) == 0 })
	d.stop(0)
}
