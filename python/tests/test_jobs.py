"""Batch calls as jobs."""

import gc
import select
import threading
import time
import weakref

import pytest

import kvtier
from conftest import PATIENCE, attach, fresh_name, hashes, pattern, wait_for
from kvtier import _jobs


def test_jobs(pool, ns):
    keys = hashes(3)
    blocks = [pattern(100_000, i) for i in range(3)]
    put = ns.submit_put(keys, blocks)
    assert all(r.stored for r in put.result(20)) and put.done() and put.error is None
    out = [bytearray(100_000) for _ in keys]
    get = ns.submit_get_into(keys, out)
    called = threading.Event()
    get.add_done_callback(lambda job: called.set())
    assert all(r.hit for r in get.result(20)) and [bytes(o) for o in out] == blocks
    assert called.wait(5) and get.results() == get.result()
    assert not get.cancel()
    match = ns.submit_match(keys)
    assert match.result(20).prefix == 3 and match.results()[0].length == 100_000
    prefetch = ns.submit_prefetch(keys)
    assert prefetch.result(20) == ["hit"] * 3 == prefetch.results()
    assert len({put.id, get.id, match.id, prefetch.id}) == 4
    bad = ns.submit_match(hashes(1), lease=-1)
    with pytest.raises(kvtier.InvalidError):
        bad.result(20)
    assert isinstance(bad.error, kvtier.InvalidError)
    at_once = []
    bad.add_done_callback(at_once.append)
    assert at_once == [bad]


def test_completions(pool, ns):
    poll = select.poll()
    poll.register(pool.fileno(), select.POLLIN)
    pool.completions()
    assert poll.poll(0) == []
    jobs = [ns.submit_match(hashes(1, seed=i)) for i in range(20)]
    seen = []
    while len(seen) < 20:
        assert poll.poll(20_000)
        seen += pool.completions()
    assert {j.id for j in seen} == {j.id for j in jobs} and all(j.done() for j in seen)
    assert poll.poll(0) == [] and pool.completions() == []
    ns.lookup(hashes(1))  # its job is nobody's
    time.sleep(0.05)
    assert pool.completions() == []


def test_buffers_are_let_go(pool, ns):
    class Buffer(bytearray):
        pass

    b = Buffer(1000)
    ref = weakref.ref(b)
    job = ns.submit_get_into(hashes(1), [b])
    job.result(20)
    del b
    gc.collect()
    wait_for("that the buffer is let go", lambda: ref() is None)
    assert job.done()


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_errors_keep_no_buffers(daemons, way):
    class Buffer(bytearray):
        pass

    d = daemons(nvme=None)
    with attach(d, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        ns.put(hashes(1), [b"right"])
        kept = []
        for ok in (True, False):
            b = Buffer(b"wrong")
            ref = weakref.ref(b)
            job = ns.submit_put(hashes(1), [b])
            kept += [ns.put(hashes(1), [b]), job.result(20)]
            bad = ns.submit_match(hashes(1), lease=-1)
            with pytest.raises(kvtier.InvalidError):
                bad.result(20)
            kept.append(bad)
            if ok:
                d.kill()
                wait_for("the end", lambda: not pool.connected)
            del b, job
            gc.collect()
            assert ref() is None, (ok, kept)


def test_busy(shared_daemon, monkeypatch):
    """Beyond the limit submit refuses, and does not wait."""
    monkeypatch.setattr(_jobs, "MAX_JOBS", 30)
    monkeypatch.setattr(_jobs, "THREADS", 2)
    with attach(shared_daemon, "unix") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=100)
        gate = threading.Event()
        held = [pool._submit(lambda cancel, known: gate.wait(20), 0) for _ in range(2)]
        jobs = [ns.submit_match(hashes(1)) for _ in range(28)]
        with pytest.raises(kvtier.BusyError):
            ns.submit_match(hashes(1))
        assert not any(j.done() for j in held + jobs)  # else it has waited
        assert pool.stats().busy == 1
        assert jobs[5].cancel() and jobs[5].done()  # one that has not begun
        with pytest.raises(kvtier.CancelledError):
            jobs[5].result()
        assert ns.submit_match(hashes(1)) is not None
        gate.set()
        for j in held + jobs[:5]:
            j.result(20)


def test_close_cancels(shared_daemon):
    pool = attach(shared_daemon, "unix")
    ns = pool.open(fresh_name(), max_block_bytes=100)
    jobs = [ns.submit_match(hashes(1)) for _ in range(200)]
    pool.close()
    assert all(j.done() for j in jobs)
    assert all(j.error is None or isinstance(j.error, kvtier.Error) for j in jobs)


def test_exceptions_in_callbacks(pool, ns, caplog):
    job = ns.submit_match(hashes(1))
    job.add_done_callback(lambda j: 1 / 0)
    assert job.result(20).prefix == 0
    wait_for("the log", lambda: "ZeroDivisionError" in caplog.text)


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_cancel_is_quiet(shared_daemon, way):
    """After cancel returns nothing is written to the buffers any more."""
    with attach(shared_daemon, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4 << 20)
        keys = hashes(8)
        blocks = [pattern(4 << 20, i) for i in range(8)]
        assert all(r.ok for r in ns.put(keys, blocks))
        cancelled = 0
        for i in range(20):
            out = [bytearray(4 << 20) for _ in keys]
            job = ns.submit_get_into(keys, out)
            time.sleep(0.0003 * i)
            cancelled += job.cancel()
            assert job.done()
            for o in out:
                o[:] = b"\xcc" * len(o)
            time.sleep(0.01)
            assert all(bytes(o) == b"\xcc" * len(o) for o in out)
        assert cancelled > 0
        assert all(r.hit for r in ns.get_into(keys, out)) and [bytes(o) for o in out] == blocks
    wait_for("that nothing is held", lambda: shared_daemon.held() == (0, 0))


def test_completions_lose_nothing(shared_daemon, monkeypatch):
    """Jobs that were taken are told of, also where more end than are kept at once."""
    monkeypatch.setattr(kvtier._jobs, "MAX_KEPT", 4)
    with attach(shared_daemon, "unix") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4096)
        pool.fileno()
        submitted = set()
        with pytest.raises(kvtier.BusyError):
            for i in range(1000):
                submitted.add(ns.submit_match(hashes(1, i)))
        for job in submitted:
            job.result(PATIENCE)
        told = set()
        wait_for("all", lambda: told.update(pool.completions()) or told == submitted)


def test_cancel_from_progress(ns):
    """A job may be cancelled by what it tells of itself."""
    ns.put(hashes(4), [b"x" * 100] * 4)
    told = threading.Event()
    job = ns.submit_prefetch(hashes(4), progress=lambda i, reason: (told.wait(PATIENCE), job.cancel()))
    told.set()
    with pytest.raises(kvtier.CancelledError):
        job.result(PATIENCE)
    assert ns.match(hashes(4)).prefix == 4


def test_lists_are_copied(ns):
    """What is done to lists of arguments after a submit does not change the job."""
    parents = [None, hashes(2)[0]]
    held = threading.Event()
    for _ in range(kvtier._jobs.THREADS):
        ns.pool._submit(lambda cancel, known: held.wait(PATIENCE), 0)
    job = ns.submit_put(hashes(2), [b"a" * 100, b"b" * 100], parents=parents)
    parents[1] = b"?"
    held.set()
    assert all(r.ok for r in job.result(PATIENCE))


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_cancel_while_it_waits_for_room(shared_daemon, way):
    """A job that has not asked yet, since others use all that the session may, ends at once."""
    with attach(shared_daemon, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4096)
        budget = pool._conn.budget
        taken = budget.take(budget.most_bytes, time.monotonic() + PATIENCE)
        job = ns.submit_get_into(hashes(1), [bytearray(100)], timeout=60.0)
        wait_for("its thread", lambda: job._thread)
        began = time.monotonic()
        assert job.cancel() and time.monotonic() - began < 2.0
        budget.give(taken)
