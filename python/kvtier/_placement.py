"""Where blocks lie: brought to memory, told, and kept from being evicted."""

from __future__ import annotations

import time
from typing import Callable, List, NamedTuple, Optional, Sequence

from . import _wire as wire
from ._arguments import hashes_of, number_of, parts_of
from ._attached import REASON_OF, Attached
from ._calls import Call, Cancel
from ._errors import DisconnectedError, Error, InvalidError, bare, error_of
from ._jobs import LONGEST, Job, deadline_of, tell_progress
from ._places import millis_left
from ._results import Location, reason_name, tier_of
from ._transfer import Handle


class Urgency(NamedTuple):
    """How soon blocks are wanted."""

    priority: int
    until: Optional[float]  # monotonic seconds; None: always


def urgency_of(priority: int, within: Optional[float]) -> Optional[Urgency]:
    """The urgency of a prefetch, None where it says nothing."""
    if within is not None and not within > 0:
        raise InvalidError(f"within: {within} s, want more than 0")
    if number_of("priority", priority, 0, wire.MAX_PRIORITY) == 0 and within is None:
        return None
    return Urgency(priority, None if within is None else time.monotonic() + min(within, LONGEST))


class Placement(Attached):
    """The calls about the tiers in which blocks are."""

    def prefetch(
        self,
        hashes: Sequence[bytes],
        timeout: Optional[float] = None,
        progress: Optional[Callable[[int, str], None]] = None,
        priority: int = 0,
        within: Optional[float] = None,
    ) -> List[str]:
        """Brings blocks to the store's memory, root first, and returns a reason for each:
        "hit" when it is there.

        progress: progress(index, reason) is told of each key in order, on one of the pool's
            threads or this one; it must not block. It may cancel the job.
        priority: 0 to 9; higher ones go first, and take the room of lower ones, which are
            "no_room" then.
        within: seconds after which the blocks are of no use any more; those that nobody has
            begun with by then are "deadline". None: they always are of use.

        An older daemon is told of neither of the two.
        """
        keys = hashes_of(hashes)
        urgency = urgency_of(priority, within)
        return self._prefetch(keys, deadline_of(timeout, self._pool.timeout), urgency, progress)

    def submit_prefetch(
        self,
        hashes: Sequence[bytes],
        timeout: Optional[float] = None,
        progress: Optional[Callable[[int, str], None]] = None,
        priority: int = 0,
        within: Optional[float] = None,
    ) -> Job[List[str]]:
        """prefetch as a job."""
        keys = hashes_of(hashes)
        urgency = urgency_of(priority, within)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(
            lambda cancel, known: self._prefetch(keys, deadline, urgency, progress, cancel, known), len(keys)
        )

    def _prefetch(
        self,
        hashes: List[bytes],
        deadline: float,
        urgency: Optional[Urgency],
        progress: Optional[Callable[[int, str], None]] = None,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[str]]] = None,
    ) -> List[str]:
        results: List[Optional[str]] = [None] * len(hashes) if out is None else out
        h = self._at()
        if h is not None:
            try:
                for begin in range(0, len(hashes), h.conn.keys):
                    self._prefetch_part(
                        h, hashes[begin : begin + h.conn.keys], begin, deadline, urgency, progress, cancel, results
                    )
            except Error as e:
                reason = REASON_OF.get(self._failed(e), "unavailable")
                results[:] = [reason if r is None else r for r in results]
        done = ["unavailable" if r is None else r for r in results]
        results[:] = done
        return done

    def _prefetch_part(
        self,
        h: Handle,
        hashes: List[bytes],
        begin: int,
        deadline: float,
        urgency: Optional[Urgency],
        progress: Optional[Callable[[int, str], None]],
        cancel: Optional[Cancel],
        results: List[Optional[str]],
    ) -> None:
        told = 0

        def more(payload: bytes) -> bool:
            nonlocal told
            first, some = wire.read_prefetched(payload)
            if first != told or first + len(some) > len(hashes):
                raise wire.WireError(f"Prefetched tells of {len(some)} keys from {first} on, {told} were told")
            told += len(some)
            for i, (reason, _) in enumerate(some, begin + first):
                results[i] = reason_name(reason)
                if progress is not None:
                    tell_progress(progress, i, reason_name(reason))
            return told < len(hashes)

        keys = wire.Keys(h.id, h.tag, len(hashes[0]), hashes)
        packed = None
        if urgency is not None and h.conn.hints:
            packed = urgency.priority, 0 if urgency.until is None else millis_left(urgency.until)
        call = Call(wire.PREFETCHED, stream=more)
        with h.conn.in_flight(0, deadline, cancel):
            h.conn.trip(wire.PREFETCH, wire.prefetch(keys, millis_left(deadline), packed), deadline, call, cancel)

    def locate(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> List[List[Location]]:
        """Where each block lies, nearest first; nothing for what is not there."""
        return self._locate(hashes_of(hashes), deadline_of(timeout, self._pool.timeout))

    def submit_locate(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> Job[List[List[Location]]]:
        """locate as a job."""
        keys = hashes_of(hashes)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(lambda cancel, known: self._locate(keys, deadline, cancel, known), len(keys))

    def _locate(
        self,
        hashes: List[bytes],
        deadline: float,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[List[Location]]]] = None,
    ) -> List[List[Location]]:
        results: List[Optional[List[Location]]] = [None] * len(hashes) if out is None else out
        h = self._at()
        if h is not None and hashes:
            try:
                at = 0
                for part in parts_of(h.conn.keys, hashes):
                    message = wire.keys_only(wire.Keys(h.id, h.tag, len(hashes[0]), part), millis_left(deadline))
                    reply = h.conn.trip(wire.LOCATE, message, deadline, cancel=cancel)
                    located = h.conn.decode(wire.read_located, reply)
                    h.conn.check_count(len(located), len(part))
                    results[at : at + len(part)] = [
                        [Location(tier_of(p.tier), p.place, p.length) for p in places] for places in located
                    ]
                    at += len(part)
            except Error as e:
                self._failed(e)
        done = [[] if r is None else r for r in results]
        results[:] = done
        return done

    def pin(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> List[Optional[Error]]:
        """Keeps blocks from being evicted until they are unpinned, restarts included.
        None for each that is pinned, or the error: NotFoundError, DisconnectedError."""
        return self._pin(hashes_of(hashes), 0, deadline_of(timeout, self._pool.timeout))

    def unpin(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> List[Optional[Error]]:
        """Ends pin; results as there."""
        return self._pin(hashes_of(hashes), wire.FLAG_UNPIN, deadline_of(timeout, self._pool.timeout))

    def submit_pin(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> Job[List[Optional[Error]]]:
        """pin as a job. Its `results()` are None for what is pinned, too: wait until it is
        done. One that is cancelled may have pinned some."""
        return self._submit_pin(hashes, 0, timeout)

    def submit_unpin(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> Job[List[Optional[Error]]]:
        """unpin as a job, with what submit_pin says."""
        return self._submit_pin(hashes, wire.FLAG_UNPIN, timeout)

    def _submit_pin(self, hashes: Sequence[bytes], flags: int, timeout: Optional[float]) -> Job[List[Optional[Error]]]:
        keys = hashes_of(hashes)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(lambda cancel, known: self._pin(keys, flags, deadline, cancel, known), len(keys))

    def _pin(
        self,
        hashes: List[bytes],
        flags: int,
        deadline: float,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[Error]]] = None,
    ) -> List[Optional[Error]]:
        results: List[Optional[Error]] = [None] * len(hashes) if out is None else out
        at = 0
        error: Error = DisconnectedError("not connected")
        h = self._at()
        if h is not None and hashes:
            try:
                for part in parts_of(h.conn.keys, hashes):
                    named = wire.Keys(h.id, h.tag, len(hashes[0]), part)
                    message = wire.keys_only(named, millis_left(deadline), flags)
                    reply = h.conn.trip(wire.PIN, message, deadline, cancel=cancel)
                    statuses = h.conn.decode(wire.read_statuses, reply)
                    h.conn.check_count(len(statuses), len(part))
                    results[at : at + len(part)] = [error_of(s) if s else None for s in statuses]
                    at += len(part)
            except Error as e:
                self._failed(e)
                error = e
        results[at:] = [bare(error)] * (len(hashes) - at)
        return list(results)
