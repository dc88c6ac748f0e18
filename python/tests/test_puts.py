"""Puts of more than one message commits: some are answered while others are copied."""

import threading
import time

import pytest

import kvtier
from conftest import PATIENCE, WAYS, attach, fresh_name, hashes, pattern, wait_for
from kvtier import _puts, _wire


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """So that a few MB are many messages."""
    monkeypatch.setattr(_puts, "_WINDOW", 100_000)


def blocks_of(n, size=30_000, seed=0):
    return [pattern(size + i, seed + i) for i in range(n)]


def parents_of(keys):
    return [None, *keys[:-1]]


def assert_there(ns, keys, blocks):
    out = [bytearray(len(b)) for b in blocks]
    assert all(r.hit for r in ns.get_into(keys, out)) and [bytes(o) for o in out] == blocks


def test_windows(ns, pool, monkeypatch):
    keys, blocks = hashes(100), blocks_of(100)
    sent = []
    put = _wire.put
    monkeypatch.setattr(_wire, "put", lambda keys, *more: sent.append(len(keys.hashes)) or put(keys, *more))
    assert all(r.stored for r in ns.put(keys, blocks, parents=parents_of(keys)))
    assert sum(sent) == 100 and max(sent) <= 3 and len(sent) >= 34
    assert_there(ns, keys, blocks)
    del sent[:]
    assert all(r.existed for r in ns.put(keys, blocks, parents=parents_of(keys)))
    big = pattern(400_000)
    assert ns.put([*hashes(2, 1), keys[0]], [big, big, big])[1].stored  # each in a message of its own
    # What is to be durable waits for the medium, not for copies: as few messages as there can be.
    del sent[:]
    assert all(r.stored for r in ns.put(hashes(20, 2), blocks[:20], durable=True)) and len(sent) <= 2


@pytest.mark.parametrize("n, want", [(1, [1]), (2, [2]), (3, [2, 1]), (8, [3, 3, 2]), (9, [3, 3, 2, 1])])
def test_the_last_message_commits_little(ns, monkeypatch, n, want):
    """While the daemon looks at that nothing is left to be copied."""
    monkeypatch.setattr(_puts, "_LAST_WINDOW", 30_000)
    sent = []
    put = _wire.put
    monkeypatch.setattr(_wire, "put", lambda keys, *more: sent.append(len(keys.hashes)) or put(keys, *more))
    keys, blocks = hashes(n), [pattern(30_000, i) for i in range(n)]
    assert all(r.stored for r in ns.put(keys, blocks)) and sent == want
    assert_there(ns, keys, blocks)


def test_results_are_their_keys(ns):
    """Whatever becomes of the others."""
    keys, blocks = hashes(30), blocks_of(30)
    ns.put(keys[7:8], [b"another"])
    ns.put(keys[20:21], blocks[20:21])
    results = ns.put(keys, blocks)
    assert [i for i, r in enumerate(results) if not r.stored] == [7, 20]
    assert isinstance(results[7].error, kvtier.ConflictError) and results[20].existed
    job = ns.submit_put(keys, blocks)
    job.result(PATIENCE)
    assert job.results() == job.result() and all(r.existed for i, r in enumerate(job.result()) if i != 7)


def test_one_that_is_too_long(daemons):
    """It fails alone, between others."""
    d = daemons(nvme=None)
    with attach(d, "shared") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=50_000)
        blocks = blocks_of(12)
        blocks[5] = pattern(60_000)
        results = ns.put(hashes(12), blocks)
        assert [i for i, r in enumerate(results) if not r.stored] == [5]
        assert isinstance(results[5].error, kvtier.InvalidError)
    wait_for("that nothing is held", lambda: d.held() == (0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_side_by_side(shared_daemon, way):
    """More puts than there are places for: none waits for a place that another one keeps
    while that waits for one of its own."""
    with attach(shared_daemon, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        failed = []

        def work(i):
            keys, blocks = hashes(80, seed=i), blocks_of(80, 10_000, i)
            if not all(r.stored for r in ns.put(keys, blocks, timeout=60.0)):
                failed.append(i)
            assert_there(ns, keys, blocks)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failed
    wait_for("that nothing is held", lambda: shared_daemon.held() == (0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_cancelled(shared_daemon, way):
    """At any moment: what is there is right, and no place is left."""
    with attach(shared_daemon, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        blocks = blocks_of(60)
        cancelled = some = 0
        for i in range(30):
            keys = hashes(60, seed=i)
            job = ns.submit_put(keys, blocks)
            time.sleep(0.0005 * i)
            cancelled += job.cancel()
            stored = [r is not None and r.stored for r in job.results()]
            there = [b.state == kvtier.State.RESIDENT for b in ns.match(keys, all=True).blocks]
            assert all(t for s, t in zip(stored, there) if s)
            some += 0 < sum(there) < len(keys)
            out = [bytearray(len(b)) for b in blocks]
            for r, o, b in zip(ns.get_into(keys, out), out, blocks):
                assert not r.hit or bytes(o) == b
        assert cancelled
    wait_for("that nothing is held", lambda: shared_daemon.held() == (0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_that_is_killed(daemons, way):
    """In the middle of a put: what was not answered has an error, and the next put works."""
    d = daemons(nvme=None)
    with attach(d, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        blocks = blocks_of(200)
        for i in range(3):
            assert ns.put(hashes(1), [b"x"])[0].ok
            timer = threading.Timer(0.002 * (1 + i), d.kill)
            timer.start()
            results = ns.put(hashes(200, seed=100 + i), blocks, timeout=60.0)
            timer.join()
            assert all(r.ok or isinstance(r.error, kvtier.DisconnectedError) for r in results)
            d.start()
            assert pool.wait_connected(PATIENCE)
            wait_for("the namespace", lambda: ns.is_open)
            assert all(r.ok for r in ns.put(hashes(200, seed=100 + i), blocks))
            assert_there(ns, hashes(200, seed=100 + i), blocks)
    wait_for("that nothing is held", lambda: d.held() == (0, 0))
