"""Runs tests against changed copies of the package. A program: ``forks.py JOBS``, a JSON
file with a list of jobs (see :func:`run`), each of which gets a process of its own.

Importing vLLM takes seconds, so it is done once, here, and each job is forked from that.
Nothing of kvtier may be imported before the fork, and no thread may have begun.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
#: A job that runs so long is ended. Far more than any needs on a busy machine.
JOB_S = 300.0
#: Jobs at the same time. Broken code makes tests wait for what never comes.
AT_ONCE = 3

#: What the tests import, as far as it is slow. One that is missing here costs time only.
PRELOADED = (
    "hypothesis",
    "vllm.config",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.lora.request",
    "vllm.multimodal.inputs",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.parallel_sampling",
    "vllm.v1.structured_output",
    "vllm.v1.worker.utils",
)


def die_with_parent() -> None:
    """Whoever started this process may be killed; nothing may be left then."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Outcome:
    """A pytest plugin: what became of each test, and by which exceptions."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        # Setting up is not the test's own judgement; what it looks at afterwards is.
        self.failed: dict[str, list[str]] = defaultdict(list)
        self.other: dict[str, str] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            if call.when == "call":
                self.passed.add(item.nodeid)
        elif call.when == "setup" or call.excinfo.typename == "Skipped":
            self.other[item.nodeid] = f"{call.when}: {call.excinfo.exconly()}"
        else:
            self.failed[item.nodeid].append(call.excinfo.typename)


def run(job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Runs ``job["tests"]``, node ids below the directory of tests, with the package in
    ``job["path"]``, and what is temporary below ``job["home"]``. Returns the exit code of
    pytest and what was seen."""
    os.environ["TMPDIR"] = job["home"]
    tempfile.tempdir = None
    sys.path.insert(0, job["path"])
    # The tests put the directory of the true package first. It is not looked into for
    # what has been imported, nor for its parts.
    importlib.import_module("kvtier")
    import pytest

    assert job["tests"], "without names pytest would run every test there is"
    outcome = Outcome()
    code = pytest.main(
        [
            *("-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(TESTS)),
            *("-c", str(TESTS.parent / "pyproject.toml"), "--basetemp", f"{job['home']}/p"),
            *(f"{TESTS}/{test}" for test in job["tests"]),
        ],
        plugins=[outcome],
    )
    ours = {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "kvtier"}
    return int(code), {
        "exit": int(code),
        "passed": sorted(outcome.passed),
        "failed": outcome.failed,
        "other": outcome.other,
        "modules": ours,
    }


def fork(job: dict[str, Any]) -> int:
    """Begins a job; returns its process, which leads a group of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        die_with_parent()
        out = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code, result = run(job)
        Path(job["result"]).write_text(json.dumps(result))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what this process has from its parent is not its own to end


def end(pid: int) -> None:
    """Ends a job and whatever it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main() -> None:
    die_with_parent()
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(n.partition(".")[0] == "kvtier" for n in sys.modules)
    assert threading.active_count() == 1
    jobs = json.loads(Path(sys.argv[1]).read_text())
    running: dict[int, float] = {}  # process -> when it is ended
    while jobs or running:
        while jobs and len(running) < AT_ONCE:
            running[fork(jobs.pop(0))] = time.monotonic() + JOB_S
        for pid, until in list(running.items()):
            if time.monotonic() > until:
                end(pid)
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                end(pid)  # before the number may be another's
                os.waitpid(pid, 0)
                del running[pid]
        time.sleep(0.02)


if __name__ == "__main__":
    main()
