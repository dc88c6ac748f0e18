package block

import "fmt"

// DeviceWear is what an NVMe device tells of its wear in its SMART / Health
// Information log. Of several devices under a slab it is that of the worst.
type DeviceWear struct {
	Device string // its name, as nvme0n1
	// UsedPercent is how much of its rated endurance the device has used, by its own
	// estimate. It may be above 100; 255 stands for all from there on.
	UsedPercent     uint32
	SparePercent    uint32 // of the spare capacity, what is left
	SpareThreshold  uint32 // SparePercent below which the device warns
	CriticalWarning uint32 // bits, see Warnings
	WrittenBytes    int64  // by all that ever used the device; 0: it does not say
}

// Warnings names the bits of CriticalWarning.
func (w *DeviceWear) Warnings() []string {
	names := [...]string{
		"little spare capacity", "temperature", "degraded reliability", "read only", "no backup of volatile memory", "unreliable persistent memory region",
	}
	var out []string
	for bit := range 32 {
		switch {
		case w.CriticalWarning&(1<<bit) == 0:
		case bit < len(names):
			out = append(out, names[bit])
		default:
			out = append(out, fmt.Sprintf("bit %d", bit))
		}
	}
	return out
}
