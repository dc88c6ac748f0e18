package object

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/kvtier/kvtier/xfer"
)

// URL says where the objects of a backend are: KIND://BUCKET/PREFIX?PARAMETER=VALUE.
type URL struct {
	Bucket string            // or whatever a service calls it
	Prefix string            // of all keys; empty, or with a slash at the end
	Params map[string]string // those that are given

	text string
}

// ParseURL reads a URL of a kind, which knows these parameters; all but the bucket may be
// left out. Errors: xfer.ErrInvalid, which says what is wrong where.
func ParseURL(kind, s string, params ...string) (*URL, error) {
	l := &URL{text: s}
	u, err := url.Parse(s)
	if err != nil {
		return nil, l.Errorf("not a URL")
	}
	switch {
	case u.Scheme != kind:
		return nil, l.Errorf("scheme %q, want %s", u.Scheme, kind)
	case u.User != nil:
		return nil, l.Errorf("it has a user: credentials come from the environment")
	case u.Hostname() == "":
		return nil, l.Errorf("no bucket or container, want %s://NAME/PREFIX", kind)
	case u.Host != u.Hostname():
		return nil, l.Errorf("%q has a port: the service's address goes into a parameter", u.Host)
	case u.Fragment != "":
		return nil, l.Errorf("it has a fragment: write # in a prefix as %%23")
	}
	l.Bucket, l.Prefix = u.Host, strings.Trim(u.Path, "/")
	if l.Prefix != "" {
		l.Prefix += "/"
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return nil, l.Errorf("its parameters cannot be read")
	}
	l.Params = make(map[string]string)
	for name, values := range q {
		switch {
		case !slices.Contains(params, name):
			return nil, l.Errorf("unknown parameter %q, want %s", name, strings.Join(params, ", "))
		case len(values) != 1:
			return nil, l.Errorf("parameter %s is there %d times", name, len(values))
		}
		l.Params[name] = values[0]
	}
	return l, nil
}

// Errorf says what is wrong with the URL, and hides what may be secret in it.
// xfer.ErrInvalid.
func (l *URL) Errorf(format string, args ...any) error {
	return fmt.Errorf("object URL %q: %w: %s", redact(l.text), xfer.ErrInvalid, fmt.Sprintf(format, args...))
}

// redact hides what may be a password or a signature in a URL.
func redact(s string) string {
	for _, name := range []string{"sig=", "sig%3D"} {
		if i := strings.Index(s, name); i >= 0 {
			s = s[:i+len(name)] + "..."
		}
	}
	at, slashes := strings.LastIndexByte(s, '@'), strings.Index(s, "://")
	if slashes >= 0 && at > slashes {
		return s[:slashes+3] + "..." + s[at:]
	}
	return s
}
