//go:build ranksteps

package ranks

import "github.com/kvtier/kvtier/internal/steps"

func hookSteps(h func(string)) { steps.Hook(h) }
