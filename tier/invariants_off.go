//go:build !invariants

package tier

import "github.com/kvtier/kvtier/internal/chunk"

// invariants says that every change of a slot is checked against the rules below;
// it is for tests.
const invariants = false

func (s *Space) mustHold(uint32) {}

func mustBePadded(*chunk.Layout, []byte) {}
