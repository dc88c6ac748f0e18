package servers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// The account that every Azurite has, and its key: both are in its documentation.
const (
	AzuriteAccount = "devstoreaccount1"
	AzuriteKey     = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

// Azurite is the blob service of Microsoft's emulator of Azure Storage. It is right, and
// slow: its speed says nothing of Azure's, and it can take minutes to start where much else
// goes on. So the tests of a package share one, which is started by the first that needs it
// and stopped by TestMain. The zero value is ready for use.
type Azurite struct {
	once sync.Once
	dir  string
	p    *process
	err  error
}

// Start starts it, unless it runs.
func (a *Azurite) Start(t testing.TB) {
	t.Helper()
	path := find(t, "azurite")
	if i, err := os.Stat(path); err == nil && i.IsDir() {
		path = filepath.Join(path, "node_modules", ".bin", "azurite")
	}
	a.once.Do(func() { a.err = a.start(path + "-blob") })
	if a.err != nil {
		t.Fatalf("start azurite: %v", a.err)
	}
}

func (a *Azurite) start(path string) (err error) {
	if a.dir, err = os.MkdirTemp("", "azurite"); err != nil {
		return err
	}
	for range startTries {
		a.p, err = try("azurite", 3*time.Minute, func(port string) *exec.Cmd {
			// The SDK speaks a newer version of the protocol than Azurite knows. On a disk
			// all would take longer.
			cmd := exec.Command(path, "--silent", "--skipApiVersionCheck", "--disableTelemetry",
				"--blobHost", "127.0.0.1", "--blobPort", port, "--inMemoryPersistence", "--extentMemoryLimit", "2048")
			cmd.Dir = a.dir
			return cmd
		})
		if err == nil {
			return nil
		}
	}
	return err
}

// Addr is host and port.
func (a *Azurite) Addr() string { return a.p.addr }

// Endpoint is the URL of the account at an address: Addr, or a proxy's.
func (a *Azurite) Endpoint(addr string) string { return "http://" + addr + "/" + AzuriteAccount }

// Login lets the SDK's standard chain find the account, and none of this machine's.
func (a *Azurite) Login(t testing.TB) {
	t.Setenv("AZURE_STORAGE_ACCOUNT", AzuriteAccount)
	t.Setenv("AZURE_STORAGE_KEY", AzuriteKey)
	t.Setenv("AZURE_STORAGE_CONNECTION_STRING", "")
	t.Setenv("AZURE_STORAGE_SAS_TOKEN", "")
}

// Stop stops it and removes what it kept.
func (a *Azurite) Stop() error {
	if a.p != nil {
		a.p.end()
	}
	if a.dir == "" {
		return nil
	}
	if err := os.RemoveAll(a.dir); err != nil {
		return fmt.Errorf("stop azurite: %w", err)
	}
	return nil
}
