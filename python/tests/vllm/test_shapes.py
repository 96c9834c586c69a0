"""Sizes that do not fit each other: blocks and chunks of every size, prompts shorter
than a chunk, prompts far longer than the arena."""

import time

import pytest
from engine import MAX_LEN
from situations import DOC, document, held, until, warm
from vllm.v1.request import RequestStatus

LONG = document(70, 1000)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("chunk", [128, 256, 512])
def test_blocks_and_chunks(make, block, chunk):
    e = make(block=block, chunk=chunk, blocks=4 * (MAX_LEN // block) + 1, slots=300)
    whole = len(LONG) // chunk * chunk
    warm(e, LONG)
    e.add(LONG, 10)
    e.run()
    assert e.counts["load_tokens"] == whole

    # Only the beginning is shared; the promise is cut at chunks.
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    e.add(LONG[:700] + document(71, 200), 10)
    e.run()
    assert e.counts["load_tokens"] == 700 // chunk * chunk

    # The engine has some of it itself, up to a place inside a chunk.
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    own = e.add(LONG[: chunk + block + 1], 300)
    until(e, lambda: own.request.status == RequestStatus.RUNNING)
    loaded = e.counts["load_tokens"]
    e.add(LONG, 10)
    e.run()
    local = (chunk + block + 1) // block * block
    assert e.counts["load_tokens"] == loaded + max(0, whole - local)
    assert not e.counts["loads_failed"] and not e.counts["errors"]

    # What was generated is found by the conversation that goes on.
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    n = (chunk + block + 1 + 299) // chunk * chunk
    e.add(own.tokens[: n + 5], 2)
    e.run()
    assert e.counts["load_tokens"] == n


def test_a_hit_ends_with_a_whole_block(make):
    """Where a block is longer than a chunk, the last chunks may fill only a part of one."""
    e = make(block=128, chunk=64, blocks=4 * (MAX_LEN // 128) + 1)
    warm(e)
    q = e.add(DOC, 10)
    e.run()
    assert held(e, DOC) == 9 and e.counts["load_tokens"] == 9 * 64 // 128 * 128
    assert not e.counts["loads_failed"] and not e.counts["errors"]
    assert len(q.request.output_token_ids) == 10


def test_prompt_shorter_than_a_chunk(make):
    e = make(chunk=256)
    warm(e, document(72, 600))  # so that there are slots
    short = document(73, 200)
    for _ in range(2):
        e.scheduler.reset_prefix_cache()
        q = e.add(short, 20)
        e.run()
        assert len(q.request.output_token_ids) == 20
    quiet = ("lookups", "waits", "loads", "chunks_offered", "wait_timeouts", "errors")
    assert not any(e.counts[what] for what in quiet), e.counts
    assert e.half._tracked == {}
    # It becomes a chunk by what is generated.
    q = e.add(short, 100)
    e.run()
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    e.add(q.tokens[:280], 4)
    e.run()
    assert e.counts["load_tokens"] == 256


def test_default_minimum(make):
    """Two chunks are loaded, one is not worth a step."""
    e = make(chunk=256, extra={"min_load_tokens": 512})
    warm(e, DOC)
    for n, loaded in ((300, 0), (511, 0), (512, 512), (600, 512)):
        e.scheduler.reset_prefix_cache()
        e.counts.clear()
        e.add(DOC[:n], 2)
        e.run()
        assert e.counts["load_tokens"] == loaded, n


LENGTH = 100_000


def test_prompt_that_streams_through_the_arena(make, tmp_path):
    """100,000 tokens through an arena that holds 6,144 of them: the load goes through
    it window by window, and every byte of the pages is compared."""
    extra = {"disk_path": str(tmp_path / "d"), "disk_gib": 0.2, "free_floor_gib": 0, "dirty_gib": 0.02}
    prompt = document(74, LENGTH)
    shape = {"chunk": 256, "slots": 24, "max_len": 110_000, "blocks": 13_800, "batched_tokens": 2048}
    e = make(extra=extra | {"lookup_wait_s": 20.0}, recognisable=True, **shape)
    chunks = LENGTH // 256
    for _ in range(60):
        # What found no room in the arena is offered again.
        e.add(prompt, 2)
        e.run()
        e.scheduler.reset_prefix_cache()
        assert e.cache.flush(60)  # what is in memory alone is not promised beyond the pins
        if held(e, prompt) == chunks:
            break
    assert held(e, prompt) == chunks
    e.counts.clear()
    q = e.add(prompt, 5)
    e.run()
    assert len(q.request.output_token_ids) == 5
    assert e.counts["load_tokens"] == chunks * 256 and e.counts["loads"] == 1
    assert not e.counts["loads_failed"] and e.counts["loaded_bytes"] == chunks * 256 * 16
    assert e.cache.flush(60)
    e.close()

    # Again from disk alone, with another request at the same time, and one aborted.
    e = make(extra=extra | {"lookup_wait_s": 20.0}, recognisable=True, **shape | {"blocks": 20_400})
    q = e.add(prompt, 5)
    until(e, lambda: q.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    other, gone = e.add(prompt[:40_000] + document(75, 900), 5), e.add(prompt[:5000], 5)
    deadline = time.monotonic() + 60
    while gone.request.status == RequestStatus.WAITING and time.monotonic() < deadline:
        e.step()
    e.abort(gone)
    e.run()
    assert len(q.request.output_token_ids) == len(other.request.output_token_ids) == 5
    assert e.counts["loads_done"] == e.counts["loads"] and e.counts["load_tokens"] >= chunks * 256
    assert not e.counts["errors"]
