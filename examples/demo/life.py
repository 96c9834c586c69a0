"""One life of an engine process, seen from outside: start, ask, stop or kill."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: vLLM's CPU build on a small machine without a network.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
}

#: A start takes about a minute on two idle cores; this long means a hang.
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 240


def _hear_interrupts() -> None:
    """A shell lets what it starts in the background ignore SIGINT; so would the engine."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class EngineFailed(Exception):
    """The engine process ended or hung; the message holds the end of its log."""


class Life:
    """An engine process. Use as a context manager: leaving it stops the engine
    in the ordinary way, or kills it when that fails. With ``wait`` False it may
    still be starting: call ready() before anything else."""

    def __init__(
        self,
        model: Path | str,
        kvtier: dict[str, Any] | None,
        log: Path,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
    ):
        self._log = log
        # The engine's own sockets; it leaves them lying when it is killed.
        self._sockets = tempfile.mkdtemp(prefix="kvtier-engine-")
        read_end, write_end = os.pipe()
        start = json.dumps({"model": str(model), "kvtier": kvtier, "options": options or {}})
        command = [sys.executable, str(HERE / "engine.py"), "--report", str(write_end), "--start", start]
        with open(log, "ab") as out:
            # A session of its own, so that kill() reaches every process of the engine.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
                preexec_fn=_hear_interrupts,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "VLLM_RPC_BASE_PATH": self._sockets,
                    **(environment or {}),
                },
            )
        os.close(write_end)
        self._report = os.fdopen(read_end, "rb", buffering=0)
        self._pending = b""
        if wait:
            self.ready()

    @property
    def pid(self) -> int:
        """Of the main process, and the number of the session of all of them."""
        return self._process.pid

    def ready(self) -> None:
        try:
            self._read(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def ask(
        self, prompt: list[int], max_tokens: int = 16, opt_out: bool = False, salt: str | None = None
    ) -> dict[str, Any]:
        return self.command("ask", prompt=prompt, max_tokens=max_tokens, opt_out=opt_out, salt=salt)

    def again(self, kvtier: dict[str, Any] | None, options: dict[str, Any] | None = None) -> None:
        """Another engine in the same process, after an ordinary end of this one."""
        self.command("again", timeout_s=START_TIMEOUT_S, kvtier=kvtier, options=options or {})

    def forget(self, connector: bool = False) -> None:
        if not self.command("forget", connector=connector):
            raise EngineFailed("the engine did not reset its prefix cache")

    def call(self, function: str, **arguments: Any) -> Any:
        return self.command("call", function=function, **arguments)

    def command(self, do: str, timeout_s: float = 300, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self._read(timeout_s)["result"]

    def send(self, do: str, **arguments: Any) -> None:
        """Gives a command whose answer nobody waits for."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Ends the engine in the ordinary way and waits for it."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._failed(f"did not stop within {STOP_TIMEOUT_S} s") from None
        self.kill()
        if code != 0:
            raise self._failed(f"ended with code {code}")

    def terminate(self) -> int:
        """SIGTERM to the main process, as a supervisor does; returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(STOP_TIMEOUT_S)
        self.kill()
        return code

    def end(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for the main process to end by itself; returns its exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not end within {timeout_s:.0f} s") from None

    def kill(self) -> None:
        """SIGKILL to every process of the engine; harmless when they are gone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._report.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Life:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._process.poll() is None:
            self.stop()
        else:
            self.kill()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._report], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failed(f"said nothing for {timeout_s:.0f} s")
            piece = self._report.read(65536)
            if not piece:
                raise self._failed("ended")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _failed(self, what: str) -> EngineFailed:
        tail = "\n".join(self.log_text().splitlines()[-30:])
        return EngineFailed(f"the engine {what}; end of its log:\n{tail}")
