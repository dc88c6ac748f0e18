package s3

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/internal/servers"
	"github.com/kvtier/kvtier/xfer"
	"github.com/kvtier/kvtier/xfer/xfertest"
)

// BenchmarkAgainstSDK moves objects, eight at once, by an agent and by the bare SDK with
// its own settings, in turns, and reports the ratio of their speeds.
func BenchmarkAgainstSDK(b *testing.B) {
	s := servers.StartVersityGW(b)
	s.Bucket(b, bucket)
	s.Login(b)
	cfg, err := config.LoadDefaultConfig(b.Context(), config.WithRegion(s.Region))
	if err != nil {
		b.Fatal(err)
	}
	sdk := s3.NewFromConfig(cfg, func(o *s3.Options) { o.BaseEndpoint, o.UsePathStyle = &s.Endpoint, true })
	backend, err := New(b.Context(), &Options{URL: objectURL(s.Endpoint)})
	if err != nil {
		b.Fatal(err)
	}
	agent, err := xfer.NewAgent("bench", nil)
	if err != nil {
		b.Fatal(err)
	}
	if err := agent.AddBackend(backend); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := agent.Close(); err != nil {
			b.Error(err)
		}
	})
	const side = 8
	mem := xfertest.DRAM(b, side*8<<20)
	if err := agent.Register(b.Context(), xfer.DescList{Type: xfer.DRAM, Descs: []xfer.Desc{mem.Desc}}, nil); err != nil {
		b.Fatal(err)
	}
	dev := uint64(0)
	for _, size := range []int64{8 << 20, 256 << 10} {
		local, remote := xfer.DescList{Type: xfer.DRAM}, xfer.DescList{Type: xfer.OBJ}
		for i := range int64(side) {
			dev++
			d := xfer.Desc{Len: uint64(size), Dev: dev, Meta: fmt.Sprintf("bench-%d-%d", size, i)}
			if err := agent.Register(b.Context(), xfer.DescList{Type: xfer.OBJ, Descs: []xfer.Desc{d}}, nil); err != nil {
				b.Fatal(err)
			}
			d.Meta = ""
			remote.Descs = append(remote.Descs, d)
			local.Descs = append(local.Descs, xfer.Desc{Addr: mem.Desc.Addr + uint64(i*size), Len: uint64(size)})
		}
		heap := make([][]byte, side)
		for i := range heap {
			heap[i] = make([]byte, size)
		}
		for _, op := range []xfer.Op{xfer.Write, xfer.Read} {
			b.Run(fmt.Sprintf("%s/%dKiB", op, size>>10), func(b *testing.B) {
				r, err := agent.NewRequest(op, local, remote, nil)
				if err != nil {
					b.Fatal(err)
				}
				defer r.Release()
				bare := func() {
					var wg sync.WaitGroup
					for i := range side {
						wg.Go(func() {
							key := aws.String(fmt.Sprintf("bare-%d-%d", size, i))
							if op == xfer.Write {
								if _, err := sdk.PutObject(b.Context(), &s3.PutObjectInput{Bucket: aws.String(bucket), Key: key, Body: bytes.NewReader(heap[i])}); err != nil {
									b.Error(err)
								}
								return
							}
							out, err := sdk.GetObject(b.Context(), &s3.GetObjectInput{Bucket: aws.String(bucket), Key: key})
							if err != nil {
								b.Error(err)
								return
							}
							if _, err := io.ReadFull(out.Body, heap[i]); err != nil {
								b.Error(err)
							}
							out.Body.Close()
						})
					}
					wg.Wait()
				}
				var ours, theirs time.Duration
				b.SetBytes(side * size)
				for b.Loop() {
					at := time.Now()
					if err := r.Run(b.Context()); err != nil {
						b.Fatal(err)
					}
					ours += time.Since(at)
					at = time.Now()
					bare()
					theirs += time.Since(at)
				}
				b.ReportMetric(theirs.Seconds()/ours.Seconds(), "of-SDK")
				b.ReportMetric(float64(side*size)*float64(b.N)/ours.Seconds()/1e6, "ours-MB/s")
				b.ReportMetric(float64(side*size)*float64(b.N)/theirs.Seconds()/1e6, "SDK-MB/s")
			})
		}
	}
	if st := backend.Stats(); st.Requests[object.KindGet]+st.Requests[object.KindPut] != st.Total() || st.Retries > 0 {
		b.Errorf("%+v", st)
	}
}
