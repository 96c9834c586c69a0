"""Settings of the connector, from ``kv_connector_extra_config``.

One flat object: what the connector itself needs and what goes on to libkvtier.
It is strict, because a misspelt limit that is silently ignored fills a disk.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Settings that libkvtier checks itself; they are handed over as they are.
LIBRARY_SETTINGS = frozenset(
    """
    disk_path disk_gib name role dram_gib free_floor_gib namespace_floor_gib durable
    allow_network_fs dirty_gib touch_interval_s lease_ttl_s part_deadline_s
    part_first_done_deadline_s load_window_deadline_s connect_timeout_s
    close_timeout_s breaker_errors breaker_window_s breaker_off_s read_lanes
    write_lanes gomaxprocs workers log_level runtime_dir
    """.split()
)


class SettingsError(ValueError):
    """A setting that is unknown or has a value that cannot be used."""


@dataclass(frozen=True)
class Settings:
    """What the connector does. Defaults are those of docs/configuration.md."""

    #: Tokens of a chunk; raised to a multiple of the page where pages are opaque.
    chunk_tokens: int = 256
    #: A load below this many tokens is not worth a step of the engine.
    min_load_tokens: int = 512
    #: How long a request may be held back for an answer or for disk reads.
    lookup_wait_s: float = 2.0
    #: Whether failing to open or to register stops the engine.
    required: bool = False
    #: What the engine does with a request whose load failed.
    load_failure_policy: str = "recompute"
    #: Whether chunks that hold generated tokens are stored.
    save_generated: bool = True
    #: Separates this engine's prefixes from those of others under one root.
    tag: str = ""
    #: What ``reset_cache`` does: ``epoch`` makes all earlier keys unreachable.
    on_reset: str = "epoch"
    #: Path of libkvtier.so; found by the package when empty.
    library_path: str = ""
    #: Tests only: damages one byte of every load after it was checked, to show
    #: that a test of the engine's output would notice wrong KV.
    test_flip_byte: bool = False
    #: Handed to libkvtier as they are.
    library: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads the object; raises :class:`SettingsError`."""
        values: dict[str, Any] = {}
        library: dict[str, Any] = {}
        for key, value in extra.items():
            if key in _OWN:
                name, check = _OWN[key]
                values[name] = check(key, value)
            elif key in LIBRARY_SETTINGS:
                library[key] = value
            else:
                raise SettingsError(f"unknown setting {key!r}; the nearest one is {nearest(key, _OWN.keys() | LIBRARY_SETTINGS)!r}")
        return cls(library=library, **values)

    @property
    def close_timeout_s(self) -> float:
        return self._number("close_timeout_s", 10.0)

    @property
    def lease_ttl_s(self) -> float:
        return self._number("lease_ttl_s", 60.0)

    def _number(self, key: str, default: float) -> float:
        # The library checks the value; until it has, a bad one must not matter.
        value = self.library.get(key, default)
        return float(value) if isinstance(value, (int, float)) else default


def nearest(key: object, known: Iterable[str]) -> str:
    """The one of ``known`` that somebody who wrote ``key`` probably means."""
    return difflib.get_close_matches(str(key).lower(), sorted(known), n=1, cutoff=0.0)[0]


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise SettingsError(f"{key!r} must be a whole number from {least} to {most}, not {value!r}")
        return value

    return check


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 3600:
        raise SettingsError(f"{key!r} must be a number of seconds from 0 to 3600, not {value!r}")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{key!r} must be true or false, not {value!r}")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{key!r} must be text, not {value!r}")
    return value


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        if value not in allowed:
            raise SettingsError(f"{key!r} must be one of {', '.join(allowed)}, not {value!r}")
        return value

    return check


#: Key in the configuration -> field of Settings, check.
_OWN: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "chunk_tokens": ("chunk_tokens", _whole(1, 1 << 16)),
    "min_load_tokens": ("min_load_tokens", _whole(0, 1 << 30)),
    "lookup_wait_s": ("lookup_wait_s", _seconds),
    "required": ("required", _flag),
    "load_failure_policy": ("load_failure_policy", _one_of("recompute", "fail")),
    "save_generated": ("save_generated", _flag),
    "tag": ("tag", _text),
    "on_reset": ("on_reset", _one_of("epoch")),
    "library_path": ("library_path", _text),
    "_test_flip_byte": ("test_flip_byte", _flag),
}
