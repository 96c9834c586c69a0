"""Wrong configurations, at the connector: one clear line that says what to change; the
engine serves without the cache, or stops with that line when ``required``."""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine import Engine, slot_bytes
from situations import DOC

import kvtier
from kvtier.vllm.settings import _OWN, Settings

REPOSITORY = Path(__file__).parents[3]
GIB = 1 << 30


class NotRun(Exception):
    """This machine cannot make the condition."""


def _file(d):
    (d / "file").write_text("")
    return {"disk_path": str(d / "file"), "disk_gib": 1}


def _file_in_the_middle(d):
    (d / "file").write_text("")
    return {"disk_path": str(d / "file" / "kv"), "disk_gib": 1}


def _unwritable(d):
    if os.geteuid() == 0:  # whom no mode keeps out
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(d)], capture_output=True).returncode:
            raise NotRun("no right to mount")
    else:
        d.chmod(0o500)
    return {"disk_path": str(d / "kv"), "disk_gib": 1}


def _unwritable_root(d):
    (d / "kv").mkdir()
    return _unwritable(d / "kv") | {"disk_path": str(d / "kv")}


def _of_another_user(d):
    if os.geteuid() != 0:
        raise NotRun("only root can give a directory away")
    (d / "kv").mkdir(mode=0o700)
    os.chown(d / "kv", 12345, 12345)
    return {"disk_path": str(d / "kv"), "disk_gib": 1}


def _network(d):
    """A FUSE file system that nobody serves: what it is can be asked all the same."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as e:
        raise NotRun(f"no FUSE: {e}") from e
    options = f"fd={fd},rootmode=40000,user_id=12345,group_id=12345"
    if libc.mount(b"none", str(d).encode(), b"fuse", 0, options.encode()):
        os.close(fd)
        raise NotRun(f"no right to mount: {os.strerror(ctypes.get_errno())}")
    return {"disk_path": str(d), "disk_gib": 1}


def _newer(d):
    (d / "kv").mkdir(mode=0o700)
    (d / "kv" / "kvtier.json").write_text(json.dumps({"format": 9, "root": "0" * 32, "free_bytes": 1}))
    return {"disk_path": str(d / "kv"), "disk_gib": 1}


def _damaged(d):
    (d / "kv").mkdir(mode=0o700)
    (d / "kv" / "kvtier.json").write_text("not mine")
    return {"disk_path": str(d / "kv"), "disk_gib": 1}


def _open_runtime_dir(d):
    d.chmod(0o755)
    return {"runtime_dir": str(d)}


def just(**settings):
    return lambda d: settings


#: What is wrong -> settings, what the line says: what it is about and what to change.
WRONG = {
    "unknown key": (just(dram_gb=1), "unknown setting 'dram_gb'; the nearest one is 'dram_gib'"),
    "wrong type": (just(dram_gib="16"), '"dram_gib": want a number of GiB, got "16"'),
    "unit in the value": (just(lookup_wait_s="2s"), "'lookup_wait_s' must be a number of seconds"),
    "bytes for GiB": (just(dram_gib=16 << 30), '"dram_gib": must be from 0 to 1048576 GiB'),
    "milliseconds for seconds": (just(lease_ttl_s=600_000), '"lease_ttl_s": must be from 0.001 to 86400 seconds'),
    "flag as text": (just(durable="yes"), '"durable": want true or false, got "yes"'),
    "null": (just(read_lanes=None), '"read_lanes": want a whole number, got null'),
    "cap without a disk": (just(disk_gib=5), '"disk_gib" needs "disk_path"'),
    "file in place of the directory": (_file, r"file is a file, name a directory|is a file, name a directory"),
    "file on the way": (_file_in_the_middle, "a part of .* is a file, name a directory"),
    "unwritable path": (_unwritable, "cannot be made .*make it for uid|choose another"),
    "unwritable root": (_unwritable_root, "change its mode or mount, or choose another"),
    "root of another user": (_of_another_user, "belongs to uid 12345 and this process runs as uid 0, choose another"),
    "network file system": (_network, r"\(fuse\): choose a local disk, or allow it with allow_network_fs"),
    "root of a newer format": (_newer, "has format 9: was written by a newer version, update kvtier"),
    "damaged root": (_damaged, "remove it if the directory is a cache"),
    "runtime directory open to others": (_open_runtime_dir, "is open to other users, make it 0700"),
    "more memory than there is": (
        just(dram_gib=500_000), "dram_gib asks for 500000 GiB and .* set dram_gib to at most [0-9.]+"
    ),
    "memory below a chunk": (
        just(dram_gib=slot_bytes(64) / 2 / GIB), "raise dram_gib or lower the tokens of a chunk"
    ),
    "no such library": (just(library_path="/no/such/libkvtier.so"), "/no/such/libkvtier.so is not a file"),
}  # fmt: skip


@pytest.fixture
def wrong(request, tmp_path, monkeypatch):
    """The settings of a row, and what undoes the condition."""
    # How long a scheduler waits for a worker that may never come.
    monkeypatch.setattr("kvtier.vllm.scheduler.OPEN_S", 0.2)
    make, says = WRONG[request.param]
    home = tmp_path / "wrong"
    home.mkdir(mode=0o700)
    try:
        try:
            settings = make(home)
        except NotRun as e:
            pytest.skip(f"not run: {e}")
        yield settings, says
    finally:
        for d in (home / "kv", home):  # most rows have mounted nothing
            subprocess.run(["umount", "-l", str(d)], capture_output=True)
        home.chmod(0o700)


def lines(caplog, text):
    return [r for r in caplog.records if r.name == "vllm.kvtier" and re.search(text, r.getMessage())]


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
def test_engine_serves_without_the_cache(wrong, caplog):
    settings, says = wrong
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        e = Engine(extra=settings | {"required": False})
    try:
        q = e.add(DOC, 3)
        e.run()
        assert len(q.request.output_token_ids) == 3 and not e.problems
        assert e.half.off and e.worker_half.is_off
        assert not e.counts["chunks_offered"] and not e.counts["errors"]
    finally:
        e.close()
    errors = [r for r in caplog.records if r.name == "vllm.kvtier" and r.levelname == "ERROR"]
    assert len(errors) == 1, [r.getMessage() for r in errors]
    text = errors[0].getMessage()
    assert text.startswith("kvtier: the cache is off for this engine: ") and "\n" not in text
    assert re.search(says, text), text


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
def test_engine_stops_when_the_cache_is_required(wrong):
    settings, says = wrong
    with pytest.raises(Exception, match=says) as e:
        Engine(extra=settings | {"required": True})
    assert isinstance(e.value, (kvtier.Error, ValueError)) and "\n" not in str(e.value)


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_both_halves_refuse(role, tmp_path):
    """In an engine with several processes each of them stops by itself."""
    e = Engine()
    try:
        cls, cfg = type(e.worker), e.config
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        (tmp_path / "file").write_text("")
        cfg.kv_transfer_config.kv_connector_extra_config = {"required": True, "disk_path": str(tmp_path / "file")}
        kv = e.worker_half._kv_cache_config
        with pytest.raises(kvtier.Error, match="is a file, name a directory"):
            if role == "scheduler":
                cls(cfg, KVConnectorRole.SCHEDULER, kv)
            else:
                cls(cfg, KVConnectorRole.WORKER, kv).register_kv_caches(e.caches)
    finally:
        e.close()


@pytest.mark.parametrize("required", [False, True])
def test_cap_smaller_than_a_chunk(tmp_path, caplog, required):
    """The disk cannot take part, DRAM can."""
    extra = {"disk_path": str(tmp_path / "kv"), "disk_gib": 8192 / GIB, "free_floor_gib": 0, "required": required}
    says = "nothing of this engine goes to disk.*larger than the disk cap, raise disk_gib"
    if required:
        with pytest.raises(kvtier.ConfigError, match=says):
            Engine(extra=extra, recognisable=True)
        return
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        e = Engine(extra=extra, recognisable=True)
    try:
        (line,) = lines(caplog, "nothing of this engine goes to disk")
        assert line.levelname == "ERROR" and re.search(says, line.getMessage()), line.getMessage()
        e.add(DOC, 2)
        e.run()
        assert e.counts["chunks_granted"] and not e.half.off
    finally:
        e.close()


def plain(code, **kw):
    """A process with the binding alone."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, json, kvtier\n" + code],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(REPOSITORY / "python")}, **kw,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_library_that_is_none(tmp_path):
    (tmp_path / "libkvtier.so").write_bytes(b"\x7fELF but not really")
    code = f"""
try:
    kvtier.Cache.open({{}}, {str(tmp_path / "libkvtier.so")!r})
except kvtier.LibraryNotFound as e:
    print(e)
"""
    assert f"{tmp_path / 'libkvtier.so'} cannot be loaded: " in plain(code)


def test_more_memory_than_the_container_has(tmp_path):
    """In a control group with a limit, version 1 or 2, where this process may make one."""
    for parent, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"kvtier-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / name).exists():
            break
        group.rmdir()
    else:
        pytest.skip("not run: no control group can be made here")
    try:
        (group / name).write_text(str(256 << 20))
        code = f"""
import os
try:
    kvtier.Cache.open({{"dram_gib": 1, "name": "x", "runtime_dir": {str(tmp_path)!r}}})
except kvtier.ConfigError as e:
    print(e)
"""
        out = plain(code, preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    finally:
        group.rmdir()
    assert "dram_gib asks for 1 GiB and " in out and "is 0.25 GiB: raise the limit, or set dram_gib to at most" in out
    assert group.name in out or "hierarchical_memory_limit" in out


def test_more_memory_than_is_free_is_a_warning(tmp_path):
    """What is taken now may be free later; so it opens, and says so."""
    total = free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) << 10
        elif line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    budget = (total - (1 << 30) + free) // 2 / GIB
    if (total - (1 << 30) - free) < GIB or budget * GIB < free:
        pytest.skip("not run: nearly all memory is free")
    with kvtier.Cache.open({"dram_gib": budget, "name": "x", "runtime_dir": str(tmp_path)}) as cache:
        assert cache.wait_open(60)
        assert any("dram_gib is more than what is free now" in r.text for r in cache.records())


def test_documentation_lists_every_setting_of_the_connector():
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    part = page.split("\n## The vLLM connector\n")[1].split("\n## ")[0]
    listed = {}
    for name, default, unit, effect in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*) \|$", part, re.MULTILINE):
        listed[name] = default
        assert unit and effect, name
    empty = {"tag": "none", "library_path": "found by the package"}
    want = {}
    for name, (field, _) in _OWN.items():
        if not name.startswith("_"):  # those are for tests
            value = getattr(Settings(), field)
            want[name] = str(value).lower() if value != "" else empty[name]
    assert listed == want
