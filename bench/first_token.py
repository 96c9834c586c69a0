"""Time to first token from DRAM and disk against a cold prefill, on a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from figure import Figure

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "demo.py"


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as work:
        result = Path(work) / "demo.json"
        subprocess.run([sys.executable, str(DEMO), "--only", "vllm", "--json", str(result)], check=True, stdout=subprocess.DEVNULL)
        runs = {r["name"]: r for r in json.loads(result.read_text())["runs"]}
    cold = runs["cold"]["ttft_s"]
    return [
        Figure(f"time to first token from {name}, 8,000 tokens", "s", "cold", (runs[name]["ttft_s"],), cold, True, 5.0)
        for name in ("dram", "disk")
    ]
