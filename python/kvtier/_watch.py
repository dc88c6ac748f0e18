"""Events of a store, as they come."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Callable, Deque, Iterator, Optional

from . import _wire as wire
from ._calls import Call
from ._connection import Connection
from ._errors import BusyError, CancelledError, DisconnectedError, Error
from ._results import EVENT_KINDS, REMOVED_REASONS, Event, tier_of

_QUEUE = 16384  # messages that wait for a slow watcher
_QUEUE_BYTES = 64 << 20  # and their bytes
_SEND = 10.0  # seconds in which the request must be sent


class Watch(Iterator[Event]):
    """The events of a watch. Iterate over it; `close` ends it, as does dropping it."""

    def __init__(
        self,
        conn: Connection,
        ns: int,
        tag: int,
        snapshot: bool,
        incarnation: int,
        after: int,
        timeout: Optional[float],
    ) -> None:
        self._end = time.monotonic() + (timeout if timeout is not None else 1e9)
        self._some: "queue.SimpleQueue[Optional[bytes]]" = queue.SimpleQueue()
        self._ready: Deque[Event] = deque()
        self._conn = conn
        self._call = _Watching(self._some, conn)
        self._over = False
        conn.begin(self._call)
        message = wire.watch(ns, tag, incarnation, after, snapshot)
        conn.send([wire.message(wire.WATCH, self._call.id, message)], time.monotonic() + _SEND)

    def __iter__(self) -> "Watch":
        return self

    def __next__(self) -> Event:
        while True:
            event = self._poll(max(0.0, min(3600.0, self._end - time.monotonic())))
            if event is not None:
                return event

    def _poll(self, seconds: float) -> Optional[Event]:
        """The next event, None if no message comes in so many seconds. StopIteration."""
        while not self._ready:
            if self._over:
                raise StopIteration
            try:
                payload = self._some.get(timeout=seconds)
            except queue.Empty:
                if time.monotonic() >= self._end:
                    self.close()
                return None
            if payload is None:
                if self._over:
                    raise StopIteration
                self._over = True
                raise self._call.error or DisconnectedError("the watch has ended")
            self._call.taken += len(payload)
            self._decode(payload)
        return self._ready.popleft()

    def _decode(self, payload: bytes) -> None:
        m = self._conn.decode(wire.read_events, payload)
        if m.start is not None:
            self._ready.append(Event("start", m.start[1], incarnation=m.start[0], resumed=m.start[2]))
        for e in m.events:
            kind = EVENT_KINDS[e.kind] if e.kind < len(EVENT_KINDS) else f"kind {e.kind}"
            reason = REMOVED_REASONS[e.reason] if e.reason < len(REMOVED_REASONS) else f"reason {e.reason}"
            self._ready.append(
                Event(kind, e.seq, e.name, e.hash, e.parent, tier_of(e.tier), e.length, e.many, reason, e.gone)
            )

    def close(self) -> None:
        """Ends the watch: the iteration stops. For any thread; twice is harmless."""
        if self._over:
            return
        self._over = True
        if self._conn.abandon(self._call, CancelledError("the watch was closed")):
            self._conn.cancel_later(self._call.id)

    def __del__(self) -> None:
        if hasattr(self, "_over"):
            self.close()


class _Watching(Call):
    """The call of a watch: what comes is queued, and so is its end."""

    __slots__ = ("some", "conn", "came", "taken", "behind", "told")

    def __init__(self, some: "queue.SimpleQueue[Optional[bytes]]", conn: Connection) -> None:
        super().__init__(wire.EVENTS, stream=self.more)
        self.some = some
        self.conn = conn
        self.came = 0  # bytes, by the reader
        self.taken = 0  # bytes, by the watcher
        self.behind = False
        self.told: Callable[[], None] = lambda: None  # called when something is queued

    def more(self, payload: bytes) -> bool:
        self.came += len(payload)
        if self.some.qsize() >= _QUEUE or self.came - self.taken > _QUEUE_BYTES:
            self.behind = True  # the watch ends, and nothing else of the session
            self.conn.cancel_later(self.id)
            return False
        self.some.put(payload)
        self.told()
        return True

    def finish(self, error: Optional[Error]) -> None:
        super().finish(BusyError("the watch took its events too slowly") if self.behind else error)
        self.some.put(None)
        self.told()
