"""Batch calls as jobs."""

import contextlib
import gc
import inspect
import os
import select
import signal
import threading
import time
import weakref

import pytest

import kvtier
from conftest import PATIENCE, attach, fresh_name, hashes, pattern, wait_for
from kvtier import _jobs, aio


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


BATCH_CALLS = ["match", "get_into", "get_region", "put", "put_region", "prefetch", "locate", "pin", "unpin"]
BATCH_CALLS += ["reserve", "commit", "lease_read", "report_prefill"]


def test_every_batch_call_is_a_job_and_a_coroutine():
    """By the same name and with the same arguments."""
    calls = [(kvtier.Namespace, aio.Namespace, name) for name in BATCH_CALLS]
    for sync, awaited, name in [*calls, (kvtier.Pool, aio.Pool, "match_all")]:
        want = inspect.signature(getattr(sync, name))
        job = inspect.signature(getattr(sync, f"submit_{name}"))
        assert job.replace(return_annotation=want.return_annotation) == want, name
        answers = [signature.return_annotation.replace("'", "").replace('"', "") for signature in (want, job)]
        assert answers[1] == f"Job[{answers[0]}]", name
        assert inspect.iscoroutinefunction(getattr(awaited, name)), name
        assert list(inspect.signature(getattr(awaited, name)).parameters) == list(want.parameters), name
    named = {n for n in dir(kvtier.Namespace) if n.startswith("submit_")}
    assert named == {f"submit_{n}" for n in BATCH_CALLS}


def test_jobs_that_move_no_bytes(pool, ns, shared_daemon):
    keys = hashes(3)
    ns.put(keys[:2], [b"x" * 100] * 2, durable=True)
    locate = ns.submit_locate(keys)
    assert locate.result(PATIENCE) == locate.results() == ns.locate(keys)
    assert [len(places) for places in locate.result()] == [2, 2, 0]
    pin = ns.submit_pin(keys)
    assert pin.result(PATIENCE)[:2] == [None, None] and isinstance(pin.result()[2], kvtier.NotFoundError)
    assert pin.results() == pin.result()
    assert shared_daemon.stat()["pinned"] == 2
    assert ns.submit_unpin(keys[:2]).result(PATIENCE) == [None, None]
    assert shared_daemon.stat()["pinned"] == 0
    both = pool.submit_match_all([(ns, keys), (ns, keys[1:])], lease=5)
    prefix, matches = both.result(PATIENCE)
    assert prefix == 1 and [m.prefix for m in matches] == [2, 1] and both.results() == matches
    for m in matches:
        m.lease.release()
    for empty in (ns.submit_locate([]), ns.submit_pin([]), ns.submit_unpin([])):
        assert empty.result(PATIENCE) == []
    with pytest.raises(kvtier.InvalidError):
        ns.submit_pin([b"short"])


def test_reserved_and_lent_by_jobs(pool, ns, shared_daemon):
    reserve = ns.submit_reserve([100, 200])
    places = reserve.result(PATIENCE)
    assert [p.size for p in places] == [100, 200] and reserve.results() == places
    for i, p in enumerate(places):
        p.buffer[:] = pattern(p.size, i)
    commit = ns.submit_commit(places, hashes(2), parents=[None, hashes(1)[0]])
    assert all(r.stored for r in commit.result(PATIENCE)) and commit.results() == commit.result()
    with pytest.raises(kvtier.InvalidError):
        ns.submit_commit(places, hashes(2))
    lent = ns.submit_lease_read(hashes(3), 60)
    loan = lent.result(PATIENCE)
    assert lent.results() == loan.results and [v is not None for v in loan.views] == [pool.shared, pool.shared, False]
    if pool.shared:
        assert [bytes(v) for v in loan.views[:2]] == [pattern(100, 0), pattern(200, 1)]
    loan.release()
    wait_for("that nothing is held", lambda: shared_daemon.held() == (0, 0))


def test_a_reservation_is_committed_once(ns):
    """Also by jobs at the same time; the others are told, and keep what is theirs."""
    for round in range(20):
        mine, other = ns.reserve([10, 10])
        mine.buffer[:] = other.buffer[:] = b"0123456789"
        jobs, stored = [], 0
        with contextlib.suppress(kvtier.InvalidError):  # where the first are done so soon
            for ours in ([mine], [mine, other]) * 2:
                jobs.append(ns.submit_commit(ours, hashes(len(ours), seed=round)))
        for job in jobs:
            with contextlib.suppress(kvtier.InvalidError):
                stored += sum(r.stored for r in job.result(PATIENCE))
        if other._place is not None:
            stored += ns.commit([other], hashes(3, seed=round)[2:])[0].stored
        assert stored == 2


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_jobs_without_an_answer_are_cancelled(daemons, way):
    """Also while the daemon stands still, and what it did for them is given back."""
    d = daemons(nvme=None)
    with attach(d, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4096)
        keys = hashes(3)
        ns.put(keys, [b"x" * 100] * 3)
        for _ in range(3):
            reserved = ns.reserve([100])
            d.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, d.process.pid, os.WSTOPPED | os.WNOWAIT)
            jobs = [
                ns.submit_locate(keys, timeout=60.0),
                ns.submit_pin(keys, timeout=60.0),
                ns.submit_unpin(keys, timeout=60.0),
                ns.submit_reserve([100] * 3, timeout=60.0),
                ns.submit_commit(reserved, hashes(1, seed=9), timeout=60.0),
                pool.submit_match_all([(ns, keys), (ns, keys)], lease=60.0, timeout=60.0),
                ns.submit_match(keys, lease=60.0, timeout=60.0),
            ]
            wait_for("their threads", lambda: all(job._thread for job in jobs))
            began = time.monotonic()
            assert all([job.cancel() for job in jobs])
            assert time.monotonic() - began < 5.0
            for job in jobs:
                with pytest.raises(kvtier.CancelledError):
                    job.result(0)
            d.process.send_signal(signal.SIGCONT)
            assert ns.match(keys).prefix == 3
        del jobs, reserved
        gc.collect()
        wait_for("that nothing is held", lambda: d.held() == (0, 0))


def test_disowned_jobs(shared_daemon):
    """A job that only its owner knows is not told of, and lives as long as he wants it."""
    with attach(shared_daemon, "unix") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4096)
        poll = select.poll()
        poll.register(pool.fileno(), select.POLLIN)
        ns.put(hashes(1), [b"x"])
        for early in (True, False):
            job = ns.submit_match(hashes(1), lease=60.0)
            if early:
                job.disown()
            job.result(PATIENCE)
            wait_for("its end", lambda: not pool._jobs._open)
            job.disown()
            assert pool.completions() == [] and poll.poll(0) == []
            del job
            gc.collect()
            wait_for("that the lease is given back", lambda: shared_daemon.held()[0] == 0)


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
