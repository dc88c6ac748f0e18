package azure_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/sas"

	"github.com/kvtier/kvtier/backends/azure"
	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
)

var _ object.Client = (*azure.Client)(nil)

// TestObjects: what is put comes back, whole and in ranges, with its checksum.
func TestObjects(t *testing.T) {
	c := open(t, newContainer(t))
	if err := c.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a", "dir/b", "odd name+%&?#ü", "c=d,e;f"} {
		src := memory(t, 100_003)
		put := mustPut(t, c, key, src)
		head, err := c.Head(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if head != put || head.Sum != c.Sum(src) || head.Bytes != 100_003 || head.ETag == "" || head.Modified.IsZero() {
			t.Errorf("head %+v, put said %+v", head, put)
		}
		if mustRead(t, c, key, 100_003) != flat(src) {
			t.Errorf("%s has other bytes", key)
		}
		dst := blank(t, 777)
		got, err := c.Get(t.Context(), key, 99, dst, false)
		if err != nil {
			t.Fatal(err)
		}
		if flat(dst) != flat(src)[99:99+777] || got.Bytes != 100_003 || got.ETag != head.ETag {
			t.Errorf("a range of %s has other bytes, or %+v", key, got)
		}
	}
	// Another client, without the prefix, finds them below it.
	page, err := c.List(t.Context(), "", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, o := range page.Objects {
		keys = append(keys, o.Key)
	}
	if want := []string{"a", "c=d,e;f", "dir/b", "odd name+%&?#ü"}; !slices.Equal(keys, want) || page.Next != "" {
		t.Errorf("list gives %q, want %q", keys, want)
	}
}

// TestEnds: reads past the end say what there is; what is not there is not found.
func TestEnds(t *testing.T) {
	c := open(t, newContainer(t))
	src := memory(t, 1000)
	mustPut(t, c, "a", src)
	dst := blank(t, 600)
	got, err := c.Get(t.Context(), "a", 500, dst, false)
	wantClass(t, err, object.ClassRange)
	if !errors.Is(err, xfer.ErrShort) || got.N != 500 || got.Bytes != 1000 || flat(dst)[:500] != flat(src)[500:] {
		t.Errorf("half a range: %v, %+v", err, got)
	}
	for _, off := range []int64{1000, 5000} {
		if got, err = c.Get(t.Context(), "a", off, dst, false); got.N != 0 {
			t.Errorf("%d bytes came from %d on", got.N, off)
		}
		wantClass(t, err, object.ClassRange)
	}
	if got, err := c.Get(t.Context(), "a", 0, nil, true); err != nil || got.Bytes != 1000 {
		t.Errorf("nothing of an object: %v, %+v", err, got)
	}
	mustPut(t, c, "empty", nil)
	if i, err := c.Head(t.Context(), "empty"); err != nil || i.Bytes != 0 {
		t.Errorf("empty object: %v, %+v", err, i)
	}
	_, err = c.Get(t.Context(), "absent", 0, dst, true)
	if e := wantClass(t, err, object.ClassNotFound); e.Code != "BlobNotFound" || e.Request == "" || !errors.Is(err, xfer.ErrNotFound) {
		t.Errorf("absent: %v", err)
	}
	_, err = c.Head(t.Context(), "absent")
	if e := wantClass(t, err, object.ClassNotFound); e.Code != "BlobNotFound" || e.Request == "" {
		t.Errorf("absent: %v", err)
	}
	for _, key := range []string{"", "a.", "a./b", "a/", "a//b", strings.Repeat("k", c.Limits().KeyBytes+1)} {
		if _, err := c.Put(t.Context(), key, src, c.Sum(src), false); !errors.Is(err, xfer.ErrInvalid) {
			t.Errorf("put %.20q: %v, want ErrInvalid", key, err)
		}
	}
	mustPut(t, c, strings.Repeat("k", c.Limits().KeyBytes), src)
}

// TestChecksum: the service refuses bytes that do not have their checksum, and a Get finds
// an object that does not have its own.
func TestChecksum(t *testing.T) {
	l := newContainer(t)
	c := open(t, l)
	src := memory(t, 50_000)
	wrong := c.Sum(src)
	wrong.Value++
	_, err := c.Put(t.Context(), "a", src, wrong, false)
	if e := wantClass(t, err, object.ClassCorrupt); e.Code != "Crc64Mismatch" || e.Status != 400 || e.Request == "" || !errors.Is(err, object.ErrCorrupt) {
		t.Errorf("put: %v", err)
	}
	u, err := c.Begin(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.PutPart(t.Context(), u, 1, src, wrong)
	wantClass(t, err, object.ClassCorrupt)
	_, err = c.Head(t.Context(), "a")
	wantClass(t, err, object.ClassNotFound)

	// What lies about its checksum was changed at the service.
	mustPut(t, c, "a", src)
	text := "123abc"
	if _, err := bare(t, l).NewBlobClient(l.Prefix+"a").SetMetadata(t.Context(), map[string]*string{"kvtier_crc64": &text}, nil); err != nil {
		t.Fatal(err)
	}
	got, err := c.Get(t.Context(), "a", 0, blank(t, 50_000), true)
	wantClass(t, err, object.ClassCorrupt)
	if got.Verified {
		t.Error("verified")
	}
	if _, err := c.Get(t.Context(), "a", 1, blank(t, 100), false); err != nil {
		t.Errorf("a range has no checksum: %v", err)
	}
}

// TestIfAbsent: of many that make an object only one does, by one request or in parts.
func TestIfAbsent(t *testing.T) {
	c := open(t, newContainer(t))
	const racers = 8
	for _, parts := range []int{1, 2} {
		for round := range 3 {
			key := fmt.Sprintf("%d-%d", parts, round)
			var wg sync.WaitGroup
			errs := make([]error, racers)
			bytes := make([]string, racers)
			for i := range racers {
				src := memory(t, 3000)
				bytes[i] = flat(src)
				wg.Go(func() {
					if parts == 1 {
						_, errs[i] = c.Put(t.Context(), key, src, c.Sum(src), true)
						return
					}
					_, errs[i] = upload(t.Context(), c, key, src, 2000, true)
				})
			}
			wg.Wait()
			won := -1
			for i, err := range errs {
				switch {
				case err == nil && won >= 0:
					t.Fatalf("%s: %d and %d both made it", key, won, i)
				case err == nil:
					won = i
				case object.ClassOf(err) != object.ClassExists && (parts == 1 || object.ClassOf(err) != object.ClassNotFound):
					t.Errorf("%s: %v", key, err)
				}
			}
			if won < 0 {
				t.Fatalf("%s: nobody made it: %v", key, errs)
			}
			if mustRead(t, c, key, 3000) != bytes[won] {
				t.Errorf("%s has not the winner's bytes", key)
			}
		}
	}
}

// upload makes an object in parts of n bytes.
func upload(ctx context.Context, c *azure.Client, key string, src object.Vector, n int64, ifAbsent bool) (object.Info, error) {
	u, err := c.Begin(ctx, key)
	if err != nil {
		return object.Info{}, err
	}
	var parts []object.Part
	for off := int64(0); off < src.Len(); off += n {
		v := src.Slice(off, min(n, src.Len()-off))
		p, err := c.PutPart(ctx, u, len(parts)+1, v, c.Sum(v))
		if err != nil {
			return object.Info{}, err
		}
		parts = append(parts, p)
	}
	slices.Reverse(parts) // order is by number
	return c.Complete(ctx, u, parts, ifAbsent)
}

// TestUpload: parts become one object, with the checksum of all; two uploads of one object
// do not mix, and one that is given up leaves nothing to see.
func TestUpload(t *testing.T) {
	c := open(t, newContainer(t))
	src := memory(t, 10_001)
	i, err := upload(t.Context(), c, "a", src, 3000, false)
	if err != nil {
		t.Fatal(err)
	}
	if i.Bytes != 10_001 || i.Sum != c.Sum(src) {
		t.Errorf("complete said %+v, want 10001 bytes with %v", i, c.Sum(src))
	}
	if mustRead(t, c, "a", 10_001) != flat(src) {
		t.Error("other bytes")
	}
	if _, err = upload(t.Context(), c, "a", src, 3000, true); object.ClassOf(err) != object.ClassExists {
		t.Errorf("upload of what exists: %v", err)
	}

	given, err := c.Begin(t.Context(), "b")
	if err != nil {
		t.Fatal(err)
	}
	part, err := c.PutPart(t.Context(), given, 1, src, c.Sum(src))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Abort(t.Context(), given); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Head(t.Context(), "b"); object.ClassOf(err) != object.ClassNotFound {
		t.Errorf("an upload that was given up: %v", err)
	}
	if page, err := c.List(t.Context(), "b", "", 0); err != nil || len(page.Objects) != 0 {
		t.Errorf("an upload that was given up is listed: %+v, %v", page, err)
	}
	other := memory(t, 7000)
	if _, err := upload(t.Context(), c, "b", other, 3000, false); err != nil {
		t.Fatal(err)
	}
	if mustRead(t, c, "b", 7000) != flat(other) {
		t.Error("uploads were mixed")
	}
	// Its parts went with the other's commit.
	_, err = c.Complete(t.Context(), given, []object.Part{part}, false)
	wantClass(t, err, object.ClassNotFound)
	if mustRead(t, c, "b", 7000) != flat(other) {
		t.Error("an upload that failed left bytes")
	}
}

// TestList: pages are of the length that was asked for, each object comes once, in order.
func TestList(t *testing.T) {
	c := open(t, newContainer(t))
	n := 330
	if os.Getenv("KVTIER_SOAK") != "" {
		n = 5100 // more than the service puts into a page
	}
	src := memory(t, 3)
	sum := c.Sum(src)
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				if _, err := c.Put(t.Context(), fmt.Sprintf("list/%04d", i), src, sum, false); err != nil {
					t.Errorf("put: %v", err)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	mustPut(t, c, "other", src)
	for _, limit := range []int{0, 100} {
		var keys []string
		cursor, pages := "", 0
		for {
			page, err := c.List(t.Context(), "list/", cursor, limit)
			if err != nil {
				t.Fatal(err)
			}
			pages++
			if limit > 0 && len(page.Objects) > limit {
				t.Errorf("a page of %d, want at most %d", len(page.Objects), limit)
			}
			for _, o := range page.Objects {
				if o.Bytes != 3 || o.ETag == "" {
					t.Fatalf("listed as %+v", o)
				}
				keys = append(keys, o.Key)
			}
			if cursor = page.Next; cursor == "" {
				break
			}
		}
		if len(keys) != n || !slices.IsSorted(keys) || keys[0] != "list/0000" || keys[n-1] != fmt.Sprintf("list/%04d", n-1) || len(slices.Compact(keys)) != n {
			t.Errorf("limit %d: %d keys in %d pages, want %d in order", limit, len(keys), pages, n)
		}
	}
	// And removed again, in batches, one of them with one that is not there.
	for first := 0; first < n; first += 255 {
		var keys []string
		for i := first; i < min(n, first+255); i++ {
			keys = append(keys, fmt.Sprintf("list/%04d", i))
		}
		errs, err := c.Delete(t.Context(), append(keys, "absent"))
		if err != nil || len(errs) != len(keys)+1 {
			t.Fatalf("delete: %v, %d answers", err, len(errs))
		}
		for i, err := range errs {
			if err != nil {
				t.Errorf("delete %d: %v", first+i, err)
			}
		}
	}
	if page, err := c.List(t.Context(), "", "", 0); err != nil || len(page.Objects) != 1 || page.Objects[0].Key != "other" {
		t.Errorf("left are %+v, %v", page, err)
	}
}

// TestDelete: each object has its own answer.
func TestDelete(t *testing.T) {
	l := newContainer(t)
	c := open(t, l)
	src := memory(t, 3)
	for _, key := range []string{"a", "leased", "b", "odd name+%&?#ü"} {
		mustPut(t, c, key, src)
	}
	lease(t, l, "leased")
	errs, err := c.Delete(t.Context(), []string{"a", "absent", "leased", "bad.", "odd name+%&?#ü"})
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range []int{0, 1, 4} {
		if errs[i] != nil {
			t.Errorf("delete %d: %v", i, errs[i])
		}
	}
	if e := wantClass(t, errs[2], object.ClassOther); e.Status != 412 || e.Code != "LeaseIdMissing" || e.Request == "" || e.Key != "leased" {
		t.Errorf("leased: %v", errs[2])
	}
	if !errors.Is(errs[3], xfer.ErrInvalid) {
		t.Errorf("bad name: %v", errs[3])
	}
	for _, key := range []string{"b", "b"} { // alone, and when it is gone
		if errs, err = c.Delete(t.Context(), []string{key}); err != nil || errs[0] != nil {
			t.Errorf("delete %s: %v, %v", key, errs, err)
		}
	}
	page, err := c.List(t.Context(), "", "", 0)
	if err != nil || len(page.Objects) != 1 || page.Objects[0].Key != "leased" {
		t.Errorf("left are %+v, %v", page, err)
	}
	if errs, err := c.Delete(t.Context(), nil); err != nil || len(errs) != 0 {
		t.Errorf("nothing: %v, %v", errs, err)
	}
	if _, err := c.Delete(t.Context(), make([]string, 257)); object.ClassOf(err) != object.ClassOther || err == nil {
		t.Errorf("too many: %v", err)
	}
}

// TestSignature: a shared access signature does for all that a client does.
func TestSignature(t *testing.T) {
	l := newContainer(t)
	all := sas.ContainerPermissions{Read: true, Add: true, Create: true, Write: true, Delete: true, List: true}
	signed, err := bare(t, l).GetSASURL(all, time.Now().Add(time.Hour), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, signature, _ := strings.Cut(signed, "?")
	t.Setenv("AZURE_STORAGE_KEY", "")
	t.Setenv("AZURE_STORAGE_SAS_TOKEN", signature)
	c := open(t, l)
	if err := c.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	src := memory(t, 5000)
	mustPut(t, c, "a", src)
	if _, err := upload(t.Context(), c, "b", src, 3000, true); err != nil {
		t.Fatal(err)
	}
	if mustRead(t, c, "b", 5000) != flat(src) {
		t.Error("other bytes")
	}
	if errs, err := c.Delete(t.Context(), []string{"a", "absent", "b"}); err != nil || errors.Join(errs...) != nil {
		t.Errorf("delete: %v, %v", err, errs)
	}
	t.Setenv("AZURE_STORAGE_SAS_TOKEN", strings.Replace(signature, "sig=", "sig=x", 1))
	err = open(t, l).Check(t.Context())
	if e := wantClass(t, err, object.ClassDenied); strings.Contains(err.Error(), "sig=") || e.Code == "" {
		t.Errorf("%v, want a code and no signature", err)
	}
}
