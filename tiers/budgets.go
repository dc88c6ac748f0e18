package tiers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvtier/kvtier/index"
	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/policy"
)

const (
	// An hour's budget may come at once, so that a store that was idle is not held to
	// what the mean second allows.
	admissionBurst = 24 // parts of a day
	// Ghosts of four times as many blocks as the tier holds, if they are of a size that is
	// small for blocks: what it holds can change at any time. Nobody knows how many G4 holds.
	admissionGhosts   = 4
	admissionSlot     = 64 << 10
	admissionGhostMax = 1 << 20
	// maxBudgets bounds those of namespaces of a tier.
	maxBudgets = 1 << 10
)

// MinWriteBudget is the least of a budget of bytes, a largest block an hour, and
// MinRequestBudget that of one of requests, one an hour.
const (
	MinWriteBudget   = admissionBurst * block.MaxBlockBytes
	MinRequestBudget = admissionBurst
)

// spending is a budget, and what is left of it.
type spending struct {
	block.WriteBudget
	a *policy.Admission
}

// perDay is the bucket of so many a day. It begins half full: not under pressure.
func perDay(n int64) policy.Budget {
	burst := float64(n) / admissionBurst
	return policy.Budget{Rate: float64(n) / float64(24*time.Hour), Burst: burst, Start: burst / 2}
}

// checkBudget says what is wrong with a budget by itself.
func checkBudget(b block.WriteBudget) error {
	name := "write budget of " + b.String()
	_, badGlob := path.Match(b.Namespaces, "")
	switch {
	case b.Tier != block.G3 && b.Tier != block.G4:
		return fmt.Errorf("%w: %s: there are budgets of g3 and g4", block.ErrInvalid, name)
	case badGlob != nil:
		return fmt.Errorf("%w: %s: %w", block.ErrInvalid, name, badGlob)
	case b.Bytes != 0 && b.Bytes < MinWriteBudget:
		return fmt.Errorf("%w: %s: %d bytes a day, at least %d", block.ErrInvalid, name, b.Bytes, int64(MinWriteBudget))
	case b.Requests != 0 && b.Requests < MinRequestBudget:
		return fmt.Errorf("%w: %s: %d requests a day, at least %d", block.ErrInvalid, name, b.Requests, int64(MinRequestBudget))
	case b.Requests != 0 && b.Tier != block.G4:
		return fmt.Errorf("%w: %s: requests are for g4", block.ErrInvalid, name)
	}
	return nil
}

// checkBudgets says what is wrong with those of the options.
func (o Options) checkBudgets() error {
	seen := map[string]bool{}
	for _, b := range o.WriteBudgets {
		if err := checkBudget(b); err != nil {
			return err
		}
		switch {
		case seen[b.String()]:
			return fmt.Errorf("%w: write budget of %s: given twice", block.ErrInvalid, b)
		case b.Tier == block.G3 && o.NoSlabs:
			return fmt.Errorf("%w: write budget of %s for a store without NVMe tier", block.ErrInvalid, b)
		}
		seen[b.String()] = true
	}
	return nil
}

// openBudgets makes the admissions to the tiers that there are below G2, with what the
// last opening has left in their buckets.
func (s *Store) openBudgets() error {
	if s.g3 != nil {
		s.toG3 = newAdmission(block.G3, min(admissionGhosts*s.g3.capacity/admissionSlot, admissionGhostMax))
	}
	if len(s.opts.Objects) > 0 {
		s.toG4 = newAdmission(block.G4, admissionGhostMax)
	}
	for _, b := range s.opts.WriteBudgets {
		if s.to(b.Tier) == nil {
			return fmt.Errorf("%w: write budget of %s: there is no such tier", block.ErrInvalid, b)
		}
		if err := s.SetWriteBudget(b); err != nil {
			return err
		}
	}
	return s.loadLevels()
}

// to is the admission to a tier; nil when there is none.
func (s *Store) to(id block.TierID) *admission {
	switch id {
	case block.G3:
		return s.toG3
	case block.G4:
		return s.toG4
	}
	return nil
}

// SetWriteBudget changes a budget; see api.Store.
func (s *Store) SetWriteBudget(b block.WriteBudget) error {
	if err := checkBudget(b); err != nil {
		return fmt.Errorf("set write budget: %w", err)
	}
	a := s.to(b.Tier)
	if a == nil {
		return fmt.Errorf("set write budget: %w: this store has no tier %s", block.ErrUnavailable, b.Tier)
	}
	if err := a.set(b); err != nil {
		return fmt.Errorf("set write budget of %s: %w", b, err)
	}
	return nil
}

// set makes, changes or takes away one budget.
func (a *admission) set(b block.WriteBudget) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := slices.IndexFunc(a.mu.spend, func(s *spending) bool { return s.Namespaces == b.Namespaces })
	switch {
	case b.Bytes == 0 && b.Requests == 0:
		if at >= 0 {
			a.mu.spend = slices.Delete(a.mu.spend, at, at+1)
		}
	case at >= 0:
		s := a.mu.spend[at]
		a.levels(s) // what came until now came by the old rate
		if err := s.a.SetBudgets(perDay(b.Bytes), perDay(b.Requests)); err != nil {
			return err
		}
		s.WriteBudget = b
	case len(a.mu.spend) == maxBudgets:
		return fmt.Errorf("%w: there are %d", block.ErrNoSpace, maxBudgets)
	default:
		p, err := policy.NewAdmission(policy.AdmissionOptions{Bytes: perDay(b.Bytes), Requests: perDay(b.Requests), Ghosts: int(a.ghosts)})
		if err != nil {
			return err
		}
		a.mu.spend = append(a.mu.spend, &spending{b, p})
	}
	a.mu.of = map[block.NamespaceID][]*spending{}
	a.bounded.Store(len(a.mu.spend) > 0)
	return nil
}

// levels is what is left of a budget now. It is called under the lock.
func (a *admission) levels(s *spending) (bytes, requests int64) {
	b, r := s.a.Levels(a.now())
	return int64(b), int64(r)
}

func (a *admission) stats() *block.AdmissionStats {
	if a == nil || !a.bounded.Load() {
		return nil
	}
	st := &block.AdmissionStats{Admitted: a.verdicts[policy.Admitted].Load(), Rejected: map[string]int64{}}
	for v := policy.NoRoom; int(v) < policy.Verdicts; v++ {
		st.Rejected[v.String()] = a.verdicts[v].Load()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.mu.spend {
		bytes, requests := a.levels(s)
		st.Budgets = append(st.Budgets, block.BudgetStats{WriteBudget: s.WriteBudget, AvailableBytes: bytes, AvailableRequests: requests})
	}
	return st
}

// What is in the buckets is kept in a file of the data directory, so that a start does
// not fill them. It is written every budgetsEvery while they are spent from, and at the
// end: a crash forgets what was spent since.
const (
	levelsFile    = "write-budgets.json"
	levelsVersion = 1
	levelsMost    = 1 << 20 // bytes of the file
	budgetsEvery  = 10 * time.Second
)

// levelsRecord is the file.
type levelsRecord struct {
	Version int           `json:"version"`
	Saved   int64         `json:"saved_unix_ms"`
	Levels  []levelRecord `json:"levels"`
}

// levelRecord is what was left of one budget.
type levelRecord struct {
	Budget   string `json:"budget"` // as block.WriteBudget writes its name
	Bytes    int64  `json:"bytes"`
	Requests int64  `json:"requests"`
}

// loadLevels puts into the buckets what was there, and what has come since. Where that
// cannot be found out they are empty: the device has perhaps been written to all day.
func (s *Store) loadLevels() error {
	file := filepath.Join(s.opts.Dir, levelsFile)
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var r levelsRecord
	if err == nil && len(data) > levelsMost {
		err = fmt.Errorf("%w: %d bytes", block.ErrCorrupt, len(data))
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err == nil && r.Version != levelsVersion {
		return fmt.Errorf("%s: %w: %d, this program knows %d", file, index.ErrVersion, r.Version, levelsVersion)
	}
	if err != nil {
		s.log.Warn("what is left of the write budgets cannot be read; they begin empty", "file", file, "err", err)
	}
	since := max(0, time.Since(time.UnixMilli(r.Saved)))
	for _, a := range []*admission{s.toG3, s.toG4} {
		if a == nil {
			continue
		}
		for _, p := range a.mu.spend {
			at := slices.IndexFunc(r.Levels, func(l levelRecord) bool { return l.Budget == p.String() })
			switch {
			case err != nil:
				p.a.SetLevels(0, 0)
			case at >= 0:
				l := r.Levels[at]
				days := since.Hours() / 24
				p.a.SetLevels(float64(l.Bytes)+days*float64(p.Bytes), float64(l.Requests)+days*float64(p.Requests))
			}
		}
	}
	return nil
}

// saveLevels writes the file if something was spent since the last time. A file that cannot be
// written costs the buckets' levels at the next start, and nothing now.
func (s *Store) saveLevels() {
	spent := false
	r := levelsRecord{Version: levelsVersion, Saved: time.Now().UnixMilli(), Levels: []levelRecord{}}
	for _, a := range []*admission{s.toG3, s.toG4} {
		if a == nil {
			continue
		}
		spent = a.spent.Swap(false) || spent
		a.mu.Lock()
		for _, p := range a.mu.spend {
			bytes, requests := a.levels(p)
			r.Levels = append(r.Levels, levelRecord{p.String(), bytes, requests})
		}
		a.mu.Unlock()
	}
	if !spent {
		return
	}
	data, err := json.Marshal(r)
	if err == nil {
		err = replaceFile(filepath.Join(s.opts.Dir, levelsFile), data, !s.opts.NoSync)
	}
	if err != nil {
		s.log.Warn("what is left of the write budgets could not be saved", "err", err)
	}
}

// keepLevels saves them until the store's life ends.
func (s *Store) keepLevels() {
	tick := time.NewTicker(budgetsEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.saveLevels()
		case <-s.life.Done():
			return
		}
	}
}
