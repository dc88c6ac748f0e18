"""What a session holds for its caller: leases, lent blocks, reserved places."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

from . import _wire as wire
from ._connection import Connection
from ._errors import DisconnectedError, Error, InvalidError, LeaseExpiredError, Status, error_of
from ._places import millis
from ._results import GetResult

if TYPE_CHECKING:
    from ._places import Place
    from ._transfer import Handle


class Lease:
    """Blocks stay where they are until it is released or runs out. It belongs to the
    session: a lost one ends it. Use it as a context manager to release it."""

    def __init__(self, conn: Connection, ids: List[int], count: int, seconds: float) -> None:
        self._conn: Optional[Connection] = conn
        self._ids = ids
        self.count = count  # of blocks
        self.until = time.monotonic() + seconds  # as time.monotonic tells it

    def __repr__(self) -> str:
        return f"<kvtier.Lease of {self.count} blocks, {max(0.0, self.until - time.monotonic()):.1f} s left>"

    @property
    def alive(self) -> bool:
        """Whether it still holds, as far as this side knows."""
        conn = self._conn
        return conn is not None and conn.error is None and time.monotonic() < self.until

    def renew(self, seconds: float, timeout: float = 10.0) -> None:
        """Lets it run for so many seconds from now. LeaseExpiredError when it has ended,
        DeadlineError without an answer."""
        conn = self._conn
        if conn is None:
            raise LeaseExpiredError("the lease was released")
        if conn.error is not None:
            raise LeaseExpiredError("the session of the lease has ended")
        self.until = renew(conn, self._ids, seconds, time.monotonic() + timeout)

    def release(self) -> None:
        """Gives the blocks free. Twice is harmless."""
        conn, self._conn = self._conn, None
        if conn is not None and conn.error is None:
            for id in self._ids:
                conn.release_later(id)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def renew(conn: Connection, ids: Sequence[int], seconds: float, deadline: float) -> float:
    """Renews leases of a session, and returns until when they run."""
    if not seconds > 0:
        raise InvalidError(f"seconds: {seconds}")
    ms = millis(seconds)
    now = time.monotonic()
    try:
        statuses = conn.decode(wire.read_statuses, conn.trip(wire.RENEW, wire.renew(ms, ids), deadline))
    except DisconnectedError as e:
        raise LeaseExpiredError(f"the session of the lease has ended: {e}") from e
    conn.check_count(len(statuses), len(ids))
    for status in statuses:
        if status == Status.LEASE_EXPIRED:
            raise LeaseExpiredError("no such lease")
        if status:
            raise error_of(status, f"renew a lease for {seconds} s")
    return now + ms / 1000


class Loan:
    """Blocks that are lent to be read where they lie.

    views: a read-only memoryview of each block, None for what is not there.
    results: for each key what a get would say; `results[i].reason` says why a view is None.

    The views may be read until the loan ends: by release, when its time is over
    (`until`), or with the session. After that their bytes may be other blocks'. A loan
    that is dropped is released; if arrays were made of its views its time runs out.
    """

    def __init__(
        self,
        conn: Optional[Connection],
        lease: int,
        until: float,
        views: List[Optional[memoryview]],
        results: List[GetResult],
    ) -> None:
        self._conn = conn
        self._lease = lease
        self.until = until
        self.views = views
        self.results = results

    @property
    def alive(self) -> bool:
        """Whether the views may be read, as far as this side knows."""
        conn = self._conn
        return conn is not None and conn.error is None and time.monotonic() < self.until

    def renew(self, seconds: float, timeout: float = 10.0) -> None:
        """Lets it run for so many seconds from now. LeaseExpiredError when it has ended,
        DeadlineError without an answer."""
        conn = self._conn
        if conn is None or conn.error is not None:
            raise LeaseExpiredError("the loan has ended")
        self.until = renew(conn, [self._lease], seconds, time.monotonic() + timeout)

    def release(self) -> None:
        """Ends the loan. The views are released, unless something else was made of them
        (an array, say), which must not be read any more. Twice is harmless."""
        self._release_views()
        self._give_back()

    def _release_views(self) -> bool:
        """Whether nobody can read there any more."""
        quiet = True
        for v in self.views:
            if v is not None:
                try:
                    v.release()
                except BufferError:
                    quiet = False  # its user was told
        self.views = [None] * len(self.views)
        return quiet

    def _give_back(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None and conn.error is None:
            conn.release_later(self._lease)

    def __enter__(self) -> "Loan":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._release_views():
            self._give_back()


class Reservation:
    """A place for a block that is written where it will lie.

    buffer: writable, of the size that was reserved. Where the store's memory is not
        shared it is memory of this process.
    """

    def __init__(self, h: "Handle", place: "Place", size: int) -> None:
        self._conn = h.conn
        self._ns = h.id
        self._place: Optional["Place"] = place
        self.size = size
        self.buffer = memoryview(bytearray(size)) if place.memory is None else place.memory[:size]

    def __repr__(self) -> str:
        return f"<kvtier.Reservation of {self.size} bytes{'' if self._place is not None else ', over'}>"

    @property
    def in_place(self) -> bool:
        """Whether the buffer lies in the store's memory."""
        return self._place is not None and self._place.memory is not None

    def _check(self, i: int, h: "Optional[Handle]") -> None:
        """Refuses what cannot be committed in a namespace."""
        if self._place is None:
            raise InvalidError(f"reservation {i} was committed or aborted")
        if h is not None and h.conn is self._conn and h.id != self._ns:
            raise InvalidError(f"reservation {i} is of another namespace")

    def _take(self) -> "Optional[Taken]":
        """What is to be committed; None when another thread was faster."""
        place, self._place = self._place, None
        return None if place is None else (self._conn, place, self.buffer)

    def _let_go(self) -> None:
        """Makes an end of the buffer: nothing is to be written there any more."""
        try:
            self.buffer.release()
        except BufferError:
            pass  # something else was made of it, whose user was told

    def abort(self) -> None:
        """Gives the place back; the buffer must not be written to any more. Harmless when
        it was committed or aborted."""
        place, self._place = self._place, None
        if place is not None:
            self._let_go()
            self._conn.places.used([place], [True])

    def __del__(self) -> None:
        try:
            self.abort()
        except (Error, AttributeError):
            pass  # it was never whole, or its session is over


# A reservation that is being committed: its session, place and bytes.
Taken = Tuple[Connection, "Place", memoryview]


def take_all(reservations: Sequence[Reservation]) -> List[Taken]:
    """Takes reservations to be committed, all of them or none."""
    taken: List[Taken] = []
    for i, r in enumerate(reservations):
        one = r._take()
        if one is None:
            for before, (_, place, _) in zip(reservations, taken):
                before._place = place
            raise InvalidError(f"reservation {i} was committed or aborted")
        taken.append(one)
    return taken
