"""The coordinator of a group: leases, store and load plans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays, _lib, errors
from ._handle import Closing, Handle

if TYPE_CHECKING:
    from .cache import Cache

LEASE_PREFETCH = 1  # start disk reads within the pin budget
LEASE_PIN = 2  # hold the slots of what is resident

# Codes of a verdict (column 0).
GRANTED = 1
HAVE = 2
PENDING = 3  # another operation is bringing it
DECLINED = 4
READY = 5
FAILED = 6
LATER = 7  # of a further window

_NO_DISK = 1
_UNSENT = 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the leader accepted for a group; valid for one leader session."""

    chunk_tokens: int
    block_tokens: int
    dcp: int
    interleave: int
    slots: int
    session: int
    slot_bytes: int
    dram_bytes: int
    disk_bytes: int  # 0: no disk
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Hits:
    """A leader's reply to a lease. The first three count leading chunks."""

    held: int
    resident: int
    leased: int
    pending: int
    answer: int  # grows with each reply of the lease id
    read_bytes: int
    session: int


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A wish to store ``keys``, an array [n, 32], of which the first one has
    ``first_ordinal`` and follows ``parent``. ``op`` is new in its group and not 0."""

    op: int
    first_ordinal: int
    parent: bytes
    keys: Any
    no_disk: bool = False


def wait_accepted(library: _lib.Library, call: Callable[[int, Any], int], timeout_s: float) -> Accepted:
    """Waits for the acceptance of a group by ``call(ms, out)``."""
    out = _lib.Accepted(struct_size=ctypes.sizeof(_lib.Accepted))
    library.check(_lib.wait(lambda ms: call(ms, ctypes.byref(out)), timeout_s))
    return Accepted(
        out.chunk_tokens, out.block_tokens, out.dcp, out.interleave, out.slots, out.session,
        out.slot_bytes, out.dram_bytes, out.disk_bytes, bytes(out.fingerprint),
    )  # fmt: skip


class Coordinator(Closing):
    """Plans for a group of ranks; made by :meth:`kvtier.Cache.coordinate`. May be
    used from any thread."""

    def __init__(self, cache: Cache, group: str, ranks: int) -> None:
        lib = self._lib = cache._lib
        self._cache = cache  # is not collected, and so not closed, before this
        name = group.encode()
        if b"\0" in name:
            raise ValueError("a group's name cannot hold a zero byte")
        out = ctypes.c_uint64()
        lib.check(lib.coordinate(cache._handle.use(), name, ranks, ctypes.byref(out)))
        self._handle = Handle(self, lib, out.value, lambda h: _close(lib, h))

    def ready(self, timeout_s: float) -> Accepted:
        """Waits until the group is accepted. Raises Timeout, Refused."""
        handle = self._handle.use()
        return wait_accepted(self._lib, lambda ms, out: self._lib.coord_ready(handle, ms, out), timeout_s)

    def session(self) -> int:
        """The leader session now; 0: none, everything is a miss. Does not block."""
        out = ctypes.c_uint64()
        self._lib.check(self._lib.coord_session(self._handle.use(), ctypes.byref(out)))
        return out.value

    def lease(self, lease_id: int, keys: Any, flags: int) -> bool:
        """Asks for a lease of a leading run; does not wait for the answer. The same
        id again replaces. False: busy or no leader, the older lease stays."""
        array = _arrays.keys(keys)
        code = self._lib.lease(self._handle.use(), lease_id, _arrays.address(array), len(array), flags)
        if code in (errors.E_BUSY, errors.E_NO_LEADER):
            return False
        self._lib.check(code)
        return True

    def lease_result(self, lease_id: int, after: int = 0, timeout_s: float = 0.0) -> Hits | None:
        """The newest reply with a number above ``after``, waited for. None: none in
        time. Raises LeaseLost when the lease is not known (any more)."""
        handle = self._handle.use()
        out = _lib.Hits(struct_size=ctypes.sizeof(_lib.Hits))
        code = _lib.wait(
            lambda ms: self._lib.lease_result(handle, lease_id, after, ms, ctypes.byref(out)),
            timeout_s, again=errors.E_PENDING,
        )  # fmt: skip
        if code == errors.E_PENDING:
            return None
        if code in (errors.E_MISS, errors.E_NO_LEADER):
            raise errors.LeaseLost(code, self._lib.failure(code).message)
        self._lib.check(code)
        return Hits(out.held, out.resident, out.leased, out.pending, out.answer, out.read_bytes, out.session)

    def release(self, lease_id: int) -> None:
        self._lib.check(self._lib.release(self._handle.use(), lease_id))

    def renew(self, lease_ids: Sequence[int]) -> None:
        """Keeps leases from expiring, with one message."""
        array = np.array(lease_ids, dtype=np.uint64)
        self._lib.check(self._lib.renew(self._handle.use(), _arrays.address(array), array.size))

    def store_begin(
        self, requests: Sequence[StoreRequest], timeout_s: float
    ) -> tuple[int, list[_arrays.Words | None]]:
        """Asks for slots for all requests with one wait. Returns the leader session
        and for each request verdicts [n, 4] (code, slot, generation, 0), or None
        when there was no answer: that operation does not exist."""
        if not requests:
            return 0, []
        array = (_lib.StoreBegin * len(requests))()
        kept: list[tuple[_arrays.Keys, _arrays.Words]] = []
        for r, q in zip(array, requests, strict=True):
            keys = _arrays.keys(q.keys)
            verdicts = np.zeros((len(keys), 4), np.uint32)
            kept.append((keys, verdicts))
            r.struct_size = ctypes.sizeof(_lib.StoreBegin)
            r.first_ordinal, r.op, r.flags = q.first_ordinal, q.op, _NO_DISK if q.no_disk else 0
            ctypes.memmove(r.parent.b, _arrays.key(q.parent), 32)
            r.keys, r.n, r.verdicts = _arrays.address(keys), len(keys), _arrays.address(verdicts)
        session = ctypes.c_uint64()
        self._lib.check(
            self._lib.store_begin(
                self._handle.use(), array, len(array), _lib.milliseconds(timeout_s), ctypes.byref(session)
            )
        )
        return session.value, [
            v if r.status == errors.OK else None for r, (_, v) in zip(array, kept, strict=True)
        ]

    def load_begin(
        self, op: int, lease_id: int, first_ordinal: int, keys: Any, timeout_s: float
    ) -> tuple[int, _arrays.Words] | None:
        """Begins a load of leased keys. Returns the leader session and verdicts
        [n, 4]. None: the operation does not exist at the leader; tell the ranks all
        the same, with session 0, so that they report it."""
        array = _arrays.keys(keys)
        verdicts = np.zeros((len(array), 4), np.uint32)
        session = ctypes.c_uint64()
        code = self._lib.load_begin(
            self._handle.use(), op, lease_id, first_ordinal, _arrays.address(array), len(array),
            _lib.milliseconds(timeout_s), _arrays.address(verdicts), ctypes.byref(session),
        )  # fmt: skip
        if code == errors.OK:
            return session.value, verdicts
        if code in (errors.E_ARG, errors.E_HANDLE, errors.E_FORKED, errors.E_INTERNAL):
            raise self._lib.failure(code)
        return None

    def cancel(self, op: int, unsent: bool) -> None:
        """Ends an operation; ``unsent``: no rank has heard of it."""
        self._lib.check(self._lib.cancel(self._handle.use(), op, _UNSENT if unsent else 0))

    def reset(self) -> bytes:
        """New weights in a running engine: a random epoch (16 bytes) for all later
        keys. It is good also while there is no leader to tell."""
        epoch = ctypes.create_string_buffer(16)
        code = self._lib.reset(self._handle.use(), epoch)
        if code not in (errors.E_NO_LEADER, errors.E_BUSY, errors.E_TIMEOUT):
            self._lib.check(code)
        return epoch.raw

    def close(self) -> None:
        if self._handle.end():
            _close(self._lib, self._handle.value)


def _close(library: _lib.Library, handle: int) -> None:
    # A closed cache has ended it already, which is as good.
    library.coord_close(handle)
