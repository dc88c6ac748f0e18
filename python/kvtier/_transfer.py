"""Gets of one session, whichever way the bytes go."""

from __future__ import annotations

import time
from typing import Any, List, NamedTuple, Optional, Sequence

from xxhash import xxh3_128, xxh3_128_digest

from . import _wire as wire
from ._buffers import copy_sum, sum_of
from ._calls import Call, Cancel
from ._connection import Connection
from ._errors import Status, status_of
from ._loans import Loan
from ._places import millis_left
from ._results import GetResult, Tier, reason_name, tier_of

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
        with conn.in_flight(total, deadline, cancel):
            if in_place:
                index = _get_in_place(h, index, hashes, views, deadline, out, moved, cancel)
            if index:
                _get_sent(h, index, hashes, views, deadline, flags, out, moved, cancel)
        at += n


def keys_of(h: Handle, hashes: Sequence[bytes]) -> wire.Keys:
    return wire.Keys(h.id, h.tag, len(hashes[0]), hashes)


def got_of(h: Handle, reply: bytes, n: int) -> wire.Got:
    got = h.conn.decode(wire.read_got, reply)
    if len(got.keys) != n:
        h.conn.release_later(got.lease)
        raise h.conn.give_up(f"the daemon answered {len(got.keys)} keys of a get of {n}")
    return got


def outcome_of(k: wire.GotKey, room: int) -> GetResult:
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
    keys = keys_of(h, [hashes[i] for i in index])
    message = wire.get(keys, wire.FLAG_IN_PLACE, millis_left(deadline))
    got = got_of(h, conn.trip(wire.GET, message, deadline, cancel=cancel), len(index))
    rest: List[int] = []
    lent: List[int] = []
    try:
        for i, k in zip(index, got.keys):
            if cancel is not None:
                cancel.check()
            r = outcome_of(k, len(views[i]))
            if r.hit:
                if k.chunk == wire.NO_CHUNK or k.length != k.total:
                    raise conn.give_up(f"the daemon lent {k.length} of {k.total} bytes in no place")
                src = conn.at(k.chunk, k.offset, k.length)
                if src is None:
                    rest.append(i)
                    continue
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
    message = wire.get(keys_of(h, [hashes[i] for i in index]), flags, millis_left(deadline))
    got = got_of(h, conn.trip(wire.GET, message, deadline, call, cancel), len(index))
    for j, (i, k) in enumerate(zip(index, got.keys)):
        r = outcome_of(k, len(views[i]))
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
    message = wire.get(keys_of(h, named), wire.FLAG_IN_PLACE, millis_left(deadline))
    got = got_of(h, conn.trip(wire.GET, message, deadline, cancel=cancel), len(named))
    views: List[Optional[memoryview]] = []
    results: List[GetResult] = []
    loan = Loan(conn, got.lease, began + got.lease_ms / 1000, views, results)
    there = 0
    for k in got.keys:
        r = outcome_of(k, wire.MAX_BLOCK)
        view = None
        if r.hit:
            at = conn.at(k.chunk, k.offset, k.length)
            if at is None:
                r = _NO_ROOM
            elif verify and sum_of(at) != k.sum:
                r = _corrupt(r)
            else:
                view = at.toreadonly()
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
