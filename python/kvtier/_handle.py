"""Ownership of a handle of the library by a Python object."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from . import errors
from ._lib import Library


class Handle:
    """A handle that is closed once: by :meth:`end`, when its owner is collected, or
    at the end of the interpreter, whichever comes first. In a forked child nothing
    is closed, the parent goes on using it."""

    def __init__(self, owner: object, library: Library, value: int, close: Callable[[int], None]) -> None:
        self.library = library
        self.value = value
        self._finalizer = weakref.finalize(owner, _close, os.getpid(), value, close)

    @property
    def open(self) -> bool:
        return self._finalizer.alive

    def use(self) -> int:
        """The handle, or an exception when it was closed."""
        if not self._finalizer.alive:
            raise errors.Error(errors.E_CLOSED, "it is closed")
        return self.value

    def end(self) -> bool:
        """Takes the duty to close: True for the first caller only."""
        return self._finalizer.detach() is not None


class Closing:
    """A context manager whose end is ``close()``."""

    def close(self) -> object:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(pid: int, value: int, close: Callable[[int], None]) -> None:
    if os.getpid() == pid:
        close(value)
