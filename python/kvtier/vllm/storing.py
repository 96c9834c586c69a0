"""The storing side of the scheduler's half: which chunks to offer in a step, and the
plans of those that were granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

import kvtier

from .content import NotIdentified, NotYet
from .diagnosis import Diagnosis
from .keychain import MAX_KEYS
from .metadata import KVTierMetadata, StorePlan
from .settings import Settings
from .stats import KVTierStats, logger
from .tracked import Tracked

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.core.sched.output import SchedulerOutput

#: What all offers of a step together may wait for their answers: so long, or this share
#: of the time that the step is going to take. The last step of a prompt has no other
#: chance, and one of a second is not noticeably longer for a few milliseconds.
STORE_WAIT_S = 0.002
STORE_WAIT_SHARE = 0.02


class Storing:
    """Chunks leave the pages only in the step that completes them: from
    ``request_finished`` on the pages belong to others. Not thread-safe.

    ``ids``: numbers of operations, shared with loads and leases. ``ahead``: tokens
    after a chunk that its key names. ``exclude``: called with a request that no keys
    can describe after all, and why."""

    def __init__(
        self,
        settings: Settings,
        stats: KVTierStats,
        diagnosis: Diagnosis,
        ids: Iterator[int],
        ahead: int,
        exclude: Callable[[Tracked, str], None],
    ) -> None:
        self._settings = settings
        self._stats = stats
        self._diagnosis = diagnosis
        self._ids = ids
        self._ahead = ahead
        self._exclude = exclude
        self._chunk = self._span = 1
        self._capacity = 0

    def adopt(self, chunk: int, span: int, capacity: int) -> None:
        """A leader session begins. ``chunk``: C, ``span``: tokens of one block id,
        ``capacity``: tokens that fit in DRAM and on disk."""
        self._chunk, self._span, self._capacity = chunk, span, capacity

    def step(
        self,
        coordinator: kvtier.Coordinator,
        session: int,
        tracked: Mapping[str, Tracked],
        output: SchedulerOutput,
        meta: KVTierMetadata,
        step_s: float,
    ) -> None:
        """Offers what the step completes, and adds to ``meta`` what was granted.
        ``step_s``: what it is expected to take, 0 when that is not known. Raises after
        the rest is done when the plan of a request failed."""
        offers: list[tuple[Tracked, int, kvtier.StoreRequest]] = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            t = tracked.get(request_id)
            if t is None or not t.may_store or t.frozen or t.chain is None:
                continue
            r = t.request
            # Capped by what is known: drafts and tokens still being sampled are
            # scheduled, but not final.
            end = min(r.num_computed_tokens + scheduled, r.num_tokens - self._ahead)
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
            wait_s = max(STORE_WAIT_S, STORE_WAIT_SHARE * step_s)
            answered, verdicts = coordinator.store_begin([o for _, _, o in offers], wait_s)
        except kvtier.Error as e:  # the leader is going
            logger.debug("kvtier: nothing is stored in this step: %s", e)
            self._stats.add("store_timeouts", len(offers))
            return
        failed: Exception | None = None
        for (t, end, offer), v in zip(offers, verdicts, strict=True):
            self._stats.add("chunks_offered", end - offer.first_ordinal)
            if v is None:
                self._stats.add("store_timeouts")
                continue
            try:
                if answered != session:
                    raise ValueError("another leader answered")
                plan = self._plan(t, end, offer, v, session, output)
            except Exception as e:
                # Whatever was granted will have no writer.
                coordinator.cancel(offer.op, True)
                t.may_store = False
                failed = e
                continue
            if plan is not None:
                meta.stores.append(plan)
        if failed is not None:
            raise failed

    def _offer(self, t: Tracked, end: int) -> kvtier.StoreRequest | None:
        """Asks for slots for chunks cursor..end, whose tokens are computed when this
        step has run."""
        if self._ahead:
            # The token after the last computed one may have been replaced; the key that
            # named it is of another prefix.
            t.cursor = min(t.cursor, max(t.request.num_computed_tokens - self._ahead, 0) // self._chunk)
        t.chain.truncate(max(t.cursor, t.request.num_computed_tokens // self._chunk))
        try:
            t.chain.extend(end)
        except NotYet:  # a session went on, with something new; the next step asks again
            return None
        except NotIdentified as e:
            self._exclude(t, str(e))
            return None
        except (OverflowError, TypeError, ValueError) as e:
            self._exclude(t, f"its tokens are not numbers of 32 bits ({e})")
            return None
        return kvtier.StoreRequest(
            op=next(self._ids),
            first_ordinal=t.cursor,
            parent=t.chain.parent(t.cursor),
            keys=t.chain.kept(t.cursor, end),
            no_disk=bool(t.epoch) or t.memory_only,
        )

    def _plan(
        self,
        t: Tracked,
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
        self._stats.add("chunks_granted", len(granted))
        self._stats.add("chunks_declined", len(declined))
        self._stats.add("chunks_held", len(codes) - len(granted) - len(declined))
        if not len(granted):
            return None
        if (warning := self._diagnosis.stored(len(granted), self._chunk, self._capacity)) is not None:
            logger.warning("kvtier: %s", warning)
        last = first + int(granted[-1])
        a = first * self._chunk // self._span
        b = -(-(last + 1) * self._chunk // self._span)
        table = output.kv_connector_block_state.get_block_ids(t.request.request_id)[0]
        if len(table) < b:
            raise ValueError(f"{len(table)} blocks for {b} that are stored")
        grants = [(int(k), int(verdicts[k, 1]), int(verdicts[k, 2])) for k in granted]
        return StorePlan(offer.op, session, first, grants, list(table[a:b]))
