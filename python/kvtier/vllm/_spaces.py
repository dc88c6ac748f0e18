"""The pool's namespaces of an engine, each opened once, and a thread for what the scheduler must not wait for."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ._describe import Group, Rank, descriptor, name
from ._settings import Settings

log = logging.getLogger("vllm.kvtier")

#: Seconds after which a namespace that could not be opened is tried again.
AGAIN = 30.0


class Refused(Exception):
    """There is no such namespace to be had; why was said when it was asked for first."""


class Spaces:
    """Opens namespaces by rank, group and hash seed.

    Args:
        pool: to open them in.
        settings: of the connector.
        quiet: another part of the same engine says why one cannot be opened.
    """

    def __init__(self, pool: Any, settings: Settings, *, quiet: bool = False) -> None:
        self._pool = pool
        self._settings = settings
        self._quiet = quiet
        self._lock = threading.Lock()
        self._open: dict[tuple[Rank, Group, str], Any] = {}
        self._opening: set[tuple[Rank, Group, str]] = set()
        self._refused: dict[tuple[Rank, Group, str], tuple[float, Exception]] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def get(self, rank: Rank, group: Group, seed: str) -> Any | None:
        """The namespace, or None when there is none to be had. It waits for the server."""
        key = (rank, group, seed)
        with self._lock:
            space = self._open.get(key)
            if space is not None or self._still_refused(key):
                return space
        return self._open_now(key)

    def get_soon(self, rank: Rank, group: Group, seed: str) -> Any | None:
        """The namespace, or None while it is being opened in the background. Refused when there is none to be had."""
        key = (rank, group, seed)
        self._pool.completions()  # jobs are waited for one by one; none is kept for this
        with self._lock:
            space = self._open.get(key)
            if space is not None:
                return space
            if self._still_refused(key):
                raise Refused(str(self._refused[key][1])) from self._refused[key][1]
            if key not in self._opening:
                self._opening.add(key)
                self._queue(lambda: self._open_now(key))
        return None

    def later(self, fn: Callable[[], object]) -> None:
        """Calls fn in the background."""
        with self._lock:
            self._queue(fn)

    def close(self) -> None:
        """Does what is left to do, for a second at most, and ends the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._work.put(None)
        if thread is not None:
            thread.join(1.0)

    def _queue(self, fn: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-spaces", daemon=True)
            self._thread.start()
        self._work.put(fn)

    def _run(self) -> None:
        while (fn := self._work.get()) is not None:
            try:
                fn()
            except Exception as err:
                log.debug("kvtier: in the background: %s", err)

    def _still_refused(self, key: tuple[Rank, Group, str]) -> bool:
        refused = self._refused.get(key)
        return refused is not None and time.monotonic() - refused[0] < AGAIN

    def _open_now(self, key: tuple[Rank, Group, str]) -> Any | None:
        rank, group, seed = key
        called = name(rank, group, seed, self._settings.namespace)
        space: Any | None = None
        try:
            space = self._pool.open(called, **descriptor(rank, group, seed))
            log.info("kvtier: blocks of %d bytes are kept in namespace %s", group.block_bytes, called)
        except Exception as err:
            with self._lock:
                again = key in self._refused
                self._refused[key] = (time.monotonic(), err)
            if not again and not self._quiet:
                log.warning("kvtier: no hits from namespace %s: %s", called, err)
        with self._lock:
            self._opening.discard(key)
            if space is not None:
                self._open[key] = space
        return space
