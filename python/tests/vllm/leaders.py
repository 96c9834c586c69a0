"""A leader in a process of its own, which tests ask, stop and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine import library_leftovers

_PROGRAM = """
import json, sys, kvtier
cache = kvtier.Cache.open(json.loads(sys.argv[1]))
assert cache.wait_open(60), cache.state()
print("open", flush=True)
for line in sys.stdin:
    print(json.dumps(cache.stats()), flush=True)
cache.close()
"""


class LeaderProcess:
    """Leads the root that ``settings`` name, until closed or killed. While it is stopped
    it must not be asked."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        python = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(settings | {"role": "leader"})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python},
            text=True,
        )
        line = self._process.stdout.readline()
        if line != "open\n":
            self.kill()
            raise AssertionError("the leader did not open")

    def __enter__(self) -> LeaderProcess:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def stats(self) -> dict:
        self._process.stdin.write("stats\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def settled(self, timeout_s: float = 60.0) -> dict:
        """What it still holds for engines; waits for what ends by itself."""
        end = time.monotonic() + timeout_s
        while (left := library_leftovers(self.stats())) and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def stop(self) -> None:
        """As a machine that swaps does, or a debugger; returns when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """No harm when it was not stopped, or is gone."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """An orderly end, also when it was stopped or killed."""
        if not self.alive:
            return
        self.go_on()
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def attached(e, timeout_s: float = 60.0) -> None:
    """Waits until the scheduler's half and the rank of an engine have a leader."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if e.half._attached(time.monotonic()) and e.cache.state()[0] == "member":
            return
        time.sleep(0.01)
    raise AssertionError(f"not attached: {e.cache.state()}")
