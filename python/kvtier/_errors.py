"""What can go wrong, one exception class for each status of the protocol."""

from __future__ import annotations

import enum
from typing import Dict, Type


class Status(enum.IntEnum):
    """Statuses as they stand in messages (docs/protocol.md, section 10)."""

    OK = 0
    NOT_FOUND = 1
    NO_SPACE = 2
    LEASE_EXPIRED = 3
    CORRUPT = 4
    INVALID = 5
    UNAVAILABLE = 6
    DISCONNECTED = 7
    CONFLICT = 8
    MISMATCH = 9
    CLOSED = 10
    DENIED = 11
    DEADLINE = 12
    CANCELLED = 13
    INTERNAL = 14
    BUSY = 15


class Error(Exception):
    """Base of all exceptions of this package. `status` says which one it is."""

    status: Status = Status.INTERNAL


class NotFoundError(Error):
    """No such namespace (and `create` was False), or no such block."""

    status = Status.NOT_FOUND


class NoSpaceError(Error):
    """The store has no room and nothing that may leave. Later, or not at all."""

    status = Status.NO_SPACE


class LeaseExpiredError(Error):
    """No such lease or reservation of this session (any more)."""

    status = Status.LEASE_EXPIRED


class CorruptError(Error):
    """The bytes came with another checksum than was said."""

    status = Status.CORRUPT


class InvalidError(Error, ValueError):
    """A wrong argument; the text names it."""

    status = Status.INVALID


class UnavailableError(Error):
    """A tier, a device or a version of the protocol is not there."""

    status = Status.UNAVAILABLE


class DisconnectedError(Error):
    """Nobody answers. The pool connects again in the background."""

    status = Status.DISCONNECTED


class ConflictError(Error):
    """The key is there with other bytes: what computes the hashes is wrong."""

    status = Status.CONFLICT


class MismatchError(Error):
    """The namespace is there with another descriptor; the text names the field."""

    status = Status.MISMATCH


class ClosedError(Error):
    """The pool is closed, or the daemon is ending."""

    status = Status.CLOSED


class DeniedError(Error):
    """The token is absent or wrong, or may not do this."""

    status = Status.DENIED


class DeadlineError(Error, TimeoutError):
    """The call's time was over before it was done."""

    status = Status.DEADLINE


class CancelledError(Error):
    """The job was cancelled."""

    status = Status.CANCELLED


class InternalError(Error):
    """The daemon failed, or answered what makes no sense."""

    status = Status.INTERNAL


class BusyError(Error):
    """Beyond a limit of the session or of the pool: again when others have ended."""

    status = Status.BUSY


_CLASSES: Dict[int, Type[Error]] = {
    c.status: c
    for c in (
        NotFoundError,
        NoSpaceError,
        LeaseExpiredError,
        CorruptError,
        InvalidError,
        UnavailableError,
        DisconnectedError,
        ConflictError,
        MismatchError,
        ClosedError,
        DeniedError,
        DeadlineError,
        CancelledError,
        InternalError,
        BusyError,
    )
}


def status_of(code: int) -> Status:
    """The status of a code; unknown ones are as INTERNAL is."""
    return Status(code) if 0 <= code <= Status.BUSY else Status.INTERNAL


def error_of(code: int, text: str = "") -> Error:
    """The exception of a status other than OK."""
    cls = _CLASSES.get(code, InternalError)
    return cls(text or cls.__name__[:-5].lower())


def bare(e: Error) -> Error:
    """An error to be kept, without the frames that it came through, and their memory."""
    e.__traceback__ = e.__context__ = e.__cause__ = None
    return e
