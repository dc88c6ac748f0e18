"""How long messages may be, and how many keys they name."""

import threading
import time

import pytest

import kvtier
from conftest import hashes
from kvtier import _wire as wire
from test_scripted import Fake, in_thread


@pytest.fixture
def small(tmp_path):
    """A pool whose server has messages of 64 KiB, a namespace, and that server."""
    fake = Fake(tmp_path / "s")
    thread = threading.Thread(target=lambda: (fake.welcome(message=65536), fake.open()))
    thread.start()
    pool = kvtier.connect(fake.address, required=True)
    ns = pool.open("n", max_block_bytes=4 << 20)
    thread.join()
    yield pool, ns, fake
    fake.close()
    pool.close()


def test_limits(small):
    pool, _, _ = small
    limits = pool.server.limits
    assert (limits.message, limits.keys) == (65536, 429)
    assert wire.keys_of(1 << 20) == 8192


def test_long_lists_are_cut(small):
    _, ns, fake = small
    answer = in_thread(ns.match, hashes(1000))
    named = []
    while sum(named) < 1000:
        id, _, p = fake.message(wire.MATCH)
        assert len(p) <= 65536
        n = int.from_bytes(p[4:8], "little")
        named.append(n)
        fake.reply(id, wire.MATCHED, wire._MATCHED.pack(n, 0, 0, 0, n) + wire._BLOCK.pack(2, 2, 5) * n)
    assert named == [429, 429, 142]
    assert answer().prefix == 1000


def test_too_long_a_message_is_not_sent(small):
    """No call of the package makes one; what would is refused."""
    pool, _, _ = small
    with pytest.raises(kvtier.InvalidError, match="message of 65537 bytes, this session takes at most 65536"):
        pool._conn.trip(wire.MATCH, bytes(65537), time.monotonic() + 1)
    assert pool.error is None


def test_too_long_a_reply_fails_its_call(small):
    pool, ns, fake = small
    for size in (65537, 1 << 20, 16 << 20):
        for _ in range(2):  # the second follows one that was skipped
            job = ns.submit_match(hashes(1))
            id, _, _ = fake.message(wire.MATCH)
            fake.reply(1 << 40, wire.MATCHED, bytes(size))  # of no call
            fake.reply(id, wire.MATCHED, bytes(size))
            with pytest.raises(kvtier.InvalidError, match=f"reply of {size} bytes"):
                job.result()
        job = ns.submit_match(hashes(1))
        id, _, _ = fake.message(wire.MATCH)
        fake.reply(id, wire.MATCHED, wire._MATCHED.pack(1, 0, 0, 0, 1) + wire._BLOCK.pack(2, 2, 5))
        assert job.result().prefix == 1
    assert pool.error is None


@pytest.mark.parametrize("size", [0, 65535, (16 << 20) + 1])
def test_sizes_that_cannot_be(tmp_path, size):
    fake = Fake(tmp_path / "s")
    thread = threading.Thread(target=lambda: fake.welcome(message=size))
    thread.start()
    with pytest.raises(kvtier.InvalidError, match=f"messages of {size} bytes"):
        kvtier.connect(fake.address, required=True)
    thread.join()
    fake.close()
