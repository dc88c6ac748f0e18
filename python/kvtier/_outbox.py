"""What a session sends: frames now, and what is told with the next ones."""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING, Callable, Iterator, List, Optional, Union

from . import _wire as wire
from ._dial import PlainStream, poller
from ._errors import DeadlineError, DisconnectedError, Error

if TYPE_CHECKING:
    from ._connection import Connection

Buffer = Union[bytes, memoryview]

LATER = 0.005  # seconds for which what is given back waits for more of it, or a call to go with
_LEASES = 64  # that do not wait any longer
_LOOK_UP = 0.5  # seconds after which a sender looks whether the session has ended
_OVERTIME = 0.1  # seconds past its deadline in which a frame that was begun is finished
_IOV = 512  # buffers of one write


class Outbox:
    """The sending side. A frame is a header, as bytes, and what it is for behind it, as
    memoryviews; or one whole as bytes."""

    def __init__(self, conn: "Connection", stream: PlainStream, ids: Iterator[int]) -> None:
        self._conn = conn
        self._stream = stream
        self._ids = ids
        self.lock = threading.Lock()  # of who sends
        self._poll = poller(stream.fileno(), select.POLLOUT)
        # Of what follows. A __del__ takes it, which runs anywhere.
        self._kept_lock = threading.RLock()
        self._leases: List[int] = []
        self._grants: List[int] = []
        self._kept: List[Buffer] = []  # whole frames
        self._attentive = False  # the I/O thread looks soon without being woken

    # Now

    def send(
        self, buffers: List[Buffer], deadline: float, before_blocking: Optional[Callable[[], None]] = None
    ) -> None:
        """Sends whole frames, with what was kept for the next ones before them.
        DeadlineError; a frame that could not be sent whole is the session's end. Without
        frames it sends all that was kept."""
        mine = False
        try:
            mine = self.lock.acquire(False)
            if not mine:
                if before_blocking is not None:
                    before_blocking()
                self._await_turn(deadline)
                mine = True
            if self._conn.error is not None:
                raise self._conn.lost()
            kept = self._take(not buffers)
            if kept:
                self._write(kept + buffers, deadline, before_blocking, kept)
            else:
                self._write(buffers, deadline, before_blocking, kept)
        except Error:
            raise
        except OSError as e:
            lost = DisconnectedError(f"connection lost: {e}")
            self._conn.end(lost)
            raise lost from e
        except BaseException as e:  # a frame may be half sent
            self._conn.interrupted(e)
            raise
        finally:
            if mine:
                self.lock.release()

    def _await_turn(self, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            reader = threading.get_ident() == self._conn.io_thread
            if self.lock.acquire(timeout=max(0.0, min(left, LATER if reader else _LOOK_UP))):
                return
            if left <= 0:
                raise DeadlineError("the connection took no bytes in time")
            if self._conn.error is not None:
                raise self._conn.lost()
            if reader:  # who has the lock may wait for somebody to read
                self._conn.attend()

    def _write(
        self, buffers: List[Buffer], deadline: float, before_blocking: Optional[Callable[[], None]], kept: List[Buffer]
    ) -> None:
        i = 0
        while i < len(buffers):
            try:
                n = self._stream.write(buffers[i : i + _IOV] if i or len(buffers) > _IOV else buffers)
            except BlockingIOError:
                if before_blocking is not None:
                    before_blocking()
                    before_blocking = None
                self._wait(isinstance(buffers[i], bytes) and not self._stream.owes, deadline, kept[i:])
                continue
            while n:
                b = buffers[i]
                if n < len(b):
                    buffers[i] = memoryview(b)[n:]
                    break
                n -= len(b)
                i += 1

    def _wait(self, between: bool, deadline: float, kept: List[Buffer]) -> None:
        """Waits until the socket takes bytes. Between frames the time may be over: the rest
        is not sent, and what was kept is kept."""
        if self._conn.error is not None:
            raise self._conn.lost()
        left = deadline - time.monotonic()
        if left <= 0 and between:
            with self._kept_lock:
                self._kept = kept + self._kept
            raise DeadlineError("the connection took no bytes in time")
        if left <= -_OVERTIME:
            self._conn.end(DisconnectedError("connection given up: the daemon took no bytes"))
            raise DeadlineError("the connection took no bytes in time")
        left += 0.0 if between else _OVERTIME
        if threading.get_ident() == self._conn.io_thread:  # both sides might wait
            self._conn.attend()
            self._poll.poll(min(left, LATER) * 1000)
        else:
            self._poll.poll(min(left, _LOOK_UP) * 1000)

    # Later

    def release(self, lease: int) -> None:
        """Gives a lease back soon. 0 is none."""
        if lease:
            with self._kept_lock:
                self._leases.append(lease)
                self._told()

    def give_back(self, grant: int) -> bool:
        """Gives a place back with the next call, or soon. False: the session has ended."""
        with self._kept_lock:
            if self._conn.error is not None:
                return False
            self._grants.append(grant)
            self._told()
        return True

    def keep(self, frame: bytes) -> None:
        """Sends a whole frame likewise."""
        with self._kept_lock:
            self._kept.append(frame)
            self._told()

    def _told(self) -> None:
        if not self._attentive:
            self._attentive = True
            self._conn.wake_io()

    def untold(self) -> bool:
        """Whether something waits to be told."""
        return bool(self._kept or self._leases or self._grants)

    def attentive(self, active: bool) -> bool:
        """Whether the I/O thread must look again after LATER: something waits, or calls go
        on, which then need not wake it."""
        with self._kept_lock:
            self._attentive = active or self.untold()
            return self._attentive

    def drain(self) -> "tuple[List[int], List[int]]":
        """Takes out the leases and places that were not told."""
        with self._kept_lock:
            leases, self._leases = self._leases, []
            grants, self._grants = self._grants, []
        return leases, grants

    def _take(self, all: bool) -> List[Buffer]:
        """What waits to be told, as frames. Leases wait for each other unless all is wanted:
        each message costs the server an answer."""
        if not (self._kept or self._grants or (self._leases and (all or len(self._leases) >= _LEASES))):
            return []
        with self._kept_lock:
            leases, grants = self.drain()
            out, self._kept = self._kept, []
        most = self._conn.keys
        while leases or grants:
            body = wire.release(leases[:most], grants[:most])
            # Nobody waits for the reply: what is gone already needs no giving back.
            out.append(wire.message(wire.RELEASE, next(self._ids), body))
            leases, grants = leases[most:], grants[most:]
        return out

    def ping(self) -> None:
        """Sends a Ping, if it can be sent at once."""
        if self.lock.acquire(False):
            try:
                if not self._poll.poll(0):
                    return
                self._write([wire.header(wire.PING, 0)], time.monotonic(), None, [])
            except (OSError, Error):
                pass  # the session is busy, or has ended
            finally:
                self.lock.release()
