"""The calls of `kvtier` with await.

    pool = await kvtier.aio.connect("unix:/path/of/session.sock")
    ns = await pool.open("my-model", max_block_bytes=1 << 20)
    results = await ns.get_into(hashes, buffers)

Names, arguments, results and errors are those of `kvtier.Pool` and `kvtier.Namespace`. A
call is a job of the pool; where that refuses more, the call waits. A task that is
cancelled in a call goes on when the call's memory is quiet.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, TypeVar

from . import _pool
from ._dial import Region
from ._errors import BusyError, Error
from ._jobs import Job
from ._loans import Loan, Reservation
from ._match import Match
from ._namespace import Namespace as _Namespace
from ._results import Event, GetResult, Location, PlanOptions, PutResult, Server, Stats
from ._watch import Watch as _Watch

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_BUSY = 0.002  # seconds before a submit that was refused is tried again


async def connect(
    address: str,
    token: Optional[str] = None,
    name: Optional[str] = None,
    tls: Optional["ssl.SSLContext"] = None,
    shared: bool = True,
    regions: Sequence[Region] = (),
    timeout: float = 10.0,
    required: bool = False,
) -> "Pool":
    """kvtier.connect."""
    loop = asyncio.get_running_loop()
    return Pool(
        await loop.run_in_executor(
            None, lambda: _pool.connect(address, token, name, tls, shared, regions, timeout, required)
        )
    )


async def _done(submit: Callable[[], Job[T]], timeout: float) -> T:
    """Submits a job and waits for it."""
    end = time.monotonic() + timeout
    while True:
        try:
            job = submit()
            break
        except BusyError:
            if time.monotonic() >= end:
                raise
            await asyncio.sleep(_BUSY)
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def wake() -> None:
        if not over.done():
            over.set_result(None)

    def tell(_: Job[T]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    job.add_done_callback(tell)
    job.disown()
    try:
        await over
    except asyncio.CancelledError:
        quiet = loop.run_in_executor(None, job.cancel)
        while not quiet.done():
            try:
                await asyncio.shield(quiet)
            except asyncio.CancelledError:
                pass  # once more: the memory is not quiet yet
        raise
    return job.result()


class Pool:
    """kvtier.Pool with await. `sync` is that."""

    def __init__(self, pool: _pool.Pool) -> None:
        self.sync = pool

    async def __aenter__(self) -> "Pool":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.sync.close)

    @property
    def connected(self) -> bool:
        return self.sync.connected

    @property
    def shared(self) -> bool:
        return self.sync.shared

    @property
    def error(self) -> Optional[Error]:
        return self.sync.error

    @property
    def server(self) -> Optional[Server]:
        return self.sync.server

    def stats(self) -> Stats:
        return self.sync.stats()

    async def _run(self, call: Callable[[], T], timeout: Optional[float]) -> T:
        return await _done(
            lambda: self.sync._submit(lambda cancel, known: call(), 0),
            self.sync.timeout if timeout is None else timeout,
        )

    async def wait_connected(self, timeout: Optional[float] = None) -> bool:
        return await self._run(lambda: self.sync.wait_connected(timeout), timeout)

    async def open(self, name: str, *, timeout: Optional[float] = None, **fields: Any) -> "Namespace":
        """Arguments are those of kvtier.Pool.open."""
        return Namespace(self, await self._run(lambda: self.sync.open(name, timeout=timeout, **fields), timeout))

    async def match_all(
        self,
        requests: "Sequence[Tuple[Namespace, Sequence[bytes]]]",
        lease: Optional[float] = None,
        timeout: Optional[float] = None,
    ) -> Tuple[int, List[Match]]:
        sync = [(ns.sync, hashes) for ns, hashes in requests]
        return await _done(
            lambda: self.sync.submit_match_all(sync, lease, timeout), self.sync.timeout if timeout is None else timeout
        )

    def watch(
        self, *, snapshot: bool = False, incarnation: int = 0, after: int = 0, timeout: Optional[float] = None
    ) -> "Watch":
        return Watch(lambda: self.sync.watch(snapshot=snapshot, incarnation=incarnation, after=after, timeout=timeout))


class Namespace:
    """kvtier.Namespace with await. `sync` is that."""

    def __init__(self, pool: Pool, ns: _Namespace) -> None:
        self.pool = pool
        self.sync = ns

    @property
    def name(self) -> str:
        return self.sync.name

    @property
    def error(self) -> Optional[Error]:
        return self.sync.error

    @property
    def is_open(self) -> bool:
        return self.sync.is_open

    def _time(self, timeout: Optional[float]) -> float:
        return self.sync.pool.timeout if timeout is None else timeout

    async def match(
        self,
        hashes: Sequence[bytes],
        lease: Optional[float] = None,
        all: bool = False,
        timeout: Optional[float] = None,
        plan: Optional[PlanOptions] = None,
        conversation: Optional[str] = None,
    ) -> Match:
        return await _done(
            lambda: self.sync.submit_match(hashes, lease, all, timeout, plan, conversation), self._time(timeout)
        )

    async def get_into(
        self, hashes: Sequence[bytes], buffers: Sequence[Any], timeout: Optional[float] = None, no_promote: bool = False
    ) -> List[GetResult]:
        return await _done(lambda: self.sync.submit_get_into(hashes, buffers, timeout, no_promote), self._time(timeout))

    async def get_region(
        self,
        hashes: Sequence[bytes],
        segments: Sequence[Any],
        timeout: Optional[float] = None,
        no_promote: bool = False,
    ) -> List[GetResult]:
        return await _done(
            lambda: self.sync.submit_get_region(hashes, segments, timeout, no_promote), self._time(timeout)
        )

    async def put(
        self,
        hashes: Sequence[bytes],
        buffers: Sequence[Any],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> List[PutResult]:
        return await _done(
            lambda: self.sync.submit_put(hashes, buffers, parents, durable, ttl, timeout), self._time(timeout)
        )

    async def put_region(
        self,
        hashes: Sequence[bytes],
        segments: Sequence[Any],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> List[PutResult]:
        return await _done(
            lambda: self.sync.submit_put_region(hashes, segments, parents, durable, ttl, timeout), self._time(timeout)
        )

    async def prefetch(
        self,
        hashes: Sequence[bytes],
        timeout: Optional[float] = None,
        progress: Optional[Callable[[int, str], None]] = None,
        priority: int = 0,
        within: Optional[float] = None,
    ) -> List[str]:
        return await _done(
            lambda: self.sync.submit_prefetch(hashes, timeout, progress, priority, within), self._time(timeout)
        )

    async def report_prefill(self, position: int, tokens: int, seconds: float, timeout: Optional[float] = None) -> bool:
        return await _done(
            lambda: self.sync.submit_report_prefill(position, tokens, seconds, timeout), self._time(timeout)
        )

    async def reserve(self, sizes: Sequence[int], timeout: Optional[float] = None) -> List[Reservation]:
        return await _done(lambda: self.sync.submit_reserve(sizes, timeout), self._time(timeout))

    async def commit(
        self,
        reservations: Sequence[Reservation],
        hashes: Sequence[bytes],
        parents: Optional[Sequence[Optional[bytes]]] = None,
        durable: bool = False,
        ttl: float = 0.0,
        timeout: Optional[float] = None,
    ) -> List[PutResult]:
        return await _done(
            lambda: self.sync.submit_commit(reservations, hashes, parents, durable, ttl, timeout), self._time(timeout)
        )

    async def lease_read(
        self, hashes: Sequence[bytes], seconds: float, verify: bool = True, timeout: Optional[float] = None
    ) -> Loan:
        return await _done(lambda: self.sync.submit_lease_read(hashes, seconds, verify, timeout), self._time(timeout))

    async def locate(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> List[List[Location]]:
        return await _done(lambda: self.sync.submit_locate(hashes, timeout), self._time(timeout))

    async def pin(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> List[Optional[Error]]:
        return await _done(lambda: self.sync.submit_pin(hashes, timeout), self._time(timeout))

    async def unpin(self, hashes: Sequence[bytes], timeout: Optional[float] = None) -> List[Optional[Error]]:
        return await _done(lambda: self.sync.submit_unpin(hashes, timeout), self._time(timeout))

    def lookup(self, hashes: Sequence[bytes], fresh: float = 1.0) -> Optional[List[bool]]:
        """It never waits, and is no coroutine."""
        return self.sync.lookup(hashes, fresh)

    def watch(
        self, *, snapshot: bool = False, incarnation: int = 0, after: int = 0, timeout: Optional[float] = None
    ) -> "Watch":
        return Watch(lambda: self.sync.watch(snapshot=snapshot, incarnation=incarnation, after=after, timeout=timeout))


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event from another thread."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass  # the loop is closed: nobody waits


class Watch:
    """kvtier.Watch for `async for`. It begins with the first event that is asked for. One
    that is cancelled while it waits loses nothing: the event is the next one's."""

    def __init__(self, begin: Callable[[], _Watch]) -> None:
        self._begin = begin
        self._watch: Optional[_Watch] = None
        self._closed = False

    def __aiter__(self) -> "Watch":
        return self

    async def __anext__(self) -> Event:
        loop = asyncio.get_running_loop()
        if self._watch is None and not self._closed:
            self._watch = await loop.run_in_executor(None, self._begin)
        watch = self._watch
        if watch is None:
            raise StopAsyncIteration
        while True:
            some = asyncio.Event()
            watch._call.told = lambda: _wake(loop, some)
            try:
                event = watch._poll(0.0)
            except StopIteration:
                raise StopAsyncIteration from None
            if event is not None:
                return event
            try:
                await asyncio.wait_for(some.wait(), max(0.0, min(3600.0, watch._end - time.monotonic())))
            except asyncio.TimeoutError:
                pass  # the watch is over, or goes on

    async def close(self) -> None:
        """Ends the watch."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()

    async def __aenter__(self) -> "Watch":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()
