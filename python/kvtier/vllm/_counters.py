"""Counts of one half of the connector, taken by vLLM once a step."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

log = logging.getLogger("vllm.kvtier")

#: Each counter and what it says, also as Prometheus tells it.
COUNTERS = {
    "lookups": "Lookups of requests in the kvtier pool.",
    "lookup_timeouts": "Lookups that were not answered in time and counted as misses.",
    "hit_blocks": "Blocks found in the pool that the scheduler decided to load.",
    "load_blocks": "Blocks loaded from the pool.",
    "load_bytes": "Bytes loaded from the pool.",
    "load_failed_blocks": "Blocks that were to be loaded and were recomputed instead.",
    "save_blocks": "Blocks stored in the pool.",
    "save_bytes": "Bytes stored in the pool.",
    "save_existed_blocks": "Blocks that the pool had already when they were to be stored.",
    "save_failed_blocks": "Blocks that the pool did not take.",
    "save_dropped_blocks": "Blocks that were not stored because the staging memory was full.",
}
#: Each series of durations in seconds.
DURATIONS = {
    "load_seconds": "Time of a request's load, from the step that ordered it to the last byte.",
    "save_seconds": "Time of a batch of blocks stored.",
}
#: Durations kept between two steps.
_MOST = 1024
#: Seconds between two log lines of the same kind of failure.
_QUIET = 30.0


class Counters:
    """Adds up from several threads; ``take`` gives what came since the last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}
        self._told: dict[str, float] = {}

    def add(self, name: str, n: float = 1) -> None:
        """Adds to a counter."""
        if n:
            with self._lock:
                self._data[name] = self._data.get(name, 0) + n

    def observe(self, name: str, seconds: float) -> None:
        """Adds to a series of durations."""
        with self._lock:
            series = self._data.setdefault(name, [])
            if len(series) < _MOST:
                series.append(seconds)

    def failure(self, what: str, err: object) -> None:
        """Logs that something failed, at most once in a while for each kind."""
        kind = f"{what} {err if isinstance(err, str) else type(err).__name__}"
        now = time.monotonic()
        with self._lock:
            if now - self._told.get(kind, -_QUIET) < _QUIET:
                return
            self._told[kind] = now
        log.warning("kvtier: %s failed, the engine computes instead: %s", what, err or type(err).__name__)

    def take(self) -> dict[str, Any]:
        """What was counted since the last call."""
        with self._lock:
            data, self._data = self._data, {}
            return data
