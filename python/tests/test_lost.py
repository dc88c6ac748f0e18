"""A daemon that dies, hangs, comes back, or is another one."""

import logging
import os
import signal
import threading
import time

import pytest

import kvtier
from conftest import WAYS, attach, fresh_name, hashes, pattern, quickly, wait_for


@pytest.mark.parametrize("way", WAYS)
def test_killed_and_restarted(daemons, way):
    """Calls are misses while it is away, and hits again from NVMe what was durable."""
    d = daemons()
    with attach(d, way) as pool:
        ns = pool.open(fresh_name(), model="m", max_block_bytes=1 << 20)
        keys = hashes(4)
        blocks = [pattern(200_000 + i, i) for i in range(4)]
        assert all(r.stored for r in ns.put(keys, blocks, durable=True))
        lease = ns.match(keys, lease=60).lease
        places = ns.reserve([100])
        d.kill()
        wait_for("the end of the session", lambda: not pool.connected)

        def many():
            for _ in range(1000):
                assert ns.match(keys).prefix == 0

        quickly(0.5, many)  # half a millisecond each
        out = [bytearray(len(b)) for b in blocks]
        results = ns.get_into(keys, out)
        assert [r.reason for r in results] == ["unavailable"] * 4
        assert results[0].status == kvtier.Status.DISCONNECTED
        puts = ns.put(keys, blocks)
        assert all(isinstance(r.error, kvtier.DisconnectedError) for r in puts)
        assert ns.report_prefill(0, 1, 1.0) is False
        assert ns.prefetch(keys) == ["unavailable"] * 4 and ns.locate(keys) == [[]] * 4
        assert ns.lookup(keys) == [False] * 4 and ns.reserve([100]) == []
        assert all(isinstance(e, kvtier.DisconnectedError) for e in ns.pin(keys))
        assert ns.lease_read(keys, 1).views == [None] * 4
        assert pool.match_all([(ns, keys)])[0] == 0
        assert ns.match(keys).status == kvtier.Status.DISCONNECTED
        assert pool.stats().disconnected_calls >= 1000 and pool.server is None and pool.error is not None
        with pytest.raises(kvtier.DisconnectedError):
            ns.watch()
        later = pool.open(fresh_name(), max_block_bytes=100)  # it opens itself
        assert not later.is_open
        d.start()
        wait_for("the new session", lambda: pool.connected and ns.is_open and later.is_open)
        assert not lease.alive
        with pytest.raises(kvtier.LeaseExpiredError):
            lease.renew(1)
        gone = ns.commit(places, hashes(1, seed=9))[0]
        assert isinstance(gone.error, kvtier.LeaseExpiredError)
        results = ns.get_into(keys, out)
        assert all(r.hit for r in results) and [bytes(o) for o in out] == blocks
        assert later.put(hashes(1), [b"x"])[0].stored
        s = pool.stats()
        assert s.reconnects == 1 and s.connects == 2
    wait_for("that nothing is held", lambda: d.held() == (0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_killed_in_the_middle(daemons, way):
    """Threads go on through kills: never a wrong byte, never an exception."""
    d = daemons()
    wrong = []
    stop = threading.Event()
    with attach(d, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)

        def work(seed):
            out = [bytearray(300_000) for _ in range(4)]
            hits = 0
            try:
                while not stop.is_set():
                    keys = hashes(4, seed=seed)
                    ns.put(keys, [pattern(300_000, seed * 10 + i) for i in range(4)], timeout=2)
                    for i, r in enumerate(ns.get_into(keys, out, timeout=2)):
                        if r.hit and bytes(out[i]) != pattern(300_000, seed * 10 + i):
                            wrong.append(f"bytes of {seed}/{i}")
                        hits += r.hit
                    ns.match(keys, lease=1, timeout=2)
                if not hits:
                    wrong.append("no hit at all")
            except BaseException as e:
                wrong.append(repr(e))
                raise

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for _ in range(3):
            time.sleep(0.3)
            d.kill()
            d.start()
            wait_for("the new session", lambda: ns.is_open)
        time.sleep(0.3)
        stop.set()
        for t in threads:
            t.join(20)
        assert not wrong and not any(t.is_alive() for t in threads)
        assert pool.stats().reconnects >= 3
    wait_for("that nothing is held", lambda: d.held() == (0, 0))


def test_nobody_there(tmp_path, binary, daemons):
    """A pool begins disconnected, and connects when the daemon comes."""
    d = daemons()
    d.stop()
    quickly(1, lambda: kvtier.connect(d.unix, timeout=5).close())
    with kvtier.connect(d.unix, timeout=5) as pool:
        assert not pool.connected
        ns = pool.open(fresh_name(), max_block_bytes=100)
        assert ns.match(hashes(1)).prefix == 0 and not ns.is_open
        d.start()
        wait_for("the session", lambda: ns.is_open)
        assert ns.put(hashes(1), [b"x"])[0].stored
    for address in (f"unix:{tmp_path}/none", "127.0.0.1:1"):
        with pytest.raises(kvtier.DisconnectedError):
            kvtier.connect(address, required=True)
        with kvtier.connect(address) as pool:
            assert isinstance(pool.error, kvtier.DisconnectedError)
            assert not pool.wait_connected(0.05)


def test_hangs(daemons):
    """A daemon that stops answering costs one call its time, and the others nothing."""
    d = daemons()
    with attach(d, "unix") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=100)
        ns.put(hashes(1), [b"x"])
        os.kill(d.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, d.process.pid, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        m = ns.match(hashes(1), timeout=0.3)
        assert m.prefix == 0 and m.status == kvtier.Status.DEADLINE
        assert 0.3 <= time.monotonic() - began < 5

        def others():
            for _ in range(100):
                assert ns.match(hashes(1), timeout=5).prefix == 0
                assert ns.get_into(hashes(1), [bytearray(1)])[0].reason == "unavailable"

        quickly(0.2, others)
        os.kill(d.process.pid, signal.SIGCONT)
        wait_for("hits", lambda: ns.match(hashes(1)).prefix == 1)
        assert pool.stats().reconnects == 0


def test_token(daemons):
    d = daemons(token="secret")
    for address in (d.unix, d.tcp):
        for required in (True, False):
            for token in (None, "wrong"):
                with pytest.raises(kvtier.DeniedError):
                    kvtier.connect(address, token=token, required=required)
        with kvtier.connect(address, token="secret", required=True) as pool:
            assert pool.open(fresh_name(), block_bytes=1).is_open


def test_another_descriptor_after_a_reconnect(daemons, binary, caplog):
    """It is told once, calls are misses, and the others go on."""
    d = daemons()
    with attach(d, "unix") as pool:
        ns = pool.open("n", model="m", dtype="bf16", block_bytes=8)
        good = pool.open("g", block_bytes=8)
        ns.put(hashes(1), [b"x" * 8])
        d.kill()
        for name in ("catalog", "catalog.manifest", "g3.slab"):
            path = d.path / name
            if path.is_dir():
                for f in sorted(path.rglob("*"), reverse=True):
                    f.rmdir() if f.is_dir() else f.unlink()
                path.rmdir()
            else:
                path.unlink()
        d.xfer_port = 0
        socket = d.args[d.args.index("--socket") + 1]
        d.args[d.args.index("--socket") + 1] = socket + ".other"
        d.start()  # where the pool does not look
        with kvtier.connect(d.unix + ".other", required=True) as other:
            other.open("n", model="m", dtype="fp8", block_bytes=8)
        d.stop()
        d.args[d.args.index("--socket") + 1] = socket
        with caplog.at_level(logging.WARNING, "kvtier"):
            d.start()
            wait_for("the new session", lambda: good.is_open)
            wait_for("the mismatch", lambda: isinstance(ns.error, kvtier.MismatchError))
            assert "dtype" in str(ns.error)
            for _ in range(3):
                assert ns.match(hashes(1)).prefix == 0
                assert not ns.get_into(hashes(1), [bytearray(8)])[0].hit
            assert good.put(hashes(1), [b"y" * 8])[0].stored
        assert len([r for r in caplog.records if "dtype" in r.getMessage()]) == 1


def test_daemon_ends_in_order(daemons):
    d = daemons()
    with attach(d, "shared") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=100)
        ns.put(hashes(1), [b"x"])
        d.stop()
        wait_for("the end", lambda: not pool.connected)
        assert ns.match(hashes(1)).prefix == 0
        d.start()
        wait_for("the new session", lambda: ns.is_open)
        assert ns.get_into(hashes(1), [bytearray(1)])[0].hit
