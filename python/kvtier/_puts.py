"""Puts of one session, whichever way the bytes go."""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, List, NamedTuple, Optional, Sequence, Tuple

from xxhash import xxh3_128

from . import _wire as wire
from ._buffers import STEP, copy_sum, sum_of
from ._calls import Call, Cancel
from ._connection import Connection
from ._errors import Error, InvalidError, LeaseExpiredError, NoSpaceError, Status, bare, error_of
from ._outbox import Buffer
from ._places import Place, millis_left
from ._results import PutResult, Tier
from ._transfer import Handle, Moved, keys_of

# Bytes that one message commits, as a rule: the daemon hashes them while the next are copied.
_WINDOW = 4 << 20
# Bytes that the last one of several commits: while the daemon hashes those nothing is copied.
_LAST_WINDOW = 1 << 20
_AHEAD = 2  # such messages that are not answered while more is copied
_SEND_AHEAD = 2 * wire.MAX_DATA  # bytes that are queued before they are sent

_STORED = PutResult(True, False, None)
_EXISTED = PutResult(False, True, None)

# Of a block that lies in its place: grant, length and checksum.
Item = Tuple[int, int, bytes]


class PutOptions(NamedTuple):
    durable: int  # tier
    ttl_ms: int


def put(
    h: Handle,
    hashes: Sequence[bytes],
    views: Sequence[memoryview],
    parents: Optional[Sequence[Optional[bytes]]],
    options: PutOptions,
    deadline: float,
    out: List[Optional[PutResult]],
    moved: Moved,
    cancel: Optional[Cancel] = None,
) -> None:
    """Puts blocks and sets the results in out, a window at a time."""
    with h.conn.in_flight(0, deadline, cancel):
        _Put(h, hashes, views, parents, options, deadline, out, moved, cancel).run()


class _Window:
    """Blocks that lie in places, and the call that commits them."""

    __slots__ = ("at", "places", "call")

    def __init__(self, at: int, places: Sequence[Place], call: Call) -> None:
        self.at = at  # of the first one's key
        self.places = places
        self.call = call


class _Put:
    """A put under way."""

    def __init__(
        self,
        h: Handle,
        hashes: Sequence[bytes],
        views: Sequence[memoryview],
        parents: Optional[Sequence[Optional[bytes]]],
        options: PutOptions,
        deadline: float,
        out: List[Optional[PutResult]],
        moved: Moved,
        cancel: Optional[Cancel],
    ) -> None:
        self.h = h
        self.hashes = hashes
        self.views = views
        self.parents = parents
        self.options = options
        self.deadline = deadline
        self.out = out
        self.moved = moved
        self.cancel = cancel
        self.idle: List[Place] = []  # for the next windows
        self.waiting: Deque[_Window] = deque()  # that are committed, and not answered
        self.expired: List[int] = []  # keys whose places ran out

    def run(self) -> None:
        try:
            self._all(0, len(self.hashes), False)
            # A place may run out between its grant and the commit: once more with a new one.
            expired, self.expired = self.expired, []
            for i in expired:
                self._all(i, i + 1, True)
        except BaseException as e:
            if not isinstance(e, Error):
                self.h.conn.interrupted(e)
            self._give_up()
            raise

    def _all(self, at: int, end: int, fresh: bool) -> None:
        """Puts the keys from at to end."""
        while at < end:
            if self.cancel is not None:
                self.cancel.check()
            try:
                places = self._obtain(at, end, fresh)
            except (NoSpaceError, InvalidError) as e:
                self.out[at] = PutResult(False, False, bare(e))
                at += 1
                continue
            n = len(places)
            self._write(at, places, at + n == end)
            at += n
        while self.waiting:
            self._settle()

    def _obtain(self, at: int, end: int, fresh: bool) -> List[Place]:
        """Places for keys from at on, at least for one."""
        h = self.h
        sizes = [len(v) for v in self.views[at:end]]
        if self.waiting:
            # Its own places are free only when it has looked at the answers.
            try:
                return h.conn.places.obtain(h.id, h.tag, sizes, self.deadline, fresh, self.cancel, may_wait=False)
            except (NoSpaceError, InvalidError):
                while self.waiting:
                    self._settle()
        return h.conn.places.obtain(h.id, h.tag, sizes, self.deadline, fresh, self.cancel)

    def _write(self, at: int, places: List[Place], last: bool) -> None:
        """Brings blocks into their places and commits them. last: nothing comes behind them."""
        conn = self.h.conn
        self.idle = places
        regrant = conn.places.expected(self.h.id, len(self.views[at]))
        while self.idle:
            some = self.idle[: self._window(at, last)]
            end = at + len(some)
            # What is sent may have to wait for somebody to read.
            with conn.leading(bool(self.waiting) and all([p.memory is not None for p in some])) as look:
                items = bring(conn, some, self.views[at:end], self.deadline, self.moved, self.cancel, look)
            parents = None if self.parents is None else self.parents[at:end]
            message = put_message(self.h, items, self.hashes[at:end], parents, self.options, regrant, self.deadline)
            if (last and len(some) == len(self.idle)) or self.options.durable == Tier.NVME:
                # Nothing is left to be copied meanwhile, or the medium takes longer.
                reply = conn.trip(wire.PUT, message, self.deadline, cancel=self.cancel)
                del self.idle[: len(some)]
                self._done(at, some, reply)
            else:
                call = Call(wire.REPLY[wire.PUT])
                conn.begin(call)
                self.waiting.append(_Window(at, some, call))
                del self.idle[: len(some)]
                conn.send([wire.message(wire.PUT, call.id, message)], self.deadline)
            at = end
            while self.waiting and (len(self.waiting) > _AHEAD or self.waiting[0].call.done):
                self._settle()

    def _window(self, at: int, last: bool) -> int:
        """How many of the idle places one message commits."""
        if self.options.durable == Tier.NVME:
            return len(self.idle)
        sizes = [len(v) for v in self.views[at : at + len(self.idle)]]
        n = _fitting(sizes, _WINDOW)
        if last and n == len(sizes):
            # The end of what was in one message: some of it is left for another.
            n -= _fitting(sizes[:0:-1], _LAST_WINDOW) if sum(sizes) > 2 * _LAST_WINDOW else 0
        return n

    def _settle(self) -> None:
        """Waits for the oldest answer."""
        w = self.waiting[0]
        conn = self.h.conn
        if self.cancel is not None:
            self.cancel.enter(conn, w.call)
        try:
            reply = conn.wait(w.call, self.deadline)
        finally:
            if self.cancel is not None:
                self.cancel.leave()
        self.waiting.popleft()
        self._done(w.at, w.places, reply)

    def _done(self, at: int, places: Sequence[Place], reply: bytes) -> None:
        for i, r in enumerate(committed(self.h, places, reply), at):
            self.out[i] = r
            if isinstance(r.error, LeaseExpiredError):
                self.expired.append(i)

    def _give_up(self) -> None:
        """Lets go of what is not answered, and of places that nothing was put to."""
        conn = self.h.conn
        finish(conn, self.idle, None)
        self.idle = []
        while self.waiting:
            w = self.waiting.popleft()
            if conn.abandon(w.call):
                conn.cancel_later(w.call.id)
            elif w.call.error is None:
                try:
                    self._done(w.at, w.places, w.call.payload)
                except Error:
                    pass  # the session has ended, which is told of already
                continue
            finish(conn, w.places, None)


def _fitting(sizes: Sequence[int], most: int) -> int:
    """How many of the first sizes are together at most so many bytes, at least one."""
    n, total = min(1, len(sizes)), sum(sizes[:1])
    while n < len(sizes) and total + sizes[n] <= most:
        total += sizes[n]
        n += 1
    return n


def bring(
    conn: Connection,
    places: Sequence[Place],
    views: Sequence[memoryview],
    deadline: float,
    moved: Moved,
    cancel: Optional[Cancel],
    look: Callable[[], None] = lambda: None,
) -> List[Item]:
    """Brings bytes into their places. look is called behind each that is copied."""
    items: List[Item] = []
    queue: List[Buffer] = []
    queued = 0
    for place, view in zip(places, views):
        if cancel is not None:
            cancel.check()
        n = len(view)
        moved.bytes += n
        if place.memory is not None:
            items.append((place.id, n, copy_sum(place.memory[:n], view)))
            moved.in_place += 1
            look()
            continue
        hasher = xxh3_128()
        for offset in range(0, n, STEP):
            part = view[offset : offset + STEP]
            hasher.update(part)
            queue.append(wire.header(wire.DATA, len(part), token=place.id, offset=offset))
            queue.append(part)
            queued += len(part)
            if queued >= _SEND_AHEAD:
                conn.send(queue, deadline)
                queue, queued = [], 0
        items.append((place.id, n, hasher.digest()))
    if queue:
        conn.send(queue, deadline)
    return items


def seal(conn: Connection, place: Place, buffer: memoryview, deadline: float, cancel: Optional[Cancel]) -> Item:
    """Brings a reservation's bytes to the server, where it does not see them."""
    if place.memory is not None:
        return place.id, len(buffer), sum_of(buffer)
    return bring(conn, [place], [buffer], deadline, Moved(), cancel)[0]


def put_message(
    h: Handle,
    items: Sequence[Item],
    hashes: Sequence[bytes],
    parents: Optional[Sequence[Optional[bytes]]],
    options: PutOptions,
    regrant: bool,
    deadline: float,
) -> bytes:
    """The message that makes blocks of what lies in places."""
    none = bytes(len(hashes[0]))
    some = parents is not None and any(parents)
    has = [p is not None for p in parents] if parents is not None and some else [False] * len(hashes)
    return wire.put(
        keys_of(h, hashes),
        wire.FLAG_REGRANT if regrant else 0,
        millis_left(deadline),
        options.durable,
        options.ttl_ms,
        [(grant, n, has_parent, sum_) for (grant, n, sum_), has_parent in zip(items, has)],
        [p or none for p in parents] if parents is not None and some else (),
    )


def commit(
    h: Handle,
    places: Sequence[Place],
    items: Sequence[Item],
    hashes: Sequence[bytes],
    parents: Optional[Sequence[Optional[bytes]]],
    options: PutOptions,
    deadline: float,
    cancel: Optional[Cancel],
) -> List[PutResult]:
    """Makes blocks of what lies in places. They are used up, whatever comes of it."""
    message = put_message(h, items, hashes, parents, options, False, deadline)
    try:
        reply = h.conn.trip(wire.PUT, message, deadline, cancel=cancel)
    except BaseException:
        finish(h.conn, places, None)
        raise
    return committed(h, places, reply)


def committed(h: Handle, places: Sequence[Place], reply: bytes) -> List[PutResult]:
    """The results of a message that committed places, which are used up."""
    conn = h.conn
    try:
        done = conn.decode(wire.read_put_done, reply)
        if len(done.keys) != len(places):
            raise conn.give_up(f"the daemon answered {len(done.keys)} keys of a put of {len(places)}")
    except BaseException:
        finish(conn, places, None)
        raise
    finish(conn, places, done)
    conn.places.keep(conn.places.adopt(h.id, done.granted), new=True)
    return [put_result(k) for k in done.keys]


def finish(conn: Connection, places: Sequence[Place], done: Optional[wire.PutDone]) -> None:
    """Places were used up, if the server has taken the commit. If not it has them back, as
    where this side wrote into one that was revoked meanwhile."""
    if done is None:
        kept = [True] * len(places)
    else:
        kept = [k.status in (Status.BUSY, Status.LEASE_EXPIRED) for k in done.keys]
    conn.places.used(places, kept)


def put_result(k: wire.PutKey) -> PutResult:
    if k.status != 0:
        return PutResult(False, False, error_of(k.status, k.text))
    return _EXISTED if k.existed else _STORED
