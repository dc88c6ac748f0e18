package azure_test

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/streaming"

	"github.com/kvtier/kvtier/backends/object"
)

// BenchmarkService moves objects eight at a time, in turns by the backend and by the SDK
// alone, and reports how fast the backend is by that measure. Azurite is what limits both.
func BenchmarkService(b *testing.B) {
	const side = 8
	l := newContainer(b)
	ours := newBackend(b, at(l, ""), object.Options{PartBytes: 8 << 20})
	sdk := bare(b, l)
	for _, size := range []int{256 << 10, 8 << 20} {
		src := memory(b, size)
		plain := []byte(flat(src))
		var dst [side]object.Vector
		var plainDst [side][]byte
		for i := range side {
			dst[i], plainDst[i] = blank(b, size), make([]byte, size)
		}
		for _, op := range []struct {
			name      string
			ours, sdk func(i int) error
		}{
			{
				"put",
				func(i int) error { _, err := ours.Put(b.Context(), fmt.Sprint("ours", i), src, false); return err },
				func(i int) error {
					_, err := sdk.NewBlockBlobClient(fmt.Sprint("sdk", i)).Upload(b.Context(), streaming.NopCloser(bytes.NewReader(plain)), nil)
					return err
				},
			},
			{
				"get",
				func(i int) error {
					got, err := ours.Get(b.Context(), fmt.Sprint("ours", i), 0, dst[i], true)
					if err == nil && !got.Verified {
						return fmt.Errorf("not verified: %+v", got)
					}
					return err
				},
				func(i int) error {
					r, err := sdk.NewBlockBlobClient(fmt.Sprint("sdk", i)).DownloadStream(b.Context(), nil)
					if err != nil {
						return err
					}
					defer r.Body.Close()
					_, err = io.ReadFull(r.Body, plainDst[i])
					return err
				},
			},
		} {
			round := func(f func(i int) error) time.Duration {
				began := time.Now()
				var wg sync.WaitGroup
				for i := range side {
					wg.Go(func() {
						if err := f(i); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				return time.Since(began)
			}
			round(op.ours) // also makes what get reads
			round(op.sdk)
			b.Run(fmt.Sprintf("%s/%dKiB", op.name, size>>10), func(b *testing.B) {
				b.SetBytes(2 * side * int64(size))
				var a, s time.Duration
				for n := 0; b.Loop(); n++ {
					if n%2 == 0 {
						a += round(op.ours)
						s += round(op.sdk)
					} else {
						s += round(op.sdk)
						a += round(op.ours)
					}
				}
				b.ReportMetric(s.Seconds()/a.Seconds(), "of-sdk")
			})
		}
	}
}
