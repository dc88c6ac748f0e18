package main

import (
	"fmt"
	"math"
	"math/big"
	"path"
	"strconv"
	"strings"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/tiers"
)

// noBudget stands in the place of a budget for no bound.
const noBudget = "none"

// parseBudget reads [TIER[/GLOB]=]SIZE[,REQUESTS]: how many bytes a day may be written to a
// tier, NVMe if none is named, by all namespaces or those that the glob matches, and with
// how many requests. SIZE is one such as 2TB, or SIZE/YEARS such as 600TB/5y, which is what
// a device's maker says that it endures; none is no bound.
func parseBudget(s string) (b block.WriteBudget, err error) {
	b.Tier = block.G3
	amount := s
	if i := strings.LastIndexByte(s, '='); i >= 0 {
		tier, glob, some := strings.Cut(s[:i], "/")
		if b.Tier, err = block.ParseTier(tier); err != nil {
			return b, fmt.Errorf("write budget %q: %w", s, err)
		}
		if b.Tier != block.G3 && b.Tier != block.G4 {
			return b, fmt.Errorf("write budget %q: want g3 or g4 before the =", s)
		}
		if _, err := path.Match(glob, ""); err != nil || some && glob == "" {
			return b, fmt.Errorf("write budget %q: bad glob %q of names of namespaces", s, glob)
		}
		b.Namespaces, amount = glob, s[i+1:]
	}
	amount, requests, some := strings.Cut(amount, ",")
	if amount != noBudget {
		if b.Bytes, err = parseEndurance(amount); err != nil {
			return b, fmt.Errorf("write budget %q: %w", s, err)
		}
		if b.Bytes == 0 {
			return b, fmt.Errorf("write budget %q: nothing could be written; say %s for no bound, or serve without the tier", s, noBudget)
		}
		if b.Bytes < tiers.MinWriteBudget {
			return b, fmt.Errorf("write budget %q: want at least %s a day", s, formatSize(tiers.MinWriteBudget))
		}
	}
	if some {
		n, err := strconv.ParseInt(requests, 10, 64)
		switch {
		case err != nil || n < tiers.MinRequestBudget:
			return b, fmt.Errorf("write budget %q: %q requests a day: want a number from %d on", s, requests, int64(tiers.MinRequestBudget))
		case b.Tier != block.G4:
			return b, fmt.Errorf("write budget %q: requests are for g4", s)
		}
		b.Requests = n
	}
	return b, nil
}

// parseEndurance reads a size, or SIZE/YEARS as what of it a day has.
func parseEndurance(s string) (int64, error) {
	size, years, some := strings.Cut(s, "/")
	n, err := parseSize(size)
	if err != nil || !some {
		return n, err
	}
	number, ok := strings.CutSuffix(years, "y")
	y, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(y > 0 && y <= 100) {
		return 0, fmt.Errorf("%q: want a number of years such as 5y", years)
	}
	days := new(big.Float).SetFloat64(y * 365)
	day, _ := new(big.Float).Quo(new(big.Float).SetInt64(n), days).Int64()
	if day == math.MaxInt64 {
		return 0, fmt.Errorf("size %q: too large", s)
	}
	return day, nil
}

// checkBudget is parseBudget for a flag's check.
func checkBudget(s string) error {
	_, err := parseBudget(s)
	return err
}

// parseBudgets reads several, of which no two are of the same.
func parseBudgets(all []string) (out []block.WriteBudget, err error) {
	given := map[string]string{}
	for _, s := range all {
		b, err := parseBudget(s)
		if err != nil {
			return nil, err
		}
		if other, twice := given[b.String()]; twice {
			return nil, fmt.Errorf("%s and %s are both of %s", other, s, b)
		}
		given[b.String()] = s
		out = append(out, b)
	}
	return out, nil
}

// statBudget is a write budget as JSON.
type statBudget struct {
	Name              string `json:"name"`               // TIER, or TIER/GLOB for one of namespaces
	Bytes             int64  `json:"bytes_a_day"`        // 0: no bound
	AvailableBytes    int64  `json:"available_bytes"`    // now
	Requests          int64  `json:"requests_a_day"`     // 0: no bound
	AvailableRequests int64  `json:"available_requests"` // now
}

func describeBudgets(a *block.AdmissionStats) (out []statBudget) {
	if a == nil {
		return nil
	}
	for _, b := range a.Budgets {
		out = append(out, statBudget{b.String(), b.Bytes, b.AvailableBytes, b.Requests, b.AvailableRequests})
	}
	return out
}

func (b statBudget) line() string {
	var parts []string
	if b.Bytes > 0 {
		parts = append(parts, fmt.Sprintf("%s a day may be written, %s now", formatSizeShort(b.Bytes), formatSizeShort(b.AvailableBytes)))
	}
	if b.Requests > 0 {
		parts = append(parts, fmt.Sprintf("%s a day may be made, %d now", counted(b.Requests, "request"), b.AvailableRequests))
	}
	return b.Name + ": " + strings.Join(parts, "; ")
}
