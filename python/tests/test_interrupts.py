"""Signals in the middle of a call: nothing half read or half sent stays in the stream."""

import os
import signal
import time

import pytest

import kvtier
from conftest import attach, fresh_name, hashes, pattern, wait_for


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
