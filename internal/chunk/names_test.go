package chunk

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func testKey() Key {
	var k Key
	for i := range k {
		k[i] = byte(0xa0 + i)
	}
	return k
}

func TestNames(t *testing.T) {
	k := testKey()
	hexKey := k.String()
	require.Equal(t, "a0", SubDir(k))
	require.Equal(t, hexKey+".kvc", FileName(k))
	require.Equal(t, hexKey+".00000000000000ff.12.tmp", TempName(k, 255, 12))
	require.Equal(t, "org%2Fmodel@a0a1a2a3a4a5a6a7a8a9aaabacadaeaf", DirName("org/model", Fingerprint(k)))
}

func TestNamesParseBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var k Key
		copy(k[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "key"))
		got, ok := ParseFileName(FileName(k))
		require.True(t, ok)
		require.Equal(t, k, got)

		session, n := rapid.Uint64().Draw(t, "session"), rapid.Uint64().Draw(t, "n")
		got, s, m, ok := ParseTempName(TempName(k, session, n))
		require.True(t, ok)
		require.Equal(t, k, got)
		require.Equal(t, session, s)
		require.Equal(t, n, m)

		model := rapid.OneOf(rapid.StringN(1, 100, -1), rapid.StringMatching(`[a-z/%@.]{60,70}`)).Draw(t, "model")
		dir := DirName(model, Fingerprint(k))
		require.LessOrEqual(t, len(dir), 64+1+32)
		require.NotContains(t, dir, "/")
		prefix, ok := ParseDirName(dir)
		require.True(t, ok, dir)
		require.Equal(t, k.String()[:32], prefix)
	})
}

func TestSlugIsNeverCutInsideAnEscape(t *testing.T) {
	for n := 55; n <= 66; n++ {
		s, _, _ := strings.Cut(DirName(strings.Repeat("m", n)+"//", Fingerprint{}), "@")
		want := strings.Repeat("m", min(n, 64))
		for len(want)+3 <= 64 && strings.Count(want, "%") < 2 {
			want += "%2F"
		}
		require.Equal(t, want, s, n)
	}
}

func TestForeignNamesAreNotOurs(t *testing.T) {
	k := testKey()
	h := k.String()
	for _, bad := range []string{
		"", ".kvc", h, h + ".kvc.tmp", h + ".KVC", h + ".kvc ", " " + h + ".kvc", h[1:] + ".kvc", h + "0.kvc",
		strings.ToUpper(h) + ".kvc", "g" + h[1:] + ".kvc", "./" + h + ".kvc", h + ".kvc/", h + "\x00.kvc",
	} {
		_, ok := ParseFileName(bad)
		require.False(t, ok, bad)
	}
	const s = "0123456789abcdef"
	_, _, _, ok := ParseTempName(h + "." + s + ".0.tmp")
	require.True(t, ok)
	_, _, n, ok := ParseTempName(h + "." + s + ".18446744073709551615.tmp")
	require.True(t, ok)
	require.Equal(t, uint64(math.MaxUint64), n)
	for _, bad := range []string{
		"", ".tmp", "..tmp", "...tmp", h + ".tmp", h + "." + s + ".tmp", h + "." + s + "..tmp", h + "." + s + ".01.tmp", h + "." + s + ".+1.tmp",
		h + "." + s + ".-1.tmp", h + "." + s + ".1_0.tmp", h + "." + s + ".18446744073709551616.tmp", h + "." + s + ".1.2.tmp",
		h + "." + strings.ToUpper(s) + ".1.tmp", h + "." + s[1:] + ".1.tmp", h + "." + s + ".1", h + "." + s + ".1.kvc", h[2:] + "." + s + ".1.tmp",
	} {
		_, _, _, ok := ParseTempName(bad)
		require.False(t, ok, bad)
	}
	const p = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
	for _, bad := range []string{
		"", "@", "@" + p, "m@", "m" + p, "m@" + p[1:], "m@" + p + "0", "m@" + strings.ToUpper(p), "m@m@" + p, "m/x@" + p, "m%2f@" + p, "m%@" + p,
		"m%2@" + p, "m%41@" + p, "m%zz@" + p, strings.Repeat("m", 65) + "@" + p, "ü@" + p,
	} {
		_, ok := ParseDirName(bad)
		require.False(t, ok, bad)
	}
}

func TestHexKeys(t *testing.T) {
	k := testKey()
	got, ok := ParseKey(k.String())
	require.True(t, ok)
	require.Equal(t, k, got)
	fp, ok := ParseFingerprint(k.String())
	require.True(t, ok)
	require.Equal(t, Fingerprint(k), fp)
	for _, bad := range []string{"", "0", strings.Repeat("0", 63), strings.Repeat("0", 65), strings.Repeat("G", 64), strings.Repeat("A", 64)} {
		_, ok := ParseKey(bad)
		require.False(t, ok)
		_, ok = ParseFingerprint(bad)
		require.False(t, ok)
	}
}

func FuzzParseFileName(f *testing.F) {
	f.Add(FileName(testKey()))
	f.Add(strings.ToUpper(FileName(testKey())))
	f.Add(".kvc")
	f.Fuzz(func(t *testing.T, name string) {
		if k, ok := ParseFileName(name); ok {
			require.Equal(t, name, FileName(k))
		}
	})
}

func FuzzParseTempName(f *testing.F) {
	f.Add(TempName(testKey(), 1, 2))
	f.Add(TempName(testKey(), math.MaxUint64, math.MaxUint64))
	f.Add(testKey().String() + ".0000000000000000.00.tmp")
	f.Fuzz(func(t *testing.T, name string) {
		if k, session, n, ok := ParseTempName(name); ok {
			require.Equal(t, name, TempName(k, session, n))
		}
	})
}

func FuzzParseDirName(f *testing.F) {
	f.Add(DirName("org/model", Fingerprint(testKey())))
	f.Add("m%2@a0a1a2a3a4a5a6a7a8a9aaabacadaeaf")
	f.Fuzz(func(t *testing.T, name string) {
		if prefix, ok := ParseDirName(name); ok {
			require.Len(t, prefix, 32)
			require.True(t, strings.HasSuffix(name, "@"+prefix))
			require.LessOrEqual(t, len(name), 64+1+32)
		}
	})
}
