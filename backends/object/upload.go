package object

import (
	"context"
	"sync"
)

// uploading is an upload in parts under way.
type uploading struct {
	b        *Backend
	key      string
	size     int64
	ifAbsent bool
	begun    chan struct{} // closed when Begin has ended
	mu       struct {
		sync.Mutex
		started bool
		left    int
		parts   []Part
		u       Upload
		made    bool  // there is an upload to complete or give up
		err     error // the first
	}
}

func newUploading(b *Backend, key string, parts int, size int64, ifAbsent bool) *uploading {
	u := &uploading{b: b, key: key, size: size, ifAbsent: ifAbsent, begun: make(chan struct{})}
	u.mu.left, u.mu.parts = parts, make([]Part, parts)
	return u
}

// part stores a part; the first to come begins the upload, and others wait for that. It
// says whether it was the last to end: then finish is due, by the same goroutine.
func (u *uploading) part(ctx context.Context, number int, v Vector, size int64) (last bool) {
	u.mu.Lock()
	first := !u.mu.started
	u.mu.started = true
	u.mu.Unlock()
	if first {
		u.begin(ctx)
	}
	<-u.begun // its requests have ctx, or the like of it
	u.mu.Lock()
	up, err := u.mu.u, u.mu.err
	u.mu.Unlock()
	var part Part
	if err == nil { // else it is in vain
		sum := u.b.client.Sum(v)
		_, err = u.b.call(ctx, request{KindPart, u.key, size}, func(ctx context.Context) (err error) {
			part, err = u.b.client.PutPart(ctx, up, number, v, sum)
			return err
		})
		if err == nil {
			u.b.count.out.Add(uint64(size))
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if err != nil && u.mu.err == nil {
		u.mu.err = err
	}
	u.mu.parts[number-1] = part
	u.mu.left--
	return u.mu.left == 0
}

func (u *uploading) begin(ctx context.Context) {
	defer close(u.begun)
	var up Upload
	doubt, err := u.b.call(ctx, request{KindBegin, u.key, 0}, func(ctx context.Context) (err error) {
		up, err = u.b.client.Begin(ctx, u.key)
		return err
	})
	if doubt {
		u.b.count.aborts.Add(1) // one that nobody knows the id of
	}
	u.mu.Lock()
	u.mu.u, u.mu.made, u.mu.err = up, err == nil, err
	u.mu.Unlock()
}

// finish completes the upload, or gives it up when a part failed. No part is under way.
func (u *uploading) finish(ctx context.Context) (Info, error) {
	u.mu.Lock()
	up, parts, made, err := u.mu.u, u.mu.parts, u.mu.made, u.mu.err
	u.mu.Unlock()
	if err != nil {
		if made {
			u.b.giveUp(up)
		}
		return Info{}, err
	}
	var info Info
	doubt, err := u.b.call(ctx, request{KindComplete, u.key, 0}, func(ctx context.Context) (err error) {
		info, err = u.b.client.Complete(ctx, up, parts, u.ifAbsent)
		return err
	})
	if c := ClassOf(err); err != nil && doubt && (c == ClassExists || c == ClassNotFound) {
		info, err = u.b.landed(ctx, u.key, u.size, u.b.client.Join(parts), err)
	}
	if err != nil {
		u.b.giveUp(up)
	}
	return info, err
}

// giveUp removes an upload in the background, so that a cancelled transfer ends at once.
// There are at most as many as uploads that failed within abortTimeout.
func (b *Backend) giveUp(up Upload) {
	b.aborting.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), abortTimeout)
		defer cancel()
		_, err := b.call(ctx, request{KindAbort, up.Key, 0}, func(ctx context.Context) error {
			return b.client.Abort(ctx, up)
		})
		if err != nil {
			b.count.aborts.Add(1)
			b.opt.Logger.Warn(b.Name()+": an upload could not be given up, its parts remain", "key", up.Key, "upload", up.ID, "err", err)
		}
	})
}
