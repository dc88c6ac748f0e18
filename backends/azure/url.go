package azure

import (
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strings"

	"github.com/kvtier/kvtier/backends/object"
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
	u, err := object.ParseURL(Kind, s, "endpoint")
	if err != nil {
		return Location{}, err
	}
	fail := func(format string, args ...any) (Location, error) { return Location{}, u.Errorf(format, args...) }
	l := Location{Container: u.Bucket, Prefix: u.Prefix}
	switch {
	case !containerName.MatchString(l.Container) || len(l.Container) > 63:
		return fail("container %q, want 3 to 63 lower-case letters, digits and single hyphens", l.Container)
	case strings.Contains(l.Prefix, "./") || strings.Contains(l.Prefix, "//"):
		return fail("no part of the prefix may be empty or end with a dot: the service would take that away")
	case len(l.Prefix) > maxName/2:
		return fail("the prefix has %d bytes, want at most %d", len(l.Prefix), maxName/2)
	}
	if endpoint, ok := u.Params["endpoint"]; ok {
		if err := checkEndpoint(endpoint); err != nil {
			return fail("%v", err)
		}
		l.Endpoint = strings.TrimRight(endpoint, "/")
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
