package main

import (
	"encoding/json"
	"fmt"
	"io"
)

// tell writes what a command has found: the report as one JSON object, or what print
// makes of it for people.
func tell(w io.Writer, asJSON bool, report any, print func(io.Writer)) error {
	if !asJSON {
		print(w)
		return nil
	}
	b, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, string(b))
	return err
}

// tellRemoval ends a command that removes files: it tells the report, and that some
// could not be removed is a problem.
func tellRemoval(w io.Writer, asJSON bool, report any, print func(io.Writer), failed []badFile, removed string) error {
	if err := tell(w, asJSON, report, print); err != nil {
		return err
	}
	if len(failed) > 0 {
		return problem("%s cannot be %s", plural(len(failed), "name"), removed)
	}
	return nil
}
