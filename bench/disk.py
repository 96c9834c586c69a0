"""The disk tier: direct reads and writes, adoption, memory of the index, checksum.

The work is done by the Go program in bench/disk, on the tier itself; this module
builds it, runs it on the disk that holds temporary files (TMPDIR), and takes its
figures over."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from figure import Figure

ROOT = Path(__file__).resolve().parent.parent


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench") as work:
        program = Path(work) / "disk"
        subprocess.run(["go", "build", "-o", str(program), "./bench/disk"], cwd=ROOT, check=True)
        out = subprocess.run([str(program), "-dir", work], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [as_figure(json.loads(line)) for line in out.splitlines()]


def as_figure(s: dict) -> Figure:
    limits = tuple(s["limit"])
    return Figure(
        s["name"], s["unit"], s["limit_name"], tuple(s["value"]), statistics.median(limits), s["less_is_better"], s["want"],
        limits if s["paired"] else (),
    )  # fmt: skip
