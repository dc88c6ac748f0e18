package s3

import (
	"errors"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// FuzzParseURL: a URL that is accepted has a bucket and an address that can be one, and
// written again it means the same; the error about another one is ErrInvalid.
func FuzzParseURL(f *testing.F) {
	for _, s := range []string{
		"s3://bucket", "s3://bucket/a/b/?endpoint=http://127.0.0.1:1/&path_style=true&region=r", "s3://bucket//a", "s3://u:p@bucket", "s3://bucket:1", "s3://",
		"s3://bucket?region=a&region=b", "s3://bucket#f", "s3://bucket/%23?path_style=2", "s3://bucket?endpoint=ftp://h", "s3://bucket?endpoint=http://u@h", "S3://b", "s3:bucket", "s3://b?sig=x",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		l, err := ParseURL(s)
		if err != nil {
			if !errors.Is(err, xfer.ErrInvalid) {
				t.Fatalf("%q: %v, want ErrInvalid", s, err)
			}
			return
		}
		if l.Bucket == "" || l.Prefix != "" && (!strings.HasSuffix(l.Prefix, "/") || strings.HasPrefix(l.Prefix, "/")) {
			t.Fatalf("%q is %+v", s, l)
		}
		if e, err := url.Parse(l.Endpoint); err != nil || l.Endpoint != "" && (e.Host == "" || e.Scheme != "http" && e.Scheme != "https") {
			t.Fatalf("%q has the endpoint %q", s, l.Endpoint)
		}
		q := url.Values{paramPathStyle: {strconv.FormatBool(l.PathStyle)}, paramRegion: {l.Region}}
		if l.Endpoint != "" {
			q.Set(paramEndpoint, l.Endpoint)
		}
		u := url.URL{Scheme: Kind, Host: l.Bucket, Path: "/" + l.Prefix, RawQuery: q.Encode()}
		if again, err := ParseURL(u.String()); err != nil || again != l {
			t.Fatalf("%q is %+v, read again from %q %+v, %v", s, l, u.String(), again, err)
		}
	})
}
