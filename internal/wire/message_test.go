package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
)

var update = flag.Bool("update", false, "write the golden files anew")

// key is a recognisable key.
func key(b byte) (k chunk.Key) {
	for i := range k {
		k[i] = b + byte(i)
	}
	return k
}

// goldenRequests holds a message of every type and form.
func goldenRequests() map[string]*Request {
	run := func(n int) *Run {
		r := &Run{Parent: key(0x10), First: 7, Lease: 0x1122334455667788}
		for i := range n {
			r.Keys = append(r.Keys, key(byte(0x40+0x20*i)))
		}
		return r
	}
	flagged := func(r *Run, flags uint32) *Run { r.Flags = flags; return r }
	base := func(t Type) *Request {
		return &Request{Type: t, Op: 0xA1A2A3A4A5A6A7A8, Seq: 0x01020304, Timeout: 1500 * time.Millisecond}
	}
	with := func(t Type, f func(*Request)) *Request { r := base(t); f(r); return r }
	done := []Done{{Slot: 1, Generation: 2, Part: 3}, {Slot: 4, Generation: 5, Part: 6, Status: StatusAborted}, {Slot: 7, Generation: 8, Part: 9}}
	return map[string]*Request{
		"lookup":        with(Lookup, func(r *Request) { r.Run = run(2) }),
		"prefetch":      with(Prefetch, func(r *Request) { r.Run = run(1) }),
		"lease":         with(Lease, func(r *Request) { r.Run = flagged(run(2), LeasePrefetch|LeasePin) }),
		"lease_empty":   with(Lease, func(r *Request) { r.Run = run(0) }),
		"lease_renew":   with(Lease, func(r *Request) { r.Run = flagged(run(0), LeaseRenew); r.Renew = []uint64{5, 1 << 60} }),
		"release":       with(Release, func(r *Request) { r.Run = run(0) }),
		"store_begin":   with(StoreBegin, func(r *Request) { r.Run = flagged(run(3), StoreNoDisk) }),
		"store_done":    with(StoreDone, func(r *Request) { r.Done = done }),
		"load_begin":    with(LoadBegin, func(r *Request) { r.Run = run(2) }),
		"load_wait":     with(LoadWait, func(r *Request) { r.First = 32 }),
		"load_done":     with(LoadDone, func(r *Request) { r.Done = done[:2] }),
		"load_done_end": with(LoadDone, func(r *Request) { r.Flags = LoadDoneEnd }),
		"cancel":        base(Cancel),
		"cancel_unsent": with(Cancel, func(r *Request) { r.Flags = CancelUnsent }),
		"selftest_join": with(SelfTest, func(r *Request) { r.Test = &SelfTestBody{Step: SelfTestJoin, Chunks: 7} }),
		"selftest_report": with(SelfTest, func(r *Request) {
			r.Test = &SelfTestBody{Step: SelfTestReport, Report: ReportWrong, Text: "byte 3 is 0x01"}
		}),
		"timeout_rounds": with(Cancel, func(r *Request) { r.Timeout = 2 * time.Millisecond }),
	}
}

func goldenReplies() map[string]*Reply {
	base := Reply{Op: 0xA1A2A3A4A5A6A7A8, Seq: 0x01020304}
	with := func(t Type, f func(*Reply)) *Reply { r := base; r.Type = t; f(&r); return &r }
	hits := func(r *Reply) { r.Hits = Hits{Held: 5, Resident: 4, Leased: 3, Pending: 2, Bytes: 1 << 33} }
	return map[string]*Reply{
		"lookup":   with(Lookup, hits),
		"prefetch": with(Prefetch, hits),
		"lease":    with(Lease, hits),
		"release":  with(Release, func(*Reply) {}),
		"store_begin": with(StoreBegin, func(r *Reply) {
			r.Verdicts = []Verdict{{Granted, 3, 9}, {Have, 0, 0}, {Pending, 0, 0}, {Declined, 0, 0}}
		}),
		"store_done": with(StoreDone, func(*Reply) {}),
		"load_begin": with(LoadBegin, func(r *Reply) { r.Verdicts = []Verdict{{Ready, 1, 2}, {Later, 0, 0}} }),
		"load_wait": with(LoadWait, func(r *Reply) {
			r.First = 32
			r.Verdicts = []Verdict{{Ready, 1, 2}, {Failed, 0, 0}, {Failed, 0, 0}}
		}),
		"load_wait_timeout": with(LoadWait, func(r *Reply) { r.First = 64; r.Status = StatusTimeout }),
		"load_done":         with(LoadDone, func(r *Reply) { r.Status = StatusStale }),
		"selftest_join": with(SelfTest, func(r *Reply) {
			r.Test = SelfTestReply{Op: 5, Seed: 1 << 60}
			r.Verdicts = []Verdict{{Granted, 3, 9}, {Granted, 4, 1}}
		}),
		"selftest_failed": with(SelfTest, func(r *Reply) {
			r.Status, r.Test = StatusFailed, SelfTestReply{Op: 5, Text: "rank 1: byte 3 is 0x01"}
		}),
		"cancel": with(Cancel, func(r *Reply) { r.Status = StatusRefused }),
	}
}

// golden compares b with testdata/name, in lines of 32 hexadecimal bytes.
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	var text strings.Builder
	for line := range slices.Chunk(b, 32) {
		text.WriteString(hex.EncodeToString(line) + "\n")
	}
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(text.String()), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), text.String(), name)
}

func TestGoldenRequests(t *testing.T) {
	for name, r := range goldenRequests() {
		b, err := r.Append(nil)
		require.NoError(t, err, name)
		golden(t, "request_"+name+".hex", b)
		back, err := ParseRequest(b)
		require.NoError(t, err, name)
		require.Equal(t, r, back, name)
	}
}

func TestGoldenReplies(t *testing.T) {
	for name, r := range goldenReplies() {
		b, err := r.Append(nil)
		require.NoError(t, err, name)
		golden(t, "reply_"+name+".hex", b)
		back, err := ParseReply(b)
		require.NoError(t, err, name)
		require.Equal(t, r, back, name)
	}
}

func TestEveryTypeHasGoldenFiles(t *testing.T) {
	requests, replies := map[Type]bool{}, map[Type]bool{}
	for _, r := range goldenRequests() {
		requests[r.Type] = true
	}
	for _, r := range goldenReplies() {
		replies[r.Type] = true
	}
	for typ := Lookup; typ <= Cancel; typ++ {
		require.True(t, requests[typ] && replies[typ], typ)
	}
}

// The offsets of the header, independent of the encoder.
func TestHeaderOffsets(t *testing.T) {
	b, err := (&Request{Type: Cancel, Flags: CancelUnsent, Op: 0x0807060504030201, Seq: 0x0D0C0B0A, Timeout: time.Second}).Append(nil)
	require.NoError(t, err)
	require.Equal(t, "200000000a000100"+"0102030405060708"+"0a0b0c0d"+"00000000"+"e8030000"+"00000000", hex.EncodeToString(b))
}

func TestLargestMessage(t *testing.T) {
	r := &Request{Type: LoadBegin, Run: &Run{Keys: make([]chunk.Key, MaxKeys)}}
	b, err := r.Append(nil)
	require.NoError(t, err)
	require.Len(t, b, MaxMessage)
	_, err = ParseRequest(b)
	require.NoError(t, err)
	require.LessOrEqual(t, r.ReplyBytes(), MaxMessage)

	r.Run.Keys = append(r.Run.Keys, chunk.Key{})
	_, err = r.Append(nil)
	require.ErrorIs(t, err, ErrTooMany)

	b, err = (&Request{Type: LoadBegin, Run: &Run{Keys: make([]chunk.Key, 4096)}}).Append(nil)
	require.NoError(t, err)
	require.Len(t, b, 131168)
}

func TestTimeoutRoundsUp(t *testing.T) {
	for d, want := range map[time.Duration]uint32{
		-time.Second: 0, 0: 0, 1: 1, time.Millisecond: 1, time.Millisecond + 1: 2,
		1 << 62: 1<<32 - 1,
	} {
		require.Equal(t, want, milliseconds(d), d)
	}
}

func TestAppendRefuses(t *testing.T) {
	for name, r := range map[string]*Request{
		"no type":              {},
		"type too large":       {Type: 11},
		"run missing":          {Type: Lookup},
		"run surplus":          {Type: Cancel, Run: &Run{}},
		"release with keys":    {Type: Release, Run: &Run{Keys: make([]chunk.Key, 1)}},
		"done with run":        {Type: Lookup, Run: &Run{}, Done: make([]Done, 1)},
		"cancel with done":     {Type: Cancel, Done: make([]Done, 1)},
		"end with entries":     {Type: LoadDone, Flags: LoadDoneEnd, Done: make([]Done, 1)},
		"unsent elsewhere":     {Type: StoreDone, Flags: CancelUnsent},
		"no disk in a lease":   {Type: Lookup, Run: &Run{Flags: StoreNoDisk}},
		"renew without flag":   {Type: Lease, Run: &Run{}, Renew: []uint64{1}},
		"renew with keys":      {Type: Lease, Run: &Run{Flags: LeaseRenew, Keys: make([]chunk.Key, 1)}, Renew: []uint64{1}},
		"a test without one":   {Type: SelfTest},
		"a test in another":    {Type: Cancel, Test: &SelfTestBody{Step: SelfTestJoin}},
		"step of no test":      {Type: SelfTest, Test: &SelfTestBody{Step: SelfTestLeave + 1}},
		"report of no kind":    {Type: SelfTest, Test: &SelfTestBody{Step: SelfTestReport, Report: ReportMissing + 1}},
		"renew of another one": {Type: Lookup, Run: &Run{}, Renew: []uint64{1}},
	} {
		dst := []byte("kept")
		out, err := r.Append(dst)
		require.ErrorIs(t, err, ErrInvalid, name)
		require.Equal(t, dst, out, name)
	}
	_, err := (&Reply{Type: LoadWait, Verdicts: make([]Verdict, MaxWindow+1)}).Append(nil)
	require.ErrorIs(t, err, ErrTooMany)
	_, err = (&Reply{Type: Lookup, Verdicts: make([]Verdict, 1)}).Append(nil)
	require.ErrorIs(t, err, ErrTooMany)
	_, err = (&Request{Type: SelfTest, Test: &SelfTestBody{Step: SelfTestReport, Text: strings.Repeat("x", SelfTestText+1)}}).Append(nil)
	require.ErrorIs(t, err, ErrTooMany)
	_, err = (&Reply{Type: SelfTest, Test: SelfTestReply{Text: strings.Repeat("x", SelfTestText+1)}}).Append(nil)
	require.ErrorIs(t, err, ErrTooMany)
	_, err = (&Reply{}).Append(nil)
	require.ErrorIs(t, err, ErrInvalid)
}

func TestParseRefuses(t *testing.T) {
	good, err := goldenRequests()["lookup"].Append(nil)
	require.NoError(t, err)
	put32 := func(off int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint32(b[off:], v); return b }
	}
	for name, change := range map[string]func([]byte) []byte{
		"empty":           func([]byte) []byte { return nil },
		"cut":             func(b []byte) []byte { return b[:len(b)-32] },
		"surplus":         func(b []byte) []byte { return append(b, make([]byte, 32)...) },
		"length field":    put32(0, uint32(len(good)-32)),
		"length huge":     put32(0, 1<<32-1),
		"type 0":          func(b []byte) []byte { b[4] = 0; return b },
		"type 11":         func(b []byte) []byte { b[4] = 11; return b },
		"header flags":    func(b []byte) []byte { b[6] = 1; return b },
		"n less":          put32(20, 1),
		"n more":          put32(20, 3),
		"n overflows":     put32(20, 1<<27+2),
		"n huge":          put32(20, 1<<32-1),
		"run flags":       put32(32+36, 1),
		"another's shape": func(b []byte) []byte { b[4] = byte(StoreDone); return b },
		"no entries here": func(b []byte) []byte { b[4] = byte(Release); return b },
	} {
		_, err := ParseRequest(change(bytes.Clone(good)))
		require.ErrorIs(t, err, ErrMalformed, name)
	}
	for _, code := range []Code{0, 8, 1 << 31} {
		b, err := (&Reply{Type: LoadBegin, Verdicts: []Verdict{{Code: code}}}).Append(nil)
		require.NoError(t, err)
		_, err = ParseReply(b)
		require.ErrorIs(t, err, ErrMalformed, code)
	}
}

// Reserved bytes are ignored, so that later versions may use them.
func TestReservedBytesAreIgnored(t *testing.T) {
	want := goldenRequests()["lookup"]
	b, err := want.Append(nil)
	require.NoError(t, err)
	for i := 32 + 48; i < 32+64; i++ {
		b[i] = 0xFF
	}
	got, err := ParseRequest(b)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// What is parsed does not change with the bytes it came from.
func TestParseCopies(t *testing.T) {
	want := goldenRequests()["store_begin"]
	b, err := want.Append(nil)
	require.NoError(t, err)
	got, err := ParseRequest(b)
	require.NoError(t, err)
	clear(b)
	require.Equal(t, want, got)
}

func drawKeys(t *rapid.T, most int) []chunk.Key {
	n := rapid.IntRange(0, most).Draw(t, "keys")
	if n == 0 {
		return nil
	}
	keys := make([]chunk.Key, n)
	for i := range keys {
		keys[i] = key(byte(i))
		binary.LittleEndian.PutUint32(keys[i][:], rapid.Uint32().Draw(t, "key"))
	}
	return keys
}

func drawRequest(t *rapid.T) *Request {
	r := &Request{
		Type:    Type(rapid.Uint16Range(uint16(Lookup), uint16(Cancel)).Draw(t, "type")),
		Op:      rapid.Uint64().Draw(t, "op"),
		Seq:     rapid.Uint32().Draw(t, "seq"),
		Timeout: time.Duration(rapid.Uint32().Draw(t, "timeout")) * time.Millisecond,
	}
	s := r.Type.shape()
	r.Flags = rapid.Uint16().Draw(t, "flags") & s.flags
	switch {
	case r.Type.hasRun():
		r.Run = &Run{
			Parent: key(rapid.Byte().Draw(t, "parent")), First: rapid.Uint32().Draw(t, "first"),
			Flags: rapid.Uint32().Draw(t, "run flags") & s.runFlags, Lease: rapid.Uint64().Draw(t, "lease"),
		}
		switch {
		case r.Type == Lease && r.Run.Flags&LeaseRenew != 0:
			r.Renew = rapid.SliceOfN(rapid.Uint64(), 1, 20).Draw(t, "renew")
		case s.counts:
			r.Run.Keys = drawKeys(t, 40)
		}
	case r.Type == SelfTest:
		r.Test = &SelfTestBody{
			Step:   SelfTestStep(rapid.IntRange(int(SelfTestJoin), int(SelfTestLeave)).Draw(t, "step")),
			Chunks: rapid.Uint32().Draw(t, "chunks"), Report: rapid.Uint32Range(0, ReportMissing).Draw(t, "report"),
			Text: rapid.StringN(-1, -1, SelfTestText).Draw(t, "text"),
		}
	case r.Type == LoadWait:
		r.First = rapid.Uint32().Draw(t, "first")
	case s.counts && r.Flags == 0:
		for range rapid.IntRange(0, 40).Draw(t, "done") {
			r.Done = append(r.Done, Done{
				Slot: rapid.Uint32().Draw(t, "slot"), Generation: rapid.Uint32().Draw(t, "generation"),
				Part: rapid.Uint32().Draw(t, "part"), Status: Status(rapid.Int32().Draw(t, "status")),
			})
		}
	}
	return r
}

func TestRequestsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRequest(t)
		b, err := r.Append([]byte("before"))
		require.NoError(t, err)
		require.Equal(t, "before", string(b[:6]))
		back, err := ParseRequest(b[6:])
		require.NoError(t, err)
		require.Equal(t, r, back)
		bytes, err := RequestReplyBytes(b[6:])
		require.NoError(t, err)
		require.GreaterOrEqual(t, bytes, r.ReplyBytes())
		if len(r.Renew) == 0 {
			require.Equal(t, r.ReplyBytes(), bytes)
		}
	})
}

// The largest reply to a request is what it reserves, not a byte less.
func TestReplyBytesIsTheLargestReply(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRequest(t)
		largest := &Reply{Type: r.Type}
		switch r.Type {
		case StoreBegin, LoadBegin:
			largest.Verdicts = make([]Verdict, len(r.Run.Keys))
		case LoadWait, SelfTest:
			largest.Verdicts = make([]Verdict, MaxWindow)
		}
		b, err := largest.Append(nil)
		require.NoError(t, err)
		require.Equal(t, len(b), r.ReplyBytes())
	})
}

func FuzzParseRequest(f *testing.F) {
	for _, r := range goldenRequests() {
		b, err := r.Append(nil)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRequest(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		again, err := r.Append(nil)
		require.NoError(t, err, "what was parsed can be sent")
		require.Len(t, again, len(b))
		back, err := ParseRequest(again)
		require.NoError(t, err)
		require.Equal(t, r, back)
		_, err = RequestReplyBytes(b)
		require.NoError(t, err)
	})
}

func FuzzParseReply(f *testing.F) {
	for _, r := range goldenReplies() {
		b, err := r.Append(nil)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseReply(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		again, err := r.Append(nil)
		require.NoError(t, err, "what was parsed can be sent")
		require.Len(t, again, len(b))
		back, err := ParseReply(again)
		require.NoError(t, err)
		require.Equal(t, r, back)
	})
}
