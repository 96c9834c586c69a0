package dcp

import "errors"

// Why nothing was copied. All but ErrStopped are found before the first byte moves.
var (
	ErrGeometry = errors.New("dcp: geometry is not possible")
	ErrRegion   = errors.New("dcp: region does not fit its pages or its row")
	ErrSlot     = errors.New("dcp: slot is too small for its rows")
	ErrTable    = errors.New("dcp: block table does not cover the tokens")
	ErrBlock    = errors.New("dcp: block id is out of range")
	ErrClip     = errors.New("dcp: clip is not possible")
	ErrStopped  = errors.New("dcp: stopped before the end")
)
