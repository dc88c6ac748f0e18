package policy

import (
	"math"
	"slices"
	"time"
)

// Pauses learns how long conversations pause between their requests, so that what one
// has used can be kept until it comes back, and no longer. A conversation is known by its
// own last pauses; before there are enough of them by those of its class, which are
// others that are alike. It holds at most so many conversations and classes, and forgets
// those whose last request is longest ago.
type Pauses struct {
	conversations recent[pausing]
	classes       recent[lastPauses]
}

const (
	// pauseQuantile is the share of the pauses that are not longer than what Until says.
	// Waiting for the longest ones holds blocks for those who do not come back, too.
	pauseQuantile = 0.9
	// So many of its last pauses are kept of a conversation, and of a class.
	ownPauses, classPauses = 19, 69
	// There must be so many before they say something: of fewer, the next one is longer than
	// all in more than one case of ten.
	enoughPauses = 9
	maxClasses   = 1024
	// A request so soon behind another is the same one, asked about again.
	againWithin = 50 * time.Millisecond
)

type pausing struct {
	last time.Duration // when its last request was
	lastPauses
}

// NewPauses makes one for at most that many conversations: about 200 bytes each.
func NewPauses(conversations int) *Pauses {
	return &Pauses{
		conversations: recent[pausing]{most: conversations, at: make(map[uint64]int32)},
		classes:       recent[lastPauses]{most: maxClasses, at: make(map[uint64]int32)},
	}
}

// Request notes a request of a conversation of a class, at a time of the caller's clock,
// which does not go back.
func (p *Pauses) Request(conversation, class uint64, now time.Duration) {
	c, known := p.conversations.use(conversation)
	if pause := now - c.last; known && pause >= againWithin {
		c.add(pause, ownPauses)
		of, _ := p.classes.use(class)
		of.add(pause, classPauses)
	}
	c.last = now
}

// Until says after how long from a request nearly always the next one has come. It is 0
// when too little is known of the conversation and of its class.
func (p *Pauses) Until(conversation, class uint64) time.Duration {
	if c := p.conversations.find(conversation); c != nil && len(c.ms) >= enoughPauses {
		return c.quantile()
	}
	if c := p.classes.find(class); c != nil && len(c.ms) >= enoughPauses {
		return c.quantile()
	}
	return 0
}

// lastPauses are some pauses, of which the oldest make room for new ones.
type lastPauses struct {
	ms   []uint32
	next int // the oldest, when there is no more room
}

func (l *lastPauses) add(pause time.Duration, most int) {
	ms := uint32(min(pause.Milliseconds(), math.MaxUint32-1)) + 1 // not less than it was
	if len(l.ms) < most {
		l.ms = append(l.ms, ms)
		return
	}
	l.ms[l.next] = ms
	l.next = (l.next + 1) % most
}

// quantile is what the next pause is not longer than in so many cases, if it is one like
// them: among n values and the next one each rank is as likely.
func (l *lastPauses) quantile() time.Duration {
	var sorted [classPauses]uint32
	n := copy(sorted[:], l.ms)
	slices.Sort(sorted[:n])
	rank := int(math.Ceil(pauseQuantile * float64(n+1)))
	return time.Duration(sorted[min(rank, n)-1]) * time.Millisecond
}

// recent holds a value for each of the last keys that were used, at most so many.
type recent[V any] struct {
	most           int
	at             map[uint64]int32 // of a key, in items
	items          []recentItem[V]
	newest, oldest int32
}

type recentItem[V any] struct {
	key          uint64
	newer, older int32
	value        V
}

// find returns the value of a key, nil when there is none. It stays until the next use.
func (r *recent[V]) find(key uint64) *V {
	i, ok := r.at[key]
	if !ok {
		return nil
	}
	return &r.items[i].value
}

// use is find, and makes the key the newest; a new one has the zero value, and takes the
// place of the oldest when there is no room.
func (r *recent[V]) use(key uint64) (v *V, known bool) {
	i, known := r.at[key]
	switch {
	case known:
		r.unlink(i)
	case len(r.items) < r.most:
		i = int32(len(r.items))
		r.items = append(r.items, recentItem[V]{key: key})
	default:
		i = r.oldest
		r.unlink(i)
		delete(r.at, r.items[i].key)
		r.items[i] = recentItem[V]{key: key}
	}
	r.at[key] = i
	r.link(i)
	return &r.items[i].value, known
}

func (r *recent[V]) link(i int32) {
	it := &r.items[i]
	it.newer, it.older = -1, r.newest
	if len(r.at) == 1 { // it alone
		it.older, r.oldest = -1, i
	} else {
		r.items[r.newest].newer = i
	}
	r.newest = i
}

func (r *recent[V]) unlink(i int32) {
	it := &r.items[i]
	if it.newer >= 0 {
		r.items[it.newer].older = it.older
	} else {
		r.newest = it.older
	}
	if it.older >= 0 {
		r.items[it.older].newer = it.newer
	} else {
		r.oldest = it.newer
	}
}
