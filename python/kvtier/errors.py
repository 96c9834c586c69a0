"""What a call of the library can fail with.

A miss is not an error: functions that may miss return ``None`` or ``False``.
"""

from __future__ import annotations

OK = 0
E_ARG = -1
E_HANDLE = -2
E_CONFIG = -3
E_IO = -4
E_MISS = -5
E_DECLINED = -6
E_BUSY = -7
E_TIMEOUT = -8
E_PENDING = -9
E_REFUSED = -10
E_STALE = -11
E_NO_LEADER = -12
E_BUFFER = -13
E_NOT_SUPPORTED = -14
E_FORKED = -15
E_CLOSED = -16
E_INTERNAL = -17
E_SELFTEST = -18


class Error(Exception):
    """A call failed: ``code`` is one of the ``E_*`` numbers, ``message`` a sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[Error], tuple[int, str]]:
        return type(self), (self.code, self.message)


class ConfigError(Error):
    """The settings are wrong; the message names the key and says what to change."""


class Refused(Error):
    """The leader does not take this group; the message says what does not fit."""


class Timeout(Error):
    """The time given has passed."""


class LeaseLost(Error):
    """The lease is not known: released, expired, or of a leader that is gone."""


class NoLeader(Error):
    """No leader is attached at present; it attaches again by itself."""


class Forked(Error):
    """This process was forked from one that had loaded the library."""


class SelfTestFailed(Error):
    """A self-test brought other bytes back than went in; the message says which."""


class LibraryNotFound(Error):
    """libkvtier.so is missing, cannot be loaded, or is of another version."""


_CLASSES: dict[int, type[Error]] = {
    E_CONFIG: ConfigError,
    E_REFUSED: Refused,
    E_TIMEOUT: Timeout,
    E_NO_LEADER: NoLeader,
    E_FORKED: Forked,
    E_SELFTEST: SelfTestFailed,
}


def error(code: int, message: str) -> Error:
    """The exception for a code."""
    return _CLASSES.get(code, Error)(code, message)
