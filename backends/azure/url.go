package azure

import (
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strings"

	"github.com/kvtier/kvtier/xfer"
)

// Location is where objects are.
type Location struct {
	Container string
	Prefix    string // of all keys; empty, or with a slash at the end
	Endpoint  string // URL of the account's blob service; empty for the account's own in Azure
}

// ParseURL reads azure://CONTAINER/PREFIX?endpoint=URL. All but the container may be left
// out. Errors: xfer.ErrInvalid, which says what is wrong where.
func ParseURL(s string) (Location, error) {
	fail := func(format string, args ...any) (Location, error) {
		return Location{}, fmt.Errorf("object URL %q: %w: %s", redact(s), xfer.ErrInvalid, fmt.Sprintf(format, args...))
	}
	u, err := url.Parse(s)
	if err != nil {
		return fail("not a URL")
	}
	switch {
	case u.Scheme != Kind:
		return fail("scheme %q, want %s", u.Scheme, Kind)
	case u.User != nil:
		return fail("it has a user: credentials come from the environment")
	case !containerName.MatchString(u.Hostname()) || len(u.Hostname()) > 63:
		return fail("container %q, want 3 to 63 lower-case letters, digits and single hyphens", u.Hostname())
	case u.Port() != "":
		return fail("container %q has a port: the service's address goes into the parameter endpoint", u.Host)
	case u.Fragment != "":
		return fail("it has a fragment: write # in a prefix as %%23")
	}
	l := Location{Container: u.Host, Prefix: strings.Trim(u.Path, "/")}
	if l.Prefix != "" {
		l.Prefix += "/"
	}
	switch {
	case strings.Contains(l.Prefix, "./") || strings.Contains(l.Prefix, "//"):
		return fail("no part of the prefix may be empty or end with a dot: the service would take that away")
	case len(l.Prefix) > maxName/2:
		return fail("the prefix has %d bytes, want at most %d", len(l.Prefix), maxName/2)
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("its parameters cannot be read")
	}
	for name, values := range q {
		switch {
		case name != "endpoint":
			return fail("unknown parameter %q, want endpoint", name)
		case len(values) != 1:
			return fail("parameter %s is there %d times", name, len(values))
		}
		if err := checkEndpoint(values[0]); err != nil {
			return fail("%v", err)
		}
		l.Endpoint = strings.TrimRight(values[0], "/")
	}
	return l, nil
}

// A container's name by the service's rules. The names with $ are the service's own.
var containerName = regexp.MustCompile(`^(\$root|\$web|[a-z0-9](-?[a-z0-9]){2,62})$`)

// checkEndpoint says what is wrong with the URL of an account, without the URL: there may
// be a secret in it.
func checkEndpoint(endpoint string) error {
	u, err := url.Parse(endpoint)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("endpoint must be https://ACCOUNT.HOST, or http:// or https:// and HOST/ACCOUNT")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("endpoint has a user, a query or a fragment: a shared access signature goes into %s", envSAS)
	}
	return nil
}

// redact hides what may be a password or a signature in a URL.
func redact(s string) string {
	if i := strings.Index(s, "sig="); i >= 0 {
		s = s[:i] + "sig=..."
	}
	if i := strings.Index(s, "sig%3D"); i >= 0 {
		s = s[:i] + "sig%3D..."
	}
	at, slashes := strings.LastIndexByte(s, '@'), strings.Index(s, "://")
	if slashes >= 0 && at > slashes {
		return s[:slashes+3] + "..." + s[at:]
	}
	return s
}

// String writes container and prefix as a URL.
func (l Location) String() string { return Kind + "://" + l.Container + "/" + l.Prefix }

// account is the name of the account that an endpoint belongs to: the first part of its
// path, or, as in Azure, of its host.
func account(endpoint string) string {
	u, err := url.Parse(endpoint)
	if err != nil {
		return ""
	}
	if first, _, _ := strings.Cut(strings.Trim(u.Path, "/"), "/"); first != "" {
		return first
	}
	if net.ParseIP(u.Hostname()) != nil {
		return ""
	}
	name, _, _ := strings.Cut(u.Hostname(), ".")
	return name
}
