"""Random worlds: vLLM's real scheduler, the real library, and everything at once:
chunked prefill, preemption in small pools, priorities, asynchronous scheduling,
drafts, streaming sessions, aborts, resets with new weights, lost answers, failing
copies.

The oracle is in engine.py: pages hold hashes of prefixes, and every computed token
is compared before every forward. At the end nothing may be held anywhere.

``KVTIER_DRIVER_SECONDS`` (40) says how long, ``KVTIER_DRIVER_SEED`` runs one seed,
``KVTIER_DRIVER_STEPS`` (300) how many steps a world has. Time is real, so a seed
does not repeat to the last step, but it is the same world.
"""

from __future__ import annotations

import collections
import os
import random
import time
import traceback

import pytest
from engine import MAX_LEN, Engine, Sequence, mix
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

SECONDS = float(os.environ.get("KVTIER_DRIVER_SECONDS", "40"))
STEPS = int(os.environ.get("KVTIER_DRIVER_STEPS", "300"))
ONE_SEED = os.environ.get("KVTIER_DRIVER_SEED")


class Flaky:
    """A coordinator whose answers get lost, come late, or find it busy."""

    def __init__(self, coordinator, rng: random.Random, p: float) -> None:
        self._c, self._rng, self._p = coordinator, rng, p

    def __getattr__(self, name):
        return getattr(self._c, name)

    def _happens(self, share: float = 1.0) -> bool:
        return self._rng.random() < self._p * share

    def lease(self, *a):
        return False if self._happens(0.5) else self._c.lease(*a)

    def lease_result(self, *a):
        return None if self._happens() else self._c.lease_result(*a)

    def load_begin(self, op, *a):
        if self._happens(0.5):
            return None
        begun = self._c.load_begin(op, *a)
        if self._happens(0.5):  # the leader began it, but the answer came too late
            self._c.cancel(op, True)
            return None
        return begun

    def store_begin(self, requests, timeout):
        session, verdicts = self._c.store_begin(requests, timeout)
        for k, q in enumerate(requests):
            if self._happens():
                self._c.cancel(q.op, True)
                verdicts[k] = None
        return session, verdicts


class World:
    def __init__(self, seed: int, home) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.asynchronous = rng.random() < 0.5
        self.drafts = not self.asynchronous and rng.random() < 0.4
        self.streaming = not self.drafts and rng.random() < 0.25
        block = rng.choice([16, 16, 16, 64])
        chunk = rng.choice([64, 64, 96, 128, 160, 256])
        least = MAX_LEN // block + 1
        blocks = least + rng.choice([0, 1, 4, 20] if block == 16 else [0, 1, 4])
        if self.streaming:
            blocks = least * 9  # sessions hold pages while they wait: vLLM alone would block
        slots = rng.choice([16, 24, 48, 120])
        extra = {
            "lookup_wait_s": rng.choice([0.0, 0.02, 0.2, 1.0]),
            "min_load_tokens": rng.choice([1, 1, 64, 256]),
            "save_generated": rng.random() < 0.8,
            "load_failure_policy": "fail" if rng.random() < 0.15 else "recompute",
        }
        if rng.random() < 0.5:
            extra |= {"disk_path": str(home / f"disk-{seed}"), "free_floor_gib": 0, "allow_network_fs": True}
            extra["disk_gib"] = rng.choice([30, 200]) * 1.3 * (chunk * 64 + 8192) / (1 << 30)
        self.p_abort = rng.choice([0, 0.05, 0.15])
        self.p_reset = rng.choice([0, 0, 0.01, 0.03])
        self.p_flaky = rng.choice([0, 0.02, 0.1])
        self.p_copy = rng.choice([0, 0, 0.1])
        batched = rng.choice([64, 200, 512, 4096])
        sequences = rng.choice([2, 4, 8, 16])
        policy = "priority" if rng.random() < 0.25 else "fcfs"
        self.engine = Engine(
            block=block,
            chunk=chunk,
            blocks=blocks,
            slots=slots,
            batched_tokens=batched,
            sequences=sequences,
            async_scheduling=self.asynchronous,
            policy=policy,
            extra=extra,
            recognisable="disk_path" in extra,
            home=home,
            measured=rng.random() < 0.3,
        )
        self.scheduler = self.engine.scheduler
        if self.drafts:
            self.scheduler.num_spec_tokens = 3
        half = self.engine.half
        half._coordinator = half._leases._coordinator = Flaky(half._coordinator, rng, self.p_flaky)
        self.documents = [rng.randrange(1 << 30) for _ in range(4)]
        self.history: list[Sequence] = []
        self.queue: list[list] = []  # scheduled steps: output, work, result
        self.turns: dict[str, int] = {}
        self.longest = rng.choice([300, 600, 900])
        self.steps = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.name = (
            f"seed {seed}: block {block} chunk {chunk} blocks {blocks} slots {slots} batch {batched} x {sequences} "
            f"{policy} async {self.asynchronous} drafts {self.drafts} streaming {self.streaming} {extra}"
        )

    # ---- what happens

    def _text(self, seed: int, n: int) -> list[int]:
        out = []
        for _ in range(n):
            seed = mix(seed)
            out.append(seed % 997 + 3)
        return out

    def add(self) -> None:
        rng = self.rng
        max_new = rng.choice([1, 2, 20, 80, 150])
        if self.history and rng.random() < 0.4:
            # A conversation goes on.
            q = rng.choice(self.history)
            prompt = q.tokens[: rng.choice([q.prompt_len, q.prompt_len + q.max_new])]
            prompt = prompt + self._text(rng.randrange(1 << 30), rng.choice([0, 1, 30, 100]))
        else:
            n = rng.randrange(20, self.longest)
            shared = n if rng.random() < 0.25 else rng.choice([0, 64, 128, 256, 384, 500])
            prompt = self._text(rng.choice(self.documents), min(shared, n))
            prompt += self._text(rng.randrange(1 << 30), max(1, n - shared) if shared < n else 0)
        prompt = prompt[: MAX_LEN - max_new - 8] or [5]
        kw = {"priority": rng.choice([0, 0, 1])}
        if self.streaming and rng.random() < 0.5:
            kw["resumable"] = True
        if rng.random() < 0.05:
            kw["cache_salt"] = rng.choice(["one", "two"])
        q = self.engine.add(prompt, max_new, **kw)
        q.born = self.steps
        q.born_at = time.monotonic()
        self.turns[q.id] = rng.randrange(4)
        self.history = (self.history + [q])[-12:]

    def turn(self, request: Request) -> None:
        """The next input of a streaming session: the last sampled token, which was
        not computed, is dropped by vLLM without a word."""
        rng, q = self.rng, self.engine.sequences[request.request_id]
        self.turns[q.id] -= 1
        kept = q.tokens[: request.num_computed_tokens]
        new = self._text(rng.randrange(1 << 30), rng.choice([1, 5, 40]))
        max_new = rng.choice([1, 5, 30])
        last = self.turns[q.id] < 0 or len(kept) + len(new) + max_new + 8 > MAX_LEN
        if not last:
            again = Sequence(q.id, kept + new, max_new)
            again.request, again.born, again.born_at = request, self.steps, time.monotonic()
            self.engine.sequences[q.id] = again
            self.counts["turns"] += 1
        self.scheduler.add_request(
            Request(
                request_id=q.id,
                resumable=not last,
                prompt_token_ids=[1] if last else new,
                sampling_params=SamplingParams(max_tokens=max_new, ignore_eos=True),
                pooling_params=None,
                block_hasher=self.engine._hasher,
            )
        )

    def events(self, adding: bool) -> None:
        rng, s = self.rng, self.scheduler
        if adding and rng.random() < 0.35 and len(s.requests) < 14:
            for _ in range(rng.choice([1, 1, 1, 3])):
                self.add()
        if s.requests and rng.random() < self.p_abort:
            live = [r for r in s.requests.values() if not r.is_finished()]
            loading = [r for r in live if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
            live = loading if loading and rng.random() < 0.5 else live
            if live:
                r = rng.choice(live)
                self.counts[f"abort {r.status.name}"] += 1
                s.finish_requests(r.request_id, RequestStatus.FINISHED_ABORTED)
        if adding and rng.random() < self.p_reset:
            self.reset(running=rng.random() < 0.6, connector=rng.random() < 0.7)
        if self.streaming:
            for rid, r in list(s.requests.items()):
                idle = r.status == RequestStatus.WAITING_FOR_STREAMING_REQ and r.num_in_flight_tokens == 0
                if (
                    idle
                    and not any(rid in work for _, work, _ in self.queue)
                    and (rng.random() < 0.3 or not adding)
                ):
                    self.turn(r)

    def reset(self, running: bool, connector: bool) -> None:
        try:
            ok = self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError:
            ok = False  # waiting requests hold pages
        self.counts["resets" if ok else "failed resets"] += 1
        if ok and connector and not self.queue and self.rng.random() < 0.7:
            self.engine.weights += 1

    def spoil(self, output) -> None:
        """Copies that fail in a rank: a slot of another generation, another session."""
        for load in output.kv_connector_metadata.loads:
            if load.verdicts and self.rng.random() < self.p_copy:
                self.counts["spoilt loads"] += 1
                if self.rng.random() < 0.2:
                    load.session ^= 1
                else:
                    k = self.rng.randrange(len(load.verdicts))
                    code, slot, generation = load.verdicts[k]
                    load.verdicts[k] = (code, slot, generation + 1)

    # ---- steps

    def step(self, adding: bool) -> None:
        self.steps += 1
        self.events(adding)
        rng, e = self.rng, self.engine
        if self.scheduler.has_requests():
            output, work = e.schedule()
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            self.spoil(output)
            self.queue.append([output, work, None])
            if not output.num_scheduled_tokens:
                time.sleep(0.0003)
            if not self.asynchronous or rng.random() < 0.5:
                self.execute()
        full = len(self.queue) >= 2 or not self.scheduler.has_requests()
        if self.queue and (not self.asynchronous or full or rng.random() < 0.3):
            self.execute()
            output, _, result = self.queue.pop(0)
            if self.scheduler.requests and rng.random() < self.p_abort / 4:
                r = rng.choice(list(self.scheduler.requests.values()))
                if not r.is_finished():
                    self.counts["abort in a step"] += 1
                    self.scheduler.finish_requests(r.request_id, RequestStatus.FINISHED_ABORTED)
            e.update(output, result)
            if self.drafts:
                self.draft()
        for rid, r in self.scheduler.requests.items():
            q = e.sequences[rid]
            if self.steps - q.born > 4000 and time.monotonic() - q.born_at > 20:
                raise AssertionError(f"starved: {rid} is {r.status.name}")

    def execute(self) -> None:
        for entry in self.queue:
            if entry[2] is None:
                entry[2] = self.engine.execute(entry[0], entry[1])

    def draft(self) -> None:
        ids, drafts = [], []
        for r in self.scheduler.running:
            q, n = self.engine.sequences[r.request_id], r.num_tokens
            k = min(self.rng.randrange(4), MAX_LEN - n - 4, len(q.tokens) - n - 1)
            ids.append(r.request_id)
            drafts.append([q.tokens[n + i] if self.rng.random() < 0.7 else 1 for i in range(k)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step(True)
            if self.engine.problems:
                return
        for _ in range(20000):
            if not self.scheduler.requests and not self.queue and not self.scheduler.has_requests():
                return
            self.step(False)
        raise AssertionError(f"does not end: {[r.status.name for r in self.scheduler.requests.values()]}")

    def verdict(self) -> list[str]:
        """What is wrong at the end."""
        wrong = list(self.engine.problems[:3])
        if not wrong:
            left = self.engine.settled(15)
            if left:
                wrong.append(f"left over: {left}")
        if self.engine.counts["errors"]:
            wrong.append(f"{self.engine.counts['errors']} hooks failed")
        return wrong


def one(seed: int, home) -> tuple[World, list[str]]:
    w = World(seed, home)
    try:
        w.run(STEPS)
        wrong = w.verdict()
    except Exception:
        wrong = [*w.engine.problems[:3], traceback.format_exc(limit=-4)]
    finally:
        w.engine.close()
    return w, wrong


def test_random_worlds(tmp_path, capsys):
    if ONE_SEED is not None:
        w, wrong = one(int(ONE_SEED), tmp_path)
        assert not wrong, f"{w.name}: {wrong}"
        return
    first = random.SystemRandom().randrange(1 << 30)
    end = time.monotonic() + SECONDS
    total: collections.Counter[str] = collections.Counter()
    seed, failed = first, []
    while time.monotonic() < end:
        w, wrong = one(seed, tmp_path)
        total.update(w.counts)
        total.update(w.engine.counts)
        total.update(worlds=1, steps=w.steps, requests=len(w.engine.sequences))
        if wrong:
            failed.append(f"KVTIER_DRIVER_SEED={seed}  {w.name}: {wrong}")
            if len(failed) > 2:
                break
        seed += 1
    with capsys.disabled():
        print(f"\nseeds {first}..{seed - 1}: {dict(sorted(total.items()))}")
    assert not failed, "\n".join(failed)
    # A driver that exercises nothing proves nothing.
    if total["worlds"] >= 10:
        for what in ("loads_done", "stores", "preempted", "hits"):
            assert total[what], f"no {what} in {total['worlds']} worlds"
    elif not total["worlds"]:
        pytest.skip("no time")
