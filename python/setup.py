"""Puts libkvtier.so into the package. Everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARY = Path(__file__).resolve().parent.parent / "build" / "libkvtier.so"


class BuildWithLibrary(build_py):
    """An editable installation finds the library in build/ of the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            if not LIBRARY.is_file():
                raise SystemExit(f"{LIBRARY} is missing: run ./build.sh first")
            shutil.copy2(LIBRARY, Path(self.build_lib) / "kvtier" / "libkvtier.so")


class PlatformWheel(bdist_wheel):
    """For this platform, but for every Python: ctypes does not care."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    distclass=BinaryDistribution,
)
