"""A disk of one's own, which can be made sick: ext4 in an image file, mounted over a
loop device. Needs root; a test that cannot have one is not run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: Limits of the block layer for the processes of the outermost group.
_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


class LoopDisk:
    """Mounted at ``path`` until close()."""

    def __init__(self, directory: Path, mib: int) -> None:
        self.path = directory / "disk"
        self.path.mkdir()
        image = directory / "disk.img"
        try:
            if os.geteuid() != 0:
                raise OSError("mounting an image needs root")
            if shutil.which("mkfs.ext4") is None:
                raise OSError("there is no mkfs.ext4")
            with open(image, "wb") as f:
                f.truncate(mib << 20)
            _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", str(image))
            _run("mount", "-o", "loop", str(image), str(self.path))
        except OSError as e:
            pytest.skip(f"not run: no disk of its own: {e}")
        number = self.path.stat().st_dev
        self._numbers = f"{os.major(number)}:{os.minor(number)}"
        source = subprocess.run(
            ["findmnt", "-n", "-o", "SOURCE", str(self.path)], capture_output=True, text=True
        )
        self._device = source.stdout.strip()

    @property
    def can_be_slow(self) -> bool:
        return os.access(_THROTTLE, os.W_OK)

    def limit(self, bytes_per_s: int) -> tuple[Path, str]:
        """A file, and what to write to it, so that reads that reach the device share so
        many bytes a second; fast() ends it."""
        return _THROTTLE, f"{self._numbers} {bytes_per_s}"

    def fast(self) -> None:
        """As it was, also for reads that wait."""
        _THROTTLE.write_text(f"{self._numbers} 0")

    @contextmanager
    def slow(self, bytes_per_s: int) -> Iterator[None]:
        path, text = self.limit(bytes_per_s)
        path.write_text(text)
        try:
            yield
        finally:
            self.fast()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte free, until the block ends."""
        filler = self.path / "filler"
        with open(filler, "wb", buffering=0) as f:
            for size in (1 << 20, 4096):
                try:
                    while True:
                        f.write(b"x" * size)
                except OSError:
                    pass
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only(self, directory: Path) -> Iterator[None]:
        """A directory of it seen through a read-only mount, as in a container. (The
        file system itself has files that are open for writing.)"""
        _run("mount", "--bind", str(directory), str(directory))
        try:
            _run("mount", "-o", "remount,bind,ro", str(directory))
            yield
        finally:
            _run("umount", "-l", str(directory))

    def unmount(self) -> None:
        """Away from its place, also while it is in use."""
        _run("umount", "-l", str(self.path))

    def mount(self) -> None:
        _run("mount", self._device, str(self.path))

    def close(self) -> None:
        if self.can_be_slow:
            self.fast()
        while os.path.ismount(self.path):
            self.unmount()
