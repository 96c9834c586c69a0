"""What the tests of the binding share. They run against the built library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parent.parent
ROOT = PYTHON.parent
sys.path.insert(0, str(PYTHON))

# Generous: the machine that runs this may be busy with other tests.
SOON = 20.0

Script = Callable[..., "subprocess.CompletedProcess[str]"]


def settings(path: Path, **more: Any) -> dict[str, Any]:
    """Those of a small cache."""
    return {"disk_path": str(path), "dram_gib": 0.0625, "disk_gib": 0.25, "free_floor_gib": 0, **more}
