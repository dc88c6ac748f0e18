"""The session of a pool, which is opened again whenever it is lost."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

from ._connection import Connection
from ._dial import Address, Region, dial
from ._errors import ClosedError, DisconnectedError, Error, InvalidError, Status
from ._results import Stats
from ._waiting import Flag, Thread

if TYPE_CHECKING:
    import ssl

    from ._namespace import Namespace

_log = logging.getLogger("kvtier")

FIRST = 2.0  # seconds for which the first attempt to connect is waited for
_BACKOFF_FIRST = 0.02
_BACKOFF_MOST = 1.0
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


class Link:
    """What a pool is to its daemon: a thread that connects, opens the namespaces, reads when
    nobody else does, and connects again."""

    def __init__(
        self,
        address: Address,
        token: str,
        name: str,
        tls: Optional["ssl.SSLContext"],
        shared: bool,
        regions: Tuple[Region, ...],
        timeout: float,
    ) -> None:
        if regions and not address.unix:
            raise InvalidError("regions: only over a unix socket")
        self._region_sizes = [r.size() for r in regions]
        self._address = address
        self._token = token
        self._name = name
        self._tls = tls
        self._want_shared = shared
        self._regions = regions
        self.timeout = timeout
        self._counts = Counts()
        self._namespaces: List["Namespace"] = []
        self._closed = False
        self._ended = False  # and closed to the end
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # __del__ of reservations takes it anywhere
        self._conn: Optional[Connection] = None
        self._error: Error = DisconnectedError(f"not connected to {self._address.text}")
        self._tried = Flag()
        self._wake_lock = threading.RLock()  # the descriptor may be closed
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._leftover: Dict[int, List[int]] = {}  # of an incarnation
        self._connects = 0
        self._opening = False
        self._forked = False
        self._thread: Optional[Thread] = None

    def _start(self) -> None:
        self._thread = Thread(self._run, "kvtier-io")
        self._thread.begin()

    def _first(self, timeout: float) -> Optional[Error]:
        """Waits for the first attempt to connect, and says how it went."""
        self._tried.wait(timeout)
        return None if self._conn is not None else self._error

    def _end(self) -> None:
        """Ends the session, for who has set _closed. Twice is harmless."""
        self._poke()
        if self._thread is not None:
            # One that connects ends when that does, and needs not be waited for.
            self._thread.end(10 if self._session() is not None else 1)
        with self._wake_lock:
            wake, self._wake = self._wake, -1
            if wake >= 0:
                os.close(wake)

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
        self._tried.wait(FIRST)

    def _session(self) -> Optional[Connection]:
        conn = self._conn
        return conn if conn is not None and conn.error is None else None

    def _after_fork(self) -> None:
        """In the child: the session is the parent's, and its threads are not here."""
        conn, wake = self._conn, self._wake
        self._reset()
        self._counts = self._counts.copy()
        if conn is not None:
            conn.close_in_child()
        if wake >= 0:
            os.close(wake)
        for ns in self._namespaces:
            ns._after_fork()
        self._forked = True
