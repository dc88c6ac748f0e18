package main

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestParseEndpoint(t *testing.T) {
	for in, want := range map[string]endpoint{
		"127.0.0.1:7070": {"tcp", "127.0.0.1:7070"},
		"[::1]:0":        {"tcp", "[::1]:0"},
		":7070":          {"tcp", ":7070"},
		"host:65535":     {"tcp", "host:65535"},
		"unix:/run/a":    {"unix", "/run/a"},
		"unix:rel":       {"unix", "rel"},
	} {
		got, err := parseEndpoint(in)
		if err != nil || got != want || got.String() != in {
			t.Errorf("%q: got %v (%q), %v, want %v", in, got, got, err, want)
		}
	}
	for _, in := range []string{"", "7070", "host", "host:", "host:65536", "host:-1", "host:http", "::1:1", "unix:", "unix:" + strings.Repeat("a", 108)} {
		if got, err := parseEndpoint(in); err == nil || !strings.Contains(err.Error(), in) {
			t.Errorf("%q: got %v, %v, want an error that names the value", in, got, err)
		}
	}
}

func TestIsLoopback(t *testing.T) {
	for in, want := range map[string]bool{
		"127.0.0.1:1":          true,
		"127.9.9.9:1":          true,
		"[::1]:1":              true,
		"[::ffff:127.0.0.1]:1": true,
		"localhost:1":          true,
		"unix:/run/a":          true,
		":1":                   false,
		"0.0.0.0:1":            false,
		"[::]:1":               false,
		"10.1.2.3:1":           false,
		"name.invalid:1":       false,
	} {
		e, err := parseEndpoint(in)
		if err != nil {
			t.Fatal(err)
		}
		if got := isLoopback(context.Background(), e); got != want {
			t.Errorf("%s: got %v, want %v", in, got, want)
		}
	}
}

func TestListenInUse(t *testing.T) {
	ctx := context.Background()
	l, err := listen(ctx, endpoint{"tcp", "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	e := boundTo(l)
	_, err = listen(ctx, e)
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), e.String()) {
		t.Errorf("got %v, want an error that names %s and says in use", err, e)
	}
	// TEST-NET-1 is nobody's address.
	_, err = listen(ctx, endpoint{"tcp", "192.0.2.1:7070"})
	if !errors.Is(err, syscall.EADDRNOTAVAIL) || !strings.Contains(err.Error(), "192.0.2.1:7070") {
		t.Errorf("got %v, want an error that names the address", err)
	}
}

func TestListenUnix(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "s")
	e := endpoint{"unix", path}
	l, err := listen(ctx, e)
	if err != nil {
		t.Fatal(err)
	}
	if got := boundTo(l); got != e {
		t.Errorf("bound to %v, want %v", got, e)
	}
	if _, err := listen(ctx, e); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("second listener: %v, want in use", err)
	}
	// A killed daemon leaves its socket behind.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	l, err = listen(ctx, e)
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	l.Close()
	// What is no socket stays.
	write(t, path, "precious")
	if _, err := listen(ctx, e); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file: %v, want an error", err)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "precious" {
		t.Errorf("the file has %q, %v", data, err)
	}
}
