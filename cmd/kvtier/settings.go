package main

import (
	"fmt"
	"strings"

	"github.com/kvtier/kvtier"
	"github.com/spf13/cobra"
)

func newSettingsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "settings",
		Short: "Print every setting of the library as a Markdown table",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), settingsTable())
			return err
		},
	}
}

// settingsTable is the table of docs/configuration.md; a test compares the two,
// so that the document cannot fall behind the code.
func settingsTable() string {
	var b strings.Builder
	b.WriteString("| setting | default | unit | what it does |\n|---|---|---|---|\n")
	for _, s := range kvtier.Settings() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", s.Name, s.Default, strings.ReplaceAll(s.Unit, "|", ", "), s.Help)
	}
	return b.String()
}
