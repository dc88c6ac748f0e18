"""The daemon moves bytes in memory of this process."""

import mmap
import os
import time

import pytest

import kvtier
from conftest import fresh_name, hashes, pattern, wait_for

SIZE = 8 << 20


@pytest.fixture
def region():
    fd = os.memfd_create("region")
    os.ftruncate(fd, SIZE)
    mem = mmap.mmap(fd, SIZE)
    yield fd, mem
    mem.close()
    os.close(fd)


@pytest.fixture
def attached(shared_daemon, region):
    second = os.memfd_create("second")
    os.ftruncate(second, 1 << 20)
    with kvtier.connect(
        shared_daemon.unix,
        shared=False,
        required=True,
        regions=[kvtier.Region(fd=region[0]), kvtier.Region(fd=second, readonly=True)],
    ) as pool:
        yield pool, pool.open(fresh_name(), max_block_bytes=4 << 20), region[1], second
    os.close(second)


def test_put_and_get(attached, shared_daemon):
    pool, ns, mem, second = attached
    keys = hashes(3)
    blocks = [pattern(1 << 20, 1), pattern(1000, 2), pattern(4096, 3)]
    mem[0 : 1 << 20] = blocks[0]
    mem[1 << 20 : (1 << 20) + 400] = blocks[1][:400]
    os.pwrite(second, blocks[1][400:], 64)
    os.pwrite(second, blocks[2], 8192)
    segments = [(0, 0, 1 << 20), [(0, 1 << 20, 400), (1, 64, 600)], [(1, 8192, 4096)]]
    before = shared_daemon.hits()
    results = ns.put_region(keys, segments, parents=[None, keys[0], keys[1]], durable=True)
    assert [r.stored for r in results] == [True] * 3, results
    out = [bytearray(len(b)) for b in blocks]
    assert all(r.hit for r in ns.get_into(keys, out)) and [bytes(o) for o in out] == blocks
    at = 4 << 20
    mem[at : at + (2 << 20)] = b"\xee" * (2 << 20)
    got = ns.get_region(
        keys + hashes(1, seed=5),
        [
            (0, at, (1 << 20) + 5),
            [(0, at + (1 << 20) + 100, 300), (0, at + (1 << 20) + 1000, 700)],
            (0, 0, 100),
            (0, 0, 9),
        ],
    )
    assert [r.hit for r in got] == [True, True, False, False]
    assert got[2].status == kvtier.Status.INVALID and got[2].total == 4096 and got[3].reason == "absent"
    assert mem[at : at + (1 << 20) + 5] == blocks[0] + b"\xee" * 5
    base = at + (1 << 20)
    assert mem[base + 100 : base + 400] + mem[base + 1000 : base + 1700] == blocks[1]
    assert shared_daemon.hits() - before >= 5
    s = pool.stats()
    assert s.region_keys == 7 and s.in_place == 0


def test_many_keys(attached):
    pool, ns, mem, _ = attached
    n = 2000
    keys = hashes(n)
    for i in range(n):
        mem[i * 1024 : i * 1024 + 1000] = pattern(1000, i)
    segments = [(0, i * 1024, 1000) for i in range(n)]
    assert all(r.stored for r in ns.submit_put_region(keys, segments).result(30))
    saved = mem[: n * 1024]
    mem[:] = bytes(SIZE)
    job = ns.submit_get_region(keys, segments)
    assert all(r.hit for r in job.result(30)) and all(job.results())
    assert all(mem[i * 1024 : i * 1024 + 1000] == saved[i * 1024 : i * 1024 + 1000] for i in range(n))


def test_segments_are_checked(attached):
    pool, ns, mem, _ = attached
    key = hashes(1)
    for bad in (
        [(2, 0, 10)],
        [(-1, 0, 10)],
        [(0, SIZE - 5, 10)],
        [(0, -1, 10)],
        [(0, 0, 0)],
        [[(0, 0, 10), (0, SIZE, 1)]],
        [(0, 0, 10), (0, 0, 10)],
        [(0, 0)],
        [[(0, 0, 10, 10)]],
        [[]],
    ):
        with pytest.raises(kvtier.InvalidError):
            ns.get_region(key, bad)
        with pytest.raises(kvtier.InvalidError):
            ns.put_region(key, bad)
    with pytest.raises(kvtier.InvalidError, match="read-only"):
        ns.get_region(key, [(1, 0, 10)])


def test_cut_short(attached, region):
    """A region whose file was truncated is of no more use, and all else goes on."""
    pool, ns, mem, _ = attached
    key = hashes(1)
    os.ftruncate(region[0], 4096)
    r = ns.put_region(key, [(0, 1 << 20, 4096)])[0]
    assert isinstance(r.error, kvtier.InvalidError) and "truncated" in str(r.error)
    assert ns.put(key, [b"x"])[0].stored


def test_refused(shared_daemon, tmp_path):
    with pytest.raises(kvtier.InvalidError):
        kvtier.connect(shared_daemon.tcp, regions=[kvtier.Region(path=str(tmp_path / "none"))])
    fd = os.memfd_create("short")
    os.ftruncate(fd, 100)
    try:
        for bad in (
            kvtier.Region(fd=fd, length=101),
            kvtier.Region(fd=fd, path="/x"),
            kvtier.Region(),
            kvtier.Region(path="relative"),
        ):
            with pytest.raises(kvtier.InvalidError):
                kvtier.connect(shared_daemon.unix, regions=[bad])
    finally:
        os.close(fd)


def test_path_and_restart(daemons):
    """A region by its path; after a restart it is registered again."""
    d = daemons()
    path = f"/dev/shm/kvtier-test-{os.getpid()}-{time.monotonic_ns()}"
    with open(path, "w+b") as f:
        f.truncate(1 << 20)
        try:
            with kvtier.connect(d.unix, required=True, regions=[kvtier.Region(path=path)]) as pool:
                ns = pool.open(fresh_name(), max_block_bytes=1 << 20)
                f.write(pattern(5000, 1))
                f.flush()
                assert ns.put_region(hashes(1), [(0, 0, 5000)], durable=True)[0].stored
                d.kill()
                assert wait_for("the end", lambda: not pool.connected)
                assert ns.get_region(hashes(1), [(0, 8192, 5000)])[0].reason == "unavailable"
                d.start()
                wait_for("the session", lambda: ns.is_open)
                assert ns.get_region(hashes(1), [(0, 8192, 5000)])[0].hit
                f.seek(8192)
                assert f.read(5000) == pattern(5000, 1)
        finally:
            os.unlink(path)


def test_cancel_is_quiet(attached):
    pool, ns, mem, _ = attached
    keys = hashes(4)
    blocks = [pattern(1 << 20, i) for i in range(4)]
    ns.put(keys, blocks)
    segments = [(0, i << 20, 1 << 20) for i in range(4)]
    for i in range(20):
        job = ns.submit_get_region(keys, segments)
        time.sleep(0.0001 * i)
        job.cancel()
        assert job.done()
        mem[0 : 4 << 20] = b"\xcc" * (4 << 20)
        time.sleep(0.003)
        assert mem[0 : 4 << 20] == b"\xcc" * (4 << 20)
    assert all(r.hit for r in ns.get_region(keys, segments))
    assert mem[0 : 4 << 20] == b"".join(blocks)
