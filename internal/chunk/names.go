package chunk

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

const (
	slugBytes   = 64
	prefixHex   = 32
	chunkSuffix = ".kvc"
	tempSuffix  = ".tmp"
)

// DirName is the directory of a namespace: the model's name, made harmless and
// short for people to read, and the first 32 hex digits of the fingerprint.
func DirName(model string, fp Fingerprint) string {
	return slug(model) + "@" + hex.EncodeToString(fp[:prefixHex/2])
}

// ParseDirName gives the 32 hex digits of a name that DirName can have made.
func ParseDirName(name string) (fpPrefix string, ok bool) {
	s, prefix, found := strings.Cut(name, "@")
	if !found || !validSlug(s) {
		return "", false
	}
	var b [prefixHex / 2]byte
	if !parseHex(b[:], prefix) {
		return "", false
	}
	return prefix, true
}

// SubDir is the directory of a chunk inside its namespace's: two hex digits.
func SubDir(k Key) string { return hex.EncodeToString(k[:1]) }

// FileName is the name of a chunk's file in its SubDir.
func FileName(k Key) string { return k.String() + chunkSuffix }

// ParseFileName gives the key of a name that FileName made.
func ParseFileName(name string) (Key, bool) {
	s, found := strings.CutSuffix(name, chunkSuffix)
	if !found {
		return Key{}, false
	}
	return ParseKey(s)
}

// TempName is the name of a chunk's file while it is written. The session tells
// whose it is, n keeps two writes of one session apart.
func TempName(k Key, session uint64, n uint64) string {
	return fmt.Sprintf("%v.%016x.%d%s", k, session, n, tempSuffix)
}

// ParseTempName takes a name apart that TempName made.
func ParseTempName(name string) (k Key, session uint64, n uint64, ok bool) {
	s, found := strings.CutSuffix(name, tempSuffix)
	parts := strings.Split(s, ".")
	if !found || len(parts) != 3 {
		return Key{}, 0, 0, false
	}
	k, ok = ParseKey(parts[0])
	var raw [8]byte
	if !ok || !parseHex(raw[:], parts[1]) {
		return Key{}, 0, 0, false
	}
	session = binary.BigEndian.Uint64(raw[:])
	n, err := strconv.ParseUint(parts[2], 10, 64)
	if err != nil || strconv.FormatUint(n, 10) != parts[2] {
		return Key{}, 0, 0, false
	}
	return k, session, n, true
}

// slug writes every byte that could mean something to a shell, a file system or
// ParseDirName as %XX, and never ends inside such an escape.
func slug(model string) string {
	const digits = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(model) {
		c := model[i]
		if plain(c) {
			if b.Len()+1 > slugBytes {
				break
			}
			b.WriteByte(c)
			continue
		}
		if b.Len()+3 > slugBytes {
			break
		}
		b.WriteByte('%')
		b.WriteByte(digits[c>>4])
		b.WriteByte(digits[c&15])
	}
	return b.String()
}

func validSlug(s string) bool {
	if s == "" || len(s) > slugBytes {
		return false
	}
	for i := 0; i < len(s); i++ {
		if plain(s[i]) {
			continue
		}
		if s[i] != '%' || i+2 >= len(s) {
			return false
		}
		hi, ok1 := upperDigit(s[i+1])
		lo, ok2 := upperDigit(s[i+2])
		if !ok1 || !ok2 || plain(hi<<4|lo) {
			return false
		}
		i += 2
	}
	return true
}

func plain(c byte) bool {
	return c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
}

func upperDigit(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}
