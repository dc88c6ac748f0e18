package azure

import (
	"errors"
	"net/url"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/xfer"
)

// FuzzParseURL: a URL that is accepted has a container and an address that can be one, and
// written again it means the same; the error about another one is ErrInvalid.
func FuzzParseURL(f *testing.F) {
	for _, s := range []string{
		"azure://container", "azure://container/a/b/?endpoint=http://127.0.0.1:1/devstoreaccount1", "azure://$root", "azure://Container", "azure://a-", "azure://abc/a./b",
		"azure://abc//a//b", "azure://abc?endpoint=https://h?sig=x", "azure://abc?endpoint=http://u@h", "azure://u:p@abc", "azure://abc:1", "azure://abc?x=1", "azure://",
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
		if !containerName.MatchString(l.Container) || l.Prefix != "" && (!strings.HasSuffix(l.Prefix, "/") || strings.HasPrefix(l.Prefix, "/")) {
			t.Fatalf("%q is %+v", s, l)
		}
		u := url.URL{Scheme: Kind, Host: l.Container, Path: "/" + l.Prefix}
		if l.Endpoint != "" {
			if err := checkEndpoint(l.Endpoint); err != nil {
				t.Fatalf("%q has the endpoint %q: %v", s, l.Endpoint, err)
			}
			u.RawQuery = url.Values{"endpoint": {l.Endpoint}}.Encode()
		}
		if again, err := ParseURL(u.String()); err != nil || again != l {
			t.Fatalf("%q is %+v, read again from %q %+v, %v", s, l, u.String(), again, err)
		}
	})
}
