"""Breaks the package on purpose, in one named way after the other, and requires that a
test of the connector notices. A promise whose test passes on broken code is not tested.

The source is not touched: each mutant is a copy of the package with one place changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import forks  # noqa: E402
from mutant_list import MUTANTS, Mutant  # noqa: E402

import kvtier  # noqa: E402

PACKAGE = forks.TESTS.parent / "kvtier"
#: Importing vLLM on a machine that has other things to do.
IMPORT_S = 600.0
CONTROLS = ("one half", "the other half")

#: As the tests want it before vLLM is imported.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Run:
    """Tests with one copy of the package."""

    def __init__(self, home: Path, tests: list[str], mutant: Mutant | None) -> None:
        self.home, self.tests = home, tests
        self.misfit: Exception | None = None
        path = home / "python"
        shutil.copytree(PACKAGE, path / "kvtier", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        (path / "kvtier" / "libkvtier.so").symlink_to(kvtier._lib._find(None))
        if mutant is not None:
            file = path / "kvtier" / mutant.file
            try:
                file.write_text(mutant.apply(file.read_text()))
            except ValueError as e:
                self.misfit = e

    def job(self) -> dict[str, Any]:
        home = str(self.home)
        names = {"path": "python", "result": "result", "output": "output"}
        return {"home": home, "tests": self.tests} | {k: f"{home}/{v}" for k, v in names.items()}

    @property
    def output(self) -> str:
        try:
            return (self.home / "output").read_text(errors="replace")[-8000:]
        except OSError:
            return "it never began"

    def result(self) -> dict[str, Any]:
        """What was seen; the modules were those of the copy."""
        try:
            found = json.loads((self.home / "result").read_text())
        except OSError:
            raise AssertionError(f"it came to no end of its own:\n{self.output}") from None
        strange = {n: f for n, f in found["modules"].items() if not f.startswith(f"{self.home}/")}
        assert not strange, f"not of the copy: {strange}"
        return found


def controls(mutants: list[Mutant]) -> list[list[str]]:
    """The tests of all mutants, in two parts."""
    tests = sorted({m.test for m in mutants})
    return [tests[::2], tests[1::2]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Run]]:
    """All runs that the selected tests of this file ask for, by name."""
    wanted: dict[str, Mutant | str] = {}
    for test in request.session.items:
        if test.path == Path(__file__) and "runs" in test.fixturenames:
            (what,) = test.callspec.params.values()
            wanted[what.name if isinstance(what, Mutant) else what] = what
    # Short: paths of sockets are.
    with tempfile.TemporaryDirectory(prefix="kvtm-") as top:
        made = {}
        for n, (name, what) in enumerate(wanted.items()):
            tests = [what.test] if isinstance(what, Mutant) else controls(MUTANTS)[CONTROLS.index(what)]
            made[name] = Run(Path(top) / str(n), tests, what if isinstance(what, Mutant) else None)
        jobs = [r.job() for r in made.values() if r.misfit is None]
        Path(top, "jobs").write_text(json.dumps(jobs))
        process = subprocess.Popen(
            [sys.executable, forks.__file__, f"{top}/jobs"],
            env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=IMPORT_S + len(jobs) * forks.JOB_S)
            assert process.returncode == 0, said
        finally:
            process.kill()
            process.wait()
        yield made


@pytest.mark.parametrize("half", CONTROLS)
def test_the_code_as_it_is_passes(runs, half):
    run = runs[half]
    found = run.result()
    assert found["exit"] == 0 and found["passed"] == sorted(run.tests), run.output


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_noticed(runs, mutant):
    """By a failed assertion of the named test: not by an error of another kind, unless
    that is what the mutant is about."""
    run = runs[mutant.name]
    if run.misfit is not None:
        raise run.misfit
    found = run.result()
    assert found["exit"] != 0, f"nobody has noticed: {mutant.test} passes with\n{mutant.new}\nin place of\n{mutant.old}"
    assert found["exit"] == 1 and not found["other"], f"not by a failed assertion: {found['other']}\n{run.output}"
    assert mutant.test in found["failed"], f"{mutant.test} is not among {found['failed']}"
    assert set(found["failed"][mutant.test]) <= set(mutant.by), f"not by {mutant.by}: {found['failed']}\n{run.output}"
    assert mutant.module in found["modules"], "what was changed was never imported"


def test_names_differ():
    names = [m.name for m in MUTANTS]
    assert all(controls(MUTANTS)), "a half without tests"
    assert len(set(names)) == len(names) and not set(names) & set(CONTROLS)


def test_mutants_must_fit_the_code():
    m = Mutant("x", "x.py", old="a == b", new="a != b", test="")
    assert m.apply("if a == b:\n    pass\n") == "if a != b:\n    pass\n"
    for source, why in (
        ("a == c\n", "0 places in x.py"),
        ("a == b; a == b\n", "2 places in x.py"),
        ("x = (a == b\n", "not Python"),
    ):
        with pytest.raises(ValueError, match=why):
            m.apply(source)
    m = Mutant("x", "x.py", old="a == b", new="a == b", test="")
    with pytest.raises(ValueError, match="changes nothing"):
        m.apply("a == b\n")
