package wire

import (
	"encoding/binary"
	"fmt"
)

// SelfTestStep is where a rank is in a self-test.
type SelfTestStep uint32

const (
	SelfTestJoin   SelfTestStep = 1 + iota // it is there; answered when all ranks are, with slots to fill
	SelfTestLoad                           // it has sent its STORE_DONE; answered when the chunks can be loaded
	SelfTestReport                         // it has compared and has restored its pages; answered with the verdict
	SelfTestLeave                          // it touches no slot of the test any more, whatever came before
)

// Kinds of a report.
const (
	ReportOK      uint32 = iota
	ReportWrong          // bytes differ
	ReportMissing        // a chunk did not come back
)

// SelfTestText is the most bytes of the text in a report or a verdict.
const SelfTestText = 224

// selfTestBytes is the fixed body of the request and of the reply.
const selfTestBytes = 32 + SelfTestText

// SelfTestBody is the body of a SELFTEST:
// u32 step | u32 chunks | u32 report | u32 text length | 16 reserved | text[224].
type SelfTestBody struct {
	Step   SelfTestStep
	Chunks uint32 // JOIN: the most that the rank can take
	Report uint32 // REPORT: ReportOK and so on
	Text   string // REPORT: what is wrong
}

func (b *SelfTestBody) check() error {
	switch {
	case b.Step < SelfTestJoin || b.Step > SelfTestLeave:
		return fmt.Errorf("%w: step %d of a self-test", ErrInvalid, b.Step)
	case b.Report > ReportMissing:
		return fmt.Errorf("%w: report %d of a self-test", ErrInvalid, b.Report)
	case len(b.Text) > SelfTestText:
		return fmt.Errorf("%w: a text of %d bytes", ErrTooMany, len(b.Text))
	}
	return nil
}

func (b *SelfTestBody) put(body []byte) {
	le := binary.LittleEndian
	le.PutUint32(body[0:], uint32(b.Step))
	le.PutUint32(body[4:], b.Chunks)
	le.PutUint32(body[8:], b.Report)
	le.PutUint32(body[12:], uint32(len(b.Text)))
	copy(body[32:], b.Text)
}

func parseSelfTestBody(body []byte) (*SelfTestBody, error) {
	le := binary.LittleEndian
	text, err := parseText(body[32:], le.Uint32(body[12:]))
	if err != nil {
		return nil, err
	}
	return &SelfTestBody{
		Step: SelfTestStep(le.Uint32(body[0:])), Chunks: le.Uint32(body[4:]), Report: le.Uint32(body[8:]), Text: text,
	}, nil
}

// SelfTestReply is the body of the reply to a SELFTEST, before its verdicts:
// u64 op | u64 seed | u32 text length | 12 reserved | text[224]. The verdicts, in
// the reply to JOIN, are the slots of the chunks 0, 1, ...
type SelfTestReply struct {
	Op   uint64 // of the STORE_DONE, LOAD_WAIT and LOAD_DONE that belong to the test
	Seed uint64 // of the pattern
	Text string // why the test did not pass
}

func (r *SelfTestReply) put(body []byte) {
	le := binary.LittleEndian
	le.PutUint64(body[0:], r.Op)
	le.PutUint64(body[8:], r.Seed)
	le.PutUint32(body[16:], uint32(len(r.Text)))
	copy(body[32:], r.Text)
}

func parseSelfTestReply(body []byte) (*SelfTestReply, error) {
	le := binary.LittleEndian
	text, err := parseText(body[32:], le.Uint32(body[16:]))
	if err != nil {
		return nil, err
	}
	return &SelfTestReply{Op: le.Uint64(body[0:]), Seed: le.Uint64(body[8:]), Text: text}, nil
}

func parseText(b []byte, length uint32) (string, error) {
	if length > SelfTestText {
		return "", fmt.Errorf("%w: a text of %d bytes", ErrMalformed, length)
	}
	return string(b[:length]), nil
}
