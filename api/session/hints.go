package session

import (
	"math"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

// hints are the flags that a request may have when the session has FeatureHints.
func (s *session) hints(flags uint16) uint16 {
	if s.hinted {
		return flags
	}
	return 0
}

// reportPrefill answers CodeReportPrefill, at once.
func (s *session) reportPrefill(id uint64, p []byte) error {
	var m ReportPrefillMessage
	if err := m.Decode(p); err != nil {
		return s.fail(id, err)
	}
	if _, err := s.namespace(m.NS, m.Tag, access.Write); err != nil {
		return s.fail(id, err)
	}
	if m.Micros > maxMicros {
		return s.fail(id, invalid("micros: %d, at most %d", m.Micros, maxMicros))
	}
	r := block.PrefillReport{Position: int64(m.Position), Tokens: int64(m.Tokens), Took: time.Duration(m.Micros) * time.Microsecond}
	if err := s.srv.store.ReportPrefill(m.NS, []block.PrefillReport{r}); err != nil {
		return s.fail(id, err)
	}
	return s.reply(id, CodeReported, &ReportedMessage{})
}

// maxMicros is the longest time that a duration can say.
const maxMicros = uint64(math.MaxInt64 / time.Microsecond)
