"""Arrays at the border of the ABI: numpy arrays and buffers in, addresses out.

Nothing is copied. An array of another type or with gaps is a TypeError and not
silently converted: the copy would cost what this binding exists to avoid, and a
conversion could wrap numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint8]
Words = NDArray[np.uint32]


def address(a: NDArray[Any]) -> int:
    """Where a C-contiguous array lies; 0 (NULL) for an empty one."""
    return int(a.__array_interface__["data"][0]) if a.size else 0


def keys(value: Any) -> Keys:
    """n keys as an array [n, 32] of bytes; a list of 32-byte keys is joined."""
    if isinstance(value, (list, tuple)):
        for k in value:
            key(k)
        value = np.frombuffer(b"".join(value), np.uint8).reshape(len(value), 32)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 2 or value.shape[1] != 32:
        raise TypeError("keys must be an array of uint8 with shape [n, 32], or a list of 32-byte keys")
    return _whole(value, "keys")


def key(value: Any) -> bytes:
    """One key as 32 bytes."""
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8:
            raise TypeError("a key must be 32 bytes")
        value = value.tobytes()
    if not isinstance(value, bytes) or len(value) != 32:
        raise TypeError("a key must be 32 bytes")
    return value


def words(value: Any, what: str) -> Words:
    """A vector of uint32; lists are converted with a check of the range."""
    if isinstance(value, (list, tuple, range)):
        if any(not 0 <= int(v) < 1 << 32 for v in value):
            raise TypeError(f"{what} must fit 32 bits without a sign")
        value = np.array(value, dtype=np.uint32)
    if not isinstance(value, np.ndarray):
        view = memoryview(value)
        if view.format not in ("I", "@I", "=I", "<I"):
            raise TypeError(f"{what} must be uint32")
        value = np.frombuffer(view, np.uint32)
    if value.dtype != np.uint32 or value.ndim != 1:
        raise TypeError(f"{what} must be a vector of uint32")
    return _whole(value, what)


def quads(value: Any, what: str) -> Words:
    """An array [n, 4] of uint32: grants or verdicts."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint32 or value.ndim != 2 or value.shape[1] not in (3, 4):
        raise TypeError(f"{what} must be an array of uint32 with shape [n, 4]")
    if value.shape[1] == 3:
        value = np.pad(value, ((0, 0), (0, 1)))
    return _whole(value, what)


def octets(value: Any, what: str, writable: bool = False) -> NDArray[np.uint8]:
    """The bytes of a buffer (bytes, bytearray, memoryview, array of any type)."""
    view = memoryview(value)
    if not view.c_contiguous:
        raise TypeError(f"{what} must be contiguous")
    if writable and view.readonly:
        raise TypeError(f"{what} must be writable")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def _whole(a: NDArray[Any], what: str) -> NDArray[Any]:
    if not a.flags.c_contiguous:
        raise TypeError(f"{what} must be contiguous")
    return a
