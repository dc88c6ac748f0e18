"""Every call, over shared memory, the unix socket and TCP."""

import array
import time

import pytest

import kvtier
from conftest import attach, fresh_name, hashes, pattern, wait_for

SIZES = [1, 5, 4096, 65536, 256 << 10, (256 << 10) + 1, 1 << 20, (3 << 20) + 77]


def test_put_and_get(ns, shared_daemon):
    keys = hashes(len(SIZES))
    blocks = [pattern(n, i) for i, n in enumerate(SIZES)]
    before = shared_daemon.hits()
    puts = ns.put(keys, blocks, parents=[None, *keys[:-1]])
    assert [(p.stored, p.existed, p.error) for p in puts] == [(True, False, None)] * len(keys)
    assert all(p.existed and p.ok and not p.stored for p in ns.put(keys, blocks))
    buffers = [bytearray(b"\xee" * (n + 3)) for n in SIZES]
    results = ns.get_into(keys, buffers)
    for r, buffer, block in zip(results, buffers, blocks):
        assert r.hit and r.status == kvtier.Status.OK and r.tier in (kvtier.Tier.MEMORY, kvtier.Tier.NVME)
        assert r.length == r.total == len(block)
        assert bytes(buffer) == block + b"\xee" * 3  # what is behind it was not touched
    assert shared_daemon.hits() - before == len(keys)


def test_misses(ns):
    keys = hashes(3)
    ns.put(keys[:1], [b"x" * 100])
    buffers = [bytearray(100) for _ in keys]
    results = ns.get_into(keys, buffers)
    assert [r.reason for r in results] == ["hit", "absent", "absent"]
    assert [r.hit for r in results] == [True, False, False] and results[1].length == 0
    small = ns.get_into(keys[:1], [bytearray(99)])[0]
    assert not small.hit and small.status == kvtier.Status.INVALID and small.total == 100
    assert ns.get_into([], []) == [] and ns.put([], []) == [] and ns.match([]).prefix == 0


def test_match(ns):
    keys = hashes(5)
    ns.put(keys[:2] + keys[3:4], [b"a" * 10, b"b" * 20, b"d" * 30])
    m = ns.match(keys)
    assert m.prefix == 2 and m.lease is None and len(m.blocks) == 3
    assert (
        m.blocks[1].state == kvtier.State.RESIDENT
        and m.blocks[1].length == 20
        and m.blocks[2].state == kvtier.State.ABSENT
    )
    m = ns.match(keys, all=True)
    assert m.prefix == 2 and [b.state for b in m.blocks] == [2, 2, 0, 2, 0]


def test_match_plan(pool):
    ns = pool.open(fresh_name(), model="m", max_block_bytes=4096, tokens_per_block=256)
    keys = hashes(5)
    ns.put(keys[:4], [b"x" * 1000] * 4)
    m = ns.match(keys, plan=kvtier.PlanOptions(token=60.0))
    assert m.prefix == 4 and m.plan[:2] == (0, 4)
    assert m.plan.compute == 0 and 0 < m.plan.load == m.plan.total < m.plan.recompute == 4 * 256 * 60
    m = ns.match(keys, plan=kvtier.PlanOptions(position=1e-18, within=5, overlap=True))
    assert m.prefix == 4 and m.plan.start == m.plan.stop and m.plan.load == 0
    assert ns.match(keys).plan is None
    m = ns.submit_match(keys, plan=kvtier.PlanOptions(token=60.0)).result()
    assert m.plan.stop == 4
    with pytest.raises(kvtier.InvalidError):  # nobody knows what prefill costs
        ns.match(keys, plan=kvtier.PlanOptions())
    for bad in (
        lambda: ns.match(keys, plan=kvtier.PlanOptions(token=-1)),
        lambda: ns.match(keys, plan=kvtier.PlanOptions(token=1, within=0)),
        lambda: ns.match(keys, lease=1, plan=kvtier.PlanOptions(token=1)),
        lambda: ns.match(hashes(20000), plan=kvtier.PlanOptions(token=1)),
    ):
        with pytest.raises(kvtier.InvalidError, match="plan"):
            bad()


def test_match_of_more_than_a_message(ns):
    keys = hashes(9000)
    ns.put(keys[:3], [b"x"] * 3)
    assert ns.match(keys).prefix == 3 and len(ns.match(keys, all=True).blocks) == 9000


def test_leases(ns, shared_daemon):
    keys = hashes(3)
    ns.put(keys, [b"x" * 10] * 3)
    with ns.match(keys, lease=30).lease as lease:
        assert lease.count == 3 and lease.alive
        lease.renew(60)
        assert lease.until - time.monotonic() > 50
        assert shared_daemon.held()[0] >= 1
    wait_for("the lease's end", lambda: shared_daemon.held()[0] == 0)
    with pytest.raises(kvtier.LeaseExpiredError):
        lease.renew(1)
    short = ns.match(keys, lease=0.02).lease
    time.sleep(0.1)
    with pytest.raises(kvtier.LeaseExpiredError):
        short.renew(1)
    del short
    m = ns.match(keys, lease=30)
    del m  # a lease that is dropped is given back
    wait_for("the lease's end", lambda: shared_daemon.held()[0] == 0)


def test_match_all(pool, ns):
    other = pool.open(fresh_name(), max_block_bytes=4096, kv_group=1)
    keys, short = hashes(4), hashes(4, length=8)
    ns.put(keys, [b"x"] * 4)
    other.put(short[:2], [b"y"] * 2)
    prefix, matches = pool.match_all([(ns, keys), (other, short)], lease=5)
    assert prefix == 2 and [m.prefix for m in matches] == [4, 2]
    for m in matches:
        m.lease.release()
    assert pool.match_all([(ns, keys)])[0] == 4 and pool.match_all([]) == (0, [])


def test_conflict(ns):
    key = hashes(1)
    ns.put(key, [b"right"])
    r = ns.put(key, [b"wrong"])[0]
    assert isinstance(r.error, kvtier.ConflictError) and not r.ok
    buffer = bytearray(5)
    assert ns.get_into(key, [buffer])[0].hit and buffer == b"right"


def test_reserve_and_commit(pool, ns, shared_daemon):
    keys = hashes(3)
    blocks = [pattern(n, i) for i, n in enumerate((1000, 300 << 10, 1 << 20))]
    places = ns.reserve([len(b) for b in blocks])
    assert len(places) == 3 and all(p.in_place == pool.shared for p in places)
    for p, b in zip(places, blocks):
        p.buffer[:] = b
    results = ns.commit(places[:2], keys[:2], parents=[None, keys[0]])
    assert [r.stored for r in results] == [True, True]
    places[2].abort()
    places[2].abort()
    for again in (places[0], places[2]):
        with pytest.raises(kvtier.InvalidError, match="committed or aborted"):
            ns.commit([again], keys[:1])
    out = [bytearray(len(b)) for b in blocks[:2]]
    assert all(r.hit for r in ns.get_into(keys[:2], out)) and [bytes(b) for b in out] == blocks[:2]
    dropped = ns.reserve([4096] * 3)
    assert len(dropped) == 3
    del dropped
    wait_for("the places' end", lambda: shared_daemon.held()[1] == 0)


def test_reservations_are_of_their_namespace(pool, ns):
    other = pool.open(fresh_name(), max_block_bytes=4096)
    r = ns.reserve([10])
    r[0].buffer[:] = b"0123456789"
    with pytest.raises(kvtier.InvalidError, match="another namespace"):
        other.commit(r, hashes(1))
    with pytest.raises(kvtier.InvalidError, match="twice"):
        ns.commit(r + r, hashes(2))
    assert ns.commit(r, hashes(1))[0].stored


def test_more_than_the_session_may_hold(ns, pool):
    """A put of more blocks and bytes than there are places for goes in parts."""
    n = pool.server.limits.grants + 10
    keys = hashes(n)
    blocks = [pattern(512 << 10, i) for i in range(n)]
    assert all(r.ok for r in ns.put(keys, blocks))
    out = [bytearray(512 << 10) for _ in keys]
    assert all(r.hit for r in ns.get_into(keys, out))
    assert all(bytes(o) == b for o, b in zip(out, blocks))
    assert 1 <= len(ns.reserve([4096] * (n + 50))) <= pool.server.limits.grants


def test_lease_read(pool, ns, shared_daemon):
    keys = hashes(3)
    blocks = [pattern(1 << 20, 1), pattern(777, 2)]
    ns.put(keys[:2], blocks)
    with ns.lease_read(keys, 60) as loan:
        if not pool.shared:
            assert loan.views == [None] * 3 and loan.results[0].status == kvtier.Status.UNAVAILABLE
            return
        assert [v is None for v in loan.views] == [False, False, True] and loan.results[2].reason == "absent"
        assert loan.views[0] == blocks[0] and loan.views[1] == blocks[1] and loan.views[0].readonly
        assert loan.alive and loan.until - time.monotonic() > 50
        view = loan.views[0]
    with pytest.raises(ValueError):
        view[0]
    wait_for("the loan's end", lambda: shared_daemon.held()[0] == 0)
    with ns.lease_read(keys, 1, verify=False) as loan:
        assert loan.views[1] == blocks[1]


def test_prefetch_locate_pin(ns):
    keys = hashes(3)
    ns.put(keys[:2], [b"x" * 100] * 2, durable=True)
    told = []
    assert ns.prefetch(keys, progress=lambda i, reason: told.append((i, reason))) == ["hit", "hit", "absent"]
    assert told == [(0, "hit"), (1, "hit"), (2, "absent")]
    places = ns.locate(keys)
    assert [p.tier for p in places[0]] == [kvtier.Tier.MEMORY, kvtier.Tier.NVME] and places[2] == []
    assert places[0][0].length == 100
    errors = ns.pin(keys)
    assert errors[:2] == [None, None] and isinstance(errors[2], kvtier.NotFoundError)
    assert ns.unpin(keys[:2]) == [None, None]


def test_ttl(ns):
    key = hashes(1)
    ns.put(key, [b"x"], ttl=0.05)
    wait_for("the block's end", lambda: ns.match(key).prefix == 0)


def test_watch(pool, ns):
    keys = hashes(2)
    ns.put(keys[:1], [b"x" * 10])
    w = ns.watch(snapshot=True, timeout=10)
    start = next(w)
    assert start.kind == "start" and start.incarnation == pool.server.incarnation
    assert [e.kind for e in (next(w), next(w))] == ["present", "snapshot"]
    ns.put(keys[1:], [b"y" * 20], parents=[keys[0]])
    e = next(w)
    assert (e.kind, e.hash, e.parent, e.length, e.namespace) == ("stored", keys[1], keys[0], 20, ns.name)
    w.close()
    assert list(w) == []
    assert any(len(list(ns.watch(timeout=t))) == 1 for t in (0.1, 1.0, 5.0))  # it begins within that
    everything = pool.watch(timeout=5)
    assert next(everything).kind == "start"


def test_lookup(ns):
    keys = hashes(3)
    ns.put(keys[:2], [b"x", b"y"])
    assert ns.lookup(keys) is None  # the answer is out
    assert wait_for("the answer", lambda: ns.lookup(keys)) == [True, True, False]
    assert ns.lookup(keys[:1]) == [True]  # it is fresh
    # What could not be got is not there for a while, or until it is put.
    assert not ns.get_into(keys[2:], [bytearray(1)])[0].hit
    assert ns.lookup(keys[2:]) == ns.lookup(keys[2:], fresh=0) == [False]
    ns.put(keys[2:], [b"z"])
    assert wait_for("the answer", lambda: ns.lookup(keys[2:])) == [True]
    assert wait_for("a new answer", lambda: ns.lookup(keys, fresh=0)) == [True] * 3


def test_open(pool):
    name = fresh_name()
    with pytest.raises(kvtier.NotFoundError):
        pool.open(name, create=False)
    ns = pool.open(name, model="m", dtype="bf16", layout="NHD", tokens_per_block=16, block_bytes=64, hash_seed=7)
    assert ns.is_open and ns.block_bytes == 64 and ns.hash_len == 0
    ns.put(hashes(1), [b"x" * 64])
    assert pool.open(name, create=False).hash_len == 16
    fields = dict(model="m", dtype="bf16", layout="NHD", tokens_per_block=16, block_bytes=64, hash_seed=7)
    assert pool.open(name, create=False, **fields).is_open
    with pytest.raises(kvtier.MismatchError, match="layout"):
        pool.open(name, create=False, **{**fields, "layout": "HND"})
    with pytest.raises(kvtier.MismatchError, match="dtype"):
        pool.open(name, model="m", dtype="fp8", layout="NHD", tokens_per_block=16, block_bytes=64, hash_seed=7)
    with pytest.raises(kvtier.MismatchError, match="hash_seed"):
        pool.open(name, model="m", dtype="bf16", layout="NHD", tokens_per_block=16, block_bytes=64, hash_seed=8)
    r = ns.put(hashes(1, seed=1), [b"x" * 63])[0]
    assert isinstance(r.error, kvtier.InvalidError)


def test_wrong_arguments(pool, ns):
    key = hashes(1)
    for call in (
        lambda: ns.match([b"123"]),
        lambda: ns.match([b"1" * 8, b"1" * 16]),
        lambda: ns.match(key, lease=0),
        lambda: ns.get_into(key, []),
        lambda: ns.get_into(key, [b"read-only"]),
        lambda: ns.get_into(key, [memoryview(bytearray(10))[::2]]),
        lambda: ns.put(key, [b""]),
        lambda: ns.put(key, [bytes((8 << 20) + 1)]),
        lambda: ns.put(key, [b"x"], parents=[]),
        lambda: ns.put(key, [b"x"], parents=[b"short"]),
        lambda: ns.put(key, [b"x"], ttl=-1),
        lambda: ns.reserve([0]),
        lambda: ns.lease_read(key, 0),
        lambda: ns.get_region(key, [(0, 0, 10)]),
        lambda: ns.put_region(key, [[]]),
        lambda: pool.open("x"),
        lambda: pool.open("", block_bytes=1),
        lambda: pool.open("x", block_bytes=1, max_block_bytes=1),
        lambda: pool.open("a/b", block_bytes=1),
        lambda: pool.open("x", block_bytes=-1),
        lambda: kvtier.connect("nonsense"),
        lambda: kvtier.connect("unix:/" + "x" * 200),
        lambda: kvtier.connect("127.0.0.1:1", timeout=0),
        lambda: kvtier.connect("127.0.0.1:1", regions=[kvtier.Region(path="/nothing")]),
    ):
        with pytest.raises(kvtier.InvalidError):
            call()
    for call in (
        lambda: ns.match(key[0]),
        lambda: ns.match(["1234567812345678"]),
        lambda: ns.match(7),
        lambda: ns.get_into(key, [7]),
        lambda: ns.put(key, ["text"]),
        lambda: ns.put(key, [b"x"], parents=[7]),
        lambda: ns.reserve(["x"]),
        lambda: pool.open(7, block_bytes=1),
        lambda: pool.open("x", block_bytes="1"),
        lambda: kvtier.connect(7),
    ):
        with pytest.raises(TypeError):
            call()
    other_length = hashes(1, length=8)
    ns.put(key, [b"x"])
    with pytest.raises(kvtier.InvalidError):
        ns.match(other_length)
    assert ns.match(key).prefix == 1  # and nothing is lost by all that


def test_buffers(ns):
    numpy = pytest.importorskip("numpy")
    key = hashes(6)
    a = numpy.arange(1000, dtype=numpy.float32).reshape(10, 100)
    half = numpy.arange(64, dtype=numpy.float16)
    ns.put(key[:4], [a, array.array("d", [1.5] * 9), memoryview(bytes(10)), half])
    into = numpy.zeros((10, 100), dtype=numpy.float32)
    doubles = array.array("d", [0.0] * 9)
    assert all(r.hit for r in ns.get_into(key[:2], [into, doubles]))
    assert (into == a).all() and list(doubles) == [1.5] * 9
    back = numpy.zeros_like(half)
    assert ns.get_into(key[3:4], [back])[0].hit and (back == half).all()
    with pytest.raises(kvtier.InvalidError, match="contiguous"):
        ns.put(key[4:5], [a.T])

    class Tensor:
        """What a tensor on the CPU looks like."""

        def __init__(self, n, device="cpu", contiguous=True):
            self.mem = numpy.zeros(n, dtype=numpy.uint8)
            self.nbytes = n
            self.device = type("device", (), {"type": device})
            self.contiguous = contiguous

        def data_ptr(self):
            return self.mem.ctypes.data

        def is_contiguous(self):
            return self.contiguous

    t = Tensor(4000)
    assert ns.get_into(key[:1], [t])[0].hit and (t.mem.view(numpy.float32).reshape(10, 100) == a).all()
    with pytest.raises(kvtier.InvalidError, match="cuda"):
        ns.get_into(key[:1], [Tensor(4000, device="cuda")])
    with pytest.raises(kvtier.InvalidError, match="contiguous"):
        ns.get_into(key[:1], [Tensor(4000, contiguous=False)])

    class Foreign:
        """Memory that only tells where it is."""

        def __init__(self, a):
            self.a = a
            self.__array_interface__ = a.__array_interface__

    mem = numpy.zeros(4000, dtype=numpy.uint8)
    assert ns.get_into(key[:1], [Foreign(mem)])[0].hit and (mem.view(numpy.float32).reshape(10, 100) == a).all()


def test_stats(shared_daemon):
    with attach(shared_daemon, "unix") as pool:
        ns = pool.open(fresh_name(), max_block_bytes=100)
        ns.put(hashes(2), [b"x" * 10] * 2)
        ns.get_into(hashes(3), [bytearray(10) for _ in range(3)])
        ns.match(hashes(3))
        s = pool.stats()
        assert (s.connects, s.reconnects, s.disconnected_calls) == (1, 0, 0)
        assert (s.matches, s.gets, s.hits, s.corrupt, s.puts, s.in_place) == (3, 3, 2, 0, 2, 0)
        assert (s.bytes_in, s.bytes_out) == (20, 20)
        assert pool.session and pool.server.name.startswith("kvtier")


def test_closed(shared_daemon):
    pool = attach(shared_daemon, "shared")
    ns = pool.open(fresh_name(), max_block_bytes=100)
    ns.put(hashes(1), [b"x"])
    pool.close()
    pool.close()
    for call in (
        lambda: ns.match(hashes(1)),
        lambda: ns.put(hashes(1), [b"x"]),
        lambda: ns.submit_match(hashes(1)),
        lambda: pool.open("x", block_bytes=1),
    ):
        with pytest.raises(kvtier.ClosedError):
            call()
    assert not pool.connected
    wait_for("that nothing is held", lambda: shared_daemon.held() == (0, 0))


INF, NAN = float("inf"), float("nan")


def test_numbers_beyond_messages(pool, ns, shared_daemon):
    """Times that no message tells are cut, or refused as wrong arguments."""
    h = hashes(2)
    assert all(r.ok for r in ns.put(h, [b"x" * 100] * 2, timeout=INF))
    assert ns.match(h, timeout=INF).prefix == 2
    with pytest.raises(kvtier.InvalidError):
        ns.match(h, lease=INF)  # a day is the most
    with ns.match(h, lease=1.0).lease as lease:
        for seconds in (0, NAN, INF):
            with pytest.raises(kvtier.InvalidError):
                lease.renew(seconds)
    for ttl in (INF, NAN, 1e18):
        with pytest.raises(kvtier.InvalidError):
            ns.put(h, [b"x" * 100] * 2, ttl=ttl)
        with pytest.raises(kvtier.InvalidError):
            pool.open("n", max_block_bytes=4096, ttl=ttl)
    address = pool.address
    with kvtier.connect(address, timeout=INF, required=True) as p:
        assert p.open(fresh_name(), max_block_bytes=4096).is_open
    for bad in ({"token": b"t"}, {"name": 7}):
        with pytest.raises(TypeError):
            kvtier.connect(address, **bad)
    for bad in ({"name": "x" * 5000}, {"name": "\udc80"}, {"token": "\udc80"}):
        with pytest.raises(kvtier.InvalidError):
            kvtier.connect(address, **bad)
    with pytest.raises(kvtier.InvalidError):
        kvtier.connect("unix:/a\0b")
    with pytest.raises(kvtier.InvalidError):
        pool.open("\udc80", max_block_bytes=4096)


def test_a_dropped_loan(pool, ns):
    """Views of a loan that was dropped cannot be read: they would change under their reader."""
    ns.put(hashes(1), [b"x" * 100])
    views = ns.lease_read(hashes(1), 5.0).views
    if pool.shared:
        with pytest.raises(ValueError):
            bytes(views[0])


def test_a_committed_buffer(ns):
    """What was committed is a block, and its buffer can be written to no more."""
    (r,) = ns.reserve([100])
    r.buffer[:] = b"y" * 100
    assert ns.commit([r], hashes(1))[0].ok
    with pytest.raises(ValueError):
        r.buffer[0] = 1
    assert ns.get_into(hashes(1), [bytearray(100)])[0].hit
