package tiers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/index/block"
	"github.com/kvtier/kvtier/internal/arena"
)

// The SMART / Health Information log of an NVMe device (NVM Express Base Specification
// 2.0, 5.16.1.3), and the kernel's way to ask for it (linux/nvme_ioctl.h).

const (
	smartBytes = 512
	// smartUnit is what the log counts writes in: thousands of units of 512 bytes.
	smartUnit = 1000 * 512

	adminIoctl   = 0xc0484e41 // NVME_IOCTL_ADMIN_CMD: _IOWR('N', 0x41, struct nvme_admin_cmd)
	adminBytes   = 72         // of struct nvme_admin_cmd
	opGetLogPage = 0x02
	logSmart     = 0x02
	allSpaces    = 0xffffffff // the log of the controller, not of one namespace
)

// errNoWear: the device does not tell of its wear.
var errNoWear = errors.New("does not tell of its wear")

// decodeSmart reads the log. A device that leaves the fields of wear empty, or fills in
// what cannot be, does not tell: errNoWear. Emulated ones do so.
func decodeSmart(b []byte) (block.DeviceWear, error) {
	if len(b) != smartBytes {
		return block.DeviceWear{}, fmt.Errorf("%w: the log has %d bytes, want %d", errNoWear, len(b), smartBytes)
	}
	w := block.DeviceWear{
		CriticalWarning: uint32(b[0]),
		SparePercent:    uint32(b[3]),
		SpareThreshold:  uint32(b[4]),
		UsedPercent:     uint32(b[5]),
	}
	switch {
	case w.CriticalWarning == 0 && w.SparePercent == 0 && w.SpareThreshold == 0 && w.UsedPercent == 0:
		return block.DeviceWear{}, fmt.Errorf("%w: the log says nothing of it", errNoWear)
	case w.SparePercent > 100 || w.SpareThreshold > 100:
		return block.DeviceWear{}, fmt.Errorf("%w: the log says that %d%% is spare, threshold %d%%", errNoWear, w.SparePercent, w.SpareThreshold)
	}
	// Of 128 bits; what no device can have written is not said.
	units, high := binary.LittleEndian.Uint64(b[48:]), binary.LittleEndian.Uint64(b[56:])
	if high == 0 && units <= math.MaxInt64/smartUnit {
		w.WrittenBytes = int64(units) * smartUnit
	}
	return w, nil
}

// encodeGetSmart writes the command that has the log written to an address.
func encodeGetSmart(dst []byte, to uint64) {
	clear(dst[:adminBytes])
	host := binary.NativeEndian
	dst[0] = opGetLogPage
	host.PutUint32(dst[4:], allSpaces)
	host.PutUint64(dst[24:], to)
	host.PutUint32(dst[36:], smartBytes)
	host.PutUint32(dst[40:], logSmart|(smartBytes/4-1)<<16) // how many words, less one
	// No timeout of ours: one that the kernel runs into resets the controller, so it is
	// the kernel's, in which a device that works always answers.
}

// readWear asks an NVMe device for its wear, by its node below dev, which is /dev. It
// takes as long as the device and the kernel do, which gives a device up that does not
// answer. Errors: errNoWear for what is no NVMe device or does not tell; those of the
// system, as where the caller may not ask.
func readWear(dev string, d disk) (block.DeviceWear, error) {
	w, err := block.DeviceWear{}, error(nil)
	if strings.HasPrefix(d.name, "nvme") { // to others the ioctl may mean something else
		w, err = askNVMe(dev, d)
	} else {
		err = fmt.Errorf("%w: it is no NVMe device", errNoWear)
	}
	if err != nil {
		return block.DeviceWear{}, fmt.Errorf("%s: %w", d.name, err)
	}
	w.Device = d.name
	return w, nil
}

func askNVMe(dev string, d disk) (w block.DeviceWear, err error) {
	f, err := os.Open(filepath.Join(dev, d.name))
	if err != nil {
		return w, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return w, err
	}
	if sys := st.Sys().(*syscall.Stat_t); sys.Mode&unix.S_IFMT != unix.S_IFBLK || sys.Rdev != d.number {
		return w, fmt.Errorf("%w: %s is not its node", errNoWear, f.Name())
	}
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return w, fmt.Errorf("map memory: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	log, cmd := mem[:smartBytes], mem[smartBytes:][:adminBytes]
	encodeGetSmart(cmd, arena.Addr(log))
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), adminIoctl, uintptr(arena.Addr(cmd)))
	switch {
	case errno != 0:
		return w, fmt.Errorf("get log page: %w", errno)
	case status != 0:
		return w, fmt.Errorf("%w: get log page: NVMe status %#x", errNoWear, status)
	}
	return decodeSmart(log)
}
