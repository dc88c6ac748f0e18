"""Batch calls that run beside their callers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Generic, List, Optional, Set, TypeVar

from ._calls import Cancel
from ._errors import BusyError, CancelledError, ClosedError, DeadlineError, DisconnectedError, Error, InvalidError, bare
from ._waiting import Flag, Thread, Waiters

R = TypeVar("R")

_log = logging.getLogger("kvtier")

MAX_JOBS = 1024  # submitted and not over
MAX_KEPT = 4096  # over, and not taken by completions
THREADS = 16
LONGEST = 1e6  # seconds that a call may take: what locks and messages can tell

# What a job does: it gets the means to be cancelled, and a list for what it knows so far.
Work = Callable[[Cancel, List[Any]], R]


class Job(Generic[R]):
    """A call that was submitted. Its memory is in use until it is done."""

    def __init__(self, jobs: "Jobs", id: int, work: "Work[R]", keys: int, silent: bool) -> None:
        self.id = id
        self._silent = silent  # completions does not tell of it
        self._jobs = jobs
        self._work: Optional[Work[R]] = work
        self._thread = 0  # that works on it
        self._known: List[Any] = [None] * keys
        self._cancel = Cancel()
        self._begun = False
        self._told = False  # to the pool's jobs, that it is over
        self._over = Flag()
        self._result: Optional[R] = None
        self._error: Optional[BaseException] = None
        self._callbacks: List[Callable[["Job[R]"], None]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<kvtier.Job {self.id} {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether it is over, however it ended: its memory is not touched any more."""
        return self._over.is_set()

    def result(self, timeout: Optional[float] = None) -> R:
        """Waits, at most `timeout` seconds, and returns what the call returns, or raises
        what it raises. CancelledError when it was cancelled, DeadlineError when it is not
        done in time."""
        if not self._over.wait(timeout):
            raise DeadlineError(f"job {self.id} is not done after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def results(self) -> List[Any]:
        """The results of its keys as far as they are known, None for the others."""
        return list(self._known)

    @property
    def error(self) -> Optional[BaseException]:
        """What result raises when it is done, None if it returns something."""
        return self._error

    def cancel(self) -> bool:
        """Ends the job, and returns when its memory is quiet: nothing is written there or
        read from there any more. False when it was done already. In a `progress`, or on the
        job's own thread, it returns at once: the job ends when that has returned."""
        if self._over.is_set():
            return False
        self._cancel.cancel()
        if not self._begun:  # who begins it now ends it at once
            self._finish(None, CancelledError(f"job {self.id} was cancelled"))
            self._jobs.withdraw(self)  # last: if this is interrupted a thread finds it, and goes on
            return True
        if self._thread == threading.get_ident() or getattr(_progress, "told", False):
            return True
        self._over.wait()
        return isinstance(self._error, CancelledError)

    def disown(self) -> None:
        """Lets `completions` tell of it no more: it is its owner's alone."""
        self._jobs.disown(self)

    def add_done_callback(self, fn: Callable[["Job[R]"], None]) -> None:
        """Calls fn(job) when it is done, on one of the pool's threads, or at once on this
        one if it is. It must not block; what it raises is logged."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(fn)
                return
        self._call(fn)

    def _call(self, fn: Callable[["Job[R]"], None]) -> None:
        try:
            fn(self)
        except Exception:
            _log.exception("callback of job %d", self.id)

    def _run(self) -> None:
        work = self._work
        self._thread = threading.get_ident()
        self._begun = True
        try:
            self._cancel.check()
            assert work is not None
            self._finish(work(self._cancel, self._known), None)
        except Error as e:
            self._finish(None, bare(e))
        except BaseException as e:
            _log.exception("job %d", self.id)
            self._finish(None, e)

    def _finish(self, result: Optional[R], error: Optional[BaseException]) -> None:
        """Ends it. Only the first end counts; another does what is left of that."""
        with self._lock:
            if not self._over.is_set():
                self._result, self._error = result, error
            self._work = None  # and with it the buffers
            self._thread = 0
            self._over.set()
        self._jobs.over(self)
        while self._callbacks:
            try:
                fn = self._callbacks.pop(0)
            except IndexError:
                break  # another thread is at it
            self._call(fn)


_progress = threading.local()  # told: this thread is in a progress


def tell_progress(progress: Callable[[int, str], None], i: int, reason: str) -> None:
    """Calls what a caller gave, on the thread that reads."""
    _progress.told = True
    try:
        progress(i, reason)
    except Exception:
        _log.exception("progress of a prefetch")
    finally:
        _progress.told = False


class Jobs:
    """The jobs of a pool: a bounded queue, the threads that work on it, and what is done."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._some = Waiters()  # for a job
        self._queue: Deque[Job[Any]] = deque()
        self._open: Set[Job[Any]] = set()
        self._done: Deque[Job[Any]] = deque()
        self._followed = False  # somebody takes what is done
        self._last = 0
        self._closed = False
        self._event = -1
        self._workers: List[Thread] = []

    def submit(self, work: "Work[R]", keys: int, silent: bool = False) -> "Job[R]":
        """Queues a job. BusyError beyond MAX_JOBS."""
        job = None
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("the pool is closed")
                kept = len(self._done) if self._followed else 0
                if len(self._open) >= MAX_JOBS or kept >= MAX_KEPT:
                    raise BusyError(f"{len(self._open)} jobs are under way, {kept} are not taken by completions")
                self._last += 1
                job = Job(self, self._last, work, keys, silent)
                self._open.add(job)
                self._queue.append(job)
                if not self._some.tell(1):
                    self._begin_worker()
            return job
        except BaseException:
            if job is not None:  # nobody gets it: its memory is not used
                job._silent = True
                job.cancel()
            raise

    def _begin_worker(self) -> None:
        """Starts one more thread, up to THREADS. BusyError when there is none at all."""
        if len(self._workers) >= THREADS:
            return
        worker = Thread(self._serve, f"kvtier-job-{len(self._workers) + 1}")
        try:
            self._workers.append(worker)
            worker.begin()
        except BaseException as e:
            if not worker.begun and worker in self._workers:
                self._workers.remove(worker)
            if not isinstance(e, RuntimeError):
                raise
            if not self._workers:
                raise BusyError(f"no thread for a job: {e}") from e

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._queue:
                    job = self._queue.popleft()
                elif self._closed:
                    return
                else:
                    turn = self._some.turn()
                    job = None
            if job is None:
                self._some.wait(turn)
                continue
            job._run()
            del job  # its result is its owner's

    def withdraw(self, job: "Job[Any]") -> None:
        """Takes a job out that has not begun."""
        with self._lock:
            if job in self._queue:
                self._queue.remove(job)

    def over(self, job: "Job[Any]") -> None:
        with self._lock:
            if job in self._open and not job._silent:
                if not job._told:
                    job._told = True
                    self._done.append(job)
                if not self._followed and len(self._done) > MAX_KEPT:
                    self._done.popleft()
                if self._event >= 0:
                    os.eventfd_write(self._event, 1)
            self._open.discard(job)

    def disown(self, job: "Job[Any]") -> None:
        with self._lock:
            job._silent = True
            if job in self._done:
                self._done.remove(job)
                if not self._done:
                    self._quieten()

    def completions(self) -> "List[Job[Any]]":
        with self._lock:
            self._followed = True
            self._quieten()
            done = list(self._done)
            self._done.clear()
        return done

    def _quieten(self) -> None:
        """Nothing is left for completions to tell."""
        if self._event >= 0:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass  # nothing was

    def fileno(self) -> int:
        with self._lock:
            self._followed = True
            if self._event < 0:
                self._event = os.eventfd(1 if self._done else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._event

    def close(self) -> None:
        """Cancels all, and waits for the threads."""
        with self._lock:
            self._closed = True
            jobs = list(self._open)
            self._some.tell()
        for job in jobs:
            job.cancel()
        for worker in self._workers:
            worker.end(10)
        with self._lock:
            if self._event >= 0:
                os.close(self._event)
                self._event = -1

    def after_fork(self) -> None:
        """In the child, which has none of the threads: its copies of jobs have ended."""
        jobs, event = list(self._open), self._event
        self._reset()
        if event >= 0:
            os.close(event)
        for job in jobs:
            job._lock = threading.Lock()
            job._over = Flag()
            job._callbacks = []
            job._finish(None, DisconnectedError("the job is the parent's"))
        self._done.clear()


def deadline_of(timeout: Optional[float], default: float) -> float:
    """When a call of so many seconds ends. InvalidError."""
    if timeout is None:
        timeout = default
    elif not timeout >= 0:
        raise InvalidError(f"timeout: {timeout} s")
    return time.monotonic() + min(timeout, LONGEST)
