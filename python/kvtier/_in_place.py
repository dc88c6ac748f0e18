"""Blocks that are written and read where they lie."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from . import _puts as puts
from . import _transfer as transfer
from . import _wire as wire
from ._arguments import hashes_of, parents_of, put_options
from ._attached import MISS, Attached, misses
from ._calls import Cancel
from ._connection import Connection
from ._errors import CancelledError, DisconnectedError, Error, InvalidError, LeaseExpiredError, Status
from ._jobs import Job, deadline_of
from ._loans import Loan, Reservation, take_all
from ._puts import PutOptions
from ._results import GetResult, PutResult, Tier
from ._transfer import Handle


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
        return self._reserve(self._sizes(sizes), deadline_of(timeout, self._pool.timeout))

    def submit_reserve(self, sizes: Sequence[int], timeout: Optional[float] = None) -> Job[List[Reservation]]:
        """reserve as a job. One that is cancelled has reserved nothing."""
        wanted = self._sizes(sizes)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(lambda cancel, known: self._reserve(wanted, deadline, cancel, known), len(wanted))

    def _sizes(self, sizes: Sequence[int]) -> List[int]:
        wanted = list(sizes)
        for i, n in enumerate(wanted):
            if isinstance(n, bool) or not isinstance(n, int):
                raise TypeError(f"size {i}: {type(n).__name__}, want int")
            if not 1 <= n <= wire.MAX_BLOCK:
                raise InvalidError(f"size {i}: {n} bytes, want 1 to {wire.MAX_BLOCK}")
        return wanted

    def _reserve(
        self,
        sizes: List[int],
        deadline: float,
        cancel: Optional[Cancel] = None,
        known: Optional[List[Optional[Reservation]]] = None,
    ) -> List[Reservation]:
        h = self._at()
        if h is None:
            return []
        out: List[Reservation] = []
        try:
            with h.conn.whole():
                while len(out) < len(sizes):
                    wanted = sizes[len(out) :]
                    # Who waits for a place holds none, or two would wait for each other.
                    places = h.conn.places.obtain(h.id, h.tag, wanted, deadline, True, cancel, may_wait=not out)
                    out += [Reservation(h, p, n) for p, n in zip(places, wanted)]
        except Error as e:
            if not out and isinstance(e, InvalidError):
                raise
            if isinstance(e, CancelledError):
                for r in out:
                    r.abort()
            self._failed(e)
        if known is not None:
            known[: len(out)] = out
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
        args = self._commit_args(reservations, hashes, parents, durable, ttl)
        return self._commit(*args, deadline_of(timeout, self._pool.timeout))

    def submit_commit(
        self,
        reservations: Sequence[Reservation],
        hashes: Sequence[bytes],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Job[List[PutResult]]:
        """commit as a job. One that is cancelled before it has begun leaves the reservations
        as they were; later, blocks may have been made of them, and they are over."""
        args = self._commit_args(reservations, hashes, parents, durable, ttl)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(lambda cancel, known: self._commit(*args, deadline, cancel, known), len(args[1]))

    def _commit_args(
        self,
        reservations: Sequence[Reservation],
        hashes: Sequence[bytes],
        parents: Optional[Sequence[Optional[bytes]]],
        durable: bool,
        ttl: float,
    ) -> Tuple[List[Reservation], List[bytes], Optional[List[Optional[bytes]]], PutOptions]:
        keys = hashes_of(hashes)
        some = list(reservations)
        if len(keys) != len(some):
            raise InvalidError(f"{len(keys)} hashes and {len(some)} reservations")
        above = parents_of(keys, parents)
        options = put_options(durable, ttl)
        if len(set(map(id, some))) != len(some):
            raise InvalidError("a reservation is there twice")
        for i, r in enumerate(some):
            r._check(i, self._handle)
        return some, keys, above, options

    def _commit(
        self,
        reservations: List[Reservation],
        keys: List[bytes],
        parents: Optional[List[Optional[bytes]]],
        options: PutOptions,
        deadline: float,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[PutResult]]] = None,
    ) -> List[PutResult]:
        h = self._at()
        for i, r in enumerate(reservations):
            r._check(i, h)
        taken = take_all(reservations)
        results: List[Optional[PutResult]] = [None] * len(keys) if out is None else out
        error: Error = DisconnectedError("not connected")
        groups: List[int] = []
        for i, (conn, place, _) in enumerate(taken):
            if h is None or conn is not h.conn:
                expired = LeaseExpiredError("the session of the reservation has ended")
                results[i] = PutResult(False, False, expired if h is not None else error)
                conn.places.used([place], [True])
            else:
                groups.append(i)
        try:
            if h is not None and groups:
                self._pool._counts.add(puts=len(groups), bytes_out=sum(reservations[i].size for i in groups))
                with h.conn.whole():
                    self._commit_here(h, groups, taken, keys, parents, options, deadline, results, cancel)
        except Error as e:
            self._failed(e)
            error = e
        finally:
            for r in reservations:
                r._let_go()
        return self._stored(keys, results, error)

    def _commit_here(
        self,
        h: Handle,
        index: List[int],
        taken: Sequence[Tuple[Connection, Any, memoryview]],
        keys: Sequence[bytes],
        parents: Optional[Sequence[Optional[bytes]]],
        options: PutOptions,
        deadline: float,
        results: List[Optional[PutResult]],
        cancel: Optional[Cancel],
    ) -> None:
        places = [taken[i][1] for i in index]
        try:
            items = [puts.seal(h.conn, p, taken[i][2], deadline, cancel) for i, p in zip(index, places)]
        except BaseException:
            puts.finish(h.conn, places, None)
            raise
        some = None if parents is None else [parents[i] for i in index]
        done = puts.commit(h, places, items, [keys[i] for i in index], some, options, deadline, cancel)
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
        args = self._lease_args(hashes, seconds)
        return self._lease_read(*args, verify, deadline_of(timeout, self._pool.timeout))

    def submit_lease_read(
        self, hashes: Sequence[bytes], seconds: float, verify: bool = True, timeout: Optional[float] = None
    ) -> Job[Loan]:
        """lease_read as a job. The time of the loan begins when the daemon has answered."""
        args = self._lease_args(hashes, seconds)
        deadline = deadline_of(timeout, self._pool.timeout)

        def work(cancel: Cancel, known: List[Any]) -> Loan:
            loan = self._lease_read(*args, verify, deadline, cancel)
            known[:] = loan.results
            return loan

        return self._pool._submit(work, len(args[0]))

    def _lease_args(self, hashes: Sequence[bytes], seconds: float) -> Tuple[List[bytes], float]:
        keys = hashes_of(hashes)
        if not seconds > 0:
            raise InvalidError(f"seconds: {seconds}")
        if len(keys) > wire.MAX_KEYS:
            raise InvalidError(f"hashes: {len(keys)}, at most {wire.MAX_KEYS}")
        return keys, seconds

    def _lease_read(
        self, keys: List[bytes], seconds: float, verify: bool, deadline: float, cancel: Optional[Cancel] = None
    ) -> Loan:
        h = self._at()
        if h is None or not keys or h.conn.memory is None:
            reason = MISS if h is None else GetResult(Status.UNAVAILABLE, "unavailable", Tier.NONE, 0, 0)
            return Loan(None, 0, 0.0, [None] * len(keys), [reason] * len(keys))
        try:
            loan = transfer.lend(h, keys, seconds, verify, deadline, cancel)
        except Error as e:
            return Loan(None, 0, 0.0, [None] * len(keys), misses([None] * len(keys), self._failed(e)))
        self._pool._counts.add(gets=len(keys), hits=len(keys) - loan.views.count(None))
        return loan
