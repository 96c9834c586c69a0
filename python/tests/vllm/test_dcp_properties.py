"""The arithmetic of chunks, virtual blocks and ranks, against a reference that deals out
tokens one by one and divides nothing: which blocks a store and a load name, what a lookup
promises, what a load that failed reports, and which bytes are where afterwards."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from one_process import Group, Shape, allocated, request, scheduled
from situations import attempts, document, held
from vllm.v1.outputs import KVConnectorOutput

import kvtier
from kvtier.coordinator import HAVE
from kvtier.vllm.diagnosis import Diagnosis
from kvtier.vllm.settings import Settings
from kvtier.vllm.stats import KVTierStats
from kvtier.vllm.storing import Storing
from kvtier.vllm.tracked import NO_LIMIT, Tracked
from kvtier.vllm.wishes import Wishes

DOC = document(1, 3400)
OTHER = 50_000  # no token of the document
#: A busy machine is no finding; a directory that examples share is none either.
UNHURRIED = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
UNTOUCHED = np.uint64(0xEEEE_EEEE_EEEE_EEEE)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    block = draw(st.sampled_from((16, 32, 48, 64, 96, 128)))
    interleave = draw(st.sampled_from([i for i in (1, 2, 3, 8, 16, block) if block % i == 0]))
    chunk = draw(st.one_of(st.sampled_from((64, 128, 256, 512)), st.integers(64, 512)))
    return Shape(block, draw(st.integers(1, 8)), interleave, chunk)


def shuffled(data: st.DataObject, n: int) -> list[int]:
    """The ids 1..n, as a pool gives them out after a while."""
    seed = data.draw(st.integers(0, 1 << 32), "seed of the blocks")
    return (np.random.default_rng(seed).permutation(n) + 1).tolist()


def most_tokens(s: Shape) -> int:
    """Of an example: a few of whatever is larger, so that borders of both are met."""
    return 3 * max(s.chunk, s.block * s.dcp) + 40


class Dealt:
    """Tokens dealt out in their order: I to a rank, rank after rank, until each has B of
    them, which is a block; and C to a chunk, whatever the ranks."""

    def __init__(self, shape: Shape, n: int) -> None:
        self.chunk: list[int] = []
        self.block: list[int] = []
        self.rank: list[int] = []
        self.row: list[int] = []  # in the rank's page
        self.first_in_block: list[bool] = []
        chunk = in_chunk = block = rank = in_turn = 0
        have = [0] * shape.dcp
        for _ in range(n):
            self.chunk.append(chunk)
            self.block.append(block)
            self.rank.append(rank)
            self.row.append(have[rank])
            self.first_in_block.append(not any(have))
            have[rank] += 1
            in_turn += 1
            if in_turn == shape.interleave:
                rank, in_turn = rank + 1 if rank + 1 < shape.dcp else 0, 0
            if have[-1] == shape.block:
                block, have = block + 1, [0] * shape.dcp
            in_chunk += 1
            if in_chunk == shape.chunk:
                chunk, in_chunk = chunk + 1, 0

    def whole_chunks(self, n: int) -> int:
        """Chunks that have no token but the first n."""
        return len(set(self.chunk[:n]) - set(self.chunk[n : n + 1]))

    def blocks_of(self, tokens: list[int]) -> list[int]:
        """The places of all blocks that hold one of these, in order."""
        return sorted({self.block[t] for t in tokens})

    def promised(self, known: int, chunks: int, local: int) -> int:
        """How far it goes from ``local`` on in whole blocks, all tokens of which are known
        and in one of the first chunks."""
        promise = 0
        for t in range(local, known):
            if self.chunk[t] >= chunks:
                break
            if self.first_in_block[t + 1]:
                promise = t + 1 - local
        return promise

    def bad_blocks(self, first: int, n: int, good: int) -> list[int]:
        """Blocks of the range with a token that is not in the first good chunks of it."""
        fine = set(itertools.islice(Counter(self.chunk[first : first + n]), good))
        return self.blocks_of([t for t in range(first, first + n) if self.chunk[t] not in fine])


VERDICTS = st.sampled_from((kvtier.GRANTED, kvtier.GRANTED, HAVE, kvtier.DECLINED))


@settings(max_examples=150, **UNHURRIED)
@given(shape=shapes(), data=st.data())
def test_a_store_names_the_blocks_of_its_chunks(shape: Shape, data: st.DataObject) -> None:
    tokens = most_tokens(shape)
    dealt = Dealt(shape, tokens + 1)
    whole = dealt.whole_chunks(tokens)
    end = data.draw(st.integers(1, whole), "end")
    first = data.draw(st.integers(0, end - 1), "first")
    codes = data.draw(st.lists(VERDICTS, min_size=end - first, max_size=end - first), "codes")
    table = shuffled(data, dealt.block[-1] + 1)
    own = Settings()
    stats = KVTierStats()
    storing = Storing(own, stats, Diagnosis(own), itertools.count(1), 0, lambda t, why: pytest.fail(why))
    storing.adopt(shape.chunk, shape.block * shape.dcp, 1 << 30)
    r = request(DOC[:tokens], 0)
    t = Tracked(r, b"", Wishes())
    t.cursor = first
    offer = kvtier.StoreRequest(7, first, b"", np.zeros((end - first, 32), np.uint8))
    verdicts = np.array([(code, 100 + k, 1000 + k, 0) for k, code in enumerate(codes)], np.uint32)
    # vLLM has given the request no more blocks than its computed tokens need.
    computed = [t for t in range(tokens) if dealt.chunk[t] < end]
    mine = table[: dealt.block[computed[-1]] + 1]
    plan = storing._plan(t, end, offer, verdicts, 9, scheduled(r, 1, mine))

    granted = [k for k, code in enumerate(codes) if code == kvtier.GRANTED]
    declined = [k for k, code in enumerate(codes) if code == kvtier.DECLINED]
    assert t.cursor == (first + declined[0] if declined else end)
    if not granted:
        assert plan is None
        return
    carried = [t for t in range(tokens) if first <= dealt.chunk[t] <= first + granted[-1]]
    assert plan.blocks == [table[b] for b in dealt.blocks_of(carried)]
    assert plan.grants == [(k, 100 + k, 1000 + k) for k in granted]
    assert (plan.op, plan.session, plan.first_ordinal) == (7, 9, first)


class Course:
    """Requests of one document on one group: what is stored, looked up and loaded."""

    def __init__(self, group: Group, dealt: Dealt, tokens: int, table: list[int]) -> None:
        self.group, self.dealt = group, dealt
        self.doc = DOC[:tokens]
        self.numbers = itertools.count(1)
        self.values = np.arange(1, len(dealt.block) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        half = len(table) // 2
        self.stored_at, self.loaded_at = table[:half], table[half:]
        for t in range(tokens):
            group.pages[dealt.rank[t]][self.stored_at[dealt.block[t]], dealt.row[t]] = self.values[t]

    def store(self, pieces: list[int]) -> None:
        """Computes the document in so many tokens a step, until all of it is held."""
        whole = self.dealt.whole_chunks(len(self.doc))
        for _ in attempts(0.01):  # slots come in the background
            r = request(self.doc, next(self.numbers))
            self.group.half.on_new_request(r)
            for n in pieces:
                table = self.stored_at[: self.dealt.block[r.num_computed_tokens + n - 1] + 1]
                self.check_stores(r, n, meta := self.group.plan(scheduled(r, n, table)))
                self.group.save(meta)
                r.num_computed_tokens += n
            self.group.half.request_finished(r)
            if not whole or held(self.group, self.doc) == whole:
                return
        raise AssertionError("the document is not held")

    def check_stores(self, r, n: int, meta) -> None:
        dealt, computed = self.dealt, r.num_computed_tokens + n
        for plan in meta.stores:
            last = plan.first_ordinal + plan.grants[-1][0]
            carried = [t for t in range(len(self.doc)) if plan.first_ordinal <= dealt.chunk[t] <= last]
            assert carried[-1] < computed and last < dealt.whole_chunks(computed), "pages that are not computed"
            assert plan.blocks == [self.stored_at[b] for b in dealt.blocks_of(carried)]

    def load(self, data: st.DataObject) -> None:
        """A request that begins as the document does, with a hit of the engine's own."""
        group, dealt = self.group, self.dealt
        shared = len(self.doc) - data.draw(st.integers(0, len(self.doc) - 1), "not shared")
        known = shared + data.draw(st.integers(0, 40), "tail")
        local = data.draw(st.sampled_from([t for t in range(known) if dealt.first_in_block[t]]), "local")
        r = request(self.doc[:shared] + [OTHER] * (known - shared), next(self.numbers))
        have = dealt.whole_chunks(shared)
        group.half.on_new_request(r)
        n = group.look_up(r, local)
        assert n == dealt.promised(known, have, local)
        table = self.loaded_at[: dealt.block[known - 1] + 1]
        group.half.update_state_after_alloc(r, allocated(table), n)
        if n:
            limit = self._follow(r, local, n, table, data)
            if limit is not None:
                event("a load failed")
                again = group.look_up(r, local)
                assert again == dealt.promised(known, min(have, limit), local) < n
        group.half.request_finished(r)

    def _follow(self, r, local: int, n: int, table: list[int], data: st.DataObject) -> int | None:
        """Loads n tokens, which fail where the data say; the limit that follows from it."""
        group, dealt = self.group, self.dealt
        span = range(local, local + n)
        (plan,) = group.plan().loads
        assert plan.blocks == [table[b] for b in dealt.blocks_of(span)]
        assert (plan.first_token, plan.tokens) == (local, n)
        assert plan.chunks == len({dealt.chunk[t] for t in span}) == len(plan.verdicts)
        for pages in group.pages:
            pages[self.loaded_at] = UNTOUCHED
        breaks = data.draw(st.lists(st.none() | st.integers(0, plan.chunks - 1), min_size=len(group.workers),
                                    max_size=len(group.workers)), "breaks")  # fmt: skip
        invalid = group.load([self._broken(plan, at) for at in breaks])
        for w, at, bad in zip(group.workers, breaks, invalid, strict=True):
            told = w.told[plan.op]
            good = plan.chunks if told.status == 0 else told.failed_chunk
            assert good <= (plan.chunks if at is None else at)
            assert bad == {table[b] for b in dealt.bad_blocks(local, n, good)}
        worst = set().union(*invalid)
        self._check_pages(span, table, worst)
        group.half.update_connector_output(
            KVConnectorOutput(finished_recving={r.request_id}, invalid_block_ids=worst)
        )
        limit = group.half._tracked[r.request_id].limit
        if not worst:
            assert limit == NO_LIMIT
            return None
        kept = next(t for t in span if table[dealt.block[t]] in worst)
        assert limit == dealt.whole_chunks(kept), "chunks that lie before the first bad block"
        return limit

    @staticmethod
    def _broken(plan, at: int | None):
        """A rank's copy of a plan; from chunk ``at`` on the slot is not what it was."""
        verdicts = [(c, s, g + (k == at)) for k, (c, s, g) in enumerate(plan.verdicts)]
        return replace(plan, verdicts=verdicts)

    def _check_pages(self, span: range, table: list[int], bad: set[int]) -> None:
        """What is not reported is there, and nothing else was written."""
        dealt, group = self.dealt, self.group
        want = [np.full_like(pages, UNTOUCHED) for pages in group.pages]
        ignored = sorted(bad)
        for t in span:
            want[dealt.rank[t]][table[dealt.block[t]], dealt.row[t]] = self.values[t]
        for pages, right in zip(group.pages, want, strict=True):
            right[ignored] = pages[ignored]
            assert (pages[self.loaded_at] == right[self.loaded_at]).all()


@settings(max_examples=40, **UNHURRIED)
@given(shape=shapes(), data=st.data())
def test_what_is_promised_loaded_and_reported(tmp_path, shape: Shape, data: st.DataObject) -> None:
    dealt = Dealt(shape, most_tokens(shape) + 100)
    tokens = most_tokens(shape) - data.draw(st.integers(0, max(shape.chunk, shape.block * shape.dcp)), "tokens less")
    piece = data.draw(st.integers(1, tokens), "piece")
    blocks = 2 * (dealt.block[-1] + 1)
    table = shuffled(data, blocks)
    group = Group(shape, blocks + 1, tmp_path)
    try:
        course = Course(group, dealt, tokens, table)
        course.store([n for n in (piece, tokens - piece) if n])
        for _ in range(3):
            course.load(data)
        assert not any(group.half.leftovers().values())
        assert not any(w._running or w._finished for w in group.workers)
    finally:
        group.close()
