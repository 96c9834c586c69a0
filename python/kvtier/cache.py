"""A cache: opening, closing, statistics, completions."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _lib, errors
from ._handle import Closing, Handle

if TYPE_CHECKING:
    from .blob import Blob
    from .coordinator import Coordinator
    from .rank import Rank, Region

CLOSE_TIMEOUT_S = 10.0

# Bytes of a token on a rank, by the rank's handle. Of the module and not of a Cache:
# a root that is opened twice is one cache, and either may take the other's events.
token_bytes: dict[int, float] = {}

_STATES = ("opening", "leader", "member", "closed")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the library's log. ``dropped``: records lost before it."""

    time_ns: int
    level: int  # 0 debug, 1 info, 2 warning, 3 error
    dropped: int
    text: str


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """The one report about a load of a rank; the rank's own copy has stopped.
    ``failed_chunk``: index in the operation of the first chunk that is not in the
    pages, the number of chunks when all are. ``tokens`` are in the pages, from the
    first token of the load on; ``bytes`` of them lie on this rank (rounded)."""

    op: int
    status: int  # errors.OK or the cause
    rank: int  # Rank.handle
    failed_chunk: int
    tokens: int
    bytes: int


class Cache(Closing):
    """An open cache; made by :meth:`open`. May be used from any thread. Closing it
    ends what was opened on it."""

    def __init__(self, handle: int, library: _lib.Library) -> None:
        self._lib = library
        self._handle = Handle(self, library, handle, lambda h: _finish(library, h))

    @classmethod
    def open(cls, settings: dict[str, Any], library: str | None = None) -> Cache:
        """Opens a cache; returns at once, everything is a miss until it is leader or
        member. ``library``: path of libkvtier.so."""
        lib = _lib.load(library)
        text = json.dumps(settings).encode()
        out = ctypes.c_uint64()
        lib.check(lib.open(text, len(text), ctypes.byref(out)))
        return cls(out.value, lib)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Writes out what waits for disk and closes, within the time given. Further
        calls do nothing. False: closed, but not everything was written."""
        if not self._handle.open:
            return True
        end = time.monotonic() + timeout_s
        rest = min(timeout_s, 1.0)
        written = True
        try:
            # A leader's chunks, in slices, so that Ctrl-C ends the wait.
            if self.state()[0] == "leader":
                written = self.flush(timeout_s)
            rest = max(rest, end - time.monotonic())
        finally:
            if self._handle.end():
                code = self._lib.close(self._handle.value, _lib.milliseconds(rest))
                written = written and code == errors.OK
        return written

    def state(self) -> tuple[str, str]:
        """``opening``, ``leader``, ``member`` or ``closed``, and a line for people."""
        if not self._handle.open:
            return "closed", "closed by this process"
        state = ctypes.c_int32()
        detail = ctypes.create_string_buffer(512)
        self._lib.check(self._lib.state(self._handle.use(), ctypes.byref(state), detail, len(detail)))
        return _STATES[state.value], detail.value.decode(errors="replace")

    def wait_open(self, timeout_s: float) -> bool:
        """Waits until the cache is leader or member; False when the time is up."""
        handle = self._handle.use()
        code = _lib.wait(lambda ms: self._lib.wait_open(handle, ms), timeout_s)
        return self._reached(code)

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing waits for disk; False when the time is up."""
        handle = self._handle.use()
        code = _lib.wait(lambda ms: self._lib.flush(handle, ms), timeout_s)
        return self._reached(code)

    def _reached(self, code: int) -> bool:
        if code == errors.E_TIMEOUT:
            return False
        self._lib.check(code)
        return True

    def stats(self) -> dict[str, Any]:
        """Statistics, see the documentation of the library."""
        size = 1 << 14
        while True:
            buffer = ctypes.create_string_buffer(size)
            need = ctypes.c_size_t()
            code = self._lib.stats(self._handle.use(), buffer, size, ctypes.byref(need))
            if code != errors.E_BUFFER:
                self._lib.check(code)
                result: dict[str, Any] = json.loads(buffer.value)
                return result
            size = need.value * 2  # they grow while the cache works

    def records(self, n: int = 64) -> list[Record]:
        """Takes up to ``n`` log records."""
        array = (_lib.Record * n)()
        got = ctypes.c_size_t()
        self._lib.check(self._lib.log_poll(self._handle.use(), array, n, ctypes.byref(got)))
        return [
            Record(r.time_ns, r.level, r.dropped, r.text.decode(errors="replace")) for r in array[: got.value]
        ]

    def poll(self, n: int = 64) -> list[LoadEvent]:
        """Takes up to ``n`` completions of loads."""
        array = (_lib.Event * n)()
        got = ctypes.c_size_t()
        self._lib.check(self._lib.poll(self._handle.use(), array, n, ctypes.byref(got)))
        return [
            LoadEvent(
                e.op, e.status, e.handle, e.failed_chunk, e.tokens,
                round(e.tokens * token_bytes.get(e.handle, 0)),
            )
            for e in array[: got.value]
        ]  # fmt: skip

    def eventfd(self) -> int:
        """A descriptor that is readable while :meth:`poll` or :meth:`records` has
        something. It belongs to the library: poll it, do not read or close it."""
        fd = ctypes.c_int32()
        self._lib.check(self._lib.eventfd(self._handle.use(), ctypes.byref(fd)))
        return fd.value

    def blob(self, model: str, chunk_bytes: int, chunk_tokens: int, **identity: str) -> Blob:
        """Whole chunks of ``chunk_bytes``. ``identity``: ``weights``, ``kv_dtype``,
        ``attention``, ``quantisation``: what must be equal for bytes to be
        interchangeable, besides the model's name."""
        from .blob import Blob

        return Blob(self, model, chunk_bytes, chunk_tokens, identity)

    def coordinate(self, group: str, ranks: int = 1) -> Coordinator:
        """Joins a group of ranks as its coordinator."""
        from .coordinator import Coordinator

        return Coordinator(self, group, ranks)

    def register(self, description: dict[str, Any], regions: Iterable[Region]) -> Rank:
        """Joins a group as one of its ranks. The pages must stay mapped until the
        rank is closed."""
        from .rank import Rank

        return Rank(self, description, list(regions))


def _finish(library: _lib.Library, handle: int) -> None:
    # Collected, or the interpreter ends: a short time for what is still dirty.
    library.close(handle, _lib.milliseconds(CLOSE_TIMEOUT_S))
