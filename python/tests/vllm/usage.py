"""What a cache takes on disk, seen from outside."""

from __future__ import annotations

import os
from pathlib import Path


def allocated(root: Path) -> int:
    """What `du` says, in bytes, also while files and directories come and go."""
    total = 0
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, n) for n in names)):
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                pass
    return total
