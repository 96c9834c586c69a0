"""kvtier: a KV-cache tier in DRAM and on disk for LLM inference engines.

Importing this loads no library; that happens with the first call that needs it,
see :func:`kvtier.Cache.open`. After that the process must not fork and go on using
it: a forked child gets :class:`kvtier.Forked`.
"""

from __future__ import annotations

from . import keys
from .blob import Blob
from .cache import Cache, LoadEvent, Record
from .coordinator import (
    DECLINED,
    FAILED,
    GRANTED,
    HAVE,
    LATER,
    LEASE_PIN,
    LEASE_PREFETCH,
    PENDING,
    READY,
    Accepted,
    Coordinator,
    Hits,
    StoreRequest,
)
from .errors import (
    ConfigError,
    Error,
    Forked,
    LeaseLost,
    LibraryNotFound,
    NoLeader,
    Refused,
    SelfTestFailed,
    Timeout,
)
from .rank import Rank, Region

__version__ = "0.1.0"

__all__ = [
    "DECLINED",
    "FAILED",
    "GRANTED",
    "HAVE",
    "LATER",
    "LEASE_PIN",
    "LEASE_PREFETCH",
    "PENDING",
    "READY",
    "Accepted",
    "Blob",
    "Cache",
    "ConfigError",
    "Coordinator",
    "Error",
    "Forked",
    "Hits",
    "LeaseLost",
    "LibraryNotFound",
    "LoadEvent",
    "NoLeader",
    "Rank",
    "Record",
    "Refused",
    "Region",
    "SelfTestFailed",
    "StoreRequest",
    "Timeout",
    "keys",
]
