"""What the engine waits for: lookups, puts; and what the library costs at rest."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import numpy as np

import kvtier
from copying import description, granted, resident
from figure import Figure, percentile

LOOKUP_KEYS = 512
LOOKUPS = 2000
PUTS = 400
PUT_BYTES = 1 << 20
#: A put may hold up its caller this long at the 99th percentile.
PUT_BOUND_US = 10_000.0
LOOKUP_BOUND_US = 100.0
IDLE_SECONDS = 3.0
#: One hundredth of one core.
IDLE_BOUND = 0.01
MEMORY_BOUND_MIB = 32.0

#: The other process: leads a root until its standard input ends.
LEADER = """
import sys, kvtier
with kvtier.Cache.open({"disk_path": sys.argv[1], "dram_gib": 0.25, "disk_gib": 1}) as cache:
    cache.wait_open(10.0)
    print(cache.state()[0], flush=True)
    sys.stdin.read()
"""

#: Reports the CPU seconds of an idle leader and the memory that opening added.
IDLE = """
import sys, time, kvtier
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096 / 2**20
before = resident()
with kvtier.Cache.open({"disk_path": sys.argv[1], "dram_gib": 0.25, "disk_gib": 1}) as cache:
    cache.wait_open(10.0)
    blob = cache.blob("idle", chunk_bytes=65536, chunk_tokens=256)
    blob.ready(10.0)
    time.sleep(1.0)
    used = time.process_time()
    time.sleep(float(sys.argv[2]))
    print(time.process_time() - used, resident() - before)
"""


def lookup() -> list[Figure]:
    """A lease of 512 held keys, its answer and its release, from a process that
    is not the leader."""
    layers_row = 64
    memory = np.zeros((LOOKUP_KEYS * 256, layers_row), np.uint8)
    region = kvtier.Region(
        group=0, name="kv", component="target", layer=0, head=-1, bytes=layers_row, replicated=False,
        base=memory.ctypes.data, block_stride=16 * layers_row, token_stride=layers_row,
    )  # fmt: skip
    blocks = LOOKUP_KEYS * 256 // 16
    with tempfile.TemporaryDirectory() as root:
        leader = subprocess.Popen(
            [sys.executable, "-c", LEADER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            if leader.stdout.readline().strip() != "leader":
                raise RuntimeError("the other process did not become leader")
            with kvtier.Cache.open({"disk_path": root, "role": "member"}) as cache:
                rank = cache.register(description("bench", blocks), [region])
                coordinator = cache.coordinate("bench", ranks=1)
                accepted = coordinator.ready(10.0)
                first = kvtier.keys.root(accepted.fingerprint)
                keys = kvtier.keys.chain(first, 256, np.arange(LOOKUP_KEYS * 256, dtype=np.uint32))
                op, session, grants = granted(coordinator, 1, first, keys)
                rank.store(op, session, 0, grants, np.arange(blocks, dtype=np.uint32))
                resident(coordinator, 1, keys)
                coordinator.release(1)
                times = []
                for i in range(LOOKUPS):
                    start = time.perf_counter()
                    coordinator.lease(i + 2, keys, kvtier.LEASE_PREFETCH | kvtier.LEASE_PIN)
                    hits = coordinator.lease_result(i + 2, timeout_s=1.0)
                    times.append((time.perf_counter() - start) * 1e6)
                    coordinator.release(i + 2)
                    if hits is None or hits.resident != LOOKUP_KEYS:
                        raise RuntimeError(f"a lookup found {hits}")
                rank.close(10.0)
        finally:
            leader.stdin.close()
            leader.wait(30)
    median, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return [
        Figure("lookup of 512 keys, p50", "us", "bound", (median,), LOOKUP_BOUND_US, True, 1.0),
        Figure("lookup of 512 keys, p99", "us", "bound", (p99,), 10 * LOOKUP_BOUND_US, True, 0.0),
    ]


def put() -> list[Figure]:
    """Puts of 1 MiB chunks while the disk writes behind."""
    payload = np.random.default_rng(2).integers(0, 256, PUT_BYTES, dtype=np.uint8)
    times, copies = [], []
    with tempfile.TemporaryDirectory() as root:
        settings = {"disk_path": root, "dram_gib": 0.25, "disk_gib": 1}
        with kvtier.Cache.open(settings) as cache:
            blob = cache.blob("bench", chunk_bytes=PUT_BYTES, chunk_tokens=256)
            first = kvtier.keys.root(blob.ready(10.0))
            keys = kvtier.keys.chain(first, 256, np.arange(PUTS * 256, dtype=np.uint32))
            parent = None
            for i in range(PUTS):
                start = time.perf_counter()
                stored = blob.put(keys[i].tobytes(), payload, parent=parent, ordinal=i)
                times.append((time.perf_counter() - start) * 1e6)
                if not stored:
                    raise RuntimeError(f"put {i} was declined")
                parent = keys[i].tobytes()
                start = time.perf_counter()
                payload.copy()
                copies.append((time.perf_counter() - start) * 1e6)
    return [
        Figure("put of 1 MiB, p50", "us", "memcpy", (percentile(times, 0.5),), percentile(copies, 0.5), True, 0.0),
        Figure("put of 1 MiB, p99", "us", "bound", (percentile(times, 0.99),), PUT_BOUND_US, True, 1.0),
    ]


def idle() -> list[Figure]:
    with tempfile.TemporaryDirectory() as root:
        out = subprocess.run(
            [sys.executable, "-c", IDLE, root, str(IDLE_SECONDS)], capture_output=True, text=True, check=True
        )
    cpu, memory = (float(x) for x in out.stdout.split())
    return [
        Figure("CPU of an idle leader", "cores", "bound", (cpu / IDLE_SECONDS,), IDLE_BOUND, True, 1.0),
        Figure("memory of the library, without arenas", "MiB", "bound", (memory,), MEMORY_BOUND_MIB, True, 1.0),
    ]


def measure() -> list[Figure]:
    return lookup() + put() + idle()
