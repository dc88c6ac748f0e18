"""Signals in the middle of a call: nothing half read or half sent stays in the stream, and no
lock, call or thread is left without an end."""

import itertools
import os
import signal
import sys
import threading
import time

import pytest

import kvtier
from conftest import PATIENCE, attach, fresh_name, hashes, pattern, wait_for
from kvtier._calls import Budget
from kvtier._jobs import THREADS, Jobs
from kvtier._waiting import Flag


class Interrupt(Exception):
    """What the handler raises, as that of SIGINT raises KeyboardInterrupt."""


@pytest.fixture
def interrupt():
    """Interrupts the main thread after so many seconds."""

    def raise_it(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_half_a_frame_is_the_end(daemons, interrupt, way):
    d = daemons(shared=False)
    with attach(d, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4 << 20)
        blocks = [pattern(4 << 20, i) for i in range(8)]
        assert all(r.ok for r in ns.put(hashes(8), blocks))
        places = ns.reserve([4 << 20])
        assert len(places) == 1
        os.kill(d.process.pid, signal.SIGSTOP)
        time.sleep(0.1)  # each of its threads stops when it is next scheduled
        interrupt(0.5)
        with pytest.raises(Interrupt):
            ns.commit(places, hashes(1, 1), timeout=10.0)  # the socket is full within a block
        os.kill(d.process.pid, signal.SIGCONT)
        # What comes next is not read as the rest of that block.
        wait_for("a session", lambda: pool.stats().reconnects == 1 and ns.is_open)
        out = [bytearray(4 << 20) for _ in range(8)]
        assert all(r.hit for r in ns.get_into(hashes(8), out))
        assert all(o == b for o, b in zip(out, blocks))


def test_interrupted_at_any_step(shared_daemon, interrupt):
    """Whenever a signal comes, the session that is used next is in order."""
    with attach(shared_daemon, "unix") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        blocks = [pattern(1 << 20, i) for i in range(8)]
        assert all(r.ok for r in ns.put(hashes(8), blocks))
        out = [bytearray(1 << 20) for _ in range(8)]
        for i in range(60):
            try:
                interrupt(0.001 + i * 0.0003)
                while True:
                    for r, o, b in zip(ns.get_into(hashes(8), out), out, blocks):
                        assert not r.hit or o == b
            except Interrupt:
                pass
            wait_for("a session", lambda: ns.is_open)
            m = ns.match(hashes(8), timeout=5.0)
            assert m.prefix == 8 or m.status == kvtier.Status.DISCONNECTED  # it may find out


class Stepper:
    """Raises Interrupt at one step of a call on this thread: where a function of the package,
    or of those that it uses, begins, and where a function in C has returned to one. These
    are the places at which CPython runs the handlers of signals."""

    def __init__(self, at):
        self.left = at
        self.name = ""  # of the function that was interrupted

    def _step(self, frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event in ("call", "c_return") and module.split(".")[0] in ("kvtier", "threading", "contextlib"):
            self.left -= 1
            if self.left == 0:
                self.name = f"{module}.{frame.f_code.co_name}"
                raise Interrupt

    def __call__(self, call):
        """Whether the call was interrupted, even if it did not hear of it, as in a __del__."""
        sys.setprofile(self._step)
        try:
            call()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        return bool(self.name)


def every_step(call, stride=1):
    """Makes calls, each interrupted a step later, until one is not."""
    for at in itertools.count(1, stride):
        stepper = Stepper(at)
        if not call(stepper):
            assert at > 1
            return


def elsewhere(call):
    """Makes a call on another thread, which must end. It is interrupted nowhere."""
    out = []
    thread = threading.Thread(target=lambda: out.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert out, "the call has no end"
    return out[0]


def test_a_budget_is_never_left_locked():
    def once(stepper):
        budget = Budget(1, 100)

        def call():
            budget.give(budget.take(10, time.monotonic() + 5))

        interrupted = stepper(call)
        elsewhere(lambda: budget.give(0))
        elsewhere(budget.end)
        return interrupted

    every_step(once)


def test_a_budget_is_never_left_locked_by_who_waits():
    def once(stepper):
        budget = Budget(0, 100)

        def call():
            with pytest.raises(kvtier.DeadlineError):
                budget.take(10, time.monotonic() + 0.002)

        interrupted = stepper(call)
        elsewhere(lambda: budget.give(0))
        assert elsewhere(lambda: budget.take(10, time.monotonic() + 5)) == 10
        return interrupted

    every_step(once)


def test_a_flag_is_never_left_locked():
    def once(stepper):
        flag = Flag()
        interrupted = stepper(lambda: flag.wait(0.002))
        elsewhere(flag.set)
        assert elsewhere(flag.wait)
        return interrupted

    every_step(once)


def test_a_flag_is_told_by_who_was_interrupted():
    def once(stepper):
        flag = Flag()
        waiting = threading.Thread(target=flag.wait, daemon=True)
        waiting.start()
        wait_for("who waits", lambda: flag._waiters._turns)
        interrupted = stepper(flag.set)
        if not interrupted or flag.is_set():
            waiting.join(PATIENCE)
            assert not waiting.is_alive()
        flag.set()
        return interrupted

    every_step(once)


@pytest.mark.parametrize("cancel", [False, True])
def test_jobs_end_whatever_is_interrupted(cancel):
    """A job that was submitted ends, is told of once, and all can be closed."""
    jobs = Jobs()
    jobs.fileno()
    busy = threading.Event()
    fill = [jobs.submit(lambda *_: busy.wait(), 0, True) for _ in range(THREADS)] if cancel else []
    jobs.submit(lambda *_: None, 0, True)

    def once(stepper):
        made = []
        if not cancel:
            wait_for("an idle thread", lambda: jobs._some._turns)

        def call():
            made.append(jobs.submit(lambda *_: 1, 1))
            if cancel:
                made[0].cancel()
            else:
                made[0].result()

        interrupted = stepper(call)
        if cancel and interrupted and made:
            elsewhere(made[0].cancel)
        if made:
            wait_for("the end of the job", made[0].done)
        if cancel:
            return interrupted
        wait_for("the end of all jobs", lambda: not jobs._open)
        told = jobs.completions()
        assert told == made or (not made and len(told) <= 1)
        return interrupted

    every_step(once)
    busy.set()
    wait_for("the end of all jobs", lambda: not jobs._open and all(f.done() for f in fill))
    told = jobs.completions()
    assert len(told) == len(set(told))
    elsewhere(jobs.close)
    assert all(w.over.is_set() for w in jobs._workers)


def test_jobs_end_when_the_start_of_a_thread_is_interrupted():
    def once(stepper):
        jobs = Jobs()
        interrupted = stepper(lambda: jobs.submit(lambda *_: 1, 0))
        assert elsewhere(lambda: jobs.submit(lambda *_: 2, 0).result(PATIENCE)) == 2
        elsewhere(jobs.close)
        assert not jobs._open and all(w.over.is_set() for w in jobs._workers)
        return interrupted

    every_step(once)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a __del__
@pytest.mark.parametrize("way", ["shared", "unix"])
@pytest.mark.parametrize("what, stride", [("get", 1), ("put", 3), ("reserve", 3)])
def test_calls_end_whatever_is_interrupted(daemons, way, what, stride):
    """After an interrupt at any step of a call the pool is in order, on every thread."""
    # A daemon of its own: a place that a call lost may stay granted until the process ends.
    with attach(daemons(shared=way == "shared"), way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 16)
        blocks = [pattern(1 << 16, i) for i in range(2)]
        assert all(r.ok for r in ns.put(hashes(2), blocks))
        out = [bytearray(1 << 16) for _ in range(2)]
        put = itertools.count(1)

        def call():
            if what == "get":
                ns.get_into(hashes(2), out)
            elif what == "put":
                ns.put(hashes(2, next(put)), blocks)
            else:
                ns.commit(ns.reserve([1 << 16]), hashes(1, next(put)))

        def all_there():
            got = [bytearray(1 << 16) for _ in range(2)]
            return all(r.hit for r in ns.get_into(hashes(2), got)) and got == blocks

        def once(stepper):
            interrupted = stepper(call)
            wait_for(f"the blocks, after {stepper.name} was interrupted", lambda: elsewhere(lambda: (all_there(),))[0])
            return interrupted

        every_step(once, stride)
        assert pool.stats().reconnects > 0


def test_close_goes_on_where_it_was_interrupted(shared_daemon):
    def once(stepper):
        pool = attach(shared_daemon, "unix")
        interrupted = stepper(pool.close)
        elsewhere(pool.close)
        wait_for(f"the end of its thread, after {stepper.name} was interrupted", pool._thread.over.is_set)
        assert pool._wake == -1
        return interrupted

    every_step(once)
