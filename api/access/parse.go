package access

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"unicode"

	"github.com/kvtier/kvtier/index/block"
)

// maxName is how long the name of an identity may be.
const maxName = 255

// file is a list as it is written.
type file struct {
	Identities []entry `json:"identities"`
}

type entry struct {
	Name        string   `json:"name"`
	TokenSHA256 string   `json:"token_sha256"`
	UID         *uint32  `json:"uid"`
	Read        []string `json:"read"`
	Write       []string `json:"write"`
	MaxSessions *int     `json:"max_sessions"`
	MaxLeases   *int     `json:"max_leases"`
}

// Parse reads a list: a JSON object {"identities": [...]}, and for each
//
//	name          of the identity, for logs, listings and denials
//	token_sha256  SHA-256 of its token, in hexadecimal
//	uid           its user on this host
//	read, write   globs (path.Match) over the names of namespaces that it may read and write
//	max_sessions  how many it may have open at once [DefaultMaxSessions]
//	max_leases    how many it may hold at once, in sessions and over gRPC [DefaultMaxLeases]
//
// with a token, a user or both. What cannot be is an ErrInvalid that names the entry.
func Parse(data []byte) (*List, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var f file
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("%w: %s", block.ErrInvalid, describe(err))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: something follows the JSON object", block.ErrInvalid)
	}
	if len(f.Identities) == 0 {
		return nil, fmt.Errorf("%w: identities: there are none, so nobody could connect", block.ErrInvalid)
	}
	l := &List{}
	for i := range f.Identities {
		id, err := f.Identities[i].identity()
		if err == nil {
			err = l.add(id)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: identity %d (%q): %w", block.ErrInvalid, i+1, f.Identities[i].Name, err)
		}
	}
	return l, nil
}

// describe says where JSON is at fault, in the words of the file.
func describe(err error) string {
	var typ *json.UnmarshalTypeError
	if errors.As(err, &typ) {
		return fmt.Sprintf("%s: a JSON %s at byte %d, want %s", typ.Field, typ.Value, typ.Offset, typ.Type)
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

func (e *entry) identity() (*Identity, error) {
	if e.Name == "" || len(e.Name) > maxName {
		return nil, fmt.Errorf("name: length %d, want 1 to %d", len(e.Name), maxName)
	}
	for _, r := range e.Name {
		if !unicode.IsPrint(r) || r == '/' {
			return nil, fmt.Errorf("name: character %q is not allowed", r)
		}
	}
	id := &Identity{name: e.Name, uid: e.UID, read: e.Read, write: e.Write}
	if e.TokenSHA256 != "" {
		sum, err := hex.DecodeString(e.TokenSHA256)
		switch {
		case err != nil:
			return nil, fmt.Errorf("token_sha256: %w", err)
		case len(sum) != sha256.Size:
			return nil, fmt.Errorf("token_sha256: %d bytes, want the %d of a SHA-256", len(sum), sha256.Size)
		}
		id.digest = (*[sha256.Size]byte)(sum)
		if *id.digest == sha256.Sum256(nil) {
			return nil, errors.New("token_sha256: it is that of an empty token, which everybody has")
		}
	}
	if id.digest == nil && id.uid == nil {
		return nil, errors.New("neither token_sha256 nor uid, by which it would be known")
	}
	if len(e.Read)+len(e.Write) == 0 {
		return nil, errors.New("neither read nor write: it could do nothing")
	}
	for _, globs := range []struct {
		field string
		all   []string
	}{{"read", e.Read}, {"write", e.Write}} {
		for _, g := range globs.all {
			if err := checkGlob(g); err != nil {
				return nil, fmt.Errorf("%s: glob %q: %w", globs.field, g, err)
			}
		}
	}
	return id, id.limit(e.MaxSessions, e.MaxLeases)
}

// limit sets what it may have at once; nil: the defaults.
func (i *Identity) limit(sessions, leases *int) error {
	maxLeases := DefaultMaxLeases
	i.usage.maxSessions = DefaultMaxSessions
	for _, l := range []struct {
		field     string
		from, set *int
	}{{"max_sessions", sessions, &i.usage.maxSessions}, {"max_leases", leases, &maxLeases}} {
		switch {
		case l.from == nil:
		case *l.from < 1:
			return fmt.Errorf("%s: %d, want 1 or more", l.field, *l.from)
		default:
			*l.set = *l.from
		}
	}
	i.usage.leases = NewLeases(maxLeases)
	return nil
}

// checkGlob refuses what matches no name that a namespace can have.
func checkGlob(g string) error {
	switch _, err := path.Match(g, ""); {
	case err != nil:
		return err
	case g == "":
		return errors.New("it is empty, and matches no namespace")
	case strings.ContainsRune(g, '/'):
		return errors.New("no namespace has a '/' in its name")
	}
	return nil
}

// add takes one more, unless it could be taken for another.
func (l *List) add(id *Identity) error {
	for _, other := range l.all {
		switch {
		case other.name == id.name:
			return errors.New("name: another identity has it too")
		case id.digest != nil && other.digest != nil && *id.digest == *other.digest:
			return fmt.Errorf("token_sha256: identity %q has the same token", other.name)
		case id.uid != nil && other.uid != nil && *id.uid == *other.uid:
			return fmt.Errorf("uid: identity %q has %d too", other.name, *id.uid)
		}
	}
	l.all = append(l.all, id)
	return nil
}
