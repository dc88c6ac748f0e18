"""Forks, and clients that are killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

import kvtier
from conftest import WAYS, attach, fresh_name, hashes, pattern, wait_for


def in_child(work):
    """Runs work in a forked child, and fails when it does."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + 30
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork(shared_daemon, way):
    """A child has a session of its own, while the parent's goes on under load."""
    stop = threading.Event()
    failed = []
    with attach(shared_daemon, way) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
        keys = hashes(4)
        blocks = [pattern(300_000, i) for i in range(4)]
        assert all(r.stored for r in ns.put(keys, blocks))
        session = pool.session
        places = ns.reserve([100])
        job = ns.submit_match(keys)
        job.result(20)

        def load():
            out = [bytearray(300_000) for _ in keys]
            while not stop.is_set():
                if not all(r.hit for r in ns.get_into(keys, out)) or [bytes(o) for o in out] != blocks:
                    failed.append("the parent's bytes")
                ns.submit_match(keys).result(20)

        threads = [threading.Thread(target=load) for _ in range(2)]
        for t in threads:
            t.start()

        def child():
            out = [bytearray(300_000) for _ in keys]
            results = ns.get_into(keys, out)
            assert all(r.hit for r in results), results
            assert [bytes(o) for o in out] == blocks
            assert pool.session not in (0, session) and pool.shared == (way == "shared")
            mine = hashes(1, seed=os.getpid())
            assert ns.put(mine, [b"child"])[0].stored
            assert ns.submit_match(mine).result(20).prefix == 1
            gone = ns.commit(places, hashes(1, seed=3))[0]
            assert isinstance(gone.error, kvtier.LeaseExpiredError), gone
            pool.close()

        for _ in range(3):
            in_child(child)
        in_child(lambda: None)  # one that does nothing with it
        stop.set()
        for t in threads:
            t.join(20)
        assert not failed and pool.session == session and pool.stats().reconnects == 0
        places[0].buffer[:] = bytes(100)
        assert ns.commit(places, hashes(1, seed=4))[0].stored


KILLED = """
import sys, os, random
sys.path.insert(0, sys.argv[1])
import kvtier
pool = kvtier.connect(sys.argv[2], shared=sys.argv[3] == "shared", required=True)
ns = pool.open(sys.argv[4], max_block_bytes=1 << 20)
keys = [bytes([i]) * 16 for i in range(8)]
data = [bytes([i]) * 200000 for i in range(8)]
ns.put(keys, data)
lease = ns.match(keys, lease=3600).lease
loan = ns.lease_read(keys, 3600)
places = ns.reserve([100000] * 8)
print("ready", flush=True)
out = [bytearray(200000) for _ in keys]
n = 0
while True:
    n += 1
    ns.get_into(keys, out)
    ns.put([os.urandom(16)], [os.urandom(100000)])
    places += ns.reserve([1000])
    if n % 3 == 0:
        places.pop(0).abort()
"""


# How many clients are killed in each way; 200 in all with KVTIER_SOAK.
KILLS = 68 if os.environ.get("KVTIER_SOAK") else 4


@pytest.mark.parametrize("way", WAYS)
def test_killed_clients(daemons, way):
    """What a client held that was killed is free again soon, and all room can be used."""
    d = daemons(dram="256MiB")
    address = d.tcp if way == "tcp" else d.unix
    here = os.path.dirname(os.path.dirname(kvtier.__file__))
    rng = random.Random(7)
    for begin in range(0, KILLS, 4):
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", KILLED, here, address, way, f"ns-{i}"], stdout=subprocess.PIPE, text=True
            )
            for i in range(begin, min(begin + 4, KILLS))
        ]
        for c in clients:
            assert c.stdout.readline() == "ready\n"
        leases, places = d.held()
        assert leases >= len(clients) and places >= len(clients)
        for c in clients:
            time.sleep(rng.random() * 0.05)
            c.kill()
            c.wait()
            c.stdout.close()
        killed = time.monotonic()
        wait_for("that nothing is held", lambda: d.held() == (0, 0))
        assert time.monotonic() - killed < 5
    with attach(d, way) as pool:
        ns = pool.open("ns-0", max_block_bytes=1 << 20)
        keys = [bytes([i]) * 16 for i in range(8)]
        out = [bytearray(200000) for _ in keys]
        for i, r in enumerate(ns.get_into(keys, out)):
            assert not r.hit or out[i] == bytes([i]) * 200000
        # As many bytes as the store has, which needs all of its room.
        for i in range(300):
            assert ns.put(hashes(1, seed=i), [pattern(1 << 20, i)])[0].ok


def test_a_watch_of_the_parent(shared_daemon):
    """In the child a watch of the parent's is over."""
    with attach(shared_daemon, "unix") as pool:
        watch = pool.open(fresh_name(), max_block_bytes=4096).watch()
        next(watch)
        with pool._conn._step:  # as another thread may hold it just then
            pid = os.fork()
            if pid == 0:
                try:
                    signal.alarm(10)
                    try:
                        next(watch)
                    except kvtier.DisconnectedError:
                        watch.close()
                        del watch
                        os._exit(0)
                finally:
                    os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        watch.close()
