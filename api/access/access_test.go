package access_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/api/access"
	"github.com/kvtier/kvtier/index/block"
)

func digest(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

func parse(t *testing.T, format string, args ...any) *access.List {
	t.Helper()
	l, err := access.Parse(fmt.Appendf(nil, format, args...))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestIdentities shows who is known by what, and what each may do.
func TestIdentities(t *testing.T) {
	l := parse(t, `{"identities": [
		{"name": "writer", "token_sha256": %q, "write": ["llama-*", "qwen"]},
		{"name": "reader", "token_sha256": %q, "read": ["llama-?", "[ab]*"], "uid": 0},
		{"name": "local", "uid": 1000, "read": ["*"], "write": ["*"]},
		{"name": "auditor", "token_sha256": %q, "read": ["*"], "write": ["llama-*"]}
	]}`, digest("w"), strings.ToUpper(digest("r")), digest("a"))
	for _, tt := range []struct {
		who       *access.Identity
		name      string
		namespace string
		want      access.Right
	}{
		{l.ByToken("w"), "writer", "llama-8b", access.Write},
		{l.ByToken("w"), "writer", "llama", 0},
		{l.ByToken("w"), "writer", "qwen", access.Write},
		{l.ByToken("w"), "writer", "qwen2", 0},
		{l.ByToken("r"), "reader", "llama-8", access.Read},
		{l.ByToken("r"), "reader", "llama-8b", 0},
		{l.ByToken("r"), "reader", "alpha", access.Read},
		{l.ByUID(0), "reader", "beta", access.Read},
		{l.ByUID(1000), "local", "llama-8b", access.Read | access.Write},
		{l.ByToken("a"), "auditor", "llama-8b", access.Read | access.Write},
		{l.ByToken("a"), "auditor", "qwen", access.Read},
		{access.Single("secret").ByToken("secret"), "", "x", access.Read | access.Write},
		{nil, "", "x", access.Read | access.Write},
	} {
		if tt.who.Name() != tt.name || tt.who.Rights(tt.namespace) != tt.want {
			t.Errorf("%q may %v %q, want %q, %v", tt.who.Name(), tt.who.Rights(tt.namespace), tt.namespace, tt.name, tt.want)
		}
		err := tt.who.Check(access.Read, tt.namespace)
		if denied := tt.want&access.Read == 0; denied != errors.Is(err, block.ErrDenied) {
			t.Errorf("%q reads %q: error %v", tt.name, tt.namespace, err)
		} else if denied && (!strings.Contains(err.Error(), tt.name) || !strings.Contains(err.Error(), tt.namespace)) {
			t.Errorf("the denial names not both: %v", err)
		}
	}
	if !l.Users() || access.Single("secret").Users() {
		t.Error("users are known where there are none, or the other way round")
	}
	for _, who := range []*access.Identity{
		l.ByToken("x"), l.ByToken(""), l.ByToken(digest("w")), l.ByUID(1), access.Single("secret").ByToken("secre"), access.Single("secret").ByUID(0),
	} {
		if who != nil {
			t.Errorf("a stranger is taken for %q", who.Name())
		}
	}
	for _, tt := range []struct {
		who *access.Identity
		all access.Right
	}{
		{l.ByToken("w"), 0},
		{l.ByUID(1000), access.Read | access.Write},
		{l.ByToken("a"), access.Read},
		{access.Single("x").ByToken("x"), access.Read | access.Write},
		{nil, access.Read | access.Write},
	} {
		if tt.who.All() != tt.all {
			t.Errorf("%q may %v all namespaces, want %v", tt.who.Name(), tt.who.All(), tt.all)
		}
	}
	if err := l.ByToken("a").CheckAll(access.Read, "a watch"); err != nil {
		t.Error(err)
	}
	if err := l.ByToken("a").CheckAll(access.Read|access.Write, "a scrub"); !errors.Is(err, block.ErrDenied) || !strings.Contains(err.Error(), "scrub") || !strings.Contains(err.Error(), "auditor") {
		t.Errorf("error %v", err)
	}
}

// TestLimits shows how many sessions and leases each may have.
func TestLimits(t *testing.T) {
	l := parse(t, `{"identities": [
		{"name": "few", "token_sha256": %q, "read": ["*"], "max_sessions": 2, "max_leases": 1},
		{"name": "default", "uid": 1000, "read": ["*"]}
	]}`, digest("few"))
	few := l.ByToken("few")
	for range 2 {
		if err := few.TakeSession(); err != nil {
			t.Fatal(err)
		}
	}
	if err := few.TakeSession(); err == nil || !strings.Contains(err.Error(), `identity "few" has 2 sessions, at most 2`) {
		t.Errorf("a session too many: error %v", err)
	}
	few.EndSession()
	if err := few.TakeSession(); err != nil {
		t.Errorf("a session for one that has ended: %v", err)
	}
	if err := few.TakeLease(); err != nil {
		t.Fatal(err)
	}
	if err := few.TakeLease(); err == nil || !strings.Contains(err.Error(), `identity "few" has 1 leases, at most 1`) {
		t.Errorf("a lease too many: error %v", err)
	}
	few.Leases().Add(block.Lease{ID: 1, Left: time.Hour, Count: 3}, 1)
	want := []access.Usage{
		{Name: "few", Sessions: 2, SessionsLimit: 2, SessionsRefused: 1, Leases: 1, LeasesLimit: 1, LeasesRefused: 1},
		{Name: "default", SessionsLimit: access.DefaultMaxSessions, LeasesLimit: access.DefaultMaxLeases},
	}
	if got := l.Usage(); !slices.Equal(got, want) {
		t.Errorf("usage %+v, want %+v", got, want)
	}

	// Where clients are not told apart nobody has a limit of his own.
	for _, everybody := range []*access.Identity{nil, access.Single("x").ByToken("x")} {
		for range access.DefaultMaxLeases + 1 {
			if err := errors.Join(everybody.TakeSession(), everybody.TakeLease()); err != nil {
				t.Fatal(err)
			}
		}
		everybody.EndSession()
		if u := everybody.Usage(); u.SessionsLimit != 0 || u.LeasesLimit != 0 {
			t.Errorf("usage %+v", u)
		}
	}
	if (*access.List)(nil).Usage() != nil {
		t.Error("no list has usage")
	}
}

func TestParseRefuses(t *testing.T) {
	a := `"token_sha256": "` + digest("a") + `"`
	for _, tt := range []struct{ name, text, want string }{
		{"nothing", ``, "EOF"},
		{"no JSON", `identities: []`, "invalid character"},
		{"an array", `[]`, "array"},
		{"something behind", `{"identities": [{"name": "n", ` + a + `, "read": ["*"]}]} {}`, "follows"},
		{"unknown field", `{"users": []}`, `unknown field "users"`},
		{"unknown field of one", `{"identities": [{"name": "n", ` + a + `, "reads": ["*"]}]}`, `unknown field "reads"`},
		{"a plain token", `{"identities": [{"name": "n", "token": "a", "read": ["*"]}]}`, `unknown field "token"`},
		{"wrong type", `{"identities": [{"name": "n", "uid": "root", "read": ["*"]}]}`, "uid"},
		{"negative uid", `{"identities": [{"name": "n", "uid": -1, "read": ["*"]}]}`, "uid"},
		{"none", `{"identities": []}`, "there are none"},
		{"empty", `{}`, "there are none"},
		{"no name", `{"identities": [{` + a + `, "read": ["*"]}]}`, "name: length 0"},
		{"long name", `{"identities": [{"name": "` + strings.Repeat("n", 256) + `", ` + a + `, "read": ["*"]}]}`, "name: length 256"},
		{"name", `{"identities": [{"name": "a\nb", ` + a + `, "read": ["*"]}]}`, `'\n'`},
		{"name with a slash", `{"identities": [{"name": "a/b", ` + a + `, "read": ["*"]}]}`, `'/'`},
		{"known by nothing", `{"identities": [{"name": "n", "read": ["*"]}]}`, "neither token_sha256 nor uid"},
		{"may nothing", `{"identities": [{"name": "n", ` + a + `}]}`, "neither read nor write"},
		{"no hex", `{"identities": [{"name": "n", "token_sha256": "secret", "read": ["*"]}]}`, "token_sha256"},
		{"short digest", `{"identities": [{"name": "n", "token_sha256": "abcd", "read": ["*"]}]}`, "token_sha256: 2 bytes"},
		{"empty token", `{"identities": [{"name": "n", "token_sha256": "` + digest("") + `", "read": ["*"]}]}`, "empty token"},
		{"bad glob", `{"identities": [{"name": "n", ` + a + `, "read": ["llama-["]}]}`, `read: glob "llama-["`},
		{"no sessions", `{"identities": [{"name": "n", ` + a + `, "read": ["*"], "max_sessions": 0}]}`, "max_sessions: 0, want 1 or more"},
		{"fewer than no leases", `{"identities": [{"name": "n", ` + a + `, "read": ["*"], "max_leases": -1}]}`, "max_leases: -1, want 1 or more"},
		{"leases by text", `{"identities": [{"name": "n", ` + a + `, "read": ["*"], "max_leases": "many"}]}`, "max_leases"},
		{"empty glob", `{"identities": [{"name": "n", ` + a + `, "write": [""]}]}`, `write: glob ""`},
		{"glob with a slash", `{"identities": [{"name": "n", ` + a + `, "write": ["a/*"]}]}`, `'/'`},
		{"same token", `{"identities": [{"name": "n", ` + a + `, "read": ["*"]}, {"name": "m", ` + a + `, "read": ["x"]}]}`, `identity 2 ("m"): token_sha256: identity "n" has the same token`},
		{"same name", `{"identities": [{"name": "n", ` + a + `, "read": ["*"]}, {"name": "n", "uid": 1, "read": ["x"]}]}`, "another identity has it"},
		{"same user", `{"identities": [{"name": "n", "uid": 1, "read": ["*"]}, {"name": "m", "uid": 1, "read": ["x"]}]}`, `uid: identity "n" has 1 too`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := access.Parse([]byte(tt.text)); !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want ErrInvalid with %q", err, tt.want)
			}
		})
	}
}

// FuzzParse: no bytes make it panic, and nobody gets in without a token or a user.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"identities": [{"name": "n", "token_sha256": "` + digest("a") + `", "uid": 3, "read": ["*"], "write": ["a[b-c]?"]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := access.Parse(b)
		if err != nil {
			if !errors.Is(err, block.ErrInvalid) {
				t.Errorf("error %v, want ErrInvalid", err)
			}
			return
		}
		if l.ByToken("") != nil {
			t.Error("an empty token is somebody's")
		}
		l.ByToken("a").Rights("abc")
	})
}

// TestShare: namespaces are of one share when the same may read and the same may write.
func TestShare(t *testing.T) {
	parse := func(identities string) *access.List {
		t.Helper()
		l, err := access.Parse([]byte(`{"identities": [` + identities + `]}`))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := parse(`{"name": "a", "uid": 1, "read": ["a-*", "common"], "write": ["a-*"]},
		{"name": "b", "uid": 2, "read": ["b-*", "common"], "write": ["b-*"]},
		{"name": "op", "uid": 3, "read": ["*"], "write": ["*"]}`)
	for _, tt := range []struct {
		x, y string
		same bool
	}{
		{"a-1", "a-2", true},
		{"a-1", "b-1", false},
		{"common", "a-1", false},
		{"common", "other", false},
		{"other", "another", true},
	} {
		if same := l.Share(tt.x) == l.Share(tt.y); same != tt.same {
			t.Errorf("%s and %s are of one share: %v, want %v", tt.x, tt.y, same, tt.same)
		}
	}
	if !l.Divides() {
		t.Error("it divides nothing")
	}
	for _, all := range []string{
		`{"name": "op", "uid": 3, "read": ["*"], "write": ["*"]}`,
		`{"name": "op", "uid": 3, "read": ["x", "*"], "write": ["*"]}, {"name": "auditor", "uid": 4, "read": ["*"]}`,
	} {
		if parse(all).Divides() {
			t.Errorf("%s divides namespaces", all)
		}
	}
	if access.Single("x").Divides() {
		t.Error("a single token divides namespaces")
	}
}
