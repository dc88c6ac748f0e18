package servers

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// VersityGW is a server of the S3 protocol over a directory.
type VersityGW struct {
	Endpoint  string // URL
	AccessKey string
	SecretKey string
	Region    string
	dir       string
	p         *process
}

// StartVersityGW starts one.
func StartVersityGW(t testing.TB) *VersityGW {
	t.Helper()
	path := find(t, "versitygw")
	s := &VersityGW{AccessKey: "test", SecretKey: "testsecret", Region: "us-east-1", dir: t.TempDir()}
	s.p = start(t, "versitygw", 30*time.Second, func(port string) *exec.Cmd {
		cmd := exec.Command(path, "--port", "127.0.0.1:"+port, "--quiet", "--keep-alive", "--region", s.Region, "posix", s.dir)
		cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+s.AccessKey, "ROOT_SECRET_KEY="+s.SecretKey)
		return cmd
	})
	s.Endpoint = "http://" + s.p.addr
	return s
}

// Addr is host and port.
func (s *VersityGW) Addr() string { return s.p.addr }

// Bucket makes a bucket: to this server, a directory is one.
func (s *VersityGW) Bucket(t testing.TB, name string) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(s.dir, name), 0o755); err != nil {
		t.Fatal(err)
	}
}

// Login lets the SDK's standard chain find the server's credentials, and none of this
// machine's.
func (s *VersityGW) Login(t testing.TB) {
	t.Setenv("AWS_ACCESS_KEY_ID", s.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", s.SecretKey)
	t.Setenv("AWS_SESSION_TOKEN", "")
	t.Setenv("AWS_PROFILE", "")
	t.Setenv("AWS_CONFIG_FILE", os.DevNull)
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", os.DevNull)
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
}

// Stop stops the server before the test ends.
func (s *VersityGW) Stop() { s.p.end() }
