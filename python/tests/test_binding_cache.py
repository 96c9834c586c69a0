"""The binding's objects against the real library."""

from __future__ import annotations

import gc
import math
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from binding import PYTHON, ROOT, SOON, settings
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

import kvtier
from kvtier import _lib, errors, keys

CHUNK = 4096
TOKENS = 8


def put(blob: kvtier.Blob, key: object, payload: object, parent: object = None, ordinal: int = 0) -> None:
    """An arena grows behind its use: what is declined at first is put again."""
    end = time.monotonic() + SOON
    while not blob.put(key, payload, parent, ordinal, timeout_s=SOON):
        assert time.monotonic() < end
        time.sleep(0.005)


def some_keys(blob: kvtier.Blob, n: int, first: int = 0) -> np.ndarray:
    root = keys.root(blob.ready(SOON))
    return keys.chain(root, TOKENS, np.arange(first, first + n * TOKENS, dtype=np.uint32))


def test_round_trip_over_a_restart(tmp_path: Path) -> None:
    payloads = [os.urandom(CHUNK) for _ in range(5)]
    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        assert cache.wait_open(SOON)
        assert cache.state()[0] == "leader"
        blob = cache.blob("m", CHUNK, TOKENS, kv_dtype="u8")
        ks = some_keys(blob, 5)
        assert blob.lookup(ks) == (0, 0)
        assert blob.get(ks[0]) is None
        for i, p in enumerate(payloads):
            put(blob, ks[i], p, ks[i - 1] if i else None, i)
        assert blob.lookup(ks) == (5, 5)
        assert blob.lookup(list(map(bytes, ks))) == (5, 5)
        assert [blob.get(k) for k in ks] == payloads
        assert cache.flush(SOON)
    assert cache.state()[0] == "closed"

    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        assert cache.wait_open(SOON)
        with cache.blob("m", CHUNK, TOKENS, kv_dtype="u8") as blob:
            ks = some_keys(blob, 5)
            end = time.monotonic() + SOON
            while blob.lookup(ks)[0] < 5:  # it looks for milliseconds while the root is read
                assert time.monotonic() < end
                time.sleep(0.005)
            out = np.zeros(CHUNK, np.uint8)
            for k, p in zip(ks, payloads, strict=True):
                view = blob.get(k, out=out, timeout_s=SOON)
                assert view is not None and bytes(view) == p == out.tobytes()
            blob.remove(ks[3:])
            assert blob.lookup(ks)[0] == 3
        other = cache.blob("m", CHUNK, TOKENS, kv_dtype="f8")  # not interchangeable
        assert other.ready(SOON) != blob_fingerprint(cache)


def blob_fingerprint(cache: kvtier.Cache) -> bytes:
    return cache.blob("m", CHUNK, TOKENS, kv_dtype="u8").ready(SOON)


@examples(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 20000), seed=st.integers(0, 1 << 30))
def test_any_size_comes_back(leader: kvtier.Cache, size: int, seed: int) -> None:
    payload = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    with leader.blob(f"m{seed}", size, TOKENS) as blob:
        key = some_keys(blob, 1)[0]
        put(blob, key, payload)
        assert blob.get(key, timeout_s=SOON) == payload.tobytes()


def test_buffers_are_used_in_place(leader: kvtier.Cache) -> None:
    blob = leader.blob("m", CHUNK, TOKENS)
    key = some_keys(blob, 1)[0]
    source = bytearray(os.urandom(CHUNK))
    put(blob, key, memoryview(source))
    for out in (bytearray(CHUNK), np.zeros(CHUNK // 4, np.float32), np.zeros((2, CHUNK // 2), np.uint8)):
        view = blob.get(key, out=out, timeout_s=SOON)
        assert view is not None
        assert bytes(memoryview(out).cast("B")) == bytes(source)
    with pytest.raises(TypeError, match="writable"):
        blob.get(key, out=bytes(CHUNK))
    with pytest.raises(TypeError, match="contiguous"):
        blob.put(key, np.zeros((CHUNK, 2), np.uint8)[:, 0])
    with pytest.raises(kvtier.Error, match="4095"):
        blob.put(key, bytes(CHUNK - 1))
    with pytest.raises(TypeError):
        blob.get(b"short")


def test_settings_errors_are_the_library_s(tmp_path: Path) -> None:
    with pytest.raises(kvtier.ConfigError, match='"dram_gib"') as e:
        kvtier.Cache.open({"dram_gb": 1})
    assert e.value.code == errors.E_CONFIG
    with pytest.raises(kvtier.ConfigError, match="role"):
        kvtier.Cache.open({"role": "king"})
    (tmp_path / "file").write_text("")
    with pytest.raises(kvtier.Error, match="directory") as io:
        kvtier.Cache.open({"disk_path": str(tmp_path / "file")})
    assert io.value.code == errors.E_IO


def test_closing(tmp_path: Path) -> None:
    cache = kvtier.Cache.open(settings(tmp_path / "kv"))
    blob = cache.blob("m", CHUNK, TOKENS)
    assert cache.close()
    assert cache.close()  # nothing happens
    assert cache.state() == ("closed", "closed by this process")
    for call in (cache.stats, cache.poll, cache.records, cache.eventfd, lambda: cache.wait_open(1)):
        with pytest.raises(kvtier.Error, match="closed"):
            call()
    with pytest.raises(kvtier.Error):
        blob.ready(1)
    blob.close()
    with pytest.raises(kvtier.Error, match="closed"):
        blob.ready(1)


def test_collecting_closes(tmp_path: Path) -> None:
    cache = kvtier.Cache.open(settings(tmp_path / "kv"))
    lib, handle = cache._lib, cache._handle.value
    blob = cache.blob("m", CHUNK, TOKENS)
    del cache
    gc.collect()
    assert lib.flush(handle, 0) in (errors.OK, errors.E_TIMEOUT, errors.E_NO_LEADER)  # held by the blob
    del blob
    gc.collect()
    assert lib.flush(handle, 0) == errors.E_HANDLE


def test_closing_wakes_who_waits(tmp_path: Path) -> None:
    cache = kvtier.Cache.open(settings(tmp_path / "kv"))
    coordinator = cache.coordinate("incomplete", ranks=2)
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            coordinator.ready(60)
        except kvtier.Error as e:
            seen.append(e)

    t = threading.Thread(target=wait)
    t.start()
    begin = time.monotonic()
    cache.close()
    t.join(SOON)
    assert not t.is_alive() and time.monotonic() - begin < SOON
    assert len(seen) == 1


def test_statistics_and_records(leader: kvtier.Cache) -> None:
    stats = leader.stats()
    assert stats["process"]["state"] == "leader"
    readable, _, _ = select.select([leader.eventfd()], [], [], SOON)
    assert readable
    records = leader.records()
    assert records and all(r.time_ns > 0 and r.text for r in records)
    assert leader.poll() == []


def test_timeouts(leader: kvtier.Cache) -> None:
    coordinator = leader.coordinate("incomplete", ranks=2)
    for timeout in (0.0, 0.25):
        begin = time.monotonic()
        with pytest.raises(kvtier.Timeout):
            coordinator.ready(timeout)
        assert timeout <= time.monotonic() - begin < timeout + SOON
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError):
            coordinator.ready(wrong)
    assert _lib.milliseconds(math.inf) == 3_600_000
    assert _lib.milliseconds(0.0001) == 1
    coordinator.close()
    coordinator.close()


def test_one_library_in_a_process(tmp_path: Path) -> None:
    loaded = _lib.load()
    assert _lib.load(loaded.path) is loaded
    with pytest.raises(kvtier.LibraryNotFound, match="not a file"):
        _lib._find(str(tmp_path / "libkvtier.so"))
    copy = tmp_path / "libkvtier.so"
    copy.write_bytes(b"")
    with pytest.raises(kvtier.LibraryNotFound, match="loaded already"):
        _lib.load(str(copy))


def test_prototypes_are_those_of_the_header() -> None:
    """Every function of the header is bound, with as many arguments."""
    import re

    header = (ROOT / "include" / "kvtier.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"KVT_API int32_t (kvt_\w+)\(([^)]*)\)", header)
    }
    views = {"kvt_begin", "kvt_commit"}  # for engines that are not written in Python
    assert {n: len(a) for n, a in _lib.PROTOTYPES.items()} == {
        n: c for n, c in declared.items() if n not in views
    }


def test_codes_are_those_of_the_header() -> None:
    import re

    header = (ROOT / "include" / "kvtier.h").read_text()
    for name, value in re.findall(r"#define KVT_(E_\w+) \((-\d+)\)", header):
        assert getattr(errors, name) == int(value)


def test_errors_travel() -> None:
    import pickle

    e = pickle.loads(pickle.dumps(errors.error(errors.E_TIMEOUT, "late")))
    assert type(e) is kvtier.Timeout and e.code == errors.E_TIMEOUT and str(e) == "late"


def test_example(tmp_path: Path) -> None:
    for want in ("0 of 4", "4 of 4"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "python" / "put_get.py"), str(tmp_path / "kv")],
            env={**os.environ, "PYTHONPATH": str(PYTHON)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"{want} chunks were there")
