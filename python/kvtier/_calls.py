"""A call of a session, the means to cancel it, and how many there may be at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Callable, Optional, Tuple

from ._errors import CancelledError, DeadlineError, Error
from ._waiting import Waiters

if TYPE_CHECKING:
    from ._connection import Connection


LOOK_UP = 0.1  # seconds after which who waits for room looks whether it was cancelled


class Call:
    """A request and what comes back. The reader finds it by its id."""

    __slots__ = ("id", "want", "lock", "done", "payload", "error", "began", "stream", "remote")

    def __init__(self, want: int, stream: Optional[Callable[[bytes], bool]] = None, remote: bool = False) -> None:
        # The daemon moves the bytes: the memory is quiet when it has answered.
        self.remote = remote
        self.id = 0
        self.want = want  # code of the reply
        self.lock = threading.Lock()
        self.lock.acquire()
        self.done = False
        self.payload = b""
        self.error: Optional[Error] = None
        self.began = 0.0
        # Takes replies, on the reader's thread, and says whether more follow.
        self.stream = stream

    # Whether data comes for it.
    lands = False

    def land(self, token: int, offset: int, length: int) -> Optional[memoryview]:
        """Where data goes; None: nowhere."""
        return None

    def landed(self, token: int, offset: int, length: int) -> None:
        """Data is there, and in the cache."""

    def finish(self, error: Optional[Error]) -> None:
        """Ends the call, before it is taken out of the table: who is interrupted in between
        leaves it to the session's end. Only the first time counts."""
        if not self.done:
            self.error = error
            self.done = True
        try:
            self.lock.release()
        except RuntimeError:
            pass  # another time


class Cancel:
    """Lets another thread end the calls that one is in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: Optional[Tuple["Connection", Call]] = None
        self.cancelled = False

    def enter(self, conn: "Connection", call: Call) -> None:
        """Says which call it is. CancelledError."""
        with self._lock:
            self.check()
            self._now = (conn, call)

    def leave(self) -> None:
        with self._lock:
            self._now = None

    def check(self) -> None:
        if self.cancelled:
            raise CancelledError("cancelled")

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._now is None:
                return
            conn, call = self._now
            if call.remote or conn.abandon(call, CancelledError("cancelled")):
                conn.cancel_later(call.id)


class Budget:
    """How many calls and bytes of gets a session may have in flight."""

    def __init__(self, calls: int, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._calls = calls
        self._bytes = most_bytes
        self.most_bytes = most_bytes
        self.ended = False

    def take(self, n: int, deadline: float, cancel: Optional[Cancel] = None) -> int:
        """Waits for room for one call and n bytes; returns the bytes to give back.
        DeadlineError, CancelledError."""
        n = min(n, self.most_bytes)
        while True:
            with self._lock:
                if self.ended or (self._calls >= 1 and self._bytes >= n):
                    self._calls -= 1
                    self._bytes -= n
                    return n
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError("no room for one more call in time")
                if cancel is not None:
                    cancel.check()
                turn = self._waiters.turn()
            self._waiters.wait(turn, min(left, LOOK_UP))

    def give(self, n: int) -> None:
        with self._lock:
            self._calls += 1
            self._bytes += n
            self._waiters.tell()

    def end(self) -> None:
        self.ended = True
        self._waiters.tell()
