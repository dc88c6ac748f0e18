"""Answers to lookups that must not wait."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Callable, List, Optional, Sequence, Set, Tuple

from ._jobs import Job

FRESH = 1.0  # seconds for which an answer is given again
_MOST = 65536  # answers that are kept
MOST_KEYS = 8192  # of one lookup: its answers must all be there at once
_FAILED_FOR = 10.0  # seconds for which a key whose get failed is not there

_UNTOLD = -1.0  # in place of when an answer was given first: not yet


class Lookups:
    """What is known of keys, and which are being asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: "OrderedDict[bytes, Tuple[bool, float]]" = OrderedDict()
        self._asked: Set[bytes] = set()

    def lookup(
        self, keys: Sequence[bytes], fresh: float, submit: Callable[[List[bytes]], Job[List[bool]]]
    ) -> Optional[List[bool]]:
        """The answers, None while one of them is out. submit asks for keys."""
        now = time.monotonic()
        ask: List[bytes] = []
        try:
            with self._lock:
                for key in keys:
                    answer = self._answers.get(key)
                    # An answer in the future is one of failed.
                    if key not in self._asked and (answer is None or 0 <= answer[1] < now - fresh):
                        ask.append(key)
                        self._asked.add(key)
                if not ask and self._asked.isdisjoint(keys):
                    return [self._tell(key, now) for key in keys]
            if ask:
                submit(ask).add_done_callback(lambda job: self._answered(ask, job))
        except BaseException:
            with self._lock:
                self._asked.difference_update(ask)
            raise
        return None

    def _tell(self, key: bytes, now: float) -> bool:
        there, told = self._answers[key]
        if told == _UNTOLD:
            self._answers[key] = (there, now)
        return there

    def _answered(self, keys: List[bytes], job: Job[List[bool]]) -> None:
        there = job.result() if job.error is None else []
        with self._lock:
            for i, key in enumerate(keys):
                if key in self._asked:  # else its get failed, or it was put meanwhile
                    self._asked.discard(key)
                    self._keep(key, i < len(there) and there[i], _UNTOLD)

    def _keep(self, key: bytes, there: bool, told: float) -> None:
        self._answers[key] = (there, told)
        self._answers.move_to_end(key)
        if len(self._answers) > _MOST:
            self._answers.popitem(last=False)

    def failed(self, keys: Sequence[bytes]) -> None:
        """Gets of these failed: whoever asks again at once would try them for ever."""
        until = time.monotonic() + _FAILED_FOR
        with self._lock:
            for key in keys:
                self._asked.discard(key)
                self._keep(key, False, until)

    def put(self, keys: Sequence[bytes]) -> None:
        """These were put."""
        with self._lock:
            if self._answers or self._asked:
                for key in keys:
                    self._answers.pop(key, None)
                    self._asked.discard(key)
