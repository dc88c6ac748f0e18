package s3

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"

	"github.com/kvtier/kvtier/backends/object"
)

// failure classifies what the SDK returned.
func (c *client) failure(op, key string, err error) error {
	e := &object.Error{Op: op, Where: c.String(), Key: key, Class: object.ClassOther, Err: err}
	var answer *awshttp.ResponseError
	if errors.As(err, &answer) {
		e.Status, e.Request = answer.HTTPStatusCode(), answer.ServiceRequestID()
		if answer.Response != nil && answer.Response.Response != nil {
			e.After = retryAfter(answer.Response.Header.Get("Retry-After"))
		}
	}
	var api smithy.APIError
	if errors.As(err, &api) {
		e.Code = api.ErrorCode()
		// The SDK's own text repeats the place, the code and the id.
		e.Err = nil
		if m := api.ErrorMessage(); m != "" && m != e.Code {
			e.Err = errors.New(m)
		}
	}
	c.classify(e, err)
	return e
}

// classes says what the service's codes mean.
var classes = map[string]object.Class{
	"NoSuchKey":                          object.ClassNotFound,
	"NoSuchUpload":                       object.ClassNotFound,
	"NotFound":                           object.ClassNotFound,
	"NoSuchBucket":                       object.ClassNoBucket,
	"InvalidBucketName":                  object.ClassNoBucket,
	"PreconditionFailed":                 object.ClassExists,
	"ConditionalRequestConflict":         object.ClassUnavailable, // another write is under way: ask again
	"OperationAborted":                   object.ClassUnavailable,
	"InvalidRange":                       object.ClassRange,
	"AccessDenied":                       object.ClassDenied,
	"InvalidAccessKeyId":                 object.ClassDenied,
	"SignatureDoesNotMatch":              object.ClassDenied,
	"ExpiredToken":                       object.ClassDenied,
	"InvalidToken":                       object.ClassDenied,
	"RequestTimeTooSkewed":               object.ClassDenied,
	"AccountProblem":                     object.ClassDenied,
	"SlowDown":                           object.ClassThrottled,
	"ServiceUnavailable":                 object.ClassThrottled,
	"Throttling":                         object.ClassThrottled,
	"ThrottlingException":                object.ClassThrottled,
	"RequestLimitExceeded":               object.ClassThrottled,
	"TooManyRequests":                    object.ClassThrottled,
	"BandwidthLimitExceeded":             object.ClassThrottled,
	"InternalError":                      object.ClassUnavailable,
	"RequestTimeout":                     object.ClassUnavailable,
	"IncompleteBody":                     object.ClassNetwork,
	"BadDigest":                          object.ClassCorrupt,
	"InvalidDigest":                      object.ClassCorrupt,
	"XAmzContentChecksumMismatch":        object.ClassCorrupt,
	"XAmzContentSHA256Mismatch":          object.ClassCorrupt,
	"QuotaExceeded":                      object.ClassFull,
	"InsufficientStorage":                object.ClassFull,
	"XMinioStorageFull":                  object.ClassFull,
	"XMinioAdminBucketQuotaExceeded":     object.ClassFull,
	"PermanentRedirect":                  object.ClassOther,
	"AuthorizationHeaderMalformed":       object.ClassOther,
	"IllegalLocationConstraintException": object.ClassOther,
}

// classify sets class and hint.
func (c *client) classify(e *object.Error, err error) {
	var login *credentialsError
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var dns *net.DNSError
	var dial *net.OpError
	class, known := classes[e.Code]
	switch {
	case errors.As(err, &login):
		class = object.ClassDenied
		e.Hint = "no usable credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in the shared files"
		e.Err = login
	case known:
	case e.Status != 0:
		class = ofStatus(e.Status)
	case errors.As(err, &unknown), errors.As(err, &name):
		class = object.ClassOther
		e.Hint = "the service's certificate is not believed: name its CA's file, or change the parameter " + paramEndpoint
	default:
		class = object.ClassNetwork
		if errors.As(err, &dns) || errors.As(err, &dial) && dial.Op == "dial" {
			e.Hint = "the service is not reached: see the parameter " + paramEndpoint + " of the object URL"
		}
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			class, e.Hint = object.ClassTimeout, ""
		}
	}
	e.Class = class
	c.hint(e)
}

// hint says which setting to change, where the class or code tells.
func (c *client) hint(e *object.Error) {
	switch {
	case e.Class == object.ClassNoBucket:
		e.Hint = "make bucket " + strconv.Quote(c.loc.Bucket) + ", or change BUCKET of the object URL s3://BUCKET/PREFIX"
	case e.Code == "RequestTimeTooSkewed":
		e.Hint = "this machine's clock is wrong"
	case e.Class == object.ClassDenied && e.Hint == "":
		e.Hint = "the credentials are wrong or may not do this: see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the profile, and the bucket's policy"
	case e.Status/100 == 3, e.Code == "AuthorizationHeaderMalformed", e.Code == "IllegalLocationConstraintException":
		e.Hint = "the bucket is in another region: change the parameter " + paramRegion + " or " + paramEndpoint + " of the object URL"
	}
}

// ofStatus is for answers without a code, such as those to HEAD, and for codes that are
// not known.
func ofStatus(status int) object.Class {
	switch {
	case status == http.StatusNotFound:
		return object.ClassNotFound
	case status == http.StatusForbidden, status == http.StatusUnauthorized:
		return object.ClassDenied
	case status == http.StatusPreconditionFailed:
		return object.ClassExists
	case status == http.StatusRequestedRangeNotSatisfiable:
		return object.ClassRange
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable:
		return object.ClassThrottled
	case status == http.StatusInsufficientStorage:
		return object.ClassFull
	case status == http.StatusRequestTimeout, status >= 500:
		return object.ClassUnavailable
	case status < 300:
		return object.ClassNetwork // an answer that could not be read
	}
	return object.ClassOther
}

// retryAfter reads a header: seconds, or a date.
func retryAfter(s string) time.Duration {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 1<<20 {
		return time.Duration(n) * time.Second
	}
	if at, err := http.ParseTime(s); err == nil {
		return max(0, time.Until(at))
	}
	return 0
}
