package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestConfigurationDocumentNamesEverySetting(t *testing.T) {
	document, err := os.ReadFile("../../docs/configuration.md")
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(string(document), settingsTable()),
		"docs/configuration.md must end with the output of `kvtier settings`")
}
