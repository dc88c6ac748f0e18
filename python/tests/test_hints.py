"""What an engine tells of its requests: conversations, priorities, and what prefill took."""

import struct
import time

import pytest

import kvtier
from conftest import fresh_name, hashes
from kvtier import _wire as wire
from test_scripted import fake, in_thread  # noqa: F401

HOUR = 3600.0


def left(lease):
    return lease.until - time.monotonic()


def test_conversation(ns):
    """Once its pauses are known a conversation's lease is about as long as they are."""
    keys = hashes(2)
    ns.put(keys, [b"x" * 100] * 2)
    with ns.match(keys, lease=HOUR, conversation="agent").lease as lease:
        assert left(lease) > HOUR / 2
    for _ in range(10):
        time.sleep(0.06)  # sooner it would be the same request once more
        with ns.submit_match(keys, lease=HOUR, conversation="agent").result(20).lease as lease:
            pass
    assert lease.count == 2 and left(lease) < HOUR / 2
    with ns.match(keys, lease=HOUR).lease as lease:
        assert left(lease) > HOUR / 2
    assert ns.match(keys, conversation="").prefix == 2 and ns.match(keys, conversation="\u00e4" * 127).prefix == 2
    for call in (ns.match, ns.submit_match):
        with pytest.raises(kvtier.InvalidError, match="conversation: 256 bytes, at most 255"):
            call(keys, conversation="\u00e4" * 128)
        with pytest.raises(kvtier.InvalidError, match="conversation"):
            call(keys, conversation="\ud800")
        with pytest.raises(TypeError, match="conversation"):
            call(keys, conversation=b"agent")


def test_urgency(ns):
    keys = hashes(3)
    ns.put(keys[:2], [b"x" * 100] * 2, durable=True)
    want = ["hit", "hit", "absent"]
    assert ns.prefetch(keys, priority=9, within=60) == want
    assert ns.prefetch(keys, within=1e9) == want
    assert ns.submit_prefetch(keys, priority=1).result(20) == want
    for call in (ns.prefetch, ns.submit_prefetch):
        for bad in ({"priority": 10}, {"priority": -1}, {"within": 0}, {"within": -1.0}, {"within": float("nan")}):
            with pytest.raises(kvtier.InvalidError, match=next(iter(bad))):
                call(keys, **bad)
        with pytest.raises(TypeError, match="priority"):
            call(keys, priority=1.5)


def test_report_prefill(pool):
    """Plans without a cost go by what was reported."""
    ns = pool.open(fresh_name(), model="m", max_block_bytes=4096, tokens_per_block=256)
    keys = hashes(4)
    ns.put(keys, [b"x" * 1000] * 4)
    with pytest.raises(kvtier.InvalidError):  # nobody knows what prefill costs
        ns.match(keys, plan=kvtier.PlanOptions())
    for i in range(8):
        assert ns.report_prefill(i * 100, 512, 512.0) is True
    assert ns.submit_report_prefill(0, 512, 512.0).result(20) is True
    plan = ns.match(keys, plan=kvtier.PlanOptions()).plan
    assert plan.stop == 4 and plan.recompute == pytest.approx(4 * 256)
    assert ns.report_prefill(1 << 28, 1 << 28, 1e-12)
    for call in (ns.report_prefill, ns.submit_report_prefill):
        for position, tokens, seconds, text in (
            (-1, 1, 1.0, "position"),
            ((1 << 28) + 1, 1, 1.0, "position"),
            (0, 0, 1.0, "tokens"),
            (0, (1 << 28) + 1, 1.0, "tokens"),
            (0, 1, 0.0, "seconds"),
            (0, 1, -1.0, "seconds"),
            (0, 1, float("inf"), "seconds"),
            (0, 1, float("nan"), "seconds"),
        ):
            with pytest.raises(kvtier.InvalidError, match=text):
                call(position, tokens, seconds)
        with pytest.raises(TypeError, match="tokens"):
            call(0, 1.0, 1.0)


def attach(fake, features, keys=8192):
    """A pool and a namespace with a server of these features."""
    done = in_thread(lambda: (fake.welcome(features, keys=keys), fake.open()))
    pool = kvtier.connect(fake.address, required=True)
    ns = pool.open("n", max_block_bytes=4 << 20)
    done()
    return pool, ns


def matched(fake, id, n, lease=0, lease_ms=0):
    p = struct.pack("<IQIII", n, lease, lease_ms, n, n)
    fake.reply(id, wire.MATCHED, p + struct.pack("<BBI", 2, 2, 100) * n)


def flags_of(p):
    return struct.unpack_from("<H", p, 18)[0]


def test_older_daemon(fake):  # noqa: F811
    """It is sent what it was sent before there were hints."""
    pool, ns = attach(fake, 0)
    keys = hashes(1)
    with pool:
        result = in_thread(lambda: ns.match(keys, conversation="agent"))
        id, _, p = fake.message()
        assert flags_of(p) == 0 and len(p) == 24 + 4 + 16
        matched(fake, id, 1)
        assert result().prefix == 1
        assert ns.report_prefill(0, 1, 1.0) is False
        result = in_thread(lambda: ns.prefetch(keys, priority=9, within=1.0))
        id, code, p = fake.message()
        assert code == wire.PREFETCH and flags_of(p) == 0 and len(p) == 24 + 16
        fake.reply(id, wire.PREFETCHED, struct.pack("<IIBB", 0, 1, 0, 2))
        assert result() == ["hit"]


def test_conversation_of_several_messages(fake):  # noqa: F811
    """The first has the name, and its lease says how long those of the others are."""
    pool, ns = attach(fake, wire.FEATURE_HINTS, keys=2)
    with pool:
        result = in_thread(lambda: ns.match(hashes(4), lease=HOUR, conversation="agent"))
        id, _, p = fake.message()
        assert flags_of(p) == wire.FLAG_CONVERSATION and p.endswith(b"\x05\0agent")
        assert struct.unpack_from("<I", p, 24)[0] == HOUR * 1000
        matched(fake, id, 2, 7, 2000)
        id, _, p = fake.message()
        assert flags_of(p) == 0 and struct.unpack_from("<I", p, 24)[0] == 2000
        matched(fake, id, 2, 8, 2000)
        m = result()
        assert m.prefix == 4 and m.lease.count == 4 and left(m.lease) < 3
