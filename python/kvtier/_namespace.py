"""A namespace of a pool: the calls."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from . import _puts as puts
from . import _region_moves as moves
from . import _transfer as transfer
from . import _wire as wire
from ._arguments import Segments, conversation_of, hashes_of, parents_of, put_options, segments_of
from ._attached import MISS, misses
from ._buffers import view_of
from ._calls import Cancel
from ._errors import DisconnectedError, Error, InvalidError, Status
from ._in_place import InPlace
from ._jobs import Job, deadline_of
from ._lookup import FRESH, MOST_KEYS
from ._match import Gathered, Match
from ._placement import Placement
from ._prefill import Prefill
from ._puts import PutOptions
from ._results import GetResult, PlanOptions, PutResult, State
from ._transfer import Moved
from ._watch import Watch


class Namespace(InPlace, Placement, Prefill):
    """Blocks of one kind, made by `Pool.open`. A block is bytes under a hash that stands
    for it and its whole prefix.

    `hashes` are sequences of bytes of equal length: 8, 16, 20 or 32, root first. `timeout`
    is in seconds, None for the pool's. A call is answered by its deadline: what was not
    done by then is a miss. While the daemon is not there all calls are misses at once.
    What raises: InvalidError and TypeError for wrong arguments, DeniedError when the token
    may not do this, ClosedError when the pool is closed.
    """

    def close(self) -> None:
        """Lets the pool forget it: it is not opened again after a reconnect. What is
        stored stays."""
        self._pool._forget(self)

    # Match

    def match(
        self,
        hashes: Sequence[bytes],
        lease: Optional[float] = None,
        all: bool = False,
        timeout: Optional[float] = None,
        plan: Optional[PlanOptions] = None,
        conversation: Optional[str] = None,
    ) -> Match:
        """Says which blocks are there, root first, and touches no device.

        lease: seconds for which the blocks that are told of stay where they are.
        all: look up every key, not only up to the first that is not there.
        plan: say what of the prefix is worth loading, too: the keys of `m.plan.start` up to
            `m.plan.stop`. Not together with a lease.
        conversation: the name of what the request belongs to and goes on with, a chat or the
            run of an agent, of at most 255 bytes. The lease lasts until its next request
            nearly always has come then, as far as that is known; `lease` is the longest. An
            older daemon is not told of it.
        """
        name = conversation_of(conversation)
        return self._match(hashes_of(hashes), lease, all, deadline_of(timeout, self._pool.timeout), None, plan, name)

    def _match(
        self,
        hashes: Sequence[bytes],
        lease: Optional[float],
        all: bool,
        deadline: float,
        cancel: Optional[Cancel],
        plan: Optional[PlanOptions] = None,
        conversation: str = "",
    ) -> Match:
        if lease is not None and not lease > 0:
            raise InvalidError(f"lease: {lease} s")
        if lease is not None and plan is not None:
            raise InvalidError("plan and lease exclude each other")
        h = self._at()
        if h is None or not hashes:
            return Match(0, b"", None, Status.OK if not hashes else Status.DISCONNECTED)
        self._pool._counts.add(matches=len(hashes))
        gathered = Gathered(h, hashes, lease, all, plan, conversation)
        try:
            for part in gathered.parts():
                message = gathered.message(part, deadline)
                if not gathered.take(part, h.conn.trip(wire.MATCH, message, deadline, cancel=cancel)):
                    break
        except BaseException as e:
            gathered.drop()
            if not isinstance(e, Error):
                raise
            return Match(0, b"", None, self._failed(e))
        return gathered.match()

    # Get

    def get_into(
        self,
        hashes: Sequence[bytes],
        buffers: Sequence[Any],
        timeout: Optional[float] = None,
        no_promote: bool = False,
    ) -> List[GetResult]:
        """Reads blocks into memory of the caller's, one writable buffer for each key.

        The bytes go straight there, and are verified by their checksum. A buffer may be
        longer than its block. no_promote leaves blocks where they are: those on NVMe are
        not brought to memory first.
        """
        return self._get_into(*self._get_args(hashes, buffers), deadline_of(timeout, self._pool.timeout), no_promote)

    def _get_args(self, hashes: Sequence[bytes], buffers: Sequence[Any]) -> Tuple[List[bytes], List[memoryview]]:
        keys = hashes_of(hashes)
        if len(keys) != len(buffers):
            raise InvalidError(f"{len(keys)} hashes and {len(buffers)} buffers")
        return keys, [view_of(b, True, "buffer %d" % i) for i, b in enumerate(buffers)]

    def _get_into(
        self,
        hashes: List[bytes],
        views: List[memoryview],
        deadline: float,
        no_promote: bool,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[GetResult]]] = None,
    ) -> List[GetResult]:
        h = self._at()
        if h is None:
            return self._got(hashes, [MISS] * len(hashes), out)
        results: List[Optional[GetResult]] = [None] * len(hashes) if out is None else out
        moved = Moved()
        status = Status.OK
        try:
            transfer.get(h, hashes, views, deadline, no_promote, results, moved, cancel)
        except Error as e:
            status = self._failed(e)
        self._pool._counts.add(in_place=moved.in_place)
        return self._got(hashes, misses(results, status), out, moved.bytes)

    def _got(
        self,
        hashes: Sequence[bytes],
        results: List[GetResult],
        out: Optional[List[Optional[GetResult]]],
        moved: int = 0,
    ) -> List[GetResult]:
        hits = sum(1 for r in results if r.hit)
        self._pool._counts.add(gets=len(hashes), hits=hits, bytes_in=moved)
        if hits < len(results):
            corrupt = sum(1 for r in results if r.reason == "corrupt")
            self._pool._counts.add(corrupt=corrupt)
            self._lookups.failed([k for k, r in zip(hashes, results) if not r.hit])
        if out is not None:
            out[:] = results
        return results

    def get_region(
        self,
        hashes: Sequence[bytes],
        segments: Sequence[Segments],
        timeout: Optional[float] = None,
        no_promote: bool = False,
    ) -> List[GetResult]:
        """Lets the daemon write blocks into the pool's regions.

        segments: for each key one (region, offset, length), or a list of them, which
        together take the block: region is the index in `regions` of connect, the others
        are bytes. They may be longer than the block. The daemon verifies the checksum.
        When the call returns the daemon writes there no more. A daemon that hangs is waited
        for, some seconds beyond the timeout; one that is stopped for longer, and goes on
        then, may still finish the copy that it was in.
        """
        keys = hashes_of(hashes)
        lists = self._segments(keys, segments, True)
        return self._get_region(keys, lists, deadline_of(timeout, self._pool.timeout), no_promote)

    def _segments(
        self, keys: Sequence[bytes], segments: Sequence[Segments], write: bool
    ) -> List[Sequence[wire.Segment]]:
        return segments_of(keys, segments, self._pool._regions, self._pool._region_sizes, write)

    def _get_region(
        self,
        hashes: List[bytes],
        segments: List[Sequence[wire.Segment]],
        deadline: float,
        no_promote: bool,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[GetResult]]] = None,
    ) -> List[GetResult]:
        h = self._at()
        if h is None or not hashes:
            return self._got(hashes, [MISS] * len(hashes), out)
        results: List[Optional[GetResult]] = [None] * len(hashes) if out is None else out
        moved = Moved()
        status = Status.OK
        try:
            moves.get_region(h, hashes, segments, deadline, no_promote, results, moved, cancel)
        except Error as e:
            status = self._failed(e)
        self._pool._counts.add(region_keys=len(hashes))
        return self._got(hashes, misses(results, status), out, moved.bytes)

    # Put

    def put(
        self,
        hashes: Sequence[bytes],
        buffers: Sequence[Any],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> List[PutResult]:
        """Stores blocks, parents before children, one buffer of 1 byte to 8 MiB for each.

        parents: for each key the hash of the block before it, None for a root.
        durable: return when the blocks are on NVMe, and survive a crash.
        ttl: seconds that they live, 0: as the namespace says.
        """
        keys, views, above, options = self._put_args(hashes, buffers, parents, durable, ttl)
        return self._put(keys, views, above, options, deadline_of(timeout, self._pool.timeout))

    def _put_args(
        self,
        hashes: Sequence[bytes],
        buffers: Sequence[Any],
        parents: Optional[Sequence[Optional[bytes]]],
        durable: bool,
        ttl: float,
    ) -> Tuple[List[bytes], List[memoryview], Optional[List[Optional[bytes]]], PutOptions]:
        keys = hashes_of(hashes)
        if len(keys) != len(buffers):
            raise InvalidError(f"{len(keys)} hashes and {len(buffers)} buffers")
        views = [view_of(b, False, "buffer %d" % i) for i, b in enumerate(buffers)]
        for i, v in enumerate(views):
            if not 1 <= len(v) <= wire.MAX_BLOCK:
                raise InvalidError(f"buffer {i}: {len(v)} bytes, want 1 to {wire.MAX_BLOCK}")
        return keys, views, parents_of(keys, parents), put_options(durable, ttl)

    def _put(
        self,
        hashes: List[bytes],
        views: List[memoryview],
        parents: Optional[Sequence[Optional[bytes]]],
        options: PutOptions,
        deadline: float,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[PutResult]]] = None,
    ) -> List[PutResult]:
        results: List[Optional[PutResult]] = [None] * len(hashes) if out is None else out
        h = self._at()
        error: Error = DisconnectedError("not connected")
        if h is not None:
            moved = Moved()
            try:
                puts.put(h, hashes, views, parents, options, deadline, results, moved, cancel)
            except Error as e:
                self._failed(e)
                error = e
            self._pool._counts.add(puts=len(hashes), in_place=moved.in_place, bytes_out=moved.bytes)
        return self._stored(hashes, results, error)

    def put_region(
        self,
        hashes: Sequence[bytes],
        segments: Sequence[Segments],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> List[PutResult]:
        """Lets the daemon read blocks from the pool's regions; segments as in get_region,
        but together they are the block. The other arguments are those of put."""
        keys = hashes_of(hashes)
        lists = self._segments(keys, segments, False)
        above = parents_of(keys, parents)
        return self._put_region(
            keys, lists, above, put_options(durable, ttl), deadline_of(timeout, self._pool.timeout)
        )

    def _put_region(
        self,
        hashes: List[bytes],
        segments: List[Sequence[wire.Segment]],
        parents: Optional[Sequence[Optional[bytes]]],
        options: PutOptions,
        deadline: float,
        cancel: Optional[Cancel] = None,
        out: Optional[List[Optional[PutResult]]] = None,
    ) -> List[PutResult]:
        results: List[Optional[PutResult]] = [None] * len(hashes) if out is None else out
        h = self._at()
        error: Error = DisconnectedError("not connected")
        if h is not None and hashes:
            moved = Moved()
            try:
                moves.put_region(h, hashes, segments, parents, options, deadline, results, moved, cancel)
            except Error as e:
                self._failed(e)
                error = e
            self._pool._counts.add(puts=len(hashes), region_keys=len(hashes), bytes_out=moved.bytes)
        return self._stored(hashes, results, error)

    # Events

    def watch(
        self, *, snapshot: bool = False, incarnation: int = 0, after: int = 0, timeout: Optional[float] = None
    ) -> Watch:
        """Follows what happens to blocks. The first event is "start".

        incarnation, after: go on behind event `after` of that incarnation. snapshot: where
        that cannot be, or was not asked for, what is there now comes first, as "present",
        and then "snapshot". timeout: seconds after which the iterator ends, None: never.
        DisconnectedError when there is no session, or it is lost.
        """
        h = self._at()
        if h is None:
            raise DisconnectedError(str(self.error or self._pool.error or "not connected"))
        return Watch(h.conn, h.id, h.tag, snapshot, incarnation, after, timeout)

    # Jobs

    def submit_match(
        self,
        hashes: Sequence[bytes],
        lease: Optional[float] = None,
        all: bool = False,
        timeout: Optional[float] = None,
        plan: Optional[PlanOptions] = None,
        conversation: Optional[str] = None,
    ) -> Job[Match]:
        """match as a job. This and the other submits raise BusyError beyond the pool's
        limit of jobs, and never block."""
        keys = hashes_of(hashes)
        name = conversation_of(conversation)
        deadline = deadline_of(timeout, self._pool.timeout)

        def work(cancel: Cancel, known: List[Any]) -> Match:
            m = self._match(keys, lease, all, deadline, cancel, plan, name)
            blocks = m.blocks
            known[: len(blocks)] = blocks
            return m

        return self._pool._submit(work, len(keys))

    def submit_get_into(
        self,
        hashes: Sequence[bytes],
        buffers: Sequence[Any],
        timeout: Optional[float] = None,
        no_promote: bool = False,
    ) -> Job[List[GetResult]]:
        """get_into as a job. The buffers are the job's until it is done."""
        keys, views = self._get_args(hashes, buffers)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(
            lambda cancel, known: self._get_into(keys, views, deadline, no_promote, cancel, known), len(keys)
        )

    def submit_put(
        self,
        hashes: Sequence[bytes],
        buffers: Sequence[Any],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Job[List[PutResult]]:
        """put as a job. The buffers must stay as they are until it is done."""
        keys, views, above, options = self._put_args(hashes, buffers, parents, durable, ttl)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(
            lambda cancel, known: self._put(keys, views, above, options, deadline, cancel, known), len(keys)
        )

    def submit_get_region(
        self,
        hashes: Sequence[bytes],
        segments: Sequence[Segments],
        timeout: Optional[float] = None,
        no_promote: bool = False,
    ) -> Job[List[GetResult]]:
        """get_region as a job."""
        keys = hashes_of(hashes)
        lists = self._segments(keys, segments, True)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(
            lambda cancel, known: self._get_region(keys, lists, deadline, no_promote, cancel, known), len(keys)
        )

    def submit_put_region(
        self,
        hashes: Sequence[bytes],
        segments: Sequence[Segments],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Job[List[PutResult]]:
        """put_region as a job."""
        keys = hashes_of(hashes)
        lists = self._segments(keys, segments, False)
        above = parents_of(keys, parents)
        options = put_options(durable, ttl)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(
            lambda cancel, known: self._put_region(keys, lists, above, options, deadline, cancel, known), len(keys)
        )

    # Lookups that never wait

    def lookup(self, hashes: Sequence[bytes], fresh: float = FRESH) -> Optional[List[bool]]:
        """Whether each block is resident, without waiting: None while the answer is out,
        which is to say ask again.

        An answer is given at least once, and again to whoever asks within `fresh` seconds
        of it. A key whose get failed (a miss of get_into or get_region) is not there for
        ten seconds, or until it has been put by this process, so that nobody tries it for
        ever. While disconnected nothing is there. BusyError when the pool's jobs are too
        many.
        """
        keys = hashes_of(hashes)
        if len(keys) > MOST_KEYS:
            raise InvalidError(f"hashes: {len(keys)}, at most {MOST_KEYS}")
        if self._at() is None:
            return [False] * len(keys)
        return self._lookups.lookup(keys, fresh, self._look)

    def _look(self, keys: List[bytes]) -> Job[List[bool]]:
        """Asks for keys, for a lookup."""
        deadline = deadline_of(None, self._pool.timeout)

        def work(cancel: Cancel, known: List[Any]) -> List[bool]:
            blocks = self._match(keys, None, True, deadline, cancel).blocks
            return [b.state == State.RESIDENT for b in blocks]

        return self._pool._submit(work, 0, silent=True)
