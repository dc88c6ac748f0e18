package servers

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

// Container makes a container, unless there is one of that name.
func (a *Azurite) Container(t testing.TB, name string) {
	t.Helper()
	const version = "2021-08-06" // of the protocol; every Azurite knows it
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, a.Endpoint(a.Addr())+"/"+name+"?restype=container", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	date := time.Now().UTC().Format(http.TimeFormat)
	req.Header.Set("x-ms-date", date)
	req.Header.Set("x-ms-version", version)
	// The scheme "Shared Key": the method, eleven headers that are empty, the service's own
	// headers, and the resource.
	sign := "PUT" + strings.Repeat("\n", 12) + "x-ms-date:" + date + "\nx-ms-version:" + version + "\n/" + AzuriteAccount + req.URL.Path + "\nrestype:container"
	key, err := base64.StdEncoding.DecodeString(AzuriteKey)
	if err != nil {
		t.Fatal(err)
	}
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(sign))
	req.Header.Set("Authorization", "SharedKey "+AzuriteAccount+":"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatalf("make container %s: %v", name, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusCreated && resp.StatusCode != http.StatusConflict {
		t.Fatalf("make container %s: %s", name, resp.Status)
	}
}

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
