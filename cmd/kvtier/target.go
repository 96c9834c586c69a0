package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvtier/kvtier/tier"
)

// target is the root that a command was given, with the namespaces it is about.
type target struct {
	*tier.Inspection
	leader     tier.Leadership
	leaderErr  error // it cannot be told who leads
	namespaces []*tier.InspectedNamespace
}

// openTarget looks at a root; namespace may be empty for all.
func openTarget(path, namespace string) (*target, error) {
	i, err := tier.Inspect(path)
	if err != nil {
		return nil, err
	}
	t := &target{Inspection: i}
	if t.leader, t.leaderErr = i.Leader(); t.leaderErr != nil {
		t.leaderErr = fmt.Errorf("who leads %s cannot be told: %w", i.Path(), t.leaderErr)
	}
	all, err := i.Namespaces()
	if err != nil {
		return nil, err
	}
	t.namespaces, err = choose(all, namespace)
	return t, err
}

// shortestFingerprint is how much of one has to be typed.
const shortestFingerprint = 6

// choose finds the one namespace that a person means: by the name of its directory,
// the beginning of its fingerprint, or the name of its model.
func choose(all []*tier.InspectedNamespace, name string) ([]*tier.InspectedNamespace, error) {
	if name == "" {
		return all, nil
	}
	var found []*tier.InspectedNamespace
	var names []string
	for _, n := range all {
		if n.Name == name {
			return []*tier.InspectedNamespace{n}, nil
		}
		byFingerprint := len(name) >= shortestFingerprint && (strings.HasPrefix(n.Prefix, name) ||
			n.Sidecar == tier.SidecarGood && strings.HasPrefix(n.Fingerprint.String(), name))
		byModel := n.Sidecar == tier.SidecarGood && n.Namespace.Model == name
		if byFingerprint || byModel {
			found = append(found, n)
			names = append(names, n.Name)
		}
	}
	switch len(found) {
	case 0:
		return nil, fmt.Errorf("no namespace %q: give a directory's name, the first %d or more digits of a fingerprint, or a model, as `kvtier info` shows them",
			name, shortestFingerprint)
	case 1:
		return found, nil
	}
	return nil, fmt.Errorf("%q means %d namespaces, name one of: %s", name, len(found), strings.Join(names, ", "))
}

// hold takes the lock where nobody leads, for what must not be done under a leader.
// held is false where somebody does, also one who has come since; then the leader
// is known.
func (t *target) hold() (held bool, release func() error, err error) {
	release = func() error { return nil }
	if t.leaderErr != nil {
		return false, release, t.leaderErr
	}
	if t.leader.Held {
		return false, release, nil
	}
	r, err := t.Hold()
	if err == nil {
		return true, r, nil
	}
	if !errors.Is(err, tier.ErrInUse) {
		return false, release, err
	}
	if t.leader, err = t.Leader(); err == nil && !t.leader.Held {
		err = fmt.Errorf("%s was in use a moment ago, try again: %w", t.Path(), tier.ErrInUse)
	}
	return false, release, err
}

// leaderReport is the leader as JSON.
type leaderReport struct {
	Held    bool       `json:"held"`
	PID     int        `json:"pid,omitempty"` // missing: not visible from here
	Since   *time.Time `json:"since,omitempty"`
	Unknown string     `json:"unknown,omitempty"` // why it cannot be told
}

func (t *target) leaderReport() leaderReport {
	r := leaderReport{Held: t.leader.Held, PID: t.leader.PID}
	if t.leaderErr != nil {
		r.Unknown = t.leaderErr.Error()
	}
	if t.leader.Held {
		since := t.leader.Since.UTC()
		r.Since = &since
	}
	return r
}
