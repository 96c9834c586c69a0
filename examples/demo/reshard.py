"""The second half of the demo: a C++ engine of several rank processes.

examples/cpp/engine stores under one topology, is killed, and loads under others;
this module builds it, runs it, and reads what it measured.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SOURCES = CHECKOUT / "examples" / "cpp" / "engine"
INCLUDE = CHECKOUT / "include"
LIBRARY = CHECKOUT / "build"

BUILD_TIMEOUT_S = 600
RUN_TIMEOUT_S = 900


class ReshardFailed(Exception):
    """The engine could not be built or did not run to its end."""


def build() -> Path:
    """The engine program, compiled anew when a source is younger."""
    program = LIBRARY / "engine"
    sources = sorted(SOURCES.glob("*.cpp"))
    inputs = [*sources, *SOURCES.glob("*.hpp"), *INCLUDE.iterdir()]
    if program.exists() and all(p.stat().st_mtime < program.stat().st_mtime for p in inputs):
        return program
    command = ["c++", "-std=c++17", "-O2", f"-I{INCLUDE}", *map(str, sources)]
    command += [f"-L{LIBRARY}", "-lkvtier", f"-Wl,-rpath,{LIBRARY}", "-o", str(program)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode != 0:
        raise ReshardFailed(f"the engine of examples/cpp does not compile:\n{done.stdout}")
    return program


def run(work: Path, console: Console) -> dict[str, Any]:
    """Runs the engine through its topologies; "reshard" and "complaints" as it wrote them."""
    with console.status("building the C++ engine"):
        program = build()
    console.print("\nA C++ engine of up to 8 rank processes, killed after each life:")
    result = work / "reshard.json"
    process = subprocess.Popen(
        [str(program), "--json", str(result), "--dir", str(work / "reshard")], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            for line in process.stdout:
                console.print("  " + line.rstrip())
            process.wait(RUN_TIMEOUT_S)
        finally:
            process.kill()  # its ranks end with it
    if process.returncode not in (0, 1):
        raise ReshardFailed(f"the engine ended with status {process.returncode}")
    return json.loads(result.read_text())
