"""Gets and puts in regions: the daemon moves the bytes."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from . import _wire as wire
from ._calls import Call, Cancel
from ._places import millis_left
from ._puts import PutOptions, put_result
from ._results import GetResult, PutResult
from ._transfer import Handle, Moved, got_of, keys_of, outcome_of

_MESSAGE_ROOM = 900_000  # bytes of a message's body, as a rule
_MESSAGE_HEAD = 64  # and what it has beside that


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
        with conn.in_flight(sum(room), deadline, cancel):
            message = wire.region_get(keys_of(h, hashes[begin:end]), flags, millis_left(deadline), segments[begin:end])
            call = Call(wire.GOT, remote=True)
            got = got_of(h, conn.trip(wire.REGION_GET, message, deadline, call, cancel), end - begin)
        for j, k in enumerate(got.keys):
            out[begin + j] = r = outcome_of(k, room[j])
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
        with conn.in_flight(total, deadline, cancel):
            message = wire.region_put(
                keys_of(h, hashes[begin:end]),
                millis_left(deadline),
                options.durable,
                options.ttl_ms,
                segments[begin:end],
                has,
                [p or none for p in some] if any(has) else (),
            )
            call = Call(wire.PUT_DONE, remote=True)
            done = conn.decode(wire.read_put_done, conn.trip(wire.REGION_PUT, message, deadline, call, cancel))
        if len(done.keys) != end - begin:
            raise conn.give_up(f"the daemon answered {len(done.keys)} keys of a put of {end - begin}")
        for j, key in enumerate(done.keys):
            out[begin + j] = put_result(key)
        moved.bytes += total
