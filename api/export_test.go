package api

import (
	"context"
	"time"

	"google.golang.org/grpc/mem"

	pb "github.com/kvtier/kvtier/api/kvtierpb"
	"github.com/kvtier/kvtier/index/block"
)

// NewService is what answers the calls of a server, without the server.
func NewService(s Store) pb.KvtierServer { return newService(s, &ServerOptions{Timeout: time.Minute}) }

// ToStatus is what a server makes of an error of a call.
var ToStatus = toStatus

// Connection is the context of the calls of one connection, and ends it.
func Connection(ctx context.Context, s Store) (_ context.Context, end func()) {
	ctx = (&sessions{end: s.EndSession}).TagConn(ctx, nil)
	return ctx, ctx.Value(sessionKey{}).(*connection).disconnected
}

// Decode reads a message as a server does.
func Decode(b []byte, v any) error {
	return newCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, v)
}

// NamespaceOf is the namespace that a decoded request names, 0 for none.
func NamespaceOf(v any) block.NamespaceID {
	if f, ok := v.(*putFrame); ok {
		return block.NamespaceID(f.open.GetNamespace())
	}
	if m, ok := v.(interface{ GetNamespace() uint32 }); ok {
		return block.NamespaceID(m.GetNamespace())
	}
	return 0
}

// Encode writes a message as a server does.
func Encode(v any) error {
	b, err := newCodec().Marshal(v)
	if err == nil {
		b.Free()
	}
	return err
}
