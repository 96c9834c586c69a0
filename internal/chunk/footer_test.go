package chunk

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// goldenLayout and goldenFooter are what testdata/footer.py wrote.
func goldenLayout(t testing.TB) *Layout {
	n := &Namespace{Model: "m", ChunkTokens: 7, Groups: []Group{
		{Kind: GroupFull, TokensPerRow: 1, Regions: []Region{{Name: "k", Component: "target", Head: -1, Bytes: 100}}},
		{Kind: GroupFull, TokensPerRow: 1, Regions: []Region{{Name: "v", Component: "target", Head: -1, Bytes: 60}}},
	}}
	l, err := n.Layout()
	require.NoError(t, err)
	return l
}

func count(dst []byte, from byte) {
	for i := range dst {
		dst[i] = from + byte(i)
	}
}

func goldenFooter(t testing.TB) *Footer {
	f := goldenLayout(t).Footer()
	count(f.Key[:], 0)
	count(f.Fingerprint[:], 100)
	count(f.Parent[:], 200)
	f.Ordinal = 3
	payload := make([]byte, f.PaddedBytes)
	for i := range payload {
		payload[i] = byte(i % 251)
	}
	f.Hash = HashPayload(payload)
	f.Created = 1700000000123456789
	f.Session = 0x0123456789abcdef
	f.Provenance = []byte(`{"D":4,"I":16}`)
	return f
}

func goldenPage(t testing.TB) []byte {
	b, err := os.ReadFile("testdata/footer.bin")
	require.NoError(t, err)
	return b
}

// resign gives a page its right hash again after a test changed a field, so that
// the check of the field is what finds it.
func resign(b []byte) {
	h := HashPayload(b[:offFooterHash])
	copy(b[offFooterHash:], h[:])
}

func TestFooterIsGolden(t *testing.T) {
	page := bytes.Repeat([]byte{0xff}, FooterBytes)
	require.NoError(t, goldenFooter(t).Encode(page))
	require.Equal(t, hex.Dump(goldenPage(t)), hex.Dump(page))
	got, err := DecodeFooter(page)
	require.NoError(t, err)
	require.Equal(t, goldenFooter(t), got)
	require.NoError(t, got.Check(got.Key, got.Fingerprint, goldenLayout(t)))

	clear(page)
	require.Equal(t, `{"D":4,"I":16}`, string(got.Provenance), "the footer keeps nothing of the page")
}

// The hash is the published XXH3-128 of nothing, as one little endian number.
func TestPayloadHashOrder(t *testing.T) {
	h := HashPayload(nil)
	require.Equal(t, "7f498d4624c30160d8984701d306aa99", hex.EncodeToString(h[:]))
}

func TestEveryFlippedBitIsFound(t *testing.T) {
	page := goldenPage(t)
	for i := range page {
		page[i] ^= 1 << (i % 8)
		_, err := DecodeFooter(page)
		require.ErrorIs(t, err, ErrFooterHash, "byte %d", i)
		page[i] ^= 1 << (i % 8)
	}
	for _, n := range []int{0, 1, FooterBytes - 1, FooterBytes + 1} {
		_, err := DecodeFooter(make([]byte, n))
		require.ErrorIs(t, err, ErrFooterSize)
	}
	_, err := DecodeFooter(make([]byte, FooterBytes))
	require.ErrorIs(t, err, ErrFooterHash)
}

func TestFooterFieldsAreChecked(t *testing.T) {
	le := binary.LittleEndian
	for name, c := range map[string]struct {
		change func(b []byte)
		want   error
	}{
		"magic":              {func(b []byte) { b[0] = 'X' }, ErrMagic},
		"magic before major": {func(b []byte) { b[0] = 'X'; b[offMajor] = 2 }, ErrMagic},
		"major 2":            {func(b []byte) { b[offMajor] = 2; b[offHashKind] = 9 }, ErrNewerMajor},
		"major 256":          {func(b []byte) { b[offMajor] = 0; b[offMajor+1] = 1 }, ErrNewerMajor},
		"major 0":            {func(b []byte) { b[offMajor] = 0 }, ErrFooterField},
		"footer bytes":       {func(b []byte) { le.PutUint32(b[offSize:], 8192) }, ErrFooterField},
		"hash kind":          {func(b []byte) { b[offHashKind] = 2 }, ErrFooterField},
		"no groups":          {func(b []byte) { le.PutUint32(b[offGroupCount:], 0) }, ErrFooterField},
		"65 groups":          {func(b []byte) { le.PutUint32(b[offGroupCount:], 65) }, ErrFooterField},
		"provenance":         {func(b []byte) { le.PutUint32(b[offProvLen:], MaxProvenance+1) }, ErrFooterField},
		"no payload":         {func(b []byte) { le.PutUint64(b[offPayload:], 0) }, ErrFooterField},
		"huge payload":       {func(b []byte) { le.PutUint64(b[offPayload:], 1<<63) }, ErrFooterField},
		"huge P":             {func(b []byte) { le.PutUint64(b[offPadded:], 1<<63) }, ErrFooterField},
		"payload above P":    {func(b []byte) { le.PutUint64(b[offPayload:], 4097) }, ErrFooterField},
		"P not aligned":      {func(b []byte) { le.PutUint64(b[offPadded:], 4095) }, ErrFooterField},
		"P a page too long":  {func(b []byte) { le.PutUint64(b[offPadded:], 8192) }, ErrFooterField},
	} {
		page := goldenPage(t)
		c.change(page)
		resign(page)
		_, err := DecodeFooter(page)
		require.ErrorIs(t, err, c.want, name)
	}
}

// What a later minor version adds stands in reserved bytes: this one reads on.
func TestNewerMinorIsRead(t *testing.T) {
	page := goldenPage(t)
	page[offMinor] = 7
	for _, at := range []int{109, 111, 176, 183, 192, 255, 3328, 4079} {
		page[at] = 0xee
	}
	resign(page)
	got, err := DecodeFooter(page)
	require.NoError(t, err)
	want := goldenFooter(t)
	want.Minor = 7
	require.Equal(t, want, got)
}

func TestFooterIsComparedWithWhatIsExpected(t *testing.T) {
	l := goldenLayout(t)
	for name, c := range map[string]struct {
		change func(f *Footer)
		want   error
	}{
		"key":            {func(f *Footer) { f.Key[31]++; f.Fingerprint[0]++ }, ErrKey},
		"fingerprint":    {func(f *Footer) { f.Fingerprint[31]++; f.PayloadBytes++ }, ErrFingerprint},
		"payload":        {func(f *Footer) { f.PayloadBytes++ }, ErrLengths},
		"P":              {func(f *Footer) { f.PaddedBytes += 4096 }, ErrLengths},
		"C":              {func(f *Footer) { f.ChunkTokens++; f.Groups = nil }, ErrLengths},
		"group missing":  {func(f *Footer) { f.Groups = f.Groups[:1] }, ErrGroups},
		"rows":           {func(f *Footer) { f.Groups[1].Rows++ }, ErrGroups},
		"row stride":     {func(f *Footer) { f.Groups[0].RowStride += 64 }, ErrGroups},
		"tokens per row": {func(f *Footer) { f.Groups[0].TokensPerRow = 7 }, ErrGroups},
		"kind":           {func(f *Footer) { f.Groups[0].Kind = KindBlob }, ErrGroups},
	} {
		f := goldenFooter(t)
		k, fp := f.Key, f.Fingerprint
		c.change(f)
		require.ErrorIs(t, f.Check(k, fp, l), c.want, name)
	}
}

func TestWrongFootersAreNotWritten(t *testing.T) {
	page := make([]byte, FooterBytes)
	require.ErrorIs(t, goldenFooter(t).Encode(page[:100]), ErrFooterSize)
	for name, change := range map[string]func(f *Footer){
		"no groups":         func(f *Footer) { f.Groups = nil },
		"too many groups":   func(f *Footer) { f.Groups = make([]FooterGroup, 65) },
		"long provenance":   func(f *Footer) { f.Provenance = bytes.Repeat([]byte(" "), MaxProvenance+1) },
		"broken provenance": func(f *Footer) { f.Provenance = []byte("{") },
		"lengths":           func(f *Footer) { f.PaddedBytes = 100 },
	} {
		f := goldenFooter(t)
		change(f)
		require.ErrorIs(t, f.Encode(page), ErrFooterField, name)
	}
}

func FuzzDecodeFooter(f *testing.F) {
	f.Add(goldenPage(f), false)
	f.Add(make([]byte, FooterBytes), true)
	f.Add([]byte(footerMagic), false)
	f.Fuzz(func(t *testing.T, b []byte, sign bool) {
		if sign && len(b) == FooterBytes {
			resign(b)
		}
		got, err := DecodeFooter(b)
		if err != nil {
			return
		}
		page := make([]byte, FooterBytes)
		if got.Encode(page) != nil {
			return // provenance that is no JSON is read, but not written
		}
		again, err := DecodeFooter(page)
		require.NoError(t, err)
		again.Minor = got.Minor
		require.Equal(t, got, again)
	})
}
