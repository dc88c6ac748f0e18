"""A pool: the calls of a daemon's store that are no namespace's."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Union

from . import _wire as wire
from ._arguments import text_of, ttl_ms
from ._calls import Cancel
from ._dial import Address, Region
from ._errors import (
    ClosedError,
    DeadlineError,
    DeniedError,
    DisconnectedError,
    Error,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from ._jobs import LONGEST, Job, Jobs, deadline_of
from ._link import FIRST, Link
from ._results import Limits, Server, Stats

if TYPE_CHECKING:
    import ssl

    from ._match import Match
    from ._namespace import Namespace
    from ._watch import Watch

_NOTHING = wire.release([], [])


def connect(
    address: str,
    token: Optional[str] = None,
    name: Optional[str] = None,
    tls: Optional["ssl.SSLContext"] = None,
    shared: bool = True,
    regions: Sequence[Region] = (),
    timeout: float = 10.0,
    required: bool = False,
) -> "Pool":
    """Attaches to the daemon that serves sessions at an address.

    address: `unix:PATH` of its socket, or `HOST:PORT` of its `--xfer`.
    token: that the daemon wants to see.
    name: of this client, for the daemon's logs; the process's number by default.
    tls: for TCP, an `ssl.SSLContext`.
    shared: map the store's memory where the daemon offers it (over the unix socket): this
        process then copies in and out of it itself.
    regions: files of memory in which the daemon may move bytes itself (over the unix
        socket): calls with `_region` name them by their index here.
    timeout: seconds of calls that do not name their own.
    required: raise DisconnectedError when nobody answers now. Else the pool begins
        disconnected: calls are misses, and it connects in the background.

    Raises InvalidError for a wrong argument, and DeniedError for a wrong token or a region
    that the daemon does not find to be this user's, in any case.
    """
    pool = Pool(address, token or "", name or f"pid {os.getpid()}", tls, shared, tuple(regions), timeout)
    timeout = pool.timeout
    try:
        pool._start()
        error = pool._first(timeout if required else min(timeout, FIRST))
    except BaseException:  # nobody else could close it
        pool.close()
        raise
    if error is not None and (required or isinstance(error, (DeniedError, InvalidError, NotFoundError))):
        pool.close()
        raise error
    return pool


class Pool(Link):
    """A daemon's store, made by `connect`. All methods may be called from any thread.

    A lost daemon is no exception: calls are misses at once, and the pool connects again in
    the background, with namespaces opened anew. A forked child gets a session of its own
    with its first call. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        address: str,
        token: str,
        name: str,
        tls: Optional["ssl.SSLContext"],
        shared: bool,
        regions: Tuple[Region, ...],
        timeout: float,
    ) -> None:
        if not timeout > 0:
            raise InvalidError(f"timeout: {timeout} s")
        text_of("token", token)
        text_of("name", name)
        super().__init__(Address.parse(address), token, name, tls, shared, regions, min(timeout, LONGEST))
        self._jobs = Jobs()
        _pools.add(self)

    # Life

    def close(self) -> None:
        """Ends the session: jobs are cancelled, leases and reservations given back. Calls
        raise ClosedError from then on. Closing twice is harmless, and goes on where the first
        time was interrupted."""
        if self._ended:
            return
        self._closed = True
        self._jobs.close()
        self._end()
        self._ended = True
        _pools.discard(self)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._jobs.after_fork()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # What there is

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._session() is not None

    @property
    def shared(self) -> bool:
        """Whether this process copies in and out of the store's memory itself."""
        conn = self._session()
        return conn is not None and conn.memory is not None

    @property
    def address(self) -> str:
        """Where the daemon is, as it was given."""
        return self._address.text

    @property
    def error(self) -> Optional[Error]:
        """Why there is no session now, None when there is one."""
        conn = self._conn
        if conn is None:
            return self._error
        return conn.error

    @property
    def server(self) -> Optional[Server]:
        """The daemon, None while disconnected."""
        conn = self._session()
        if conn is None:
            return None
        w = conn.welcome
        return Server(w.name, w.incarnation, Limits(w.calls, w.bytes, conn.keys, w.grants, w.grant_bytes, conn.message))

    @property
    def session(self) -> int:
        """The number of the session at the daemon, 0 while disconnected."""
        conn = self._session()
        return 0 if conn is None else conn.welcome.session

    def stats(self) -> Stats:
        """A snapshot of the counters."""
        return self._counts.stats()

    def ping(self, timeout: Optional[float] = None) -> Optional[float]:
        """Makes an empty call, and returns the seconds that it took; None when there was no
        answer."""
        conn = self._ready()
        if conn is None:
            return None
        began = time.monotonic()
        try:
            conn.trip(wire.RELEASE, _NOTHING, began + (self.timeout if timeout is None else timeout))
        except Error:
            return None
        return time.monotonic() - began

    def wait_connected(self, timeout: Optional[float] = None) -> bool:
        """Waits until there is a session, at most so many seconds (the pool's timeout)."""
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            self._ready()
            if self.connected:
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)

    # Namespaces

    def open(
        self,
        name: str,
        *,
        model: str = "",
        revision: str = "",
        dtype: str = "",
        layout: str = "",
        tokens_per_block: int = 0,
        block_bytes: int = 0,
        max_block_bytes: int = 0,
        hash_algorithm: str = "",
        hash_seed: Union[str, int] = "",
        rank_layout: str = "",
        kv_group: Union[str, int] = "",
        tenant: str = "",
        ttl: float = 0.0,
        create: bool = True,
        timeout: Optional[float] = None,
    ) -> "Namespace":
        """Opens a namespace, and makes it when it is not there and `create` is True.

        The fields say what the blocks are; a namespace that is there must have the same
        ones: MismatchError names the field that differs. Give `block_bytes` when all blocks
        have this length, else `max_block_bytes`. `ttl` in seconds is how long blocks live
        (0 without end), and counts when the namespace is made. With create=False it is only
        looked for, which needs no right to write: by its name alone, or with all fields
        that it has. NotFoundError when it is not there.

        While disconnected the namespace opens itself when there is a session. What is
        wrong then is in its `error`, and its calls are misses.
        """
        from ._namespace import Namespace

        fields = {
            "model": model,
            "revision": revision,
            "dtype": dtype,
            "layout": layout,
            "tokens_per_block": _number("tokens_per_block", tokens_per_block),
            "block_bytes": _number("block_bytes", block_bytes),
            "max_block_bytes": _number("max_block_bytes", max_block_bytes),
            "hash_algorithm": hash_algorithm,
            "hash_seed": str(hash_seed),
            "rank_layout": rank_layout,
            "kv_group": str(kv_group),
            "tenant": tenant,
        }
        for key, value in (("name", name), *fields.items()):
            text_of(key, value)
        if not name:
            raise InvalidError("name: it is empty")
        fields = {key: value for key, value in fields.items() if value}
        if (create or fields) and ("block_bytes" in fields) == ("max_block_bytes" in fields):
            raise InvalidError("give either block_bytes or max_block_bytes")
        deadline = deadline_of(timeout, self.timeout)
        ns = Namespace(self, name, fields, create, ttl_ms(ttl))
        conn = self._ready()
        if conn is not None:
            try:
                ns._open(conn, deadline)
            except (DisconnectedError, DeadlineError, ClosedError, UnavailableError) as e:
                ns._refused(e)
        with self._lock:
            self._namespaces.append(ns)
        if ns._handle is None or ns._handle.conn is not self._conn:
            self._reopen()
        return ns

    def _forget(self, ns: "Namespace") -> None:
        with self._lock:
            if ns in self._namespaces:
                self._namespaces.remove(ns)

    def match_all(
        self,
        requests: "Sequence[Tuple[Namespace, Sequence[bytes]]]",
        lease: Optional[float] = None,
        timeout: Optional[float] = None,
    ) -> "Tuple[int, List[Match]]":
        """Matches in several namespaces at once, of several ranks or KV groups: all
        requests go out before the first answer is waited for. Returns the prefix that all
        have, in keys, and each one's match."""
        from ._match import match_all

        return match_all(self, requests, lease, timeout)(None)

    def submit_match_all(
        self,
        requests: "Sequence[Tuple[Namespace, Sequence[bytes]]]",
        lease: Optional[float] = None,
        timeout: Optional[float] = None,
    ) -> "Job[Tuple[int, List[Match]]]":
        """match_all as a job. Its `results()` are the matches, when it is done."""
        from ._match import match_all

        call = match_all(self, requests, lease, timeout)

        def work(cancel: Cancel, known: List[Any]) -> "Tuple[int, List[Match]]":
            prefix, matches = call(cancel)
            known[:] = matches
            return prefix, matches

        return self._submit(work, len(requests))

    def watch(
        self, *, snapshot: bool = False, incarnation: int = 0, after: int = 0, timeout: Optional[float] = None
    ) -> "Watch":
        """Follows the events of all namespaces, as Namespace.watch does those of one."""
        from ._watch import Watch

        conn = self._ready()
        if conn is None:
            raise DisconnectedError(str(self._error))
        return Watch(conn, 0, 0, snapshot, incarnation, after, timeout)

    # Jobs

    def completions(self) -> List[Job[Any]]:
        """The jobs that are done since the last call, in the order in which they ended.
        Before the first use of this or `fileno` only the last 4096 are kept; from then on
        submit refuses when so many wait to be taken."""
        return self._jobs.completions()

    def fileno(self) -> int:
        """A descriptor (an eventfd) that is readable while completions() is not empty. It
        is for select or an event loop: do not read it. It belongs to the pool."""
        return self._jobs.fileno()

    def _submit(self, work: Any, keys: int, silent: bool = False) -> Job[Any]:
        if self._closed:
            raise ClosedError("the pool is closed")
        try:
            job = self._jobs.submit(work, keys, silent)
        except Error:
            self._counts.add(busy=1)
            raise
        self._counts.add(jobs=1)
        return job


def _number(key: str, n: int) -> str:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{key}: {type(n).__name__}, want int")
    if n < 0:
        raise InvalidError(f"{key}: {n}")
    return str(n) if n else ""


_pools: "weakref.WeakSet[Pool]" = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        if pool._closed:
            pool._ended = True  # its locks may be held by threads that are not here
        else:
            pool._after_fork()


def _at_exit() -> None:
    for pool in list(_pools):
        pool.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
