package e2e

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api"
	"github.com/kvtier/kvtier/index/block"
)

// checkSpace is check for one namespace.
func checkSpace(t *testing.T, d *daemon, trace, namespace string) int64 {
	t.Helper()
	var r checkReport
	decode(t, must(t, "replay", trace, "--server", d.addr, "--check-only", "--namespace", namespace, "--json"), &r)
	if *r.WrongBytes != 0 || *r.Missed != 0 || *r.Present != *r.Listed {
		t.Errorf("check of %s: listed %d, present %d, missed %d, wrong bytes %d", namespace, *r.Listed, *r.Present, *r.Missed, *r.WrongBytes)
	}
	return *r.Listed
}

// TestObjectImport: a daemon is killed amid a replay; its bucket is imported into an empty
// data directory, and every block that was committed there reads. What was deleted, cleared
// or is past its time does not come back. A sweep finds nothing that is lost.
func TestObjectImport(t *testing.T) {
	withoutRace(t)
	_, url := bucketOf(t)
	dir := t.TempDir()
	node := func(name string) []string {
		return []string{"--data", filepath.Join(dir, name), "--dram", "64MiB", "--nvme", "none", "--object", url, "--cluster", "west", "--object-grace", "1ms"}
	}
	const size = 20_000
	d := serve(t, node("a")...)
	c := dial(t, d)
	kept, cleared := open(t, c, "kept", size), open(t, c, "cleared", size)
	mortal, err := c.OpenNamespace(timeout(t), block.Descriptor{Name: "mortal", MaxBlockBytes: size}, 3*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	mortal.HashLen = hashBytes
	for _, ns := range []block.Namespace{kept, cleared, mortal} {
		put(t, c, ns, 0, 40, size, block.NoTier)
	}
	d.stop(0) // what is in memory goes into the bucket
	d = serve(t, node("a")...)
	c = dial(t, d)
	if st := tierStats(t, c, block.G4); st.Blocks < 80 {
		t.Fatalf("%d blocks are in the bucket", st.Blocks)
	}
	kept, cleared = open(t, c, "kept", size), open(t, c, "cleared", size)
	var hashes []block.Hash
	for _, i := range numbers(0, 30) {
		hashes = append(hashes, hashOf(i))
	}
	if n, err := c.Delete(timeout(t), kept, hashes); err != nil || n != 30 {
		t.Fatalf("delete: %d, %v", n, err)
	}
	if _, err := c.Clear(timeout(t), cleared); err != nil {
		t.Fatal(err)
	}
	replay(t, d, smallTrace, "--limit", "150")
	second := start(t, nil, "replay", smallTrace, "--server", d.addr, "--block-bytes", "64KiB", "--verify", "--namespace", "second", "--json")
	until(t, "uploads", func() bool {
		usage, err := c.ObjectUsage(timeout(t))
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(usage, func(u block.ObjectUsage) bool { return u.Namespace == "second" && u.Live > 300 })
	})
	d.kill()
	second.wait()

	d = serve(t, node("a")...)
	c = dial(t, d)
	mortal, err = c.Namespace(timeout(t), "mortal")
	if err != nil {
		t.Fatal(err)
	}
	hashes = hashes[:0]
	for _, i := range numbers(0, 40) {
		hashes = append(hashes, hashOf(i))
	}
	until(t, "the time of blocks has passed", func() bool {
		m, err := c.Match(timeout(t), mortal, hashes, block.MatchOptions{All: true})
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(m.Blocks, func(f block.Found) bool { return f.State == block.Resident })
	})
	var swept []struct {
		State                          string
		Listed, Orphans, Missing, Lost int64
	}
	decode(t, must(t, "object", "sweep", "--server", d.addr, "--json"), &swept)
	if len(swept) != 1 || swept[0].State != "done" || swept[0].Lost+swept[0].Missing != 0 || swept[0].Listed == 0 {
		t.Errorf("sweep: %+v", swept)
	}
	// Whether this sweep did it, or one in the background before: what has expired is dropped,
	// and what lives in an object that is half dead has gone into another.
	all, next, err := c.ListObjects(timeout(t), "", 0)
	if err != nil || next != "" {
		t.Fatalf("list of %d objects, next %q: %v", len(all), next, err)
	}
	for _, o := range all {
		if o.Live > 0 && (o.Namespace == "mortal" || o.Namespace == "kept" && 2*o.Live < o.Blocks) {
			t.Errorf("after a sweep there is %+v", o)
		}
	}
	first, also := checkSpace(t, d, smallTrace, "replay"), checkSpace(t, d, smallTrace, "second")
	if first == 0 || also == 0 {
		t.Errorf("after the kill there are %d and %d blocks", first, also)
	}
	d.kill()

	d = serve(t, node("b")...)
	c = dial(t, d)
	if _, err := c.Namespace(timeout(t), "kept"); err == nil {
		t.Error("a namespace is there before the import")
	}
	var imported []struct {
		Objects, Namespaces, Blocks, Known, Dead, Refused, Failed int64
		Problems                                                  []string
	}
	decode(t, must(t, "object", "import", "--server", d.addr, "--json"), &imported)
	if len(imported) != 1 || imported[0].Blocks < first+also+10 || imported[0].Namespaces < 3 || imported[0].Refused+imported[0].Failed != 0 {
		t.Errorf("import: %+v", imported)
	}
	if n, m := checkSpace(t, d, smallTrace, "replay"), checkSpace(t, d, smallTrace, "second"); n != first || m != also {
		t.Errorf("%d and %d blocks were imported, %d and %d were there", n, m, first, also)
	}
	judge := func(c *api.Client, name string, from, n int, want block.MissReason) {
		t.Helper()
		ns, err := c.Namespace(timeout(t), name)
		if err != nil {
			if want == block.Hit {
				t.Error(err)
			}
			return // nothing of it was alive
		}
		missed := get(timeout(t), t, c, ns, numbers(from, n), func(int) int { return size })
		for i := from; i < from+n; i++ {
			if missed[i] != want { // that of a hit is block.Hit
				t.Errorf("block %d of %s: %v, want %v", i, name, missed[i], want)
			}
		}
	}
	judge(c, "kept", 30, 10, block.Hit)
	judge(c, "kept", 0, 30, block.MissAbsent)
	judge(c, "cleared", 0, 40, block.MissAbsent)
	judge(c, "mortal", 0, 40, block.MissAbsent)

	decode(t, must(t, "object", "import", "--server", d.addr, "--json"), &imported)
	if imported[0].Blocks != 0 {
		t.Errorf("a second import: %+v", imported)
	}
	objects := strings.Count(must(t, "object", "ls", "--server", d.addr, "--json"), "\n")
	var usage []struct {
		Namespace                               string
		Objects, Bytes, Blocks, Live, LiveBytes int64
	}
	decode(t, must(t, "object", "usage", "--server", d.addr, "--json"), &usage)
	var sum int64
	for _, u := range usage {
		sum += u.Objects
		if u.Namespace == "kept" && u.Live != 10 {
			t.Errorf("usage of kept: %+v", u)
		}
	}
	if objects == 0 || sum != int64(objects) {
		t.Errorf("%d objects are listed, %d used", objects, sum)
	}
	if text := must(t, "object", "usage", "--server", d.addr) + must(t, "object", "ls", "--limit", "1", "--server", d.addr) + must(t, "stat", "--server", d.addr); !strings.Contains(text, "other  blocks/west/") || !strings.Contains(text, "kept ") || !strings.Contains(text, "sweep of") {
		t.Errorf("printed is\n%s", text)
	}
}

// TestObjectCommandsRefuse: commands of the object tier say what is wrong.
func TestObjectCommandsRefuse(t *testing.T) {
	d := serve(t, "--data", filepath.Join(t.TempDir(), "data"), "--dram", "32MiB", "--nvme", "none")
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"ls"}, 1, "no object tier"},
		{[]string{"usage"}, 1, "no object tier"},
		{[]string{"sweep"}, 1, "no object tier"},
		{[]string{"import"}, 1, "no object tier"},
		{[]string{"ls", "--limit", "-1"}, 2, "--limit -1"},
		{[]string{"import", "everything"}, 2, "everything"},
	} {
		r := command(t, nil, append(append([]string{"object"}, c.args...), "--server", d.addr)...)
		if r.code != c.code || !strings.Contains(r.stderr, c.says) {
			t.Errorf("object %v: exit code %d, want %d, saying %q:\n%s", c.args, r.code, c.code, c.says, r.stderr)
		}
	}
}
