"""The scheduler's half: what to look up, to load, and to store.

Runs in vLLM's scheduler process, as a member that never leads, on the
scheduler's thread alone. It holds no pages and copies nothing. Every call is
O(changes) and every wait is bounded: 1 ms for what a request brings besides tokens,
1 ms for the first answer of a lookup, 2 ms or a fiftieth of its expected time for all
offers of a step, 3 ms for the begin of a load.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import kvtier

from .announcement import capacity
from .content import LoRADigests, MediaDigests, NotIdentified, NotYet
from .diagnosis import Diagnosis
from .handshake import KVTierHandshake, check_handshakes, group_name, root_of
from .identity import has_draft_layers
from .keychain import MAX_KEYS, KeyChain, Roots, check_identifiable
from .leases import Incarnation, Leases, Patience
from .loading import Loading
from .mapping import context_ranks
from .metadata import KVTierMetadata, LoadPlan
from .settings import Settings
from .stats import LOG_S, KVTierStats, drain_records, logger
from .storing import Storing
from .tracked import NO_LIMIT, Tracked
from .wishes import NOTHING, wishes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: How often to look whether a leader has accepted the group.
ACCEPT_S = 0.01
#: How long construction waits for the group to be accepted.
OPEN_S = 5.0


class Misfit(ValueError):
    """The ranks have another geometry than this scheduler."""


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
        if group:
            self._dcp = context_ranks(self._dcp, group.kv_cache_spec)
        # As configured. What the ranks say counts; nothing here depends on it.
        self._interleave = parallel.cp_kv_cache_interleave_size
        # Tokens after a chunk that its key names: a draft layer's last row depends on
        # the next one.
        self._ahead = 1 if has_draft_layers(vllm_config) else 0

        self._cache: kvtier.Cache | None = None
        self._coordinator: kvtier.Coordinator | None = None
        self._leases: Leases | None = None
        self._patience = Patience(settings.lookup_wait_s, clock())
        self._loras = LoRADigests()
        self._media = MediaDigests()
        self._roots: Roots | None = None
        self._session = 0  # the leader session that has accepted the group; 0: all is a miss
        self._refused = 0  # a session that has refused it
        self._looked_at = -1e9
        self._epoch = b""
        self._chunk = 0  # C
        self._span = 0  # V = B * D: tokens of one block id

        self._tracked: dict[str, Tracked] = {}
        self._unread: set[str] = set()  # requests with content that is still being read
        # Of leases and operations. A later engine of the same name must not use an
        # operation's number again that the leader still remembers.
        self._ids = itertools.count((secrets.randbits(31) << 32) + 1)
        self._logged_at = clock()
        self.diagnosis = Diagnosis(settings)
        self._reasons: set[str] = set()
        self._loading = Loading(self.stats, self.diagnosis, self._ids)
        self._storing = Storing(
            settings, self.stats, self.diagnosis, self._ids, self._ahead, self._exclude
        )

    # ---- opening and closing -------------------------------------------------

    def open(self) -> None:
        """Opens the cache as a member and joins the group. Raises kvtier.Error."""
        library = dict(self._settings.library, role="member")
        self._cache = kvtier.Cache.open(library, self._settings.library_path or None)
        self._coordinator = self._cache.coordinate(self._group, self._ranks)
        self._leases = Leases(self._coordinator, self._settings, self.stats, self._ids, self._clock())
        try:
            self._adopt(self._coordinator.ready(OPEN_S))
        except kvtier.Timeout:
            logger.info("kvtier: the group is not accepted yet; until it is, every lookup is a miss")

    def check_handshake(self, workers: Sequence[KVTierHandshake]) -> None:
        """Compares what the workers registered with what this half sees. Geometry comes
        from the ranks: a scheduler that counts other tokens to a block stays out."""
        off = check_handshakes(
            workers,
            KVTierHandshake(
                root=root_of(self._settings),
                group=self._group,
                dcp=self._dcp,
                interleave=self._interleave,
                block_tokens=self._block_tokens,
                rank=-1,
                ranks=self._ranks,
            ),
        )
        if off:
            self.switch_off(off)

    def switch_off(self, why: str) -> None:
        """Misses from now on; loads in flight are still followed to their end."""
        if self.off:
            return
        self.off = True
        logger.error("kvtier: the cache is off for this engine: %s", why)
        for t in self._tracked.values():
            self._end_incarnation(t)

    def close(self) -> None:
        coordinator, self._coordinator, self._leases = self._coordinator, None, None
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
        except Misfit as e:
            self.switch_off(str(e))
            return 0
        return self._session

    def _detach(self) -> int:
        self._session = 0
        return 0

    def _adopt(self, accepted: kvtier.Accepted) -> None:
        """A leader session begins. What an earlier leader held in DRAM is gone, so
        every request offers its chunks anew; leases of the old session are void."""
        if accepted.block_tokens != self._block_tokens or accepted.dcp != self._dcp:
            raise Misfit(
                f"the group was accepted with blocks of {accepted.block_tokens} tokens on {accepted.dcp} "
                f"ranks, the scheduler has {self._block_tokens} on {self._dcp}"
            )
        self._chunk = accepted.chunk_tokens
        self._span = accepted.block_tokens * accepted.dcp
        self._loading.adopt(self._chunk, self._span, accepted.slot_bytes)
        self._storing.adopt(self._chunk, self._span, capacity(accepted))
        fresh = self._roots is None or self._roots.fingerprint != accepted.fingerprint
        if fresh:
            self._roots = Roots(accepted.fingerprint, self._settings.tag, self._loras)
        self._session = accepted.session
        for t in self._tracked.values():
            t.cursor, t.declined_at = 0, -1
            if fresh:
                t.chain = None
                self._identify(t)

    def _identify(self, t: Tracked) -> None:
        """Gives a request its key chain, or switches the cache off for it."""
        if self._roots is None or not (t.may_load or t.may_store):
            return
        r = t.request
        self._unread.discard(r.request_id)
        try:
            check_identifiable(r)
            root = self._roots.root(r, t.epoch)
            t.chain = KeyChain(r, root, self._chunk, self._media, self._ahead)
        except NotYet:
            self._unread.add(r.request_id)
        except NotIdentified as e:
            self._exclude(t, str(e))

    def _unreadable(self, t: Tracked, now: float) -> bool:
        """Whether a request is held back until its content is read. It must not be: it
        goes on without the cache."""
        self._identify(t)
        n = t.request.num_tokens - t.local
        if t.chain is not None or not t.may_load or n < max(self._settings.min_load_tokens, 1):
            return False
        if t.patience(now, self._patience.seconds(n)) > 0:
            t.hold(now)
            self.stats.add("waits")
            return True
        t.let_go(now)
        self._exclude(t, "what it brings besides tokens took too long to read")
        return False

    def _exclude(self, t: Tracked, why: str) -> None:
        """Leaves one request alone. It must not count against the cache."""
        t.may_load = t.may_store = False
        t.chain = None
        self._unread.discard(t.request.request_id)
        self.stats.add("not_cached")
        if why not in self._reasons and len(self._reasons) < 100:
            self._reasons.add(why)
            logger.info("kvtier: request %s is not cached: %s", t.request.request_id, why)

    # ---- arrival and lookup -----------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        now = self._clock()
        session = self._attached(now)
        t = self._tracked[request.request_id] = Tracked(request, self._epoch, wishes(request))
        self._identify(t)
        self._media.see(request.mm_features)
        self.diagnosis.arrived(request, t.chain, self._chunk)
        if session and self._worth_asking(t):
            self._begin(t, session, now)

    def _worth_asking(self, t: Tracked, local: int = 0) -> bool:
        if not t.may_load or t.chain is None:
            return False
        end = min(self._full_chunks(t.request), t.limit) * self._chunk
        return end - local >= max(self._settings.min_load_tokens, 1)

    def _full_chunks(self, request: Request) -> int:
        """Chunks that have a key: all their tokens are known, and those the key names."""
        return (request.num_tokens - self._ahead) // self._chunk

    def _begin(self, t: Tracked, session: int, now: float) -> Incarnation | None:
        """Begins an incarnation and asks for all full chunks known. None: there are no
        keys for the tokens of this request."""
        self._end_incarnation(t)
        n = min(self._full_chunks(t.request), t.limit, MAX_KEYS)
        try:
            keys = t.chain.lookup(n)
        except NotYet:  # a session went on, with something new
            return None
        except NotIdentified as e:
            self._exclude(t, str(e))
            return None
        except (OverflowError, TypeError, ValueError) as e:
            self._exclude(t, f"its tokens are not numbers of 32 bits ({e})")
            return None
        t.incarnation = self._leases.begin(keys, session, now)
        return t.incarnation

    def _end_incarnation(self, t: Tracked) -> None:
        i, t.incarnation = t.incarnation, None
        if i is not None and self._leases is not None:
            self._leases.end(i)

    def get_num_new_matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        t = self._tracked.get(request.request_id)
        if t is None or t.load is not None:
            return 0, False
        t.local = local
        now = self._clock()
        session = self._attached(now)
        if not session:
            self._end_incarnation(t)
            self.diagnosis.unanswered(request.request_id)
            return 0, False
        if t.frozen:
            # Preempted since the reset, so the old pages are gone.
            self._restart(t)
        if request.request_id in self._unread and self._unreadable(t, now):
            return None, False
        if not self._worth_asking(t, local):
            if t.may_load:
                self.diagnosis.looked_up(request.request_id, request.num_tokens, local, self._chunk)
            else:
                self.diagnosis.refuses(request.request_id)
            return 0, False
        try:
            run = self._run(t, session, now)
        except kvtier.Error as e:  # the leader is going, or has no room for leases
            logger.debug("kvtier: no answer for request %s: %s", request.request_id, e)
            self.stats.add("unanswered")
            self.diagnosis.unanswered(request.request_id)
            self._end_incarnation(t)
            t.let_go(now)
            return 0, False
        if run is None:
            t.hold(now)
            self.stats.add("waits")
            return None, False
        t.let_go(now)
        end = min(min(run, t.limit) * self._chunk, request.num_tokens) // self._span * self._span
        n = end - local
        if n < max(self._settings.min_load_tokens, 1):
            n = 0
        self._count_lookup(t, end, n)
        return n, n > 0

    def _count_lookup(self, t: Tracked, end: int, n: int) -> None:
        """``end`` tokens of t are there, ``n`` are promised. A request that has to wait
        for pages is looked up in every step, and counts once an incarnation."""
        i, local = t.incarnation, t.local
        if i is None or i.counted:
            return
        i.counted = True
        self.stats.add("lookups")
        self.stats.add("lookup_tokens", max(0, t.request.num_tokens - local))
        if local:
            self.stats.add("local_tokens", local)
        self.stats.waited(max(0.0, self._clock() - i.first_at))
        if n:
            self.stats.add("hits")
            self.stats.add("hit_tokens", n)
        elif end > local:
            self.stats.add("too_small")
        if i.answered:
            self.diagnosis.looked_up(t.request.request_id, end, local, self._chunk)
        else:
            self.diagnosis.unanswered(t.request.request_id)

    def _run(self, t: Tracked, session: int, now: float) -> int | None:
        """Leading chunks to promise; None: not known yet."""
        i = t.incarnation
        if i is None or not self._leases.alive(i, session, now):
            i = self._begin(t, session, now)
            if i is None:
                return 0
        most_s = self._patience.seconds(t.request.num_tokens - t.local)
        return self._leases.run(i, now, t.patience(now, most_s))

    # ---- load -------------------------------------------------------------------

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, n: int) -> None:
        t = self._tracked.get(request.request_id)
        if t is not None:
            t.held_since, t.held_s = None, 0.0
        if n == 0:
            if t is not None and t.load is None:
                self._end_incarnation(t)
            return
        if t is None:  # vLLM waits for a report all the same
            t = self._tracked[request.request_id] = Tracked(request, self._epoch, NOTHING)
        self._loading.begin(t, blocks, n, self._coordinator, self._session)

    def get_external_cache_hit_sources(self, request: Request, n: int) -> dict[CacheHitSource, int]:
        t = self._tracked.get(request.request_id)
        if t is not None and n and sum(t.sources.values()) == n:
            return dict(t.sources)
        return {CacheHitSource.HOST: n} if n else {}

    # ---- step ---------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput, meta: KVTierMetadata) -> None:
        """Fills in the metadata of a step. Loads come first: they must travel, also
        when the rest fails."""
        meta.loads = self.take_planned()
        now = self._clock()
        if now - self._logged_at > LOG_S and self._cache is not None:
            self._logged_at = now
            drain_records(self._cache)
        self._patience.measure(now, output.total_num_scheduled_tokens)
        session = self._attached(now)
        if not session:
            return
        for t in [self._tracked[i] for i in self._unread]:
            self._identify(t)
        self._leases.renew((t.incarnation for t in self._tracked.values()), session, now)
        step_s = self._patience.measured(output.total_num_scheduled_tokens)
        self._storing.step(self._coordinator, session, self._tracked, output, meta, step_s)
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id, session, now)

    def take_planned(self) -> list[LoadPlan]:
        """Loads that have not travelled: a step's metadata must carry them, whatever
        else failed."""
        return self._loading.take_planned()

    def _preempted(self, request_id: str, session: int, now: float) -> None:
        """Asks at once for what a preempted request will need again."""
        t = self._tracked.get(request_id)
        if t is None or t.load is not None or t.incarnation is not None:
            return
        if t.request.status != RequestStatus.PREEMPTED or t.request.num_computed_tokens:
            return  # resumed in the same step
        if t.frozen:
            self._restart(t)
        if self._worth_asking(t):
            self._begin(t, session, now)

    # ---- ends ----------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._loading.reported(output, self._tracked, self._coordinator)

    def request_finished(self, request: Request) -> None:
        """Nothing is stored from here on: the pages go to others before the next
        metadata is executed."""
        self.diagnosis.ended(request.request_id)
        self._unread.discard(request.request_id)
        t = self._tracked.pop(request.request_id, None)
        if t is None:
            return
        if t.load is None:
            self._end_incarnation(t)
            return
        self._loading.retire(t)
        if self._coordinator is not None:
            self._coordinator.cancel(t.load.op, False)

    def forget(self, request_id: str) -> None:
        """Does nothing more for a request; a load of it is followed to its end."""
        self._unread.discard(request_id)
        t = self._tracked.pop(request_id, None)
        if t is None:
            return
        if t.load is None:
            self._end_incarnation(t)
        else:
            self._loading.retire(t)

    def reset_cache(self) -> None:
        """New weights, or nobody knows: a new epoch, whose keys nobody has. Requests
        that keep pages store nothing from them any more; those without begin anew."""
        self._epoch = os.urandom(16)  # also without a leader: old KV must not be found
        if self._coordinator is not None:
            try:
                self._epoch = self._coordinator.reset()
            except kvtier.Error as e:
                logger.debug("kvtier: the leader did not hear of the reset: %s", e)
        self.stats.add("resets")
        for t in self._tracked.values():
            t.frozen = True  # also should what follows fail
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

    def _restart(self, t: Tracked) -> None:
        """Begins a request that has no pages anew, under the present epoch."""
        self._end_incarnation(t)
        t.epoch = self._epoch
        t.chain, t.cursor, t.declined_at = None, 0, -1
        t.frozen = False
        t.limit = NO_LIMIT
        self._identify(t)

    # ---- inspection -----------------------------------------------------------------

    def leftovers(self) -> dict[str, int]:
        """What is held for requests; all 0 when the engine is idle."""
        return {
            "requests": len(self._tracked),
            **self._loading.leftovers(),
            "leases": sum(t.incarnation is not None for t in self._tracked.values()),
        }
