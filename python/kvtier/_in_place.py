"""Blocks that are written and read where they lie."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from . import _transfer as transfer
from . import _wire as wire
from ._arguments import hashes_of, parents_of, put_options
from ._attached import MISS, Attached, misses
from ._connection import Connection
from ._errors import DisconnectedError, Error, InvalidError, LeaseExpiredError, Status
from ._jobs import deadline_of
from ._loans import Loan, Reservation
from ._results import GetResult, PutResult, Tier
from ._transfer import Handle, PutOptions


class InPlace(Attached):
    """The calls that reserve places, make blocks of them, and lend blocks."""

    def reserve(self, sizes: Sequence[int], timeout: Optional[float] = None) -> List[Reservation]:
        """Reserves places for blocks to be written where they will lie, each of `sizes`
        bytes. Fill `.buffer`, then commit, or abort. The server takes a place back that
        waits for half a minute.

        Where the store's memory is not shared the buffer is memory of this process, and
        commit sends it. Fewer reservations than sizes, from the first on, when there is
        no room for more; none while disconnected.
        """
        deadline = deadline_of(timeout, self._pool.timeout)
        for i, n in enumerate(sizes):
            if isinstance(n, bool) or not isinstance(n, int):
                raise TypeError(f"size {i}: {type(n).__name__}, want int")
            if not 1 <= n <= wire.MAX_BLOCK:
                raise InvalidError(f"size {i}: {n} bytes, want 1 to {wire.MAX_BLOCK}")
        h = self._at()
        if h is None:
            return []
        out: List[Reservation] = []
        try:
            while len(out) < len(sizes):
                wanted = sizes[len(out) :]
                # Who waits for a place holds none, or two would wait for each other.
                places = h.conn.places.obtain(h.id, h.tag, wanted, deadline, True, None, may_wait=not out)
                out += [Reservation(h, p, n) for p, n in zip(places, wanted)]
        except Error as e:
            if not out and isinstance(e, InvalidError):
                raise
            self._failed(e)
        return out

    def commit(
        self,
        reservations: Sequence[Reservation],
        hashes: Sequence[bytes],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> List[PutResult]:
        """Makes blocks of reservations that were filled; arguments and results as of put.
        Their buffers must not be written to any more. InvalidError when one was committed
        or aborted before; one that was taken back has a LeaseExpiredError."""
        keys = hashes_of(hashes)
        if len(keys) != len(reservations):
            raise InvalidError(f"{len(keys)} hashes and {len(reservations)} reservations")
        above = parents_of(keys, parents)
        options = put_options(durable, ttl)
        if len(set(map(id, reservations))) != len(reservations):
            raise InvalidError("a reservation is there twice")
        h = self._at()
        for i, r in enumerate(reservations):
            r._check(i, h)
        taken = [r._take() for r in reservations]
        results: List[Optional[PutResult]] = [None] * len(keys)
        deadline = deadline_of(timeout, self._pool.timeout)
        error: Error = DisconnectedError("not connected")
        groups: List[int] = []
        for i, (conn, place, _) in enumerate(taken):
            if h is None or conn is not h.conn:
                expired = LeaseExpiredError("the session of the reservation has ended")
                results[i] = PutResult(False, False, expired if h is not None else error)
                conn.places.used(place, True)
                conn.places.counted(-1, -place.size)
            else:
                groups.append(i)
        if h is not None and groups:
            try:
                self._commit(h, groups, taken, keys, above, options, deadline, results)
            except Error as e:
                self._failed(e)
                error = e
            self._pool._counts.add(puts=len(groups), bytes_out=sum(reservations[i].size for i in groups))
        for r in reservations:
            r._let_go()
        return self._stored(keys, results, error)

    def _commit(
        self,
        h: Handle,
        index: List[int],
        taken: Sequence[Tuple[Connection, Any, memoryview]],
        keys: Sequence[bytes],
        parents: Optional[Sequence[Optional[bytes]]],
        options: PutOptions,
        deadline: float,
        results: List[Optional[PutResult]],
    ) -> None:
        places = [taken[i][1] for i in index]
        try:
            items = [transfer.seal(h.conn, p, taken[i][2], deadline) for i, p in zip(index, places)]
        except BaseException:
            transfer.finish(h.conn, places, None)
            raise
        some = None if parents is None else [parents[i] for i in index]
        done = transfer.commit(h, places, items, [keys[i] for i in index], some, options, False, deadline)
        for i, r in zip(index, done):
            results[i] = r

    def lease_read(
        self, hashes: Sequence[bytes], seconds: float, verify: bool = True, timeout: Optional[float] = None
    ) -> Loan:
        """Lends blocks to be read where they lie, for so many seconds, in shared memory
        only: elsewhere all views are None.

        The loan's `views` are read-only memoryviews, None for what is not there. verify
        checks their checksums; without it only a changed length would be noticed.
        """
        keys = hashes_of(hashes)
        if not seconds > 0:
            raise InvalidError(f"seconds: {seconds}")
        if len(keys) > wire.MAX_KEYS:
            raise InvalidError(f"hashes: {len(keys)}, at most {wire.MAX_KEYS}")
        h = self._at()
        if h is None or not keys or h.conn.memory is None:
            reason = MISS if h is None else GetResult(Status.UNAVAILABLE, "unavailable", Tier.NONE, 0, 0)
            return Loan(None, 0, 0.0, [None] * len(keys), [reason] * len(keys))
        deadline = deadline_of(timeout, self._pool.timeout)
        try:
            loan = transfer.lend(h, keys, seconds, verify, deadline)
        except Error as e:
            return Loan(None, 0, 0.0, [None] * len(keys), misses([None] * len(keys), self._failed(e)))
        self._pool._counts.add(gets=len(keys), hits=len(keys) - loan.views.count(None))
        return loan
