"""Where blocks lie: brought to memory, told, and kept from being evicted."""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from . import _wire as wire
from ._arguments import hashes_of, parts_of
from ._attached import REASON_OF, Attached
from ._calls import Call, Cancel
from ._errors import DisconnectedError, Error, bare, error_of
from ._jobs import Job, deadline_of, tell_progress
from ._places import millis_left
from ._results import Location, reason_name, tier_of
from ._transfer import Handle


class Placement(Attached):
    """The calls about the tiers in which blocks are."""

    def prefetch(
        self,
        hashes: Sequence[bytes],
        timeout: Optional[float] = None,
        progress: Optional[Callable[[int, str], None]] = None,
    ) -> List[str]:
        """Brings blocks to the store's memory, root first, and returns a reason for each:
        "hit" when it is there. progress(index, reason) is told of each key in order, on
        one of the pool's threads or this one; it must not block. It may cancel the job."""
        keys = hashes_of(hashes)
        return self._prefetch(keys, deadline_of(timeout, self._pool.timeout), progress)

    def submit_prefetch(
        self,
        hashes: Sequence[bytes],
        timeout: Optional[float] = None,
        progress: Optional[Callable[[int, str], None]] = None,
    ) -> Job[List[str]]:
        """prefetch as a job."""
        keys = hashes_of(hashes)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(
            lambda cancel, known: self._prefetch(keys, deadline, progress, cancel, known), len(keys)
        )

    def _prefetch(
        self,
        hashes: List[bytes],
        deadline: float,
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
                        h, hashes[begin : begin + h.conn.keys], begin, deadline, progress, cancel, results
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
        call = Call(wire.PREFETCHED, stream=more)
        taken = h.conn.budget.take(0, deadline, cancel)
        try:
            h.conn.trip(wire.PREFETCH, wire.keys_only(keys, millis_left(deadline)), deadline, call, cancel)
        finally:
            h.conn.budget.give(taken)

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
