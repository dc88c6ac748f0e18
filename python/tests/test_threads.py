"""Many threads in one pool."""

import random
import threading

import pytest

import kvtier
from conftest import WAYS, attach, fresh_name, hashes, pattern, wait_for


@pytest.mark.parametrize("way", WAYS)
def test_hammer(shared_daemon, way):
    """Eight threads with calls of all kinds: every byte is right, nothing is left."""
    failed = []
    with attach(shared_daemon, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        sizes = [100, 5000, 70_000, 300_000]

        def work(seed):
            rng = random.Random(seed)
            mine = []
            try:
                for step in range(60):
                    n = rng.randint(1, 3)
                    key = hashes(n, seed=seed * 1000 + step)
                    blocks = [pattern(rng.choice(sizes), seed * 1000 + step + i) for i in range(n)]
                    kind = rng.randrange(5)
                    if kind == 0:
                        places = ns.reserve([len(b) for b in blocks])
                        for p, b in zip(places, blocks):
                            p.buffer[:] = b
                        done = ns.commit(places, key[: len(places)])
                        key = key[: len(places)]
                    elif kind == 1:
                        done = ns.submit_put(key, blocks).result(30)
                    else:
                        done = ns.put(key, blocks)
                    assert all(r.stored or isinstance(r.error, kvtier.NoSpaceError) for r in done), done
                    mine += [(k, b) for k, b, r in zip(key, blocks, done) if r.stored]
                    some = rng.sample(mine, min(len(mine), 4))
                    keys, want = [k for k, _ in some], [b for _, b in some]
                    out = [bytearray(len(b)) for b in want]
                    if rng.random() < 0.3:
                        got = ns.submit_get_into(keys, out).result(30)
                    else:
                        got = ns.get_into(keys, out)
                    for r, o, b in zip(got, out, want):
                        assert not r.hit or bytes(o) == b, "wrong bytes"
                        assert r.hit or r.reason in ("absent", "pending"), r
                    m = ns.match(keys, lease=5, all=True)
                    if m.lease is not None and rng.random() < 0.5:
                        m.lease.release()
                    ns.lookup(keys)
            except BaseException as e:
                failed.append(e)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not failed and not any(t.is_alive() for t in threads)
        assert pool.stats().corrupt == 0 and pool.stats().reconnects == 0
    wait_for("that nothing is held", lambda: shared_daemon.held() == (0, 0))


def test_calls_that_run_out(shared_daemon):
    """Very short deadlines, beside calls that have time: no answer lands at the wrong one."""
    with attach(shared_daemon, "tcp") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        keys = hashes(4)
        blocks = [pattern(900_000, i) for i in range(4)]
        assert all(r.stored for r in ns.put(keys, blocks))
        failed = []

        def stalled(r):
            """Nothing came for so long that calls are not made to wait: the machine is busy."""
            return r.status == kvtier.Status.DISCONNECTED and pool.connected

        def short():
            for _ in range(30):
                out = [bytearray(b"\xaa" * 900_000) for _ in keys]
                results = ns.get_into(keys, out, timeout=0.0005)
                then = [bytes(o) for o in out]
                for r, o, b in zip(results, then, blocks):
                    if r.hit and o != b:
                        failed.append("wrong bytes")
                    if not r.hit and r.reason != "deadline" and not stalled(r):
                        failed.append(r)
                for o in out:
                    o[:] = b"\xbb" * len(o)
                pattern(100_000)
                if any(bytes(o) != b"\xbb" * len(o) for o in out):
                    failed.append("memory was not quiet")

        def long():
            for _ in range(30):
                out = [bytearray(900_000) for _ in keys]
                results = wait_for("an answer", lambda: [r for r in ns.get_into(keys, out) if not stalled(r)])
                if not all(r.hit for r in results) or len(results) == 4 and [bytes(o) for o in out] != blocks:
                    failed.append("a call with time")

        threads = [threading.Thread(target=f) for f in (short, long, short, long)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not failed
        assert isinstance(pool, kvtier.Pool) and pool.stats().corrupt == 0
