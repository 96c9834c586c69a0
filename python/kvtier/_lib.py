"""libkvtier.so: finding it, loading it once, and the prototypes of kvtier.h.

Nothing here runs at import. The library holds a Go runtime, and that does not
survive fork(): so it is loaded by the first call that needs it, in the process
that needs it. ``CDLL`` and never ``PyDLL``: a call may wait, and other threads
have to go on meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import errors

ABI_MAJOR = 1

# The longest uninterrupted wait inside a call. Python runs signal handlers only
# between calls, so this is also how late Ctrl-C is.
SLICE_MS = 100


class Key(ctypes.Structure):
    _fields_ = [("b", ctypes.c_uint8 * 32)]


class Extra(ctypes.Structure):
    _fields_ = [
        ("chunk", ctypes.c_uint32),
        ("kind", ctypes.c_uint16),
        ("length", ctypes.c_uint16),
        ("offset", ctypes.c_int32),
        ("bytes", ctypes.c_uint8 * 32),
    ]


class Accepted(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("chunk_tokens", ctypes.c_uint32),
        ("block_tokens", ctypes.c_uint32),
        ("dcp", ctypes.c_uint32),
        ("interleave", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("session", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("dram_bytes", ctypes.c_uint64),
        ("disk_bytes", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint8 * 32),
    ]


class Hits(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("leased", ctypes.c_uint32),
        ("pending", ctypes.c_uint32),
        ("answer", ctypes.c_uint32),
        ("read_bytes", ctypes.c_uint64),
        ("session", ctypes.c_uint64),
    ]


class StoreBegin(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("first_ordinal", ctypes.c_uint32),
        ("op", ctypes.c_uint64),
        ("parent", Key),
        ("keys", ctypes.c_void_p),
        ("n", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        ("verdicts", ctypes.c_void_p),
    ]


class Region(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("name", ctypes.c_char * 32),
        ("component", ctypes.c_char * 16),
        ("layer", ctypes.c_int32),
        ("head", ctypes.c_int32),
        ("bytes", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("base", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    ]


class StoreOp(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("first_ordinal", ctypes.c_uint32),
        ("op", ctypes.c_uint64),
        ("session", ctypes.c_uint64),
        ("grants", ctypes.c_void_p),
        ("ngrants", ctypes.c_size_t),
        ("blocks", ctypes.c_void_p),
        ("nblocks", ctypes.c_size_t),
    ]


class LoadOp(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("nchunks", ctypes.c_uint32),
        ("op", ctypes.c_uint64),
        ("session", ctypes.c_uint64),
        ("first_token", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("blocks", ctypes.c_void_p),
        ("nblocks", ctypes.c_size_t),
        ("verdicts", ctypes.c_void_p),
        ("nverdicts", ctypes.c_size_t),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        ("op", ctypes.c_uint64),
        ("handle", ctypes.c_uint64),
        ("failed_chunk", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("reserved", ctypes.c_uint64),
    ]


class Record(ctypes.Structure):
    _fields_ = [
        ("time_ns", ctypes.c_int64),
        ("level", ctypes.c_int32),
        ("dropped", ctypes.c_uint32),
        ("text", ctypes.c_char * 496),
    ]


_p = ctypes.c_void_p
_i32 = ctypes.c_int32
_i64 = ctypes.c_int64
_u32 = ctypes.c_uint32
_u64 = ctypes.c_uint64
_size = ctypes.c_size_t
_text = ctypes.c_char_p
_out32 = ctypes.POINTER(_u32)
_out64 = ctypes.POINTER(_u64)
_outi32 = ctypes.POINTER(_i32)
_outn = ctypes.POINTER(_size)

# Arrays are void pointers: whoever calls has an address and has checked the type.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "kvt_version": (_out32, _p, _size),
    "kvt_open": (_text, _size, _out64),
    "kvt_close": (_u64, _i64),
    "kvt_state": (_u64, _outi32, _p, _size),
    "kvt_wait_open": (_u64, _i64),
    "kvt_key_root": (_p, _p, _size, _p),
    "kvt_keys": (_p, _u32, _p, _size, _p, _size, _p, _size, _outn),
    "kvt_blob_open": (_u64, _text, _size, _out64),
    "kvt_blob_close": (_u64,),
    "kvt_blob_ready": (_u64, _i64, _p),
    "kvt_put": (_u64, _p, _p, _u32, _p, _size, _i64),
    "kvt_get": (_u64, _p, _p, _size, _i64),
    "kvt_lookup": (_u64, _p, _size, _out32, _out32),
    "kvt_remove": (_u64, _p, _size),
    "kvt_coordinate": (_u64, _text, _u32, _out64),
    "kvt_coord_close": (_u64,),
    "kvt_coord_ready": (_u64, _i64, ctypes.POINTER(Accepted)),
    "kvt_coord_session": (_u64, _out64),
    "kvt_lease": (_u64, _u64, _p, _size, _u32),
    "kvt_lease_result": (_u64, _u64, _u32, _i64, ctypes.POINTER(Hits)),
    "kvt_release": (_u64, _u64),
    "kvt_renew": (_u64, _p, _size),
    "kvt_store_begin": (_u64, ctypes.POINTER(StoreBegin), _size, _i64, _out64),
    "kvt_load_begin": (_u64, _u64, _u64, _u32, _p, _size, _i64, _p, _out64),
    "kvt_cancel": (_u64, _u64, _u32),
    "kvt_reset": (_u64, _p),
    "kvt_register": (_u64, _text, _size, ctypes.POINTER(Region), _size, _out64),
    "kvt_unregister": (_u64, _i64),
    "kvt_rank_ready": (_u64, _i64, ctypes.POINTER(Accepted)),
    "kvt_selftest": (_u64, _u32, _u32),
    "kvt_store": (_u64, ctypes.POINTER(StoreOp)),
    "kvt_load": (_u64, ctypes.POINTER(LoadOp)),
    "kvt_load_cancel": (_u64, _u64),
    "kvt_fence": (_u64, _p, _size, _i64),
    "kvt_poll": (_u64, ctypes.POINTER(Event), _size, _outn),
    "kvt_eventfd": (_u64, _outi32),
    "kvt_stats": (_u64, _p, _size, _outn),
    "kvt_flush": (_u64, _i64),
    "kvt_log_poll": (_u64, ctypes.POINTER(Record), _size, _outn),
}


class Library:
    """The loaded library. Its functions are attributes without the prefix
    ``kvt_``; they return codes, which :meth:`check` turns into exceptions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pid = os.getpid()
        try:
            self._cdll = ctypes.CDLL(path)
        except OSError as e:
            raise errors.LibraryNotFound(errors.E_IO, f"{path} cannot be loaded: {e}") from e
        self._last_error = self._cdll.kvt_last_error
        self._last_error.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._last_error.restype = ctypes.c_size_t
        self._strerror = self._cdll.kvt_strerror
        self._strerror.argtypes = (_i32,)
        self._strerror.restype = ctypes.c_char_p
        self.version = self._check_version()
        for name, argtypes in PROTOTYPES.items():
            f = getattr(self._cdll, name)
            f.argtypes = argtypes
            f.restype = _i32
            setattr(self, name.removeprefix("kvt_"), f)

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"kvtier.h has no function kvt_{name}")

    def _check_version(self) -> str:
        version = self._cdll.kvt_version
        version.argtypes = PROTOTYPES["kvt_version"]
        version.restype = _i32
        abi = _u32()
        text = ctypes.create_string_buffer(64)
        self.check(version(ctypes.byref(abi), text, len(text)))
        if abi.value >> 16 != ABI_MAJOR:
            raise errors.LibraryNotFound(
                errors.E_NOT_SUPPORTED,
                f"{self.path} has ABI {abi.value >> 16}, this package needs {ABI_MAJOR}: install matching versions",
            )
        return text.value.decode()

    def failure(self, code: int) -> errors.Error:
        """The exception for a code that was just returned to this thread."""
        text = ctypes.create_string_buffer(2048)
        self._last_error(text, len(text))
        message = text.value.decode(errors="replace") or self._strerror(code).decode()
        return errors.error(code, message)

    def check(self, code: int) -> None:
        if code != errors.OK:
            raise self.failure(code)


_lock = threading.Lock()
_library: Library | None = None
_owner: int | None = None  # process that began to load it


def load(path: str | None = None) -> Library:
    """The library, loaded at the first call. ``path``: the file, else it is looked
    for inside the package and in ``build/`` of a checkout. A process has one
    library: a second path is an error."""
    global _library, _owner
    library = _library
    if library is not None and path is None and library.pid == os.getpid():
        return library
    with _lock:
        if _owner is not None and _owner != os.getpid():
            raise forked()
        if _library is None:
            found = _find(path)
            _owner = os.getpid()
            _library = Library(found)
        elif path is not None and not os.path.samefile(_find(path), _library.path):
            raise errors.LibraryNotFound(
                errors.E_ARG, f"{_library.path} is loaded already, a process cannot have {path} besides"
            )
        return _library


def forked() -> errors.Forked:
    return errors.Forked(
        errors.E_FORKED,
        "this process was forked after kvtier was loaded, and a Go runtime does not survive that: "
        "use the start method spawn or forkserver, or fork before the first use",
    )


def _find(path: str | None) -> str:
    if path is not None:
        if not os.path.isfile(path):
            raise errors.LibraryNotFound(errors.E_IO, f"{path} is not a file")
        return os.path.abspath(path)
    package = Path(__file__).resolve().parent
    places = [package / "libkvtier.so", package.parent.parent / "build" / "libkvtier.so"]
    for place in places:
        if place.is_file():
            return str(place)
    looked = " and ".join(str(p) for p in places)
    raise errors.LibraryNotFound(errors.E_IO, f"libkvtier.so is neither at {looked}: build it or name its path")


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def milliseconds(timeout_s: float) -> int:
    """A timeout of the ABI: seconds as milliseconds, cut to its longest wait."""
    if timeout_s != timeout_s or timeout_s < 0:
        raise ValueError(f"timeout must not be negative: {timeout_s}")
    return min(math.ceil(timeout_s * 1000), 3_600_000) if timeout_s != math.inf else 3_600_000


def wait(call: Callable[[int], int], timeout_s: float, again: int = errors.E_TIMEOUT) -> int:
    """Calls ``call(ms)`` in slices while it returns ``again``, until the time is up.
    Only for calls that can be repeated without loss. A refusal that took the whole
    slice is one that the leader may still take back, so it is waited out, too."""
    total = milliseconds(timeout_s)
    end = time.monotonic() + total / 1000
    left = total
    while True:
        ms = min(left, SLICE_MS)
        before = time.monotonic()
        code = call(ms)
        if left <= SLICE_MS:
            return code
        whole = time.monotonic() - before >= ms / 1000
        if code != again and not (code == errors.E_REFUSED and whole):
            return code
        left = max(0, math.ceil((end - time.monotonic()) * 1000))
