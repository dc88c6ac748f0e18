"""The places in the store that a session may write puts to, asked for ahead."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, List, Optional, Sequence, Set, Tuple, cast

from . import _wire as wire
from ._calls import LOOK_UP
from ._errors import BusyError, DeadlineError, InvalidError, NoSpaceError
from ._waiting import Waiters

if TYPE_CHECKING:
    from ._calls import Cancel
    from ._connection import Connection

_IDLE = 1.0  # seconds that a place waits for a put, and after a put another is expected
_BUSY_FIRST = 0.001
_BUSY_TRIES = 10
_WINDOW = 16 << 20  # bytes that one message commits, as a rule


class Place:
    """A place for a block. `memory` is None when its bytes are to be sent."""

    __slots__ = ("id", "ns", "size", "memory", "until", "since")

    def __init__(self, id: int, ns: int, size: int, memory: Optional[memoryview], until: float) -> None:
        self.id = id
        self.ns = ns
        self.size = size
        self.memory = memory
        self.until = until
        self.since = 0.0


def _fits(size: int, n: int) -> bool:
    return n <= size <= n + n // 4 + 4096


def _size_class(n: int) -> int:
    """The same for payloads that share a size of place: it rises by an eighth."""
    unit = 4096
    while unit * 16 < n:
        unit *= 2
    return -(-n // unit) * unit


class Places:
    """What one session has been granted, and how much more it may ask for."""

    def __init__(self, conn: "Connection") -> None:
        self._conn = conn
        self.most = conn.welcome.grants
        self.most_bytes = conn.welcome.grant_bytes
        self._lock = threading.RLock()  # __del__ takes it anywhere
        self._waiters = Waiters()
        self._idle: List[Place] = []
        self._count = 0  # asked for, idle and in use
        self._bytes = 0
        self._revoked: Set[int] = set()
        self._last: Tuple[int, int, float] = (0, 0, -_IDLE)  # put: namespace, size, when

    # From the reader and the I/O thread

    def revoke(self, grants: Sequence[int]) -> None:
        """The server takes places back. Those that nobody writes to it gets now."""
        for id in grants:
            with self._lock:
                quiet = True
                for i, place in enumerate(self._idle):
                    if place.id == id:
                        self._drop(i)
                        self._waiters.tell()
                        break
                else:
                    if self._count > 0:
                        self._revoked.add(id)
                        quiet = False
            if quiet and self._conn.passed:
                self._conn.give_back_later(id)

    def expire(self, now: float) -> float:
        """Gives back what was idle for long, and says after how many seconds to look again."""
        gone: List[int] = []
        with self._lock:
            for i in range(len(self._idle) - 1, -1, -1):
                place = self._idle[i]
                if now >= place.until or now - place.since >= _IDLE:
                    gone.append(place.id)
                    self._drop(i)
            if gone:
                self._waiters.tell()
            left = len(self._idle)
        for id in gone:
            self._conn.give_back_later(id)
        return _IDLE / 2 if left else 3600.0

    def end(self) -> List[int]:
        """The session has ended: returns what was idle."""
        with self._lock:
            ids = [p.id for p in self._idle]
            self._idle = []
            self._waiters.tell()
        return ids

    # From puts

    def _drop(self, i: int) -> Place:
        """Takes an idle place out and its bytes off. Needs the lock."""
        place = self._idle.pop(i)
        self._count -= 1
        self._bytes -= place.size
        return place

    def _take(self, ns: int, n: int, now: float) -> Optional[Place]:
        """Takes an idle place for n bytes. Needs the lock."""
        for i in range(len(self._idle) - 1, -1, -1):
            place = self._idle[i]
            if place.ns == ns and _fits(place.size, n) and now < place.until:
                return self._idle.pop(i)
        return None

    def keep(self, places: Sequence[Place], new: bool = False) -> None:
        """Keeps places for the next put. new: they were not counted yet."""
        if not places:
            return
        now = time.monotonic()
        with self._lock:
            if new:
                self._count += len(places)
                self._bytes += sum([p.size for p in places])
            if self._conn.error is None:
                for place in places:
                    place.since = now
                    self._idle.append(place)
                places = ()
            self._waiters.tell()
        if places:  # the session has ended
            for place in places:
                self._conn.give_back_later(place.id)
        else:
            self._conn.look_by(now + _IDLE)

    def counted(self, n: int, size: int) -> None:
        """Changes how many places there are."""
        with self._lock:
            self._count += n
            self._bytes += size
            if self._count == 0:
                self._revoked.clear()
            self._waiters.tell()

    def used(self, places: Sequence[Place], kept: Sequence[bool]) -> None:
        """Places were used. Those that the server still has it is told of, or waits to hear
        that nobody writes there."""
        with self._lock:
            told = [p.id for p, k in zip(places, kept) if k or p.id in self._revoked]
            self._revoked.difference_update(told)
            self._count -= len(places)
            self._bytes -= sum([p.size for p in places])
            if self._count == 0:
                self._revoked.clear()
            self._waiters.tell()
        for id in told:
            self._conn.give_back_later(id)

    def expected(self, ns: int, size: int) -> bool:
        """Notes a put, and says whether one like it was just before."""
        now = time.monotonic()
        with self._lock:
            last_ns, last_size, at = self._last
            self._last = (ns, size, now)
        return last_ns == ns and _fits(max(last_size, size), min(last_size, size)) and now - at < _IDLE

    def _spare(self, size: int, want: int) -> int:
        return max(0, min(want, self.most - self._count, (self.most_bytes - self._bytes) // size))

    def _room(self, size: int, want: int, wait: bool, deadline: float, cancel: Optional["Cancel"]) -> int:
        """Counts up to `want` places as asked for. Idle ones of other kinds go for it."""
        gone: List[int] = []
        try:
            while True:
                with self._lock:
                    n = self._spare(size, want)
                    while n < want and self._idle:
                        gone.append(self._drop(0).id)
                        n = self._spare(size, want)
                    if n == 0 and self._count == 0:
                        n = 1  # more than the session may have: let the server say so
                    if n > 0:
                        self._count += n
                        self._bytes += n * size
                        return n
                    if self._conn.error is not None:
                        raise self._conn.lost()
                    if not wait:
                        return 0
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise DeadlineError("no place for a put in time")
                    if cancel is not None:
                        cancel.check()
                    turn = self._waiters.turn()
                self._waiters.wait(turn, min(left, LOOK_UP))
        finally:
            for id in gone:
                self._conn.give_back_later(id)

    def adopt(self, ns: int, granted: wire.Granted) -> List[Place]:
        """Places that the server granted."""
        ttl = granted.ttl_ms / 1000
        until = time.monotonic() + ttl - min(ttl / 8, 1.0)
        out = []
        for p in granted.places:
            if not 0 < p.size <= wire.MAX_BLOCK:
                raise self._conn.give_up(f"the daemon granted a place of {p.size} bytes")
            memory = None
            if p.chunk != wire.NO_CHUNK and self._conn.memory is not None:
                memory = self._conn.at(p.chunk, p.offset, p.size)
                if memory is not None and memory.readonly:
                    raise self._conn.give_up(f"the daemon granted a place in chunk {p.chunk}, which it passed for reading")
            out.append(Place(p.grant, ns, p.size, memory, until))
        return out

    def _ask_once(
        self, ns: int, tag: int, size: int, want: int, wait: bool, deadline: float, cancel: Optional["Cancel"]
    ) -> List[Place]:
        want = self._room(size, want, wait, deadline, cancel)
        if want == 0:
            return []
        places: List[Place] = []
        try:
            message = wire.grant(ns, tag, size, want, millis_left(deadline))
            reply = self._conn.trip(wire.GRANT, message, deadline, cancel=cancel)
            places = self.adopt(ns, self._conn.decode(wire.read_granted, reply))
            if len(places) > want or any(p.size < size for p in places):
                places = []
                raise self._conn.give_up(f"the daemon granted not what was asked for: {want} places of {size} bytes")
            return places
        finally:
            self.counted(len(places) - want, sum(p.size for p in places) - want * size)

    def ask(
        self, ns: int, tag: int, size: int, want: int, wait: bool, deadline: float, cancel: Optional["Cancel"] = None
    ) -> List[Place]:
        """Asks for places. The server may not have heard yet of those given back for them:
        then it asks again."""
        pause = _BUSY_FIRST
        for tries in range(_BUSY_TRIES):
            try:
                return self._ask_once(ns, tag, size, want, wait, deadline, cancel)
            except BusyError:
                if not wait:
                    return []
                if tries == _BUSY_TRIES - 1 or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def obtain(
        self,
        ns: int,
        tag: int,
        sizes: Sequence[int],
        deadline: float,
        fresh: bool,
        cancel: Optional["Cancel"],
        may_wait: bool = True,
    ) -> List[Place]:
        """Places for the first of the sizes, at least for one. NoSpaceError and
        InvalidError are about that. fresh: only new ones."""
        now = time.monotonic()
        found: List[Optional[Place]] = []
        total = 0
        with self._lock:
            for i, n in enumerate(sizes[: min(self._conn.keys, self.most)]):
                total += n
                if i > 0 and total > _WINDOW:
                    break
                found.append(None if fresh else self._take(ns, n, now))
        if None not in found:
            return cast("List[Place]", found)
        try:
            self._fill(found, ns, tag, sizes, deadline, cancel, may_wait)
        except BaseException as e:
            if found[0] is None or not isinstance(e, (NoSpaceError, InvalidError, BusyError)):
                self.keep([p for p in found if p is not None])
                raise
        first = next((i for i, p in enumerate(found) if p is None), len(found))
        self.keep([p for p in found[first:] if p is not None])
        del found[first:]
        if not found:
            raise NoSpaceError("no place was granted")
        return [p for p in found if p is not None]

    def _fill(
        self,
        found: List[Optional[Place]],
        ns: int,
        tag: int,
        sizes: Sequence[int],
        deadline: float,
        cancel: Optional["Cancel"],
        may_wait: bool,
    ) -> None:
        for i in range(len(found)):
            if found[i] is not None:
                continue
            alone = may_wait and all(p is None for p in found)
            if not self._ask_for(found, i, ns, tag, sizes, alone, deadline, cancel) and i == 0 and may_wait:
                # Who waits for a place holds none, or two would wait for each other.
                self.keep([p for p in found if p is not None])
                found[:] = [None] * len(found)
                self._ask_for(found, i, ns, tag, sizes, True, deadline, cancel)
            if found[i] is None:
                return

    def _ask_for(
        self,
        found: List[Optional[Place]],
        i: int,
        ns: int,
        tag: int,
        sizes: Sequence[int],
        wait: bool,
        deadline: float,
        cancel: Optional["Cancel"],
    ) -> bool:
        """Asks for places for size i and those of about it behind it that have none."""
        cls = _size_class(sizes[i])
        alike = [j for j in range(i, len(found)) if found[j] is None and _size_class(sizes[j]) == cls]
        size = max(sizes[j] for j in alike)
        try:
            places = self.ask(ns, tag, size, len(alike), wait, deadline, cancel)
        except InvalidError:
            if size == sizes[i]:
                raise
            places = self.ask(ns, tag, sizes[i], 1, wait, deadline, cancel)  # another one may be too long
        used = 0
        for j in alike:
            if used < len(places) and sizes[j] <= places[used].size:
                found[j] = places[used]
                used += 1
        self.keep(places[used:])
        return used > 0


def millis(seconds: float) -> int:
    """How long a lease runs, as messages tell it."""
    return max(1, int(min(seconds, 4e6) * 1000))


def millis_left(deadline: float) -> int:
    """A deadline as messages tell it."""
    return max(1, min(0xFFFFFFFF, int((deadline - time.monotonic()) * 1000 + 0.999)))
