package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"

	"github.com/kvtier/kvtier/api/access"
)

// security is how clients prove who they are.
type security struct {
	tls    *tls.Config  // nil without TLS
	token  string       // "" without
	access *access.List // instead of the token; nil without
}

// loadSecurity reads the files that the flags name.
func loadSecurity(f *serveFlags, getenv func(string) string) (security, error) {
	var s security
	switch {
	case (f.tlsCert == "") != (f.tlsKey == ""):
		return s, usageErrorf("--tls-cert %q and --tls-key %q: both or none", f.tlsCert, f.tlsKey)
	case f.tlsClientCA != "" && f.tlsCert == "":
		return s, usageErrorf("--tls-client-ca %q needs --tls-cert and --tls-key", f.tlsClientCA)
	}
	if f.tlsCert != "" {
		cert, err := tls.LoadX509KeyPair(f.tlsCert, f.tlsKey)
		if err != nil {
			return s, fmt.Errorf("load --tls-cert %s with --tls-key %s: %w", f.tlsCert, f.tlsKey, err)
		}
		s.tls = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13}
	}
	if f.tlsClientCA != "" {
		pem, err := os.ReadFile(f.tlsClientCA)
		if err != nil {
			return s, fmt.Errorf("load --tls-client-ca: %w", err)
		}
		s.tls.ClientCAs = x509.NewCertPool()
		if !s.tls.ClientCAs.AppendCertsFromPEM(pem) {
			return s, fmt.Errorf("load --tls-client-ca %s: no certificate in it", f.tlsClientCA)
		}
		s.tls.ClientAuth = tls.RequireAndVerifyClientCert
	}
	var err error
	if f.access == "" {
		s.token, err = loadToken(f.tokenFile, getenv)
		return s, err
	}
	switch {
	case f.tokenFile != "":
		return s, usageErrorf("--access %s and --token-file %s: one of them; in the list of --access each token has its own rights", f.access, f.tokenFile)
	case getenv(tokenEnv) != "":
		return s, usageErrorf("--access %s and a token in %s: unset it; in the list of --access each token has its own rights", f.access, tokenEnv)
	}
	s.access, err = loadAccess(f.access)
	return s, err
}

// loadAccess reads who may connect, and what each may do.
func loadAccess(path string) (*access.List, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, usageErrorf("read --access: %w", err)
	}
	l, err := access.Parse(data)
	if err != nil {
		return nil, usageErrorf("--access %s: %w", path, err)
	}
	return l, nil
}

// loadToken reads the token from a file, or from the environment when there is
// none; "" when neither has one.
func loadToken(path string, getenv func(string) string) (string, error) {
	from := tokenEnv
	token := getenv(tokenEnv)
	if path != "" {
		data, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("read --token-file: %w", err)
		}
		from = "--token-file " + path
		token = string(data)
		if strings.TrimSpace(token) == "" {
			return "", fmt.Errorf("%s: no token in it", from)
		}
	}
	token = strings.TrimSpace(token)
	for _, r := range token {
		// gRPC metadata is printable ASCII.
		if r <= 0x20 || r > 0x7e {
			return "", fmt.Errorf("%s: a token has no spaces and only printable ASCII characters", from)
		}
	}
	return token, nil
}
