package azure

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/bloberror"

	"github.com/kvtier/kvtier/backends/object"
)

// codes are the service's codes whose class does not follow from the status.
var codes = map[bloberror.Code]object.Class{
	bloberror.ContainerNotFound:     object.ClassNoBucket,
	bloberror.ContainerBeingDeleted: object.ClassNoBucket,
	bloberror.ContainerDisabled:     object.ClassNoBucket,
	bloberror.BlobAlreadyExists:     object.ClassExists,
	bloberror.CRC64Mismatch:         object.ClassCorrupt,
	bloberror.MD5Mismatch:           object.ClassCorrupt,
	bloberror.ServerBusy:            object.ClassThrottled,
	bloberror.OperationTimedOut:     object.ClassThrottled, // what a partition under load says
	bloberror.InvalidBlockList:      object.ClassNotFound,  // the upload's parts are gone
	bloberror.AccountBeingCreated:   object.ClassUnavailable,
}

// class is the class of an answer.
func class(status int, code string) object.Class {
	if c, ok := codes[bloberror.Code(code)]; ok {
		return c
	}
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return object.ClassDenied
	case http.StatusNotFound:
		return object.ClassNotFound
	case http.StatusRequestedRangeNotSatisfiable:
		return object.ClassRange
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return object.ClassThrottled
	case http.StatusRequestTimeout:
		return object.ClassUnavailable
	case http.StatusInsufficientStorage:
		return object.ClassFull
	}
	if status >= 500 {
		return object.ClassUnavailable
	}
	return object.ClassOther
}

// failure is the *object.Error of what the SDK or the connection returned.
func (c *client) failure(ctx context.Context, op, key string, err error) *object.Error {
	e := &object.Error{Op: op, Where: c.loc.String(), Key: key, Err: err}
	var answer *azcore.ResponseError
	var identity *identityError
	var done *object.Error
	switch {
	case errors.As(err, &done):
		return done
	case ctx.Err() != nil:
		e.Class = object.ClassCanceled
		e.Err = ctx.Err()
	case errors.As(err, &answer):
		c.answered(e, answer)
	case errors.As(err, &identity):
		e.Class = object.ClassDenied
		e.Hint = "set " + envConnection + ", " + envAccount + " with " + envKey + " or " + envSAS + ", or an identity"
	default:
		c.unanswered(e, err)
	}
	return e
}

// refused is the failure of a request that makes an object. The service has two codes for
// one that is there and should not be.
func (c *client) refused(ctx context.Context, op, key string, err error, ifAbsent bool) *object.Error {
	e := c.failure(ctx, op, key, err)
	if ifAbsent && e.Status == http.StatusPreconditionFailed {
		e.Class = object.ClassExists
	}
	return e
}

// answered takes what the service said.
func (c *client) answered(e *object.Error, answer *azcore.ResponseError) {
	e.Status, e.Code = answer.StatusCode, answer.ErrorCode
	e.Class = class(e.Status, e.Code)
	e.Err = nil // its text has many lines
	if text := said(answer); text != "" {
		e.Err = errors.New(text)
	}
	if h := header(answer); h != nil {
		e.Request = h.Get("x-ms-request-id")
		e.After = after(h)
	}
	switch {
	case e.Class == object.ClassNoBucket:
		e.Hint = "make the container, or name another in azure://CONTAINER/PREFIX"
	case e.Class == object.ClassDenied && c.account != "":
		e.Hint = "check the credentials of account " + c.account + " (" + envConnection + ", " + envAccount + ", " + envKey + ", " + envSAS + " or the identity's role), and this machine's clock"
	case e.Class == object.ClassDenied:
		e.Hint = "set " + envConnection + ", or " + envAccount + " with " + envKey + " or " + envSAS
	case e.Status/100 == 3:
		e.Hint = "the parameter endpoint names what leads elsewhere"
	case e.Code == string(bloberror.InvalidHeaderValue) && e.Err != nil && strings.Contains(e.Err.Error(), "API version"):
		e.Hint = "the service is older than the SDK; Azurite needs --skipApiVersionCheck"
	}
}

// unanswered says why there was no answer, or none that can be understood.
func (c *client) unanswered(e *object.Error, err error) {
	e.Class = object.ClassNetwork
	var cert *tls.CertificateVerificationError
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.As(err, &cert):
		e.Class = object.ClassOther // it stays so
		e.Hint = "give the CA file of the endpoint's certificate"
	case errors.Is(err, http.ErrSchemeMismatch):
		e.Class = object.ClassOther
		e.Hint = "the endpoint does not speak TLS: http:// in the parameter endpoint?"
	case errors.As(err, &dns), errors.As(err, &op) && op.Op == "dial":
		e.Hint = "check the parameter endpoint (" + c.endpoint + ")"
	}
}

func header(answer *azcore.ResponseError) http.Header {
	if answer.RawResponse == nil {
		return nil
	}
	return answer.RawResponse.Header
}

var message = regexp.MustCompile(`(?s)<Message>([^<\n]{1,300})`)

// said is the first line of the service's own explanation.
func said(answer *azcore.ResponseError) string {
	if answer.RawResponse == nil {
		return ""
	}
	body, err := runtime.Payload(answer.RawResponse)
	if err != nil {
		return "" // the explanation broke off; status and code are there
	}
	if m := message.FindSubmatch(body); m != nil {
		return strings.TrimSpace(string(m[1]))
	}
	return ""
}

// after is how long the service asks to wait.
func after(h http.Header) time.Duration {
	for name, unit := range map[string]time.Duration{"Retry-After": time.Second, "Retry-After-Ms": time.Millisecond, "X-Ms-Retry-After-Ms": time.Millisecond} {
		if n, err := strconv.ParseUint(h.Get(name), 10, 31); err == nil && n > 0 {
			return time.Duration(n) * unit
		}
	}
	return 0
}
