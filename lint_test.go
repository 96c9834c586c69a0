package kvtier

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// onlyForTests is the package that several packages of tests share.
const onlyForTests = "internal/disktest"

// The rules of the source that no compiler knows. Tests and the command line are
// free of them; the library lives inside somebody else's process.
func TestSourceRules(t *testing.T) {
	const module = "github.com/kvtier/kvtier/"
	// Arrows go down only, and none to what is only for tests.
	mayImport := map[string][]string{
		"internal/sys":   {"internal/spawn"},
		"internal/spawn": {},
		"internal/steps": {},
		"internal/chunk": {"internal/sys", "internal/spawn"},
		"internal/wire":  {"internal/chunk", "internal/sys", "internal/spawn"},
		"dcp":            {"internal/steps"},
		"shm":            {"internal/wire", "internal/sys", "internal/spawn"},
		"tier":           {"internal/chunk", "internal/sys", "internal/spawn"},
		".":              {"dcp", "shm", "tier", "internal/chunk", "internal/wire", "internal/sys", "internal/spawn", "internal/steps"},
	}
	files := 0
	for dir, allowed := range mayImport {
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, e := range entries {
			name := filepath.Join(dir, e.Name())
			if filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
				continue
			}
			files++
			set := token.NewFileSet()
			f, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			for _, imp := range f.Imports {
				path := strings.Trim(imp.Path.Value, `"`)
				require.NotEqual(t, "os/signal", path, "%s: it steals the host's signals", name)
				if strings.HasPrefix(path, "golang.org/x/sys/unix") {
					require.Equal(t, "internal/sys", dir, "%s: only internal/sys makes system calls", name)
				}
				if ours, ok := strings.CutPrefix(path, module); ok {
					require.Contains(t, allowed, ours, "%s imports %s: arrows go down only", name, ours)
				}
			}
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.GoStmt:
					require.Equal(t, "internal/spawn", dir, "%s: start goroutines with spawn.Go", set.Position(n.Pos()))
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && x.Name == "os" {
						switch n.Sel.Name {
						case "Getenv", "LookupEnv", "Environ", "ExpandEnv":
							t.Errorf("%s: Go sees the environment of the start of the process, not what the host set later", set.Position(n.Pos()))
						}
					}
				}
				return true
			})
		}
	}
	require.Greater(t, files, 40)
}

// Every directory with library code is known to the rules.
func TestSourceRulesCoverEveryPackage(t *testing.T) {
	known := []string{".", "dcp", "shm", "tier", "internal/chunk", "internal/wire", "internal/sys", "internal/spawn", "internal/steps", onlyForTests}
	hosts := []string{"capi", "cmd", "examples", "bench", "python", "docs", "build", "testdata"}
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			base := filepath.Base(path)
			if path != "." && (strings.HasPrefix(base, ".") || slices.Contains(hosts, base)) {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) == ".go" && !strings.HasSuffix(path, "_test.go") {
			require.Contains(t, known, filepath.Dir(path))
		}
		return nil
	}))
}

// What programs are made of holds nothing that is only for tests.
func TestOnlyTestsImportWhatIsForTests(t *testing.T) {
	files := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			if base := filepath.Base(path); path != "." && (strings.HasPrefix(base, ".") || base == "build") {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, imp := range f.Imports {
			require.NotContains(t, imp.Path.Value, onlyForTests, path)
		}
		return nil
	}))
	require.Greater(t, files, 60)
}
