"""A pool: a session with a daemon that is opened again whenever it is lost."""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _wire as wire
from ._arguments import text_of, ttl_ms
from ._calls import Cancel
from ._connection import Connection
from ._dial import Address, Region, dial
from ._errors import (
    ClosedError,
    DeadlineError,
    DeniedError,
    DisconnectedError,
    Error,
    InvalidError,
    NotFoundError,
    Status,
    UnavailableError,
)
from ._jobs import LONGEST, Job, Jobs, deadline_of
from ._results import Limits, Server, Stats

if TYPE_CHECKING:
    import ssl

    from ._match import Match
    from ._namespace import Namespace
    from ._watch import Watch

_log = logging.getLogger("kvtier")

_FIRST = 2.0  # seconds for which connect waits for the first attempt
_BACKOFF_FIRST = 0.02
_BACKOFF_MOST = 1.0
_NOTHING = wire.release([], [])
_DIAL = 5.0  # seconds that an attempt may take
_OPEN_AGAIN = 1.0  # seconds before a namespace that was not opened in time is tried again
_NEVER = 1e18
# What another attempt to open a namespace does not change.
_SETTLED = (Status.INVALID, Status.MISMATCH, Status.DENIED, Status.NOT_FOUND)


class Counts:
    """Counters of a pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n: Dict[str, int] = {}

    def add(self, **n: int) -> None:
        with self._lock:
            for name, more in n.items():
                self._n[name] = self._n.get(name, 0) + more

    def copy(self) -> "Counts":
        """Another one with the same counts, without looking at the lock."""
        c = Counts()
        c._n = dict(self._n)
        return c

    def stats(self) -> Stats:
        with self._lock:
            return Stats(**self._n)


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
    error = pool._first(timeout if required else min(timeout, _FIRST))
    if error is not None and (required or isinstance(error, (DeniedError, InvalidError, NotFoundError))):
        pool.close()
        raise error
    return pool


class Pool:
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
        self._address = Address.parse(address)
        if regions and not self._address.unix:
            raise InvalidError("regions: only over a unix socket")
        self._region_sizes = [r.size() for r in regions]
        self._token = token
        self._name = name
        self._tls = tls
        self._want_shared = shared
        self._regions = regions
        self.timeout = min(timeout, LONGEST)
        self._counts = Counts()
        self._namespaces: List["Namespace"] = []
        self._closed = False
        self._jobs = Jobs()
        self._reset()
        _pools.add(self)
        self._start()

    # Life

    def _reset(self) -> None:
        self._lock = threading.RLock()  # __del__ of reservations takes it anywhere
        self._conn: Optional[Connection] = None
        self._error: Error = DisconnectedError(f"not connected to {self._address.text}")
        self._tried = threading.Event()
        self._wake_lock = threading.RLock()  # the descriptor may be closed
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._leftover: Dict[int, List[int]] = {}  # of an incarnation
        self._connects = 0
        self._opening = False
        self._forked = False
        self._thread: Optional[threading.Thread] = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvtier-io", daemon=True)
        self._thread.start()

    def _first(self, timeout: float) -> Optional[Error]:
        """Waits for the first attempt to connect, and says how it went."""
        self._tried.wait(timeout)
        return None if self._conn is not None else self._error

    def close(self) -> None:
        """Ends the session: jobs are cancelled, leases and reservations given back. Calls
        raise ClosedError from then on. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._jobs.close()
        self._poke()
        if self._thread is not None and self._thread is not threading.current_thread():
            # One that connects ends when that does, and needs not be waited for.
            self._thread.join(timeout=10 if self.connected else 1)
        with self._wake_lock:
            wake, self._wake = self._wake, -1
            os.close(wake)
        _pools.discard(self)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _poke(self) -> None:
        """Wakes the I/O thread."""
        with self._wake_lock:
            if self._wake >= 0:
                try:
                    os.eventfd_write(self._wake, 1)
                except BlockingIOError:
                    pass  # it is awake for sure

    def _run(self) -> None:
        """The I/O thread: connects, reads when nobody else does, and connects again."""
        backoff = _BACKOFF_FIRST
        told = ""
        while not self._closed:
            try:
                conn = self._dial()
            except Exception as e:
                error = e if isinstance(e, Error) else DisconnectedError(f"connect to {self._address.text}: {e}")
                self._error = error
                if str(error) != told:
                    told = str(error)
                    _log.warning("not connected: %s", error)
                self._tried.set()
                self._pause(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, _BACKOFF_MOST)
                continue
            backoff, told = _BACKOFF_FIRST, ""
            try:
                self._serve(conn)
            except Exception:  # whatever it is, calls are misses and there is a next session
                _log.exception("session with %s", self._address.text)
                self._pause(_BACKOFF_MOST)
            if not self._closed:
                _log.warning("session lost: %s", conn.error)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closed and time.monotonic() < end:
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))

    def _dial(self) -> Connection:
        d = dial(self._address, self._token, self._name, self._tls, self._want_shared, self._regions, _DIAL)
        if d.warning:
            _log.warning("the store's memory is not mapped: %s", d.warning)
        conn = Connection(d, self._poke)
        incarnation = d.welcome.incarnation

        conn.on_leftover = lambda grants: self._give_back(incarnation, grants)
        with self._lock:
            self._connects += 1
        self._counts.add(connects=1, reconnects=0 if self._connects == 1 else 1)
        return conn

    def _give_back(self, incarnation: int, grants: List[int]) -> None:
        """Gives back places of a session that has ended, in the one that there is, or the
        next. With another incarnation they are gone, and their numbers may be others'."""
        with self._lock:
            conn = self._conn
            if conn is None or conn.error is not None:
                self._leftover.setdefault(incarnation, []).extend(grants)
                return
        if conn.passed and conn.welcome.incarnation == incarnation:
            for grant in grants:
                conn.give_back_later(grant)

    def _serve(self, conn: Connection) -> None:
        try:
            with self._wake_lock:
                wake = self._wake
                if wake >= 0:
                    conn.watch(wake)
            self._opening = True
            retry = _NEVER
            with self._lock:
                self._conn = conn
                left, self._leftover = self._leftover, {}
            self._give_back(conn.welcome.incarnation, left.get(conn.welcome.incarnation, []))
            while conn.error is None and not self._closed:
                if self._opening or time.monotonic() >= retry:
                    self._opening = False
                    retry = _NEVER if self._open_all(conn) else time.monotonic() + _OPEN_AGAIN
                    self._tried.set()
                if conn.serve_for(wake, min(3600.0, max(0.0, retry - time.monotonic()))):
                    try:
                        os.eventfd_read(wake)
                    except OSError:
                        pass  # somebody was faster, or the pool is closed
            if conn.error is None:
                conn.farewell()
        except Exception as e:
            conn.end(DisconnectedError(f"connection given up: {e!r}"))
            raise
        finally:
            self._conn = None
            conn.close()
            self._error = conn.error or self._error
            self._tried.set()

    def _open_all(self, conn: Connection) -> bool:
        """Opens the namespaces that this session does not have yet. False: one of them is
        worth another attempt."""
        settled = True
        with self._lock:
            namespaces = list(self._namespaces)
        for ns in namespaces:
            if ns._handle is None or ns._handle.conn is not conn:
                if conn.stalled:
                    return False
                try:
                    ns._open(conn, time.monotonic() + self.timeout)
                except Error as e:
                    ns._refused(e)
                    settled = settled and e.status in _SETTLED
        return settled

    def _reopen(self) -> None:
        """Lets the I/O thread open namespaces again."""
        self._opening = True
        self._poke()

    def _after_fork(self) -> None:
        """In the child: the session is the parent's, and its threads are not here."""
        conn, wake = self._conn, self._wake
        self._reset()
        self._counts = self._counts.copy()
        self._jobs.after_fork()
        if conn is not None:
            conn.close_in_child()
        if wake >= 0:
            os.close(wake)
        for ns in self._namespaces:
            ns._after_fork()
        self._forked = True

    def _ready(self) -> Optional[Connection]:
        """The session, None while there is none: the call is a miss then. ClosedError."""
        if self._forked:
            self._begin_again()
        conn = self._conn
        if conn is not None and not conn.stalled and conn.error is None:
            return conn
        if self._closed:
            raise ClosedError("the pool is closed")
        return None

    def _begin_again(self) -> None:
        """Opens the child's own session."""
        with self._lock:
            if not self._forked or self._closed:
                return
            self._start()
            self._forked = False
        self._tried.wait(_FIRST)

    # What there is

    def _session(self) -> Optional[Connection]:
        conn = self._conn
        return conn if conn is not None and conn.error is None else None

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
        if not pool._closed:
            pool._after_fork()


def _at_exit() -> None:
    for pool in list(_pools):
        pool.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
