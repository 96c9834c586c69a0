"""Whole chunks in one buffer: put and get."""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays, _lib, errors
from ._handle import Closing, Handle

if TYPE_CHECKING:
    from .cache import Cache


class Blob(Closing):
    """Chunks of one model and size; made by :meth:`kvtier.Cache.blob`."""

    def __init__(
        self, cache: Cache, model: str, chunk_bytes: int, chunk_tokens: int, identity: dict[str, str]
    ) -> None:
        lib = self._lib = cache._lib
        self._cache = cache  # is not collected, and so not closed, before this
        self.chunk_bytes = chunk_bytes
        description = {"model": model, "chunk_bytes": chunk_bytes, "chunk_tokens": chunk_tokens, **identity}
        text = json.dumps(description).encode()
        out = ctypes.c_uint64()
        lib.check(lib.blob_open(cache._handle.use(), text, len(text), ctypes.byref(out)))
        self._handle = Handle(self, lib, out.value, lambda h: _close(lib, h))

    def ready(self, timeout_s: float) -> bytes:
        """Waits until puts and gets can work. Returns the fingerprint, from which
        keys begin (:func:`kvtier.keys.root`). Raises Timeout, Refused."""
        handle = self._handle.use()
        fingerprint = ctypes.create_string_buffer(32)
        self._lib.check(_lib.wait(lambda ms: self._lib.blob_ready(handle, ms, fingerprint), timeout_s))
        return fingerprint.raw

    def put(
        self, key: Any, payload: Any, parent: Any = None, ordinal: int = 0, timeout_s: float = 1.0
    ) -> bool:
        """Stores one chunk; ``payload`` is a buffer of exactly ``chunk_bytes`` and is
        copied. ``parent``: key of the chunk before it. True: it is held now (also
        when it was before), False: declined, which is no error."""
        data = _arrays.octets(payload, "payload")
        before = _arrays.key(parent) if parent is not None else None
        handle, name, address = self._handle.use(), _arrays.key(key), _arrays.address(data)
        code = _lib.wait(
            lambda ms: self._lib.put(handle, name, before, ordinal, address, data.size, ms), timeout_s
        )
        if code in (errors.E_DECLINED, errors.E_BUSY, errors.E_TIMEOUT, errors.E_NO_LEADER):
            return False
        self._lib.check(code)
        return True

    def get(self, key: Any, out: Any = None, timeout_s: float = 1.0) -> bytes | memoryview | None:
        """Reads one chunk: into ``out``, a writable buffer of ``chunk_bytes``, of
        which a view comes back, else as new bytes. None: a miss; then ``out`` may
        hold anything."""
        data = np.empty(self.chunk_bytes, np.uint8) if out is None else _arrays.octets(out, "out", writable=True)
        handle, name, address = self._handle.use(), _arrays.key(key), _arrays.address(data)
        code = _lib.wait(lambda ms: self._lib.get(handle, name, address, data.size, ms), timeout_s)
        if code in (errors.E_MISS, errors.E_BUSY, errors.E_TIMEOUT, errors.E_NO_LEADER):
            return None
        self._lib.check(code)
        return data.tobytes() if out is None else memoryview(out)

    def lookup(self, keys: Any) -> tuple[int, int]:
        """How many leading chunks are held, and how many of them in DRAM."""
        array = _arrays.keys(keys)
        held, resident = ctypes.c_uint32(), ctypes.c_uint32()
        code = self._lib.lookup(
            self._handle.use(), _arrays.address(array), len(array), ctypes.byref(held), ctypes.byref(resident)
        )
        if code in (errors.E_BUSY, errors.E_TIMEOUT, errors.E_NO_LEADER):
            return 0, 0
        self._lib.check(code)
        return held.value, resident.value

    def remove(self, keys: Any) -> None:
        """Removes chunks; those that are not held are passed over."""
        array = _arrays.keys(keys)
        self._lib.check(self._lib.remove(self._handle.use(), _arrays.address(array), len(array)))

    def close(self) -> None:
        if self._handle.end():
            _close(self._lib, self._handle.value)


def _close(library: _lib.Library, handle: int) -> None:
    # A closed cache has ended it already, which is as good.
    library.blob_close(handle)
