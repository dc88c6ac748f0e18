package e2e

import (
	"os/exec"
	"strings"
	"testing"
)

// TestTour runs what make run runs.
func TestTour(t *testing.T) {
	withoutRace(t)
	out, err := exec.CommandContext(timeout(t), "./tour.sh", kvtier, smallTrace).CombinedOutput()
	if err != nil {
		t.Fatalf("tour: %v\n%s", err, out)
	}
	for _, want := range []string{"kept   7814 of 7814 blocks", "hit    676 blocks the first time, 8490 the second"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the tour did not print %q:\n%s", want, out)
		}
	}
}
