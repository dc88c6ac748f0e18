"""Waits that outlive an exception which comes at any step, as that of a signal's handler does.

`with` on a lock of threading's is one step for it: none is left locked. The `with` and the
methods of threading.Condition and threading.Event are Python, and an exception in there
leaves their lock locked for ever, or not held by who lets it go. So they are not used here.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from typing import Callable, Deque, List, Optional

_LOOK_UP = 0.5  # seconds after which who waits for a flag looks: who set it may have been interrupted


class Turn:
    """One thread's wait for one change."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


class Waiters:
    """The threads that wait for a change of something that a lock guards. They take a turn
    while they hold that lock, wait without it, and look again."""

    def __init__(self) -> None:
        self._turns: Deque[Turn] = deque()

    def turn(self) -> Turn:
        """Of who will wait. What changes from now on ends it."""
        turn = Turn()
        self._turns.append(turn)
        return turn

    def wait(self, turn: Turn, seconds: float = -1) -> None:
        """Waits for a change, at most so many seconds."""
        try:
            turn.lock.acquire(timeout=seconds)
        finally:
            self._drop(turn)

    def tell(self, most: Optional[int] = None) -> int:
        """Something has changed: ends the turns of all, or of so many. Returns of how many."""
        turns = list(self._turns)[:most]
        for turn in turns:
            # In this order none is lost in between. To be told twice is harmless.
            try:
                turn.lock.release()
            except RuntimeError:
                pass  # it was told before
            self._drop(turn)
        return len(turns)

    def _drop(self, turn: Turn) -> None:
        try:
            self._turns.remove(turn)
        except ValueError:
            pass


class Flag:
    """It is set once, for all who wait."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.tell()

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits, at most so many seconds, and says whether it is set."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._set:
            left = _LOOK_UP if end is None else min(_LOOK_UP, end - time.monotonic())
            if left <= 0:
                break
            turn = self._waiters.turn()
            self._waiters.wait(turn, 0 if self._set else left)
        return self._set


class Thread(threading.Thread):
    """A thread that may be begun, and waited for, by who is interrupted: start, join and
    is_alive of threading.Thread leave one that never runs, or take one for ended, then."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.begun = False
        self.over = Flag()

    def begin(self) -> None:
        """RuntimeError when there is no thread."""
        tried = Flag()
        errors: List[RuntimeError] = []

        def start() -> None:  # on a thread on which no handler runs
            self.begun = True
            try:
                self.start()
            except RuntimeError as e:
                self.begun = False
                errors.append(e)
            finally:
                tried.set()

        _thread.start_new_thread(start, ())
        tried.wait()
        if errors:
            raise errors[0]

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.over.set()

    def end(self, timeout: float) -> None:
        """Waits for its end, at most so many seconds, if it was begun and is not this one."""
        if self.begun and self.ident != threading.get_ident():
            self.over.wait(timeout)
