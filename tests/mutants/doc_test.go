// Package mutants breaks the library on purpose, in one named way after the other,
// and requires that a test notices. A promise whose test passes on broken code is
// not tested.
package mutants
