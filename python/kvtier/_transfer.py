"""Gets and puts of one session, whichever way the bytes go."""

from __future__ import annotations

import time
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from xxhash import xxh3_128, xxh3_128_digest

from . import _wire as wire
from ._buffers import STEP, copy_sum, sum_of
from ._calls import Call, Cancel
from ._connection import Connection
from ._errors import InvalidError, LeaseExpiredError, NoSpaceError, Status, bare, error_of, status_of
from ._loans import Loan
from ._outbox import Buffer
from ._places import Place, millis_left
from ._results import GetResult, PutResult, Tier, reason_name, tier_of

_SEND_AHEAD = 2 * wire.MAX_DATA  # bytes that are queued before they are sent
_MESSAGE_ROOM = 900_000  # bytes of a message's body, as a rule
_MESSAGE_HEAD = 64  # and what it has beside that
_NO_ROOM = GetResult(Status.OK, "no_room", Tier.NONE, 0, 0)
_BUSY = GetResult(Status.BUSY, "unavailable", Tier.NONE, 0, 0)


class Handle(NamedTuple):
    """A namespace as one session names it."""

    conn: Connection
    id: int
    tag: int


class Moved:
    """What a transfer counts."""

    __slots__ = ("in_place", "bytes")

    def __init__(self) -> None:
        self.in_place = 0
        self.bytes = 0


class _Get(Call):
    """A get whose bytes are sent: they land in the callers' buffers."""

    __slots__ = ("views", "counts", "digests", "hashers")
    lands = True

    def __init__(self, views: Sequence[memoryview]) -> None:
        super().__init__(wire.GOT)
        self.views = views
        self.counts = [0] * len(views)
        self.digests: List[Optional[bytes]] = [None] * len(views)
        self.hashers: List[Any] = [None] * len(views)

    def land(self, token: int, offset: int, length: int) -> Optional[memoryview]:
        if token >= len(self.views):
            return None
        view = self.views[token]
        # Data comes in order. What does not is not taken, and so missed at the end.
        if offset != self.counts[token] or offset + length > len(view):
            return None
        return view[offset : offset + length]

    def landed(self, token: int, offset: int, length: int) -> None:
        view = self.views[token]
        self.counts[token] = offset + length
        part = view[offset : offset + length]
        hasher = self.hashers[token]
        if hasher is None:
            if offset == 0 and (length < wire.MAX_DATA or length == len(view)):
                self.digests[token] = xxh3_128_digest(part)
                return
            # What came before, if anything, was taken for all of it.
            hasher = self.hashers[token] = xxh3_128(view[:offset])
        hasher.update(part)

    def sum(self, i: int) -> Optional[bytes]:
        hasher = self.hashers[i]
        return self.digests[i] if hasher is None else hasher.digest()


def get(
    h: Handle,
    hashes: Sequence[bytes],
    views: Sequence[memoryview],
    deadline: float,
    no_promote: bool,
    out: List[Optional[GetResult]],
    moved: Moved,
    cancel: Optional[Cancel] = None,
) -> None:
    """Gets blocks into views and sets the results in out, a window at a time."""
    conn = h.conn
    in_place = conn.memory is not None and not no_promote
    flags = wire.FLAG_NO_PROMOTE if no_promote else 0
    at = 0
    while at < len(hashes):
        n, total = 0, 0
        while at + n < len(hashes) and n < conn.keys:
            size = min(len(views[at + n]), wire.MAX_BLOCK)
            if n and total + size > conn.budget.most_bytes:
                break
            total += size
            n += 1
        index = list(range(at, at + n))
        taken = conn.budget.take(total, deadline, cancel)
        try:
            if in_place:
                index = _get_in_place(h, index, hashes, views, deadline, out, moved, cancel)
            if index:
                _get_sent(h, index, hashes, views, deadline, flags, out, moved, cancel)
        finally:
            conn.budget.give(taken)
        at += n


def _keys(h: Handle, hashes: Sequence[bytes]) -> wire.Keys:
    return wire.Keys(h.id, h.tag, len(hashes[0]), hashes)


def _got(h: Handle, reply: bytes, n: int) -> wire.Got:
    got = h.conn.decode(wire.read_got, reply)
    if len(got.keys) != n:
        h.conn.release_later(got.lease)
        raise h.conn.give_up(f"the daemon answered {len(got.keys)} keys of a get of {n}")
    return got


def _outcome(k: wire.GotKey, room: int) -> GetResult:
    """The result of a key as far as the server decides it."""
    tier = tier_of(k.tier)
    if k.status == 0 and k.reason == wire.HIT and k.length <= room:
        return GetResult(Status.OK, "hit", tier, k.length, k.total)
    if k.status != 0:
        status = status_of(k.status)
        return GetResult(status, "unavailable", tier, 0, k.total)
    if k.reason != wire.HIT:
        return GetResult(Status.OK, reason_name(k.reason), tier, 0, k.total)
    return GetResult(Status.INVALID, "unavailable", tier, 0, k.total)


def _corrupt(r: GetResult) -> GetResult:
    return GetResult(Status.OK, "corrupt", r.tier, 0, r.total)


def _get_in_place(
    h: Handle,
    index: List[int],
    hashes: Sequence[bytes],
    views: Sequence[memoryview],
    deadline: float,
    out: List[Optional[GetResult]],
    moved: Moved,
    cancel: Optional[Cancel],
) -> List[int]:
    """Copies what the server lends, and returns the keys that it must send."""
    conn = h.conn
    began = time.monotonic()
    keys = _keys(h, [hashes[i] for i in index])
    message = wire.get(keys, wire.FLAG_IN_PLACE, millis_left(deadline))
    got = _got(h, conn.trip(wire.GET, message, deadline, cancel=cancel), len(index))
    rest: List[int] = []
    lent: List[int] = []
    try:
        for i, k in zip(index, got.keys):
            if cancel is not None:
                cancel.check()
            r = _outcome(k, len(views[i]))
            if r.hit:
                if k.chunk == wire.NO_CHUNK or k.length != k.total:
                    raise conn.give_up(f"the daemon lent {k.length} of {k.total} bytes in no place")
                src = conn.at(k.chunk, k.offset, k.length)
                if copy_sum(views[i][: k.length], src) != k.sum:
                    r = _corrupt(r)
                else:
                    lent.append(i)
            elif k.status == 0 and k.reason == wire.REASON_NO_ROOM:
                rest.append(i)
            out[i] = r
    finally:
        conn.release_later(got.lease)
    if got.lease and time.monotonic() - began >= got.lease_ms / 1000:
        # The memory may have been given to others while it was read: this process was
        # stopped, say.
        for i in lent:
            out[i] = _NO_ROOM
        return rest
    moved.in_place += len(lent)
    moved.bytes += sum(r.length for r in (out[i] for i in lent) if r is not None)
    return rest


def _get_sent(
    h: Handle,
    index: List[int],
    hashes: Sequence[bytes],
    views: Sequence[memoryview],
    deadline: float,
    flags: int,
    out: List[Optional[GetResult]],
    moved: Moved,
    cancel: Optional[Cancel],
) -> None:
    conn = h.conn
    call = _Get([views[i] for i in index])
    message = wire.get(_keys(h, [hashes[i] for i in index]), flags, millis_left(deadline))
    got = _got(h, conn.trip(wire.GET, message, deadline, call, cancel), len(index))
    for j, (i, k) in enumerate(zip(index, got.keys)):
        r = _outcome(k, len(views[i]))
        if r.hit:
            if k.length != k.total or call.counts[j] != k.length:
                raise conn.give_up(f"the daemon sent {call.counts[j]} of {k.length} bytes of a block of {k.total}")
            if call.sum(j) != k.sum:
                r = _corrupt(r)
            else:
                moved.bytes += k.length
        out[i] = r


def lend(
    h: Handle,
    hashes: Sequence[bytes],
    seconds: float,
    verify: bool,
    deadline: float,
    cancel: Optional[Cancel] = None,
) -> Loan:
    """Lends blocks where they lie, in one message; those that it cannot name are busy."""
    conn = h.conn
    began = time.monotonic()
    named = hashes[: conn.keys]
    message = wire.get(_keys(h, named), wire.FLAG_IN_PLACE, millis_left(deadline))
    got = _got(h, conn.trip(wire.GET, message, deadline, cancel=cancel), len(named))
    views: List[Optional[memoryview]] = []
    results: List[GetResult] = []
    loan = Loan(conn, got.lease, began + got.lease_ms / 1000, views, results)
    there = 0
    for k in got.keys:
        r = _outcome(k, wire.MAX_BLOCK)
        view = None
        if r.hit:
            view = conn.at(k.chunk, k.offset, k.length).toreadonly()
            if verify and sum_of(view) != k.sum:
                r, view = _corrupt(r), None
        there += view is not None
        results.append(r)
        views.append(view)
    for _ in range(len(hashes) - len(named)):
        results.append(_BUSY)
        views.append(None)
    if there == 0:
        loan.release()
    elif seconds * 1000 > got.lease_ms:
        loan.renew(seconds, max(0.001, deadline - time.monotonic()))
    return loan


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
    """Puts blocks, as many in one message as there are places for."""
    at = 0
    taken = h.conn.budget.take(0, deadline, cancel)
    try:
        while at < len(hashes):
            if cancel is not None:
                cancel.check()
            n = _put_some(h, at, len(hashes), hashes, views, parents, options, deadline, out, moved, cancel, False)
            for i in range(at, at + n):
                r = out[i]
                # A place may run out between its grant and the commit: once more with a new one.
                if r is not None and isinstance(r.error, LeaseExpiredError):
                    _put_some(h, i, i + 1, hashes, views, parents, options, deadline, out, moved, cancel, True)
            at += n
    finally:
        h.conn.budget.give(taken)


def _put_some(
    h: Handle,
    at: int,
    end: int,
    hashes: Sequence[bytes],
    views: Sequence[memoryview],
    parents: Optional[Sequence[Optional[bytes]]],
    options: PutOptions,
    deadline: float,
    out: List[Optional[PutResult]],
    moved: Moved,
    cancel: Optional[Cancel],
    fresh: bool,
) -> int:
    conn = h.conn
    sizes = [len(v) for v in views[at:end]]
    try:
        places = conn.places.obtain(h.id, h.tag, sizes, deadline, fresh, cancel)
    except (NoSpaceError, InvalidError) as e:
        out[at] = PutResult(False, False, bare(e))
        return 1
    n = len(places)
    try:
        items = _bring(conn, places, views[at : at + n], deadline, moved, cancel)
    except BaseException:
        finish(conn, places, None)
        raise
    regrant = conn.places.expected(h.id, sizes[0])
    some_parents = None if parents is None else parents[at : at + n]
    results = commit(h, places, items, hashes[at : at + n], some_parents, options, regrant, deadline, cancel)
    out[at : at + n] = results
    return n


def _bring(
    conn: Connection,
    places: Sequence[Place],
    views: Sequence[memoryview],
    deadline: float,
    moved: Moved,
    cancel: Optional[Cancel],
) -> List[Tuple[int, int, bytes]]:
    """Brings bytes into their places: grant, length and checksum of each."""
    items: List[Tuple[int, int, bytes]] = []
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


def commit(
    h: Handle,
    places: Sequence[Place],
    items: Sequence[Tuple[int, int, bytes]],
    hashes: Sequence[bytes],
    parents: Optional[Sequence[Optional[bytes]]],
    options: PutOptions,
    regrant: bool,
    deadline: float,
    cancel: Optional[Cancel] = None,
) -> List[PutResult]:
    """Makes blocks of what lies in places. They are used up, whatever comes of it."""
    conn = h.conn
    none = bytes(len(hashes[0]))
    has = [p is not None for p in parents] if parents is not None else [False] * len(hashes)
    message = wire.put(
        _keys(h, hashes),
        wire.FLAG_REGRANT if regrant else 0,
        millis_left(deadline),
        options.durable,
        options.ttl_ms,
        [wire.PutItem(grant, n, has_parent, sum_) for (grant, n, sum_), has_parent in zip(items, has)],
        [p or none for p in parents] if parents is not None and any(has) else (),
    )
    try:
        done = conn.decode(wire.read_put_done, conn.trip(wire.PUT, message, deadline, cancel=cancel))
        if len(done.keys) != len(hashes):
            raise conn.give_up(f"the daemon answered {len(done.keys)} keys of a put of {len(hashes)}")
    except BaseException:
        finish(conn, places, None)
        raise
    finish(conn, places, done)
    new = conn.places.adopt(h.id, done.granted)
    conn.places.counted(len(new), sum(p.size for p in new))
    conn.places.keep(new)
    return [put_result(k) for k in done.keys]


def finish(conn: Connection, places: Sequence[Place], done: Optional[wire.PutDone]) -> None:
    """Places were used up, if the server has taken the commit. If not it has them back, as
    where this side wrote into one that was revoked meanwhile."""
    for i, place in enumerate(places):
        kept = done is None or done.keys[i].status in (Status.BUSY, Status.LEASE_EXPIRED)
        conn.places.used(place, kept)
    conn.places.counted(-len(places), -sum(p.size for p in places))


def put_result(k: wire.PutKey) -> PutResult:
    if k.status != 0:
        return PutResult(False, False, error_of(k.status, k.text))
    return PutResult(k.existed == 0, k.existed != 0, None)


def seal(
    conn: Connection, place: Place, buffer: memoryview, deadline: float, cancel: Optional[Cancel]
) -> Tuple[int, int, bytes]:
    """Brings a reservation's bytes to the server, where it does not see them, and returns
    grant, length and checksum."""
    if place.memory is not None:
        return place.id, len(buffer), sum_of(buffer)
    return _bring(conn, [place], [buffer], deadline, Moved(), cancel)[0]


# Regions: the daemon moves the bytes


def _windows(
    h: Handle, hashes: Sequence[bytes], segments: Sequence[Sequence[wire.Segment]], item: int
) -> List[Tuple[int, int]]:
    """Cuts keys into what one message takes."""
    out = []
    room = min(_MESSAGE_ROOM, h.conn.message - _MESSAGE_HEAD)
    begin, body, total = 0, 0, 0
    for i, lists in enumerate(segments):
        size = 2 + 14 * len(lists) + item
        moved = sum(s[2] for s in lists)
        if i > begin and (
            i - begin >= h.conn.keys or body + size > room or total + moved > h.conn.budget.most_bytes
        ):
            out.append((begin, i))
            begin, body, total = i, 0, 0
        body += size
        total += moved
    out.append((begin, len(segments)))
    return out


def get_region(
    h: Handle,
    hashes: Sequence[bytes],
    segments: Sequence[Sequence[wire.Segment]],
    deadline: float,
    no_promote: bool,
    out: List[Optional[GetResult]],
    moved: Moved,
    cancel: Optional[Cancel] = None,
) -> None:
    conn = h.conn
    flags = wire.FLAG_NO_PROMOTE if no_promote else 0
    for begin, end in _windows(h, hashes, segments, len(hashes[0])):
        room = [sum(s[2] for s in lists) for lists in segments[begin:end]]
        taken = conn.budget.take(sum(room), deadline, cancel)
        try:
            message = wire.region_get(_keys(h, hashes[begin:end]), flags, millis_left(deadline), segments[begin:end])
            call = Call(wire.GOT, remote=True)
            got = _got(h, conn.trip(wire.REGION_GET, message, deadline, call, cancel), end - begin)
        finally:
            conn.budget.give(taken)
        for j, k in enumerate(got.keys):
            out[begin + j] = r = _outcome(k, room[j])
            if r.hit:
                moved.bytes += r.length


def put_region(
    h: Handle,
    hashes: Sequence[bytes],
    segments: Sequence[Sequence[wire.Segment]],
    parents: Optional[Sequence[Optional[bytes]]],
    options: PutOptions,
    deadline: float,
    out: List[Optional[PutResult]],
    moved: Moved,
    cancel: Optional[Cancel] = None,
) -> None:
    conn = h.conn
    none = bytes(len(hashes[0]))
    for begin, end in _windows(h, hashes, segments, 2 * len(hashes[0]) + 1):
        some = parents[begin:end] if parents is not None else [None] * (end - begin)
        has = [p is not None for p in some]
        total = sum(s[2] for lists in segments[begin:end] for s in lists)
        taken = conn.budget.take(total, deadline, cancel)
        try:
            message = wire.region_put(
                _keys(h, hashes[begin:end]),
                millis_left(deadline),
                options.durable,
                options.ttl_ms,
                segments[begin:end],
                has,
                [p or none for p in some] if any(has) else (),
            )
            call = Call(wire.PUT_DONE, remote=True)
            done = conn.decode(wire.read_put_done, conn.trip(wire.REGION_PUT, message, deadline, call, cancel))
        finally:
            conn.budget.give(taken)
        if len(done.keys) != end - begin:
            raise conn.give_up(f"the daemon answered {len(done.keys)} keys of a put of {end - begin}")
        for j, key in enumerate(done.keys):
            out[begin + j] = put_result(key)
        moved.bytes += total
