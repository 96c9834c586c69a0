"""The library as a guest: what it does to the process, and what the process may do."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
from binding import SOON, Script, settings

import kvtier


def test_importing_loads_nothing(script: Script) -> None:
    script("""
        import kvtier, threading
        def loaded():
            return "libkvtier" in open("/proc/self/maps").read()
        assert not loaded()
        before = len(open("/proc/self/status").read().split("Threads:")[1].split()[0])
        kvtier.keys.digest("pure")
        kvtier.Region, kvtier.Coordinator, kvtier.StoreRequest
        assert not loaded()
        kvtier.keys.root(bytes(32))
        assert loaded()
    """)


def test_a_forked_child_is_told(script: Script) -> None:
    script("""
        import kvtier, os, time
        cache = kvtier.Cache.open(settings())
        blob = cache.blob("m", 4096, 8)
        blob.ready(20)
        def child(run):
            pid = os.fork()
            if pid == 0:
                try:
                    run()
                    os._exit(0)
                except BaseException as e:
                    print(repr(e), file=sys.stderr, flush=True)
                    os._exit(1)
            end = time.monotonic() + 10
            while True:
                got, status = os.waitpid(pid, os.WNOHANG)
                if got:
                    break
                assert time.monotonic() < end, "the child hangs"
                time.sleep(0.01)
            assert status == 0, status
        def calls():
            for call in (cache.stats, lambda: cache.wait_open(5), lambda: blob.get(bytes(32)),
                         lambda: kvtier.Cache.open(settings()), lambda: kvtier.keys.root(bytes(32))):
                try:
                    call()
                except kvtier.Forked as e:
                    assert "fork" in str(e)
                else:
                    raise AssertionError("no exception")
        def collects():
            global cache, blob
            del cache, blob
            import gc; gc.collect()
        for _ in range(3):
            child(calls)
            child(collects)
            child(lambda: None)
        assert cache.state()[0] == "leader"
        assert cache.close()
    """)


def test_a_forked_child_ends(script: Script) -> None:
    """With all of the interpreter's end: finalizers and atexit handlers run."""
    script("""
        import kvtier, os, signal
        cache = kvtier.Cache.open(settings())
        assert cache.wait_open(20)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            sys.exit(7)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert cache.state()[0] == "leader"
        cache.close()
    """)


def test_fork_before_the_first_use_is_fine(script: Script) -> None:
    script("""
        import kvtier, os, signal
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            with kvtier.Cache.open(settings()) as cache:
                assert cache.wait_open(20)
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        assert "libkvtier" not in open("/proc/self/maps").read()
    """)


def test_subprocesses(script: Script) -> None:
    script("""
        import kvtier, subprocess
        cache = kvtier.Cache.open(settings())
        assert cache.wait_open(20)
        assert subprocess.run(["echo", "x"], capture_output=True, timeout=10).stdout == b"x\\n"
        assert subprocess.run("echo y", shell=True, preexec_fn=lambda: None, capture_output=True,
                              timeout=10).stdout == b"y\\n"
        cache.close()
    """)


def test_signals_stay_the_host_s(script: Script) -> None:
    script("""
        import kvtier, os, signal, time
        got = []
        signal.signal(signal.SIGTERM, lambda s, f: got.append(s))
        cache = kvtier.Cache.open(settings())
        assert cache.wait_open(20)
        signal.signal(signal.SIGUSR1, lambda s, f: got.append(s))
        for s in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), s)
        end = time.monotonic() + 10
        while len(got) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert sorted(got) == [signal.SIGUSR1, signal.SIGTERM], got
        cache.close()
    """)


def test_sigterm_ends_a_host_without_a_handler(script: Script) -> None:
    done = script(
        """
        import kvtier, os, signal, time
        cache = kvtier.Cache.open(settings())
        assert cache.wait_open(20)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        """,
        check=False,
    )
    assert done.returncode == -15


def test_ctrl_c_during_a_wait(script: Script) -> None:
    script("""
        import kvtier, os, signal, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
        cache = kvtier.Cache.open(settings())
        coordinator = cache.coordinate("incomplete", ranks=2)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            coordinator.ready(50)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no interrupt")
        assert time.monotonic() - begin < 10
        assert cache.close()
    """)


def test_other_threads_go_on(script: Script) -> None:
    """A wait inside the library holds no interpreter lock."""
    script("""
        import kvtier, threading, time
        cache = kvtier.Cache.open(settings())
        coordinator = cache.coordinate("incomplete", ranks=2)
        turns = 0
        done = threading.Event()
        def count():
            global turns
            while not done.is_set():
                turns += 1
        t = threading.Thread(target=count)
        t.start()
        try:
            coordinator.ready(0.5)
        except kvtier.Timeout:
            pass
        done.set()
        t.join()
        assert turns > 10000, turns
        cache.close()
    """)


def test_an_end_without_close(script: Script) -> None:
    """The interpreter closes what is open: nothing hangs, and nothing is lost."""
    begin = time.monotonic()
    script("""
        import kvtier, threading, time
        cache = kvtier.Cache.open(settings())
        assert cache.wait_open(20)
        blob = cache.blob("m", 4096, 8)
        root = kvtier.keys.root(blob.ready(20))
        key = kvtier.keys.chain(root, 8, list(range(8)))[0]
        while not blob.put(key, b"k" * 4096, timeout_s=20):
            time.sleep(0.005)
        coordinator = cache.coordinate("incomplete", ranks=2)
        def wait():
            try:
                coordinator.ready(50)
            except kvtier.Error:
                pass
        threading.Thread(target=wait, daemon=True).start()
    """)
    assert time.monotonic() - begin < 30
    script("""
        import kvtier
        with kvtier.Cache.open(settings()) as cache:
            assert cache.wait_open(20)
            blob = cache.blob("m", 4096, 8)
            root = kvtier.keys.root(blob.ready(20))
            key = kvtier.keys.chain(root, 8, list(range(8)))[0]
            assert blob.get(key, timeout_s=20) == b"k" * 4096
    """)


def test_sys_exit_in_a_signal_handler(script: Script) -> None:
    done = script(
        """
        import kvtier, os, signal, time
        signal.signal(signal.SIGTERM, lambda s, f: sys.exit(3))
        cache = kvtier.Cache.open(settings())
        coordinator = cache.coordinate("incomplete", ranks=2)
        os.kill(os.getpid(), signal.SIGTERM)
        coordinator.ready(50)
        """,
        check=False,
    )
    assert done.returncode == 3, done.stderr


def test_faulthandler(script: Script) -> None:
    script("""
        import faulthandler, kvtier
        faulthandler.enable()
        with kvtier.Cache.open(settings()) as cache:
            assert cache.wait_open(20)
    """)


def test_a_missing_library_is_named(script: Script) -> None:
    script("""
        import kvtier
        try:
            kvtier.Cache.open(settings(), library=DIR + "/nothing.so")
        except kvtier.LibraryNotFound as e:
            assert "nothing.so" in str(e)
        else:
            raise AssertionError("no exception")
        open(DIR + "/text.so", "w").write("text")
        try:
            kvtier.Cache.open(settings(), library=DIR + "/text.so")
        except kvtier.LibraryNotFound as e:
            assert "text.so" in str(e)
        else:
            raise AssertionError("no exception")
    """)


def test_two_processes_share_a_root(script: Script, tmp_path: Path) -> None:
    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        assert cache.wait_open(SOON)
        blob = cache.blob("m", 4096, 8)
        ks = kvtier.keys.chain(kvtier.keys.root(blob.ready(SOON)), 8, list(range(16)))
        end = time.monotonic() + SOON
        while not blob.put(ks[0], b"0" * 4096, timeout_s=SOON):
            assert time.monotonic() < end
            time.sleep(0.005)
        script("""
            import kvtier, time
            with kvtier.Cache.open(settings(role="member")) as cache:
                assert cache.wait_open(20)
                assert cache.state()[0] == "member"
                blob = cache.blob("m", 4096, 8)
                ks = kvtier.keys.chain(kvtier.keys.root(blob.ready(20)), 8, list(range(16)))
                assert blob.get(ks[0], timeout_s=20) == b"0" * 4096
                while not blob.put(ks[1], b"1" * 4096, ks[0], 1, timeout_s=20):
                    time.sleep(0.005)
                assert cache.stats()["leader"] is not None
        """)
        assert blob.get(ks[1], timeout_s=SOON) == b"1" * 4096


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_connector_is_known_by_its_name(script: Script) -> None:
    code = """
        from kvtier import _plugin
        _plugin.register()
        _plugin.register()
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        assert "KVTierConnector" in KVConnectorFactory._registry
        assert "kvtier.vllm" not in sys.modules
        assert "libkvtier" not in open("/proc/self/maps").read()
    """
    script(code, timeout=300)  # importing vLLM takes its time
