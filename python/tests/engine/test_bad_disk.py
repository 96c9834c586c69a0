"""The disk fails in every way that a disk fails, under an engine that serves: each
answer is the right one, the counters name the cause, and the tier goes and comes.

One engine stores, a second one lives through it all, a third one without kvtier
computes what is right, and a fourth one finds the damaged sidecar. vLLM's settings
are its defaults. What a request may lose is read from the counters of the bounds that
have ended its waits, not from a clock."""

from __future__ import annotations

import json
import math
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk import LoopDisk
from inside import damage
from stage import CHUNK, outputs, prompts, wait_until

MODEL = "llama"

SLOT_BYTES = 2048 * CHUNK  # 4 layers, K and V, 2 heads of 64, two bytes
#: Room for 24 chunks: a quarter of them may be pinned, the rest of a prefix streams.
SMALL_ARENA = 24 * SLOT_BYTES / (1 << 30)
LONG = 12  # chunks, of which a load cannot hold all at once
#: A read of one chunk takes five seconds, of four at once twenty.
SLOW_BYTES_PER_S = SLOT_BYTES // 5
#: Longer than reading a window of a load may take.
SLOWER_BYTES_PER_S = SLOT_BYTES // 30
WINDOW_DEADLINE_S = 5
#: First tokens that are timed, of prompts that are just long enough for a lookup.
SAMPLES = 100
SAMPLE = CHUNK + 1
TOKENS = 8  # of an answer

#: What is on disk when the trouble begins -> chunks.
STORED = {
    "truncated": 5, "flipped": 5, "swapped": 5, "deleted": 5, "slow 1": 5, "slow 2": 5,
    "after slow": 5, "unmounted": 5, "deleted after the hit": LONG, "flipped after the hit": LONG,
    "slow after the hit": LONG,
}  # fmt: skip
#: What the engine has to compute by itself, from this chunk on.
COMPUTED_FROM = {
    "truncated": 3, "flipped": 2, "swapped": 1, "deleted": 4,
    "deleted after the hit": 10, "flipped after the hit": 9,
    "slow after the hit": 6, "slow 1": 0, "slow 2": 0, "after slow": 5,
    "read-only": 0, "after read-only": 0, "full": 0, "after full": 5,
    "unmounted": 0, "sidecar": 5,
}  # fmt: skip
#: What nobody has stored before -> chunks. Eight failed writes switch a disk off.
NEW = {"read-only": 9, "after read-only": 5, "full": 5, "after full": 5}
AFTER_THE_HIT = [case for case in STORED if "after the hit" in case]
#: Not asked where no device can be made slow.
SLOW = ("slow after the hit", "slow 1", "slow 2")


@dataclass
class Told:
    answers: dict[str, dict] = field(default_factory=dict)
    #: What disk tier, loads and engine counted while a case was asked.
    counted: dict[str, dict] = field(default_factory=dict)
    #: The state of the tier after a case.
    state: dict[str, str] = field(default_factory=dict)
    right: dict[str, dict] = field(default_factory=dict)
    seen: dict[str, object] = field(default_factory=dict)


class Trouble:
    """The engine that lives through it."""

    def __init__(self, life, told: Told) -> None:
        self.life, self.told = life, told

    def disk(self) -> dict:
        return (self.life.call("inside:leader") or {"disk": {"state": "gone"}})["disk"]

    def count(self) -> dict[str, int]:
        leader = self.life.call("inside:leader")
        return (
            _flat(leader["disk"])
            | {f"loads {k}": n for k, n in leader["loads"].items()}
            | {f"engine {k}": n for k, n in self.life.call("inside:counters").items()}
        )

    def ask(self, case: str, prompt: list[int]) -> None:
        before = self.count()
        self.told.answers[case] = self.life.ask(prompt, TOKENS)
        self.told.counted[case] = _since(before, self.count())
        self.told.state[case] = self.disk()["state"]

    def wait_for_state(self, *states: str) -> None:
        wait_until(lambda: self.disk()["state"] in states, f"the tier being {' or '.join(states)}", 120)


def _flat(stats: dict) -> dict[str, int]:
    flat = {}
    for key, value in stats.items():
        if isinstance(value, dict):
            flat |= {f"{key} {k}": n for k, n in value.items()}
        elif isinstance(value, int) and not isinstance(value, bool):
            flat[key] = value
    return flat


def _since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {k: n for k, v in now.items() if (n := v - before.get(k, 0))}


def ordinal(path: Path) -> int:
    """The place of a chunk in its prefix, from its footer."""
    with open(path, "rb") as f:
        f.seek(-4096 + 100, 2)
        return struct.unpack("<I", f.read(4))[0]


@pytest.fixture(scope="module")
def told(stage, tmp_path_factory):
    disk = LoopDisk(tmp_path_factory.mktemp("bad"), mib=160)
    try:
        stage.root = disk.path / "root"
        yield tell(stage, disk)
    finally:
        disk.close()


def tell(stage, disk: LoopDisk) -> Told:
    told = Told()
    pairs = {name: prompts(40 + i, chunks) for i, (name, chunks) in enumerate((STORED | NEW).items())}
    files: dict[str, list[Path]] = {}
    common = {
        "free_floor_gib": 0,
        "breaker_off_s": 2,
        "load_window_deadline_s": WINDOW_DEADLINE_S,
        "min_load_tokens": CHUNK,
    }
    with stage.live(one_process=True, **common) as life:
        before: set[Path] = set()
        for name, chunks in STORED.items():
            life.ask(pairs[name][0])
            wait_until(lambda n=len(before) + chunks: len(stage.chunk_files()) == n, "writing to disk")
            files[name] = sorted(set(stage.chunk_files()) - before, key=ordinal)
            before.update(files[name])

        life.again(*stage.engine(dram_gib=SMALL_ARENA, **common))
        trouble(stage, disk, life, told, pairs, files)

        # Without kvtier: what is right, and what it costs.
        life.again(None, {"max_model_len": 4096})
        (sidecar,) = stage.root.glob("*@*/layout.json")
        whole = sidecar.read_bytes()
        sidecar.write_bytes(whole[: len(whole) // 2])
        pairs["sidecar"] = pairs["after full"]
        for case, k in COMPUTED_FROM.items():
            if case not in told.answers and case != "sidecar":
                continue
            prompt = pairs[case][1]
            life.forget()
            if k:  # computed in one piece as long as the one that was stored
                life.ask([*prompt[: k * CHUNK], *[1003] * (len(prompt) - k * CHUNK)], max_tokens=1)
            told.right[case] = life.ask(prompt, TOKENS)
        told.seen["ttft without kvtier"] = ttft(life)

        life.again(*stage.engine(**common))
        wait_until(lambda: life.call("inside:leader")["disk"]["state"] == "on", "the scan")
        told.answers["sidecar"] = life.ask(pairs["sidecar"][1], TOKENS)
        told.seen["sidecar"] = sidecar.read_bytes() == whole
    return told


def trouble(stage, disk: LoopDisk, life, told: Told, pairs, files) -> None:
    t = Trouble(life, told)
    t.wait_for_state("on")
    damage(files["truncated"][3], "truncate")
    damage(files["flipped"][2], "flip")
    damage(files["deleted"][4], "delete")
    one, three = files["swapped"][1], files["swapped"][3]
    aside = one.with_suffix(".aside")
    one.rename(aside), three.rename(one), aside.rename(three)
    for case in ("truncated", "flipped", "swapped", "deleted"):
        t.ask(case, pairs[case][1])

    for case, chunk, how in (("deleted after the hit", 10, "delete"), ("flipped after the hit", 9, "flip")):
        life.call("inside:damage_between_hit_and_load", path=str(files[case][chunk]), how=how)
        t.ask(case, pairs[case][1])

    if disk.can_be_slow:
        slow(disk, life, t, pairs)
    t.ask("after slow", pairs["after slow"][1])

    with disk.read_only(stage.root):
        t.ask("read-only", pairs["read-only"][1])
        t.wait_for_state("off")
        told.seen["read-only errors"] = t.disk()["errors"]
        before = t.count()
        told.seen["ttft with the tier off"] = ttft(life)
        told.seen["counted with the tier off"] = _since(before, t.count())
    t.wait_for_state("on", "trial")
    writes = t.disk()["writes"]
    t.ask("after read-only", pairs["after read-only"][1])
    wait_until(lambda: t.disk()["writes"] >= writes + 5, "writing again")
    told.seen["state after read-only"] = t.disk()["state"]

    with disk.full():
        t.ask("full", pairs["full"][1])
        wait_until(lambda: t.disk()["errors"].get("ENOSPC"), "a full disk")
        told.seen["state when full"] = t.disk()["state"]
    t.wait_for_state("on", "trial")
    writes = t.disk()["writes"]
    t.ask("after full", pairs["after full"][0])
    wait_until(lambda: t.disk()["writes"] >= writes + 5, "writing again")
    life.forget()
    t.ask("after full", pairs["after full"][1])

    disk.unmount()
    t.ask("unmounted", pairs["unmounted"][1])
    t.wait_for_state("off")
    told.seen["below the mount point"] = list(disk.path.iterdir())
    disk.mount()
    t.wait_for_state("on")
    life.forget()
    t.ask("mounted again", pairs["after slow"][1])


def slow(disk: LoopDisk, life, t: Trouble, pairs) -> None:
    """First under a load that was promised, then for everybody."""
    path, text = disk.limit(SLOWER_BYTES_PER_S)
    life.call("inside:write_between_hit_and_load", path=str(path), text=text)
    try:
        t.ask("slow after the hit", pairs["slow after the hit"][1])
    finally:
        disk.fast()
    wait_until(lambda: not t.disk()["queued_reads"], "the end of the slow reads")
    t.wait_for_state("on", "trial")

    before = t.count()
    with disk.slow(SLOW_BYTES_PER_S):
        for case in ("slow 1", "slow 2"):
            t.ask(case, pairs[case][1])
        t.wait_for_state("off")
    wait_until(lambda: not t.disk()["queued_reads"], "the end of the slow reads")
    t.told.seen["slow"] = _since(before, t.count())
    t.wait_for_state("on", "trial")


def ttft(life) -> list[float]:
    """Of prompts that nobody has seen, in order, in seconds."""
    rng = random.Random(9)
    return sorted(
        life.ask([rng.randrange(3, 1000) for _ in range(SAMPLE)], max_tokens=1)["ttft_s"]
        for _ in range(SAMPLES)
    )


def asked(told: Told, case: str) -> None:
    if case in SLOW and case not in told.answers:
        pytest.skip("not run: no limit for a block device here")


@pytest.mark.parametrize("case", COMPUTED_FROM)
def test_the_answer_is_right(told, case):
    asked(told, case)
    assert told.right[case]["local"] == COMPUTED_FROM[case] * CHUNK, "the reference must be a prefix hit"
    got = told.answers[case]
    assert outputs(got) == outputs(told.right[case]), json.dumps(told.counted.get(case))
    assert got["local"] == 0


@pytest.mark.parametrize("case", [c for c in COMPUTED_FROM if c in STORED and c not in AFTER_THE_HIT])
def test_what_is_whole_is_loaded(told, case):
    asked(told, case)
    expected = COMPUTED_FROM[case] * CHUNK
    assert sum(told.answers[case]["loaded"].values()) == expected


@pytest.mark.parametrize(
    "case, counter",
    [
        ("truncated", "corrupt size"),
        ("flipped", "corrupt payload"),
        ("swapped", "corrupt key"),
        ("deleted", "vanished"),
        ("deleted after the hit", "vanished"),
        ("flipped after the hit", "corrupt payload"),
    ],
)
def test_counters_name_the_cause(told, case, counter):
    assert told.counted[case].get(counter), told.counted[case]


@pytest.mark.parametrize("case", AFTER_THE_HIT)
def test_a_promise_was_broken(told, case):
    asked(told, case)
    assert sum(told.answers[case]["loaded"].values()) == LONG * CHUNK, "what was promised"
    assert told.counted[case].get("loads failed") == 1, told.counted[case]


def test_a_slow_load_costs_one_deadline_of_a_load(told, capsys):
    case = "slow after the hit"
    asked(told, case)
    counted = told.counted[case]
    with capsys.disabled():
        print(f"\n{case}: first token after {told.answers[case]['ttft_s']:.2f} s")
    assert counted["loads expired"] == 1, counted
    assert counted["engine loads"] == 1, "loaded again"
    assert "engine wait_timeouts" not in counted, "a failed load is not waited for again"
    assert counted["engine load_failures"] == 1, counted


@pytest.mark.parametrize("case", ["slow 1", "slow 2"])
def test_a_slow_lookup_costs_one_wait_for_it(told, case, capsys):
    asked(told, case)
    counted = told.counted[case]
    with capsys.disabled():
        print(f"\n{case}: first token after {told.answers[case]['ttft_s']:.2f} s, then {told.state[case]}")
    if case == "slow 1":  # at the second one the tier may have gone off
        assert counted["engine wait_timeouts"] == 1, counted
    assert "engine loads" not in counted, counted


@pytest.mark.parametrize("case", [c for c in COMPUTED_FROM if c != "sidecar"])
def test_no_request_loses_more_than_a_wait_and_a_deadline(told, case):
    asked(told, case)
    for what in ("engine wait_timeouts", "engine loads", "loads expired"):
        assert told.counted[case].get(what, 0) <= 1, f"{what}: {told.counted[case]}"
    assert not told.counted[case].get("engine errors"), "a hook failed"


def test_a_slow_disk_is_switched_off_and_on(told):
    asked(told, "slow 1")
    assert told.seen["slow"]["breaker_trips"] == 1
    assert told.seen["slow"]["errors slow"] >= 1, told.seen["slow"]


def test_a_read_only_disk_is_switched_off_and_on(told):
    assert told.seen["read-only errors"]["EROFS"] >= 8
    assert told.seen["state after read-only"] == "on"


def test_a_full_disk_stays_in_use(told):
    assert told.seen["state when full"] == "on"
    assert sum(told.answers["after full"]["loaded"].values()) == 5 * CHUNK


def test_an_unmounted_disk_is_not_written_below(told):
    assert told.seen["below the mount point"] == []


def test_a_disk_that_is_mounted_again_is_used_again(told):
    got = told.answers["mounted again"]
    assert outputs(got) == outputs(told.right["after slow"])
    assert sum(got["loaded"].values()) == COMPUTED_FROM["after slow"] * CHUNK
    assert got["loaded"]["disk"] and told.state["mounted again"] == "on"


def test_a_damaged_sidecar_is_written_anew(told):
    assert told.seen["sidecar"]
    assert told.answers["sidecar"]["loaded"] == {"dram": 0, "disk": 5 * CHUNK}


def test_the_figures_are_of_lookups(told):
    """While the tier is off, with a trial now and then, nothing is found or waited for,
    and still everybody asks."""
    counted = told.seen["counted with the tier off"]
    assert counted["engine lookups"] == SAMPLES, counted
    for what in ("engine loads", "engine wait_timeouts", "engine unanswered", "engine errors", "reads"):
        assert what not in counted, counted


def test_figures(told, capsys):
    """Printed only."""
    off, without = told.seen["ttft with the tier off"], told.seen["ttft without kvtier"]
    for name, part in (("median", 0.5), ("p99", 0.99)):
        at = math.ceil(part * SAMPLES) - 1
        ratio = off[at] / without[at]
        with capsys.disabled():
            print(f"\nfirst token, {name}: tier off {off[at]:.3f} s, no kvtier {without[at]:.3f} s, {ratio:.2f}x")
