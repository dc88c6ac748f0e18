package s3

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/xfer"
)

// Location is where objects are.
type Location struct {
	Bucket    string
	Prefix    string // of all keys; empty, or with a slash at the end
	Endpoint  string // URL of the service; empty for AWS's, of the region
	Region    string // empty for the SDK's standard chain
	PathStyle bool   // the bucket is in the path and not in the host's name
}

// The names of the parameters.
const (
	paramEndpoint  = "endpoint"
	paramRegion    = "region"
	paramPathStyle = "path_style"
)

// ParseURL reads s3://BUCKET/PREFIX?endpoint=URL&path_style=true&region=R. All but the
// bucket may be left out. Errors: xfer.ErrInvalid, which says what is wrong where.
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
		return fail("it has a user: credentials come from the environment or the shared files of the SDK")
	case u.Host == "":
		return fail("no bucket, want s3://BUCKET/PREFIX")
	case u.Port() != "":
		return fail("bucket %q has a port: the service's address goes into the parameter %s", u.Host, paramEndpoint)
	case u.Fragment != "":
		return fail("it has a fragment: write # in a prefix as %%23")
	}
	l := Location{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	if l.Prefix != "" {
		l.Prefix += "/"
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("its parameters cannot be read")
	}
	for name, values := range q {
		if len(values) != 1 {
			return fail("parameter %s is there %d times", name, len(values))
		}
		value := values[0]
		switch name {
		case paramEndpoint:
			e, err := url.Parse(value)
			if err != nil || e.Scheme != "http" && e.Scheme != "https" || e.Host == "" || e.User != nil || e.RawQuery != "" || e.Fragment != "" {
				return fail("%s must be http://HOST or https://HOST", paramEndpoint)
			}
			l.Endpoint = strings.TrimSuffix(value, "/")
		case paramRegion:
			l.Region = value
		case paramPathStyle:
			if l.PathStyle, err = strconv.ParseBool(value); err != nil {
				return fail("%s=%s, want true or false", paramPathStyle, value)
			}
		default:
			known := []string{paramEndpoint, paramPathStyle, paramRegion}
			return fail("unknown parameter %q, want %s", name, strings.Join(slices.Sorted(slices.Values(known)), ", "))
		}
	}
	return l, nil
}

// redact hides what may be a password in a URL.
func redact(s string) string {
	at, slashes := strings.LastIndexByte(s, '@'), strings.Index(s, "://")
	if slashes >= 0 && at > slashes {
		return s[:slashes+3] + "..." + s[at:]
	}
	return s
}

// String writes bucket and prefix as a URL.
func (l Location) String() string { return Kind + "://" + l.Bucket + "/" + l.Prefix }
