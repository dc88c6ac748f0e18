package s3

import (
	"net/url"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/backends/object"
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
	u, err := object.ParseURL(Kind, s, paramEndpoint, paramPathStyle, paramRegion)
	if err != nil {
		return Location{}, err
	}
	l := Location{Bucket: u.Bucket, Prefix: u.Prefix, Region: u.Params[paramRegion]}
	if endpoint, ok := u.Params[paramEndpoint]; ok {
		e, err := url.Parse(endpoint)
		if err != nil || e.Scheme != "http" && e.Scheme != "https" || e.Host == "" || e.User != nil || e.RawQuery != "" || e.Fragment != "" {
			return Location{}, u.Errorf("%s must be http://HOST or https://HOST", paramEndpoint)
		}
		l.Endpoint = strings.TrimSuffix(endpoint, "/")
	}
	if style, ok := u.Params[paramPathStyle]; ok {
		if l.PathStyle, err = strconv.ParseBool(style); err != nil {
			return Location{}, u.Errorf("%s=%s, want true or false", paramPathStyle, style)
		}
	}
	return l, nil
}

// String writes bucket and prefix as a URL.
func (l Location) String() string { return Kind + "://" + l.Bucket + "/" + l.Prefix }
