"""Leases and what they promise: one incarnation of a request, from its first
question to the moment it is allocated.

An *incarnation* begins when a request arrives, when it is preempted, after a
failed load, at a reset and with a new leader session. It owns a lease id and the
answers to it, and nothing that outlives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import kvtier

from .settings import Settings
from .stats import KVTierStats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: The one short wait for a reply, at the first lookup of an incarnation.
REPLY_WAIT_S = 0.001
#: An answer younger than this is not asked for again at the first lookup.
FRESH_S = 0.001
#: How often to ask while reads are pending.
POLL_S = 0.005
#: An answered request that could not be allocated for so long is asked again.
STALE_S = 1.0
#: Leases are renewed in one message this often; their TTL is 60 s.
RENEW_S = 20.0
#: A step with fewer tokens says nothing about the speed of a prefill.
MEASURED_TOKENS = 256


class Incarnation:
    """A lease and what was answered to it."""

    __slots__ = (
        "lease", "session", "keys", "sent", "asked_at", "touched_at", "hits",
        "on_disk", "wait_from", "waited", "deadline", "run", "answered_at", "first_at", "counted",
    )  # fmt: skip

    def __init__(self, lease: int, session: int, keys: npt.NDArray[np.uint8]) -> None:
        self.lease = lease
        self.session = session
        # Of the tokens known at the lease: to look up and to load, never to store.
        self.keys = keys
        self.sent = False
        self.asked_at = 0.0
        # Asked or renewed; the leader forgets the lease some time after.
        self.touched_at = 0.0
        self.hits: kvtier.Hits | None = None  # the newest reply
        # Chunks from..to that the first reply, before we prefetched, had outside of DRAM.
        # What has come since then was stored, not read.
        self.on_disk: tuple[int, int] | None = None
        self.wait_from = 0  # replies up to this number are older than the last question
        self.waited = False  # the one short wait was used
        self.deadline: float | None = None  # of the wait that began with the first lookup
        self.run: int | None = None  # chunks promised; once given it stays until a newer reply
        self.answered_at = 0.0
        self.first_at = 0.0  # the first lookup of this incarnation
        self.counted = False  # in the statistics

    @property
    def answered(self) -> bool:
        """Whether the last question has its reply."""
        return self.hits is not None and self.hits.answer > self.wait_from


class Patience:
    """How long a request may be held back: at most what the settings say, and not
    longer than computing takes, as measured."""

    def __init__(self, most_s: float, now: float) -> None:
        self._most_s = most_s
        self._step = (now, 0)  # when the last step was planned, and its tokens
        self._tokens_per_s = 0.0  # 0: not known yet

    def measure(self, now: float, scheduled: int) -> None:
        """A step of ``scheduled`` tokens begins. Learns from the one before, if it had
        enough to do."""
        began, n = self._step
        self._step = (now, scheduled)
        if n < MEASURED_TOKENS or now <= began:
            return
        rate = n / (now - began)
        # The engine may have paused after a step, so what is slow counts little.
        weight = 0.3 if rate > self._tokens_per_s else 0.05
        self._tokens_per_s += weight * (rate - self._tokens_per_s) if self._tokens_per_s else rate

    def seconds(self, tokens: int) -> float:
        if not self._tokens_per_s:
            return self._most_s
        return min(self._most_s, tokens / self._tokens_per_s)

    def measured(self, tokens: int) -> float:
        """Like seconds(), but 0 as long as nothing was measured."""
        return self.seconds(tokens) if self._tokens_per_s else 0.0


class Leases:
    """All questions to the leader about what it holds. Nothing here waits, but for
    REPLY_WAIT_S once in an incarnation."""

    def __init__(
        self,
        coordinator: kvtier.Coordinator,
        settings: Settings,
        stats: KVTierStats,
        ids: itertools.count[int],
        now: float,
    ) -> None:
        self._coordinator = coordinator
        self._stats = stats
        self._ids = ids
        # Well inside the leader's TTL: a lease that is older is asked for anew.
        self._life_s = 0.8 * settings.lease_ttl_s
        self._renewed_at = now

    def begin(self, keys: npt.NDArray[np.uint8], session: int, now: float) -> Incarnation:
        """Asks for a lease of ``keys``; busy shows as ``sent`` False."""
        i = Incarnation(next(self._ids), session, keys)
        self._ask(i, now)
        return i

    def end(self, i: Incarnation | None) -> None:
        if i is not None and i.sent:
            self._coordinator.release(i.lease)

    def alive(self, i: Incarnation, session: int, now: float) -> bool:
        """Takes a newer reply. False: nothing is leased any more and no promise holds."""
        if i.session != session:
            return False
        if not i.sent:
            return True
        if now - i.touched_at > self._life_s:
            return False  # nobody stepped the engine for a minute: nothing was renewed
        try:
            self._collect(i)
        except kvtier.LeaseLost:
            return False
        return True

    def renew(self, incarnations: Iterable[Incarnation | None], session: int, now: float) -> None:
        """Called in every step: deep in the queue nobody looks a request up."""
        if now - self._renewed_at < min(RENEW_S, self._life_s / 2):
            return
        self._renewed_at = now
        live = [i for i in incarnations if i is not None and i.sent and i.session == session]
        if live:
            self._coordinator.renew([i.lease for i in live])
        for i in live:
            i.touched_at = now

    def run(self, i: Incarnation, now: float, patience_s: float) -> int | None:
        """Leading chunks to promise; None: not known yet, ask in the next step. Raises
        kvtier.Error when the leader goes or has no room for leases."""
        first_call = i.deadline is None
        if first_call:
            i.deadline = now + patience_s
            i.first_at = now
        if not i.sent:
            if not self._ask(i, now):  # busy before and busy again: a miss
                return 0
        elif i.hits is None:
            pass
        elif first_call:
            # The answer of the arrival may be old; what was stored meanwhile would be
            # computed again.
            if i.hits.leased < len(i.keys) and now - i.asked_at > FRESH_S:
                self._ask(i, now)
        elif i.run is not None and min(now - i.answered_at, now - i.asked_at) > STALE_S:
            self._ask(i, now)

        if not i.answered and not i.waited:
            # None costs the request a whole step of the engine; the reply is usually
            # some microseconds away.
            i.waited = True
            self._collect(i, REPLY_WAIT_S)
        if i.answered:
            return self._promise(i, now)
        if i.run is not None:
            return i.run
        if now < i.deadline:
            return None
        # Not kept as the promise: a late reply still counts.
        self._stats.add("wait_timeouts")
        return 0 if i.hits is None else i.hits.resident

    def _promise(self, i: Incarnation, now: float) -> int | None:
        h = i.hits
        if i.run is not None:
            if i.answered_at < i.asked_at:
                # A newer reply replaces the promise, but never by "wait".
                i.run = h.leased if h.pending == 0 else max(h.resident, min(i.run, h.leased))
                i.answered_at = now
            return i.run
        if h.pending and now < i.deadline:
            if now - i.asked_at > POLL_S:
                self._ask(i, now)
            return None
        if h.pending:
            self._stats.add("wait_timeouts")
        # With nothing pending all of the lease: what is not in DRAM streams.
        i.run = h.leased if h.pending == 0 else h.resident
        i.answered_at = now
        return i.run

    def _ask(self, i: Incarnation, now: float) -> bool:
        """Sends the lease (again, with the same id). Busy leaves an earlier lease and
        its answer in force."""
        if not self._coordinator.lease(i.lease, i.keys, kvtier.LEASE_PREFETCH | kvtier.LEASE_PIN):
            return False
        i.sent = True
        i.asked_at = i.touched_at = now
        if i.hits is not None:
            i.wait_from = i.hits.answer
        return True

    def _collect(self, i: Incarnation, timeout_s: float = 0.0) -> None:
        """Takes a newer reply, if there is one."""
        after = i.hits.answer if i.hits is not None else 0
        hits = self._coordinator.lease_result(i.lease, after, timeout_s)
        if hits is not None:
            if i.on_disk is None:
                i.on_disk = (hits.resident, hits.held)
            i.hits = hits
