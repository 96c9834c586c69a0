"""The scheduler's half: what to look up, to load, and to store.

Runs in vLLM's scheduler process, as a member that never leads, on the
scheduler's thread alone. It holds no pages and copies nothing. Every call is
O(changes) and every wait is bounded: 1 ms for the first answer of a lookup,
2 ms for all offers of a step, 3 ms for the begin of a load.

Words. An *incarnation* of a request begins when it arrives, when it is
preempted, after a failed load, at a reset and with a new leader session; it owns
lease and answer. Keys, cursor, failure limit and epoch belong to the request.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import kvtier

from .keychain import MAX_KEYS, KeyChain, LoRADigests, NotIdentified, Roots, check_identifiable
from .metadata import KVTierHandshake, KVTierMetadata, LoadPlan, StorePlan
from .settings import Settings
from .stats import LOG_S, KVTierStats, drain_records, logger

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

LEASE_WAIT_S = 0.001
STORE_WAIT_S = 0.002
LOAD_WAIT_S = 0.003
#: An answer younger than this is not asked for again at the first lookup.
FRESH_S = 0.001
#: How often to ask while reads are pending.
POLL_S = 0.005
#: An answered request that could not be allocated for so long is asked again.
STALE_S = 1.0
#: Leases are renewed in one message this often; their TTL is 60 s.
RENEW_S = 20.0
#: How often to look whether a leader has accepted the group.
ACCEPT_S = 0.01
#: A step with fewer tokens says nothing about the speed of a prefill.
MEASURED_TOKENS = 256
#: How long construction waits for the group to be accepted.
OPEN_S = 5.0

_NO_LIMIT = 1 << 31


def group_name(engine_id: str) -> str:
    """The group of an engine's ranks and scheduler; at most 255 bytes."""
    name = f"vllm:{engine_id}"
    if len(name.encode()) > 255:
        name = f"vllm:{kvtier.keys.digest(engine_id).hex()}"
    return name


class _Incarnation:
    """A lease and what was answered to it."""

    __slots__ = (
        "lease", "session", "keys", "sent", "asked_at", "touched_at", "hits",
        "first_resident", "wait_from", "waited", "deadline", "run", "answered_at",
    )

    def __init__(self, lease: int, session: int, keys: npt.NDArray[np.uint8]) -> None:
        self.lease = lease
        self.session = session
        self.keys = keys            # of the tokens known at the lease; only to look up and to load
        self.sent = False
        self.asked_at = 0.0
        self.touched_at = 0.0       # asked or renewed; the leader forgets it some time after
        self.hits: kvtier.Hits | None = None   # the newest reply
        self.first_resident: int | None = None # chunks in DRAM before we prefetched
        self.wait_from = 0          # replies up to this number are older than the last question
        self.waited = False         # the one short wait was used
        self.deadline: float | None = None     # of the first lookup call's wait
        self.run: int | None = None # chunks promised; once given it stays until a newer reply
        self.answered_at = 0.0


class _Load:
    """A load from its begin until all ranks have reported."""

    __slots__ = ("op", "first", "blocks", "owner", "failed")

    def __init__(self, op: int, first: int, blocks: list[int], owner: _Tracked) -> None:
        self.op, self.first, self.blocks, self.owner = op, first, blocks, owner
        self.failed = False


class _Tracked:
    """What is known of one request of the engine."""

    __slots__ = (
        "request", "may_load", "may_store", "epoch", "chain", "cursor", "declined_at",
        "frozen", "limit", "local", "incarnation", "load", "sources",
    )

    def __init__(self, request: Request, epoch: bytes) -> None:
        self.request = request
        self.may_load = True
        self.may_store = True
        self.epoch = epoch
        self.chain: KeyChain | None = None     # None: no fingerprint yet, or not identified
        self.cursor = 0             # chunks that need no offer any more
        self.declined_at = -1       # chunks at the last offer that was declined
        self.frozen = False         # its pages are older than the epoch: store nothing from them
        self.limit = _NO_LIMIT      # chunks; what lies beyond failed to load once
        self.local = 0              # the engine's own hit at the last lookup
        self.incarnation: _Incarnation | None = None
        self.load: _Load | None = None
        self.sources: dict[CacheHitSource, int] = {}


class SchedulerHalf:
    """See the module. Not thread-safe; vLLM calls it from one thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = KVTierStats()
        self.off = False
        self._settings = settings
        self._clock = clock
        parallel = vllm_config.parallel_config
        self._group = group_name(vllm_config.kv_transfer_config.engine_id)
        self._ranks = parallel.world_size
        group = kv_cache_config.kv_cache_groups[0] if kv_cache_config.kv_cache_groups else None
        self._block_tokens = group.kv_cache_spec.block_size if group else 0
        self._dcp = parallel.decode_context_parallel_size

        self._cache: kvtier.Cache | None = None
        self._coordinator: kvtier.Coordinator | None = None
        self._loras = LoRADigests()
        self._roots: Roots | None = None
        self._session = 0           # the leader session that has accepted the group; 0: all is a miss
        self._refused = 0           # a session that has refused it
        self._looked_at = -1e9
        self._epoch = b""
        # Well inside the leader's TTL: a lease that is old is asked for anew.
        self._lease_life_s = 0.8 * settings.lease_ttl_s
        self._chunk = 0             # C
        self._span = 0              # V = B * D: tokens of one block id

        self._tracked: dict[str, _Tracked] = {}
        self._loads: dict[int, _Load] = {}     # by operation
        self._retired: dict[str, _Load] = {}   # of requests that ended during their load
        self._planned: list[LoadPlan] = []     # to travel with the next metadata
        self._ids = itertools.count(1)         # of leases and operations
        self._renewed_at = clock()
        self._logged_at = clock()
        self._step = (clock(), 0)   # when the last step was planned, and its tokens
        self._tokens_per_s = 0.0    # 0: not known yet
        self._granted_in_a_row = 0  # chunks stored since anything was found
        self._reasons: set[str] = set()

    # ---- opening and closing -------------------------------------------------

    def open(self) -> None:
        """Opens the cache as a member and joins the group. Raises kvtier.Error."""
        library = dict(self._settings.library, role="member")
        self._cache = kvtier.Cache.open(library, self._settings.library_path or None)
        self._coordinator = self._cache.coordinate(self._group, self._ranks)
        try:
            self._adopt(self._coordinator.ready(OPEN_S))
        except kvtier.Timeout:
            logger.info("kvtier: the group is not accepted yet; until it is, every lookup is a miss")

    def check_handshake(self, workers: Sequence[KVTierHandshake]) -> None:
        """Compares what the workers registered with what this half sees."""
        for w in workers:
            where = f"worker rank {w.rank}"
            if w.off:
                self.switch_off(f"{where} does not take part: {w.off}")
                return
            mine = {
                "group": self._group,
                "root": root_of(self._settings),
                "ranks": self._ranks,
                "block size": self._block_tokens,
            }
            theirs = {
                "group": w.group,
                "root": w.root,
                "ranks": w.ranks,
                "block size": w.block_tokens,
            }
            for what, value in mine.items():
                if theirs[what] != value:
                    raise ValueError(
                        f"scheduler and {where} disagree on the {what}: {value!r} and {theirs[what]!r}"
                    )
        if len({w.interleave for w in workers}) > 1:
            raise ValueError("the workers disagree on the interleave")

    def switch_off(self, why: str) -> None:
        """Misses from now on; loads in flight are still followed to their end."""
        if self.off:
            return
        self.off = True
        logger.error("kvtier: the cache is off for this engine: %s", why)
        for t in self._tracked.values():
            self._end_incarnation(t)

    def close(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        cache, self._cache = self._cache, None
        self._session = 0
        if coordinator is not None:
            coordinator.close()
        if cache is not None:
            drain_records(cache)
            cache.close(self._settings.close_timeout_s)

    # ---- the leader session ----------------------------------------------------

    def _attached(self, now: float) -> int:
        """The session that has accepted the group, or 0."""
        coordinator = self._coordinator
        if coordinator is None or self.off:
            return 0
        session = coordinator.session()
        if session == self._session or session == 0 or session == self._refused:
            return session if session == self._session else self._detach()
        self._detach()
        if now - self._looked_at < ACCEPT_S:
            return 0
        self._looked_at = now
        try:
            self._adopt(coordinator.ready(0.0))
        except kvtier.Timeout:
            return 0
        except kvtier.Refused as e:
            self._refused = session
            logger.error("kvtier: the leader refused this engine; every lookup is a miss: %s", e)
            return 0
        return self._session

    def _detach(self) -> int:
        self._session = 0
        return 0

    def _adopt(self, accepted: kvtier.Accepted) -> None:
        """A leader session begins. What an earlier leader held in DRAM is gone, so
        every request offers its chunks anew; leases of the old session are void."""
        if accepted.block_tokens != self._block_tokens or accepted.dcp != self._dcp:
            raise ValueError(
                f"the group was accepted with blocks of {accepted.block_tokens} tokens on {accepted.dcp} "
                f"ranks, the scheduler has {self._block_tokens} on {self._dcp}"
            )
        self._chunk = accepted.chunk_tokens
        self._span = accepted.block_tokens * accepted.dcp
        fresh = self._roots is None or self._roots.fingerprint != accepted.fingerprint
        if fresh:
            self._roots = Roots(accepted.fingerprint, self._settings.tag, self._loras)
        self._session = accepted.session
        for t in self._tracked.values():
            t.cursor, t.declined_at = 0, -1
            if fresh:
                t.chain = None
                self._identify(t)

    def _identify(self, t: _Tracked) -> None:
        """Gives a request its key chain, or switches the cache off for it."""
        if self._roots is None or not (t.may_load or t.may_store):
            return
        try:
            check_identifiable(t.request)
            t.chain = KeyChain(t.request, self._roots.root(t.request, t.epoch), self._chunk)
        except NotIdentified as e:
            self._exclude(t, str(e))

    def _exclude(self, t: _Tracked, why: str) -> None:
        """Leaves one request alone. It must not count against the cache."""
        t.may_load = t.may_store = False
        t.chain = None
        self.stats.add("not_cached")
        if why not in self._reasons and len(self._reasons) < 100:
            self._reasons.add(why)
            logger.info("kvtier: request %s is not cached: %s", t.request.request_id, why)

    # ---- arrival and lookup -----------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        now = self._clock()
        session = self._attached(now)
        t = self._tracked[request.request_id] = _Tracked(request, self._epoch)
        t.may_load, t.may_store = _wishes(request)
        self._identify(t)
        if session and self._worth_asking(t):
            self._begin(t, session, now)

    def _worth_asking(self, t: _Tracked, local: int = 0) -> bool:
        if not t.may_load or t.chain is None:
            return False
        end = min(t.request.num_tokens // self._chunk, t.limit) * self._chunk
        return end - local >= max(self._settings.min_load_tokens, 1)

    def _begin(self, t: _Tracked, session: int, now: float) -> _Incarnation | None:
        """Begins an incarnation and asks for a lease of all full chunks known. None:
        there are no keys for the tokens of this request."""
        self._end_incarnation(t)
        n = min(t.request.num_tokens // self._chunk, t.limit, MAX_KEYS)
        try:
            keys = t.chain.lookup(n)
        except (OverflowError, TypeError, ValueError) as e:
            self._exclude(t, f"its tokens are not numbers of 32 bits ({e})")
            return None
        i = t.incarnation = _Incarnation(next(self._ids), session, keys)
        self._ask(i, now)
        return i

    def _ask(self, i: _Incarnation, now: float) -> bool:
        """Sends the lease (again, with the same id). Busy leaves an earlier lease
        and its answer in force."""
        flags = kvtier.LEASE_PREFETCH | kvtier.LEASE_PIN
        if not self._coordinator.lease(i.lease, i.keys, flags):
            return False
        i.sent = True
        i.asked_at = i.touched_at = now
        if i.hits is not None:
            i.wait_from = i.hits.answer
        return True

    def _collect(self, i: _Incarnation, timeout_s: float = 0.0) -> None:
        """Takes a newer reply, if there is one. Raises kvtier.LeaseLost and others."""
        after = i.hits.answer if i.hits is not None else 0
        hits = self._coordinator.lease_result(i.lease, after, timeout_s)
        if hits is not None:
            if i.first_resident is None:
                i.first_resident = hits.resident
            i.hits = hits

    def _alive(self, i: _Incarnation, now: float) -> bool:
        """Takes a newer reply; False when nothing is leased any more."""
        if now - i.touched_at > self._lease_life_s:
            return False        # nobody stepped the engine for a minute: nothing was renewed
        try:
            self._collect(i)
        except kvtier.LeaseLost:
            return False
        return True

    def _end_incarnation(self, t: _Tracked) -> None:
        i, t.incarnation = t.incarnation, None
        if i is not None and i.sent and self._coordinator is not None:
            self._coordinator.release(i.lease)

    def get_num_new_matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        t = self._tracked.get(request.request_id)
        if t is None or t.load is not None:
            return 0, False
        t.local = local
        now = self._clock()
        session = self._attached(now)
        if not session:
            self._end_incarnation(t)
            return 0, False
        if t.frozen:
            # Preempted since the reset, so the old pages are gone.
            self._restart(t)
        if not self._worth_asking(t, local):
            return 0, False
        try:
            run = self._run(t, session, now)
        except kvtier.Error as e:       # the leader is going, or has no room for leases
            logger.debug("kvtier: no answer for request %s: %s", request.request_id, e)
            self.stats.add("unanswered")
            self._end_incarnation(t)
            return 0, False
        if run is None:
            self.stats.add("waits")
            return None, False
        end = min(min(run, t.limit) * self._chunk, request.num_tokens) // self._span * self._span
        n = end - local
        if n < max(self._settings.min_load_tokens, 1):
            n = 0
        self.stats.add("lookups")
        if n:
            self.stats.add("hits")
            self.stats.add("hit_tokens", n)
        return n, n > 0

    def _run(self, t: _Tracked, session: int, now: float) -> int | None:
        """Leading chunks to promise; None: not known yet."""
        i = t.incarnation
        if i is None or i.session != session or (i.sent and not self._alive(i, now)):
            # Nothing is pinned and no promise holds: a new incarnation, with a
            # wait of its own.
            i = self._begin(t, session, now)
            if i is None:
                return 0
        first_call = i.deadline is None
        if first_call:
            i.deadline = now + self._patience(t.request.num_tokens - t.local)
        if not i.sent:
            if not self._ask(i, now):   # busy at arrival and again: a miss
                t.incarnation = None
                return 0
        elif i.hits is None:
            pass
        elif first_call:
            # The answer of the arrival may be old; what was stored meanwhile
            # would be computed again.
            if i.hits.leased < len(i.keys) and now - i.asked_at > FRESH_S:
                self._ask(i, now)
        elif i.run is not None and min(now - i.answered_at, now - i.asked_at) > STALE_S:
            self._ask(i, now)

        if not self._answered(i) and not i.waited:
            # None costs the request a whole step of the engine; the reply is
            # usually some microseconds away.
            i.waited = True
            self._collect(i, LEASE_WAIT_S)
        if self._answered(i):
            return self._promise(i, now)
        if i.run is not None:
            return i.run
        if self._clock() < i.deadline:
            return None
        # Not kept as the promise: a late reply still counts.
        self.stats.add("wait_timeouts")
        return 0 if i.hits is None else i.hits.resident

    def _patience(self, tokens: int) -> float:
        """Seconds that a request may be held back: to wait longer than computing
        takes is no gain."""
        if not self._tokens_per_s:
            return self._settings.lookup_wait_s
        return min(self._settings.lookup_wait_s, tokens / self._tokens_per_s)

    def _measure(self, now: float, scheduled: int) -> None:
        """Learns how fast the engine computes, from steps that have enough to do."""
        began, n = self._step
        self._step = (now, scheduled)
        if n < MEASURED_TOKENS or now <= began:
            return
        rate = n / (now - began)
        # The engine may have paused after a step, so what is slow counts little.
        weight = 0.3 if rate > self._tokens_per_s else 0.05
        self._tokens_per_s += weight * (rate - self._tokens_per_s) if self._tokens_per_s else rate

    @staticmethod
    def _answered(i: _Incarnation) -> bool:
        return i.hits is not None and i.hits.answer > i.wait_from

    def _promise(self, i: _Incarnation, now: float) -> int | None:
        h = i.hits
        if i.run is not None:
            if h.answer > i.wait_from and i.answered_at < i.asked_at:
                # A newer reply replaces the promise, but never by "wait".
                i.run = h.leased if h.pending == 0 else max(h.resident, min(i.run, h.leased))
                i.answered_at = now
            return i.run
        if h.pending and now < i.deadline:
            if now - i.asked_at > POLL_S:
                self._ask(i, now)
            return None
        if h.pending:
            self.stats.add("wait_timeouts")
        i.run = h.leased if h.pending == 0 else h.resident
        i.answered_at = now
        return i.run

    # ---- load -------------------------------------------------------------------

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, n: int) -> None:
        t = self._tracked.get(request.request_id)
        if n == 0:
            if t is not None and t.load is None:
                self._end_incarnation(t)
            return
        if t is None:       # vLLM waits for a report all the same
            t = self._tracked[request.request_id] = _Tracked(request, self._epoch)
            t.may_load = t.may_store = False
        op = next(self._ids)
        try:
            ids = blocks.get_block_ids()[0]
        except Exception as e:      # no ids: the ranks report the request as a whole
            logger.error("kvtier: the blocks of a load are not known: %s", e)
            ids = []
        # request.num_computed_tokens is 0 at this moment, whatever the local hit.
        first, span, chunk = t.local, self._span or 1, self._chunk or 1
        wanted = list(ids[first // span : (first + n) // span])
        j0, j1 = first // chunk, -(-(first + n) // chunk)
        plan = LoadPlan(op, 0, request.request_id, first, n, wanted or list(ids), [], j1 - j0)
        t.load = self._loads[op] = _Load(op, first, plan.blocks, t)
        # From here on the ranks will report, also if the rest fails.
        self._planned.append(plan)
        self.stats.add("loads")
        self.stats.add("load_tokens", n)
        self._granted_in_a_row = 0
        i, t.incarnation = t.incarnation, None
        if i is None or not i.sent or i.session != self._session or not ids:
            self.stats.add("loads_unbegun")
            return
        t.sources = self._split(i, first, n)
        begun = self._coordinator.load_begin(op, i.lease, j0, i.keys[j0:j1], LOAD_WAIT_S)
        if begun is None or begun[0] != i.session:
            self._coordinator.cancel(op, True)
            self._coordinator.release(i.lease)
            self.stats.add("loads_unbegun")
            return
        plan.session = begun[0]
        plan.verdicts = _first_window(begun[1])

    def _split(self, i: _Incarnation, first: int, n: int) -> dict[CacheHitSource, int]:
        """Tokens by tier. What a prefetch of ours brought to DRAM came from disk."""
        in_dram = (i.first_resident or 0) * self._chunk
        host = max(0, min(first + n, in_dram) - first)
        split = {CacheHitSource.HOST: host, CacheHitSource.DISK: n - host}
        return {source: k for source, k in split.items() if k}

    def get_external_cache_hit_sources(self, request: Request, n: int) -> dict[CacheHitSource, int]:
        t = self._tracked.get(request.request_id)
        if t is not None and n and sum(t.sources.values()) == n:
            return dict(t.sources)
        return {CacheHitSource.HOST: n} if n else {}

    # ---- step ---------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput, meta: KVTierMetadata) -> None:
        """Fills in the metadata of a step. Loads come first: they must travel, also
        when the rest fails."""
        meta.loads, self._planned = self._planned, []
        now = self._clock()
        if now - self._logged_at > LOG_S and self._cache is not None:
            self._logged_at = now
            drain_records(self._cache)
        self._measure(now, output.total_num_scheduled_tokens)
        session = self._attached(now)
        if not session:
            return
        if now - self._renewed_at > min(RENEW_S, self._lease_life_s / 2):
            self._renewed_at = now
            self._renew(session)
        self._store(meta, output, session)
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id, session, now)

    def _renew(self, session: int) -> None:
        live = [
            t.incarnation
            for t in self._tracked.values()
            if t.incarnation is not None and t.incarnation.sent and t.incarnation.session == session
        ]
        if live:
            self._coordinator.renew([i.lease for i in live])
        for i in live:
            i.touched_at = self._renewed_at

    def _preempted(self, request_id: str, session: int, now: float) -> None:
        """Asks at once for what a preempted request will need again."""
        t = self._tracked.get(request_id)
        if t is None or t.load is not None or t.incarnation is not None:
            return
        if t.request.status != RequestStatus.PREEMPTED or t.request.num_computed_tokens:
            return      # resumed in the same step
        if t.frozen:
            self._restart(t)
        if self._worth_asking(t):
            self._begin(t, session, now)

    def _store(self, meta: KVTierMetadata, output: SchedulerOutput, session: int) -> None:
        offers: list[tuple[_Tracked, int, kvtier.StoreRequest]] = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            t = self._tracked.get(request_id)
            if t is None or not t.may_store or t.frozen or t.chain is None:
                continue
            r = t.request
            # Capped by what is known: drafts and tokens still being sampled are
            # scheduled, but not final.
            end = min(r.num_computed_tokens + scheduled, r.num_tokens)
            if not self._settings.save_generated:
                end = min(end, r.num_prompt_tokens)
            end //= self._chunk
            if end > t.cursor and end > t.declined_at:
                end = min(end, t.cursor + MAX_KEYS)
                offer = self._offer(t, end)
                if offer is not None:
                    offers.append((t, end, offer))
        if not offers:
            return
        try:
            answered, verdicts = self._coordinator.store_begin([o for _, _, o in offers], STORE_WAIT_S)
        except kvtier.Error as e:       # the leader is going
            logger.debug("kvtier: nothing is stored in this step: %s", e)
            self.stats.add("store_timeouts", len(offers))
            return
        failed: Exception | None = None
        for (t, end, offer), v in zip(offers, verdicts, strict=True):
            self.stats.add("chunks_offered", end - offer.first_ordinal)
            if v is None:
                self.stats.add("store_timeouts")
                continue
            try:
                if answered != session:
                    raise ValueError("another leader answered")
                plan = self._plan(t, end, offer, v, session, output)
            except Exception as e:
                # Whatever was granted will have no writer.
                self._coordinator.cancel(offer.op, True)
                t.may_store = False
                failed = e
                continue
            if plan is not None:
                meta.stores.append(plan)
        if failed is not None:
            raise failed

    def _offer(self, t: _Tracked, end: int) -> kvtier.StoreRequest | None:
        """Asks for slots for chunks cursor..end, whose tokens are computed when this
        step has run."""
        t.chain.truncate(max(t.cursor, t.request.num_computed_tokens // self._chunk))
        try:
            t.chain.extend(end)
        except (OverflowError, TypeError, ValueError) as e:
            self._exclude(t, f"its tokens are not numbers of 32 bits ({e})")
            return None
        return kvtier.StoreRequest(
            op=next(self._ids),
            first_ordinal=t.cursor,
            parent=t.chain.parent(t.cursor),
            keys=t.chain.kept(t.cursor, end),
            no_disk=bool(t.epoch),
        )

    def _plan(
        self,
        t: _Tracked,
        end: int,
        offer: kvtier.StoreRequest,
        verdicts: npt.NDArray[np.uint32],
        session: int,
        output: SchedulerOutput,
    ) -> StorePlan | None:
        """Makes a plan of the verdicts and moves the cursor."""
        first = offer.first_ordinal
        codes = verdicts[:, 0]
        granted = np.flatnonzero(codes == kvtier.GRANTED)
        declined = np.flatnonzero(codes == kvtier.DECLINED)
        t.cursor = first + int(declined[0]) if len(declined) else end
        t.declined_at = end if len(declined) else -1
        self.stats.add("chunks_granted", len(granted))
        self.stats.add("chunks_declined", len(declined))
        self.stats.add("chunks_held", len(codes) - len(granted) - len(declined))
        if not len(granted):
            return None
        self._note_granted(len(granted))
        last = first + int(granted[-1])
        a = first * self._chunk // self._span
        b = -(-(last + 1) * self._chunk // self._span)
        table = output.kv_connector_block_state.get_block_ids(t.request.request_id)[0]
        if len(table) < b:
            raise ValueError(f"{len(table)} blocks for {b} that are stored")
        grants = [(int(k), int(verdicts[k, 1]), int(verdicts[k, 2])) for k in granted]
        return StorePlan(offer.op, session, first, grants, list(table[a:b]))

    def _note_granted(self, n: int) -> None:
        before = self._granted_in_a_row
        self._granted_in_a_row += n
        if before < 10_000 <= self._granted_in_a_row:
            logger.warning(
                "kvtier: %d chunks were stored since a prefix was last found; if prompts share "
                "prefixes, look at chunk_tokens, tag, cache salts and at what fits in DRAM and disk",
                self._granted_in_a_row,
            )

    # ---- ends ----------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        invalid = output.invalid_block_ids
        if invalid and self._loads:
            # Ids may come steps before the end of the load, from ranks one by one.
            for load in self._loads.values():
                bad = next((k for k, b in enumerate(load.blocks) if b in invalid), None)
                if bad is not None and self._span:
                    load.failed = True
                    chunk = (load.first + bad * self._span) // self._chunk
                    load.owner.limit = min(load.owner.limit, chunk)
        for request_id in output.finished_recving or ():
            load = self._retired.pop(request_id, None)
            if load is None:
                t = self._tracked.get(request_id)
                load = t.load if t is not None else None
                if load is None:
                    continue        # not ours
                t.load = None
                if request_id in output.failed_recving:
                    load.failed = True
                    t.limit = min(t.limit, load.first // (self._chunk or 1))
            self._loads.pop(load.op, None)
            if load.failed and self._coordinator is not None:
                # A rank that could not begin it tells the leader nothing. All have
                # reported, so nobody has this operation any more.
                self._coordinator.cancel(load.op, True)

    def request_finished(self, request: Request) -> None:
        """Nothing is stored from here on: the pages go to others before the next
        metadata is executed."""
        t = self._tracked.pop(request.request_id, None)
        if t is None:
            return
        if t.load is None:
            self._end_incarnation(t)
            return
        self._retired[request.request_id] = t.load
        if self._coordinator is not None:
            self._coordinator.cancel(t.load.op, False)

    def reset_cache(self) -> None:
        """New weights, or nobody knows: a new epoch, whose keys nobody has. Requests
        that keep pages store nothing from them any more; those without begin anew."""
        self._epoch = os.urandom(16)    # also without a leader: old KV must not be found
        if self._coordinator is not None:
            try:
                self._epoch = self._coordinator.reset()
            except kvtier.Error as e:
                logger.debug("kvtier: the leader did not hear of the reset: %s", e)
        self.stats.add("resets")
        for t in self._tracked.values():
            t.frozen = True     # also should what follows fail
        now = self._clock()
        session = self._attached(now)
        for t in list(self._tracked.values()):
            r = t.request
            if t.load is not None:
                if self._coordinator is not None:
                    self._coordinator.cancel(t.load.op, False)
            elif r.num_computed_tokens == 0 and r.status != RequestStatus.RUNNING:
                self._restart(t)
                if session and self._worth_asking(t):
                    self._begin(t, session, now)

    def _restart(self, t: _Tracked) -> None:
        """Begins a request that has no pages anew, under the present epoch."""
        self._end_incarnation(t)
        t.epoch = self._epoch
        t.chain, t.cursor, t.declined_at = None, 0, -1
        t.frozen = False
        t.limit = _NO_LIMIT
        self._identify(t)

    # ---- inspection -----------------------------------------------------------------

    def leftovers(self) -> dict[str, int]:
        """What is held for requests; all 0 when the engine is idle."""
        return {
            "requests": len(self._tracked),
            "loads": len(self._loads),
            "retired": len(self._retired),
            "planned": len(self._planned),
            "leases": sum(t.incarnation is not None for t in self._tracked.values()),
        }


def _wishes(request: Request) -> tuple[bool, bool]:
    """Whether a request may load and may store, by what it asks for."""
    params = request.kv_transfer_params
    mine = params.get("kvtier") if isinstance(params, dict) else None
    mine = mine if isinstance(mine, dict) else {}
    load = mine.get("load", True) is not False
    store = mine.get("store", True) is not False
    sampling = request.sampling_params
    if request.skip_reading_prefix_cache or (sampling is not None and sampling.prompt_logprobs is not None):
        load = False
    return load, store


def _first_window(verdicts: npt.NDArray[np.uint32]) -> list[tuple[int, int, int]]:
    """The verdicts that travel: the leading resident chunks and one more, so that
    a load whose first chunk is not read yet is not taken for a failed one."""
    codes = verdicts[:, 0]
    later = np.flatnonzero(codes != kvtier.READY)
    n = int(later[0]) + 1 if len(later) else len(codes)
    return [(int(c), int(s), int(g)) for c, s, g in verdicts[:n, :3]]


def root_of(settings: Settings) -> str:
    """What both halves must have opened."""
    path = settings.library.get("disk_path")
    if path:
        return os.path.abspath(path)
    return f"name:{settings.library.get('name', 'default')}"
