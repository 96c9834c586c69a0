"""What the scheduler's half knows of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

    from .keychain import KeyChain
    from .leases import Incarnation
    from .loading import Load
    from .wishes import Wishes

NO_LIMIT = 1 << 31


class Tracked:
    """One request from its arrival to its end. Keys, cursor, failure limit and epoch
    belong to the request; lease and answers to its present incarnation."""

    __slots__ = (
        "request", "may_load", "may_store", "epoch", "chain", "cursor", "declined_at",
        "frozen", "limit", "local", "incarnation", "load", "sources", "memory_only",
        "held_since", "held_s",
    )  # fmt: skip

    def __init__(self, request: Request, epoch: bytes, asked: Wishes) -> None:
        self.request = request
        self.may_load, self.may_store = asked.load, asked.store
        self.memory_only = not asked.disk  # what it stores is not written to disk on its behalf
        self.epoch = epoch
        self.chain: KeyChain | None = None  # None: no fingerprint yet, or not identified
        self.cursor = 0  # chunks that need no offer any more
        self.declined_at = -1  # chunks at the last offer of which some were declined
        self.frozen = False  # its pages are older than the epoch: store nothing from them
        self.limit = NO_LIMIT  # chunks; what lies beyond failed to load once
        self.local = 0  # tokens of the engine's own hit at the last lookup
        self.incarnation: Incarnation | None = None
        self.load: Load | None = None
        self.sources: dict[CacheHitSource, int] = {}
        # Lookups have held it back since then, and for so long before that, since it
        # last got pages: one bound for all its incarnations.
        self.held_since: float | None = None
        self.held_s = 0.0

    def hold(self, now: float) -> None:
        """A lookup holds the request back."""
        if self.held_since is None:
            self.held_since = now

    def let_go(self, now: float) -> None:
        """A lookup does not."""
        if self.held_since is not None:
            self.held_s += now - self.held_since
            self.held_since = None

    def patience(self, now: float, most_s: float) -> float:
        """What is left of ``most_s``, the time that lookups may take in all."""
        held = 0.0 if self.held_since is None else now - self.held_since
        return max(0.0, most_s - self.held_s - held)
