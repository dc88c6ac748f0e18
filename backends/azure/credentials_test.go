package azure

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"

	"github.com/kvtier/kvtier/backends/object"
	"github.com/kvtier/kvtier/xfer"
)

func TestParseURL(t *testing.T) {
	for _, tt := range []struct {
		url  string
		want Location
		why  string // part of the error; "" for none
	}{
		{"azure://kv", Location{Container: "kv1"}, "container"},
		{"azure://kv1", Location{Container: "kv1"}, ""},
		{"azure://kv-1/", Location{Container: "kv-1"}, ""},
		{"azure://kv1/a/b/", Location{Container: "kv1", Prefix: "a/b/"}, ""},
		{"azure://kv1/a?endpoint=http%3A%2F%2F127.0.0.1%3A10000%2Fdevstoreaccount1%2F", Location{"kv1", "a/", "http://127.0.0.1:10000/devstoreaccount1"}, ""},
		{"azure://kv1/a?endpoint=https://acc.blob.core.windows.net", Location{"kv1", "a/", "https://acc.blob.core.windows.net"}, ""},
		{"s3://kv1/a", Location{}, "scheme"},
		{"azure:///a", Location{}, "container"},
		{"azure://KV1/a", Location{}, "container"},
		{"azure://kv--1/a", Location{}, "container"},
		{"azure://" + strings.Repeat("k", 64), Location{}, "container"},
		{"azure://kv1:80/a", Location{}, "port"},
		{"azure://me:secret@kv1/a", Location{}, "user"},
		{"azure://kv1/a#b", Location{}, "fragment"},
		{"azure://kv1/a//b", Location{}, "empty"},
		{"azure://kv1/a./b", Location{}, "dot"},
		{"azure://kv1/a.", Location{}, "dot"},
		{"azure://kv1/" + strings.Repeat("p", 600), Location{}, "bytes"},
		{"azure://kv1/a?region=x", Location{}, "region"},
		{"azure://kv1/a?endpoint=ftp://x", Location{}, "endpoint"},
		{"azure://kv1/a?endpoint=https://", Location{}, "endpoint"},
		{"azure://kv1/a?endpoint=https://a&endpoint=https://b", Location{}, "2 times"},
		{"azure://kv1/a?endpoint=https%3A%2F%2Fx%3Fsig%3Dsecret", Location{}, envSAS},
		{"azure://kv1/a?%zz", Location{}, "parameters"},
	} {
		got, err := ParseURL(tt.url)
		switch {
		case tt.why == "" && (err != nil || got != tt.want):
			t.Errorf("%s: %+v, %v; want %+v", tt.url, got, err, tt.want)
		case tt.why != "" && (!errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), tt.why) || strings.Contains(err.Error(), "secret")):
			t.Errorf("%s: %v, want ErrInvalid with %q and no secret", tt.url, err, tt.why)
		}
	}
}

func TestEnvironment(t *testing.T) {
	const key = "c2VjcmV0"
	for _, tt := range []struct {
		name string
		url  string
		env  map[string]string
		want environment
		why  string
	}{
		{"nothing", "azure://kv1", nil, environment{}, envAccount},
		{"account and key", "azure://kv1", map[string]string{envAccount: "acc", envKey: key}, environment{"https://acc.blob.core.windows.net/", "acc", key, ""}, ""},
		{"signature", "azure://kv1", map[string]string{envAccount: "acc", envSAS: "?sv=1&sig=x"}, environment{"https://acc.blob.core.windows.net/", "acc", "", "sv=1&sig=x"}, ""},
		{"identity", "azure://kv1", map[string]string{envAccount: "acc"}, environment{"https://acc.blob.core.windows.net/", "acc", "", ""}, ""},
		{"account of the host", "azure://kv1?endpoint=https://acc.blob.core.windows.net", map[string]string{envKey: key}, environment{"https://acc.blob.core.windows.net/", "acc", key, ""}, ""},
		{"account of the path", "azure://kv1?endpoint=http://127.0.0.1:1/dev", map[string]string{envKey: key}, environment{"http://127.0.0.1:1/dev/", "dev", key, ""}, ""},
		{"no account", "azure://kv1?endpoint=http://127.0.0.1:1", map[string]string{envKey: key}, environment{}, envAccount},
		{"connection", "azure://kv1", map[string]string{envConnection: "DefaultEndpointsProtocol=http;AccountName=acc;AccountKey=" + key + "==;EndpointSuffix=example.org;"}, environment{"http://acc.blob.example.org/", "acc", key + "==", ""}, ""},
		{"connection with an endpoint", "azure://kv1", map[string]string{envConnection: "BlobEndpoint=http://127.0.0.1:1/dev;AccountName=dev;AccountKey=" + key}, environment{"http://127.0.0.1:1/dev/", "dev", key, ""}, ""},
		{"the URL goes before", "azure://kv1?endpoint=http://127.0.0.1:2/dev", map[string]string{envConnection: "BlobEndpoint=http://127.0.0.1:1/dev;AccountName=dev;AccountKey=" + key}, environment{"http://127.0.0.1:2/dev/", "dev", key, ""}, ""},
		{"connection with a signature", "azure://kv1", map[string]string{envConnection: "BlobEndpoint=https://acc.example.org;SharedAccessSignature=sv=1&sig=x", envKey: key}, environment{"https://acc.example.org/", "acc", "", "sv=1&sig=x"}, ""},
		{"connection to nowhere", "azure://kv1", map[string]string{envConnection: "AccountKey=" + key}, environment{}, "BlobEndpoint"},
		{"no connection", "azure://kv1", map[string]string{envConnection: key}, environment{}, envConnection},
		{"bad endpoint", "azure://kv1", map[string]string{envConnection: "BlobEndpoint=acc?sig=" + key}, environment{}, "endpoint"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, name := range []string{envConnection, envAccount, envKey, envSAS} {
				t.Setenv(name, tt.env[name])
			}
			l, err := ParseURL(tt.url)
			if err != nil {
				t.Fatal(err)
			}
			got, err := readEnvironment(l)
			switch {
			case tt.why == "" && (err != nil || got != tt.want):
				t.Errorf("%+v, %v; want %+v", got, err, tt.want)
			case tt.why != "" && (!errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), tt.why) || strings.Contains(err.Error(), key)):
				t.Errorf("%v, want ErrInvalid with %q and no secret", err, tt.why)
			}
		})
	}
}

func TestOpenRefused(t *testing.T) {
	for _, tt := range []struct {
		name     string
		key, url string
		why      string
	}{
		{"key", "not base64", "azure://kv1?endpoint=https://acc.example.org", envKey},
		{"identity without TLS", "", "azure://kv1?endpoint=http://127.0.0.1:1/dev", "https"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, name := range []string{envConnection, envAccount, envSAS} {
				t.Setenv(name, "")
			}
			t.Setenv(envKey, tt.key)
			_, err := New(&Options{URL: tt.url})
			if !errors.Is(err, xfer.ErrInvalid) || !strings.Contains(err.Error(), tt.why) || tt.key != "" && strings.Contains(err.Error(), tt.key) {
				t.Errorf("%v, want ErrInvalid with %q", err, tt.why)
			}
		})
	}
	t.Setenv(envKey, "c2VjcmV0")
	if _, err := New(&Options{URL: "azure://kv1?endpoint=https://acc.example.org", Object: object.Options{Concurrency: -1}}); !errors.Is(err, xfer.ErrInvalid) {
		t.Errorf("concurrency -1: %v", err)
	}
}

// issuer is an identity whose tokens take a while.
type issuer struct {
	takes time.Duration
	lasts time.Duration
	err   error
	asked atomic.Int64
}

func (i *issuer) GetToken(ctx context.Context, o policy.TokenRequestOptions) (azcore.AccessToken, error) {
	i.asked.Add(1)
	select {
	case <-time.After(i.takes):
		return azcore.AccessToken{Token: "t", ExpiresOn: time.Now().Add(i.lasts)}, i.err
	case <-ctx.Done():
		return azcore.AccessToken{}, ctx.Err()
	}
}

// TestTokens: calls that wait for a token share one request for it, each ends with its own
// context, a token is kept until shortly before it ends, and Close waits for nobody.
func TestTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := &issuer{takes: 10 * time.Second, lasts: time.Hour}
		k := newTokens(from, func() {})
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				if err := k.ready(t.Context()); err != nil {
					t.Errorf("ready: %v", err)
				}
			})
		}
		began := time.Now()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := k.ready(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("ready with a deadline: %v", err)
		}
		if d := time.Since(began); d != time.Second {
			t.Errorf("ready with a deadline of 1s took %v", d)
		}
		wg.Wait()
		if n := from.asked.Load(); n != 1 {
			t.Errorf("asked %d times, want 1", n)
		}
		time.Sleep(54 * time.Minute)
		if err := k.ready(t.Context()); err != nil || from.asked.Load() != 1 {
			t.Errorf("ready: %v, asked %d times, want 1", err, from.asked.Load())
		}
		time.Sleep(2 * time.Minute)
		if err := k.ready(t.Context()); err != nil || from.asked.Load() != 2 {
			t.Errorf("ready: %v, asked %d times, want 2", err, from.asked.Load())
		}
		// The service may want another one than it was given.
		if _, err := k.GetToken(t.Context(), policy.TokenRequestOptions{Claims: "more"}); err != nil || from.asked.Load() != 3 {
			t.Errorf("GetToken with claims: %v, asked %d times, want 3", err, from.asked.Load())
		}
		// While the issuer fails the old one does, as long as it lasts.
		time.Sleep(56 * time.Minute)
		from.err = errors.New("out of order")
		for range 3 {
			if err := k.ready(t.Context()); err != nil || from.asked.Load() != 4 {
				t.Errorf("ready: %v, asked %d times, want 4", err, from.asked.Load())
			}
		}
		time.Sleep(5 * time.Minute)
		if err := k.ready(t.Context()); !errors.Is(err, from.err) {
			t.Errorf("ready without a token: %v", err)
		}
		k.close()
		k.close()
	})
	synctest.Test(t, func(t *testing.T) {
		refuses := &issuer{err: errors.New("who are you?")}
		k := newTokens(refuses, func() {})
		c := &client{tokens: k}
		err := c.authorize(t.Context(), "get", "a")
		if object.ClassOf(err) != object.ClassDenied || !errors.Is(err, refuses.err) {
			t.Errorf("refused: %v", err)
		}
		k.close()
	})
	synctest.Test(t, func(t *testing.T) {
		never := &issuer{takes: time.Hour}
		k := newTokens(never, func() {})
		began := time.Now()
		wait := make(chan error)
		go func() { wait <- k.ready(t.Context()) }()
		synctest.Wait()
		go k.close()
		if err := <-wait; !errors.Is(err, context.Canceled) || time.Since(began) != 0 {
			t.Errorf("ready while it is closed: %v after %v", err, time.Since(began))
		}
	})
}
