package api

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// identityKey finds who makes a call in its context. It is not there where everybody
// may do everything.
type identityKey struct{}

func identityOf(ctx context.Context) *access.Identity {
	id, _ := ctx.Value(identityKey{}).(*access.Identity)
	return id
}

// authorize says who makes a call, by its bearer token, in the context that it returns.
// A stranger is an ErrDenied with the code Unauthenticated.
func (s *Server) authorize(ctx context.Context, method string) (context.Context, error) {
	if s.access == nil || strings.HasPrefix(method, "/grpc.health.v1.Health/") {
		return ctx, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get("authorization")
	if len(values) == 0 {
		return nil, stranger{fmt.Errorf("%w: no bearer token in the call, and this server wants one", block.ErrDenied)}
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	id := s.access.ByToken(token)
	if !strings.EqualFold(scheme, "bearer") || id == nil {
		return nil, stranger{fmt.Errorf("%w: wrong bearer token", block.ErrDenied)}
	}
	return context.WithValue(ctx, identityKey{}, id), nil
}

// identified is a stream whose context says who makes the call.
type identified struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s *identified) Context() context.Context { return s.ctx }

// requestID is what the store is told of a prefetch's id: nobody cancels another's.
func requestID(ctx context.Context, id string) string {
	if who := identityOf(ctx).Name(); who != "" && id != "" {
		return who + "/" + id // the name has none
	}
	return id
}
