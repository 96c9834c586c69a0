"""30 pages of KV, 64 long requests at any time: vLLM's real scheduler, chunked prefill,
forced preemption, aborts at every stage, resets; with the cache in this process, with
more documents than DRAM holds and no reset that would keep them from the disk, and with
a leader elsewhere that is stopped and killed.

Every computed token of every scheduled request is compared in every step (engine.py),
so is what a load brought. At the end nothing may be held: pages, leases, pins, slots.

``KVTIER_PRESSURE_SECONDS`` (60, for all tests together; 600 for a long run) says how
long, ``KVTIER_PRESSURE_SEED`` repeats one seed: the same requests and events, while
the time that disks and processes take is real. A test goes on until all that it is
about has happened."""

import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing

import pytest
from engine import MAX_LEN, Engine, mix, slot_bytes
from leaders import LeaderProcess
from vllm.v1.request import RequestStatus

SECONDS = float(os.environ.get("KVTIER_PRESSURE_SECONDS", "60"))
SEED = int(os.environ.get("KVTIER_PRESSURE_SEED", random.SystemRandom().randrange(1 << 30)))
BLOCK, BLOCKS, CHUNK, SLOTS = 64, 30, 128, 40
REQUESTS = 64
LOOKUP_WAIT_S = 0.3
#: Longer than any test waits: a lease that is left over must not end by itself.
LEASE_TTL_S = 3600
#: How long the last requests may take on a slow machine before they count as stuck, and
#: what is rare to happen.
STUCK_S = 240.0
#: What requests share beginnings of; of so many, a fraction fits in DRAM.
DOCUMENTS, MANY_DOCUMENTS = 10, 60

ABORTS = [
    "before it was ever scheduled", "while WAITING", "while WAITING_FOR_REMOTE_KVS", "while RUNNING",
    "while PREEMPTED", "while loading",
]  # fmt: skip
#: What has to happen, and how often.
PRESSURE = dict.fromkeys(["preempted", "loads", "stores", "reset without connector, done"], 1)
PRESSURE |= {f"abort {when}": 1 for when in ABORTS}
NEW_WEIGHTS = {"reset with connector, done": 1, "new weights": 1}
DISK = {"evicted/dram": 1, "disk reads": 50, "disk evicted_self": 50, "tier_tokens/disk": 50 * CHUNK}
LEADER = dict.fromkeys(["loads", "stores", "wait_timeouts", "leader stopped", "leader killed"], 1)


class Crowd:
    """An engine under pressure. ``p_reset``: of a reset in each step, ``p_connector``: that
    it is one of the connector too, after which this engine writes nothing to disk."""

    def __init__(
        self,
        engine: Engine,
        seed: int,
        p_reset: float = 0.015,
        p_connector: float = 0.5,
        documents: int = DOCUMENTS,
    ) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.rng = random.Random(seed)
        self.p_reset, self.p_connector, self.documents = p_reset, p_connector, documents
        self.asynchronous = engine.config.scheduler_config.async_scheduling
        self.flight: deque = deque()
        self.aborted: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.waits = Waits(engine.half)

    # ---- events

    def _text(self, seed: int, n: int) -> list[int]:
        out = []
        for _ in range(n):
            seed = mix(seed)
            out.append(seed % 997 + 3)
        return out

    def add(self) -> None:
        rng = self.rng
        new = rng.choice([1, 3, 30, 100])
        n = rng.randrange(200, MAX_LEN - new - 8)
        shared = rng.choice([0, 128, 300, 512, n])
        prompt = self._text(rng.randrange(self.documents), min(shared, n))
        prompt += self._text(rng.randrange(1 << 30), n - len(prompt))
        q = self.engine.add(prompt, new)
        self.counts["requests"] += 1
        if rng.random() < 0.03:
            self.abort(q, "before it was ever scheduled")

    def abort(self, q, when: str) -> None:
        self.counts[f"abort {when}"] += 1
        self.aborted.add(q.id)
        self.engine.abort(q)

    def events(self) -> None:
        rng, s = self.rng, self.scheduler
        while len(s.requests) < REQUESTS:
            self.add()
        if rng.random() < 0.05:
            state = rng.choice(
                [
                    RequestStatus.WAITING,
                    RequestStatus.WAITING_FOR_REMOTE_KVS,
                    RequestStatus.RUNNING,
                    RequestStatus.PREEMPTED,
                ]
            )
            found = [r for r in s.requests.values() if r.status == state]
            if found:
                r = rng.choice(found)
                self.abort(self.engine.sequences[r.request_id], f"while {state.name}")
        if rng.random() < self.p_reset:
            self.reset(rng.random() < 0.7, rng.random() < self.p_connector, rng.random() < 0.5)

    def reset(self, running: bool, connector: bool, paused: bool) -> None:
        """With running requests it preempts them all. ``paused``: after the steps that are
        under way, as vLLM does it when weights change; with them their pages are in use."""
        while paused and self.flight:
            self.engine.update(*self.flight.popleft())
        try:
            ok = self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError:
            ok = False  # vLLM's own: a load in flight holds pages
        self.counts[f"reset {'with' if connector else 'without'} connector, {'done' if ok else 'refused'}"] += 1
        if ok and connector and not self.flight:
            self.engine.weights += 1
            self.counts["new weights"] += 1

    # ---- steps

    def press(self, seconds: float, wanted: dict[str, int], between: Callable[[], None] = lambda: None) -> None:
        """Goes on for so long, and then until all of ``wanted`` has happened."""
        now = time.monotonic()
        enough, late = now + seconds, now + seconds + STUCK_S
        while True:
            for _ in range(50):
                self.events()
                self.step()
                between()
            if (now := time.monotonic()) < enough:
                continue
            missing = {what: n for what, least in wanted.items() if (n := self.happened(what)) < least}
            if not missing:
                return
            assert now < late, f"it was no pressure: {missing} and {dict(self.counts)}"

    def happened(self, what: str) -> int:
        """Counted by the crowd, the connector, or the disk."""
        if what.startswith("disk "):
            return self.engine.cache.stats()["leader"]["disk"][what.removeprefix("disk ")]
        return self.counts[what] + self.engine.counts[what]

    def step(self) -> None:
        e = self.engine
        more = self.scheduler.has_requests()
        if more:
            output, todo = e.schedule()
            self.counts["steps"] += 1
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            loads = output.kv_connector_metadata.loads
            if loads and self.rng.random() < 0.15:
                self.abort(e.sequences[self.rng.choice(loads).request_id], "while loading")
            self.flight.append((output, e.execute(output, todo)))
            if not output.num_scheduled_tokens:
                self.counts["empty steps"] += 1
                time.sleep(0.0005)
        if self.flight and (not self.asynchronous or len(self.flight) == 2 or not more):
            e.update(*self.flight.popleft())
        assert not e.problems, e.problems[:3]

    def drain(self) -> None:
        """No more requests come; all that are there must end."""
        end = time.monotonic() + STUCK_S
        while self.scheduler.requests or self.flight or self.scheduler.has_requests():
            self.step()
            if time.monotonic() > end:
                stuck = Counter(r.status.name for r in self.scheduler.requests.values())
                raise AssertionError(f"stuck: {stuck}, {self.engine.half.leftovers()}")

    def verdict(self) -> None:
        e = self.engine
        for q in e.sequences.values():
            if q.id not in self.aborted:
                assert len(q.request.output_token_ids) == q.max_new, q.id
        left = e.settled(60)
        assert not left, f"left over: {left}"
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == e.blocks - 1
        assert not e.counts["errors"], "hooks failed"
        # Each load was reported once; vLLM itself asserts that it knows who is reported.
        assert e.counts["loads_done"] == e.counts["loads"]
        assert not self.waits.too_long, self.waits.too_long[:3]


class Waits:
    """Watches whom the scheduler's half holds back, by the clock that it reads itself:
    all the time until it gets pages."""

    def __init__(self, half) -> None:
        self.too_long: list[str] = []
        self._since: dict[str, float] = {}  # held back without an answer
        self._before: Counter[str] = Counter()  # seconds of earlier times
        self._now = 0.0
        self.held_back = 0
        self._clock, half._clock = half._clock, self._read
        self._ask, half.get_num_new_matched_tokens = half.get_num_new_matched_tokens, self._asked
        self._allocate, half.update_state_after_alloc = half.update_state_after_alloc, self._allocated

    def _read(self) -> float:
        self._now = self._clock()
        return self._now

    def _asked(self, request, local):
        answer = self._ask(request, local)
        rid = request.request_id
        if answer[0] is not None:
            if (since := self._since.pop(rid, None)) is not None:
                self._before[rid] += self._now - since
            return answer
        self.held_back += 1
        held = self._before[rid] + self._now - self._since.setdefault(rid, self._now)
        if held >= LOOKUP_WAIT_S:
            self.too_long.append(f"{rid} is held back after {held:.3f} s")
        return answer

    def _allocated(self, request, blocks, n):
        """What is looked up after this, preempted or with a failed load, waits anew."""
        self._since.pop(request.request_id, None)
        self._before.pop(request.request_id, None)
        self._allocate(request, blocks, n)


def engine(extra: dict, **kw) -> Engine:
    return Engine(
        block=BLOCK,
        blocks=BLOCKS + 1,  # one is never given to anybody
        chunk=CHUNK,
        slots=SLOTS,
        batched_tokens=256,
        sequences=16,
        extra={"lookup_wait_s": LOOKUP_WAIT_S, "min_load_tokens": 128, "lease_ttl_s": LEASE_TTL_S} | extra,
        recognisable=True,
        **kw,
    )


@pytest.fixture(autouse=True)
def seed():
    print(f"KVTIER_PRESSURE_SEED={SEED}")  # pytest shows it where a test fails


def show(capsys, crowd: Crowd) -> None:
    ours = {k: v for k, v in crowd.engine.counts.items() if isinstance(v, int) and v}
    with capsys.disabled():
        print(f"\nKVTIER_PRESSURE_SEED={SEED} {dict(sorted(crowd.counts.items()))} {ours}")


def disk(tmp_path, slots: int) -> dict:
    return {
        "disk_path": str(tmp_path / "disk"),
        "disk_gib": slots * 1.3 * (slot_bytes(CHUNK) + 8192) / (1 << 30),
        "free_floor_gib": 0,
    }


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pressure(tmp_path, capsys, asynchronous):
    with closing(engine(disk(tmp_path, 80), async_scheduling=asynchronous)) as e:
        press(capsys, Crowd(e, SEED), PRESSURE | NEW_WEIGHTS)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pressure_on_the_disk(tmp_path, capsys, asynchronous):
    """What is found was evicted from DRAM before, and the disk has to evict as well."""
    with closing(engine(disk(tmp_path, 160), async_scheduling=asynchronous)) as e:
        press(capsys, Crowd(e, SEED, p_connector=0.0, documents=MANY_DOCUMENTS), PRESSURE | DISK)


def press(capsys, crowd: Crowd, wanted: dict[str, int]) -> None:
    crowd.press(SECONDS / 6, wanted)
    crowd.drain()
    crowd.verdict()
    show(capsys, crowd)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pressure_while_the_leader_is_stopped_and_killed(tmp_path, capsys, asynchronous):
    """A request that arrives while it is stopped is answered with a miss when the bound
    of its wait is reached; when it is gone, at once."""
    settings = disk(tmp_path, 80) | {
        "runtime_dir": str(tmp_path),
        "dram_gib": SLOTS * slot_bytes(CHUNK) / (1 << 30),
        "load_window_deadline_s": 1.0,
        "close_timeout_s": 5.0,
        "lease_ttl_s": LEASE_TTL_S,
    }
    rng = random.Random(SEED + 1)
    leader = LeaderProcess(settings)
    e = engine(settings | {"role": "member"}, async_scheduling=asynchronous)
    try:
        # A new leader has what is on disk, if no reset has kept it from there.
        crowd = Crowd(e, SEED, p_reset=0.01, p_connector=0.0 if asynchronous else 0.5)
        state = "well"

        def disturb() -> None:
            nonlocal leader, state
            if rng.random() > 0.02:
                return
            if state == "stopped":
                leader.go_on()
                state = "well"
            elif rng.random() < 0.75:
                leader.stop()
                state = "stopped"
            else:
                leader.kill()
                missed(crowd)
                leader, state = LeaderProcess(settings), "well"
                crowd.counts["leader killed"] += 1
            crowd.counts[f"leader {state}"] += 1

        crowd.press(SECONDS / 6, LEADER, disturb)
        # The crowd drains without a leader that answers.
        leader.stop()
        loads = e.counts["loads"]
        crowd.drain()
        crowd.counts["loads begun while stopped"] = e.counts["loads"] - loads
        leader.go_on()
        crowd.verdict()
        assert not leader.settled(), "the leader still holds something for this engine"
        show(capsys, crowd)
    finally:
        if leader.alive:
            leader.go_on()
        e.close()
        leader.close()


def missed(crowd: Crowd) -> None:
    """Without a leader nobody waits and nothing is found."""
    e = crowd.engine
    end = time.monotonic() + STUCK_S
    while e.half._coordinator.session() and time.monotonic() < end:
        crowd.step()
    held_back, loads = crowd.waits.held_back, e.counts["loads"] + e.half.stats.data.get("loads", 0)
    for _ in range(20):
        crowd.events()
        crowd.step()
    assert crowd.waits.held_back == held_back, "a request waits for a leader that is gone"
    assert e.counts["loads"] + e.half.stats.data.get("loads", 0) == loads
