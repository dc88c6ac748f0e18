"""The tier on stubs: vLLM of each version's signatures, a pool without a daemon."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import mmap
import os
import subprocess
import sys
import threading
import time

import kvtier
import pytest
import stub_vllm
from fake_pool import Pool
from stub_vllm import LookupResult, Request

ROWS, STRIDE = 16, 8192
RETRY, MISS, HIT = LookupResult.RETRY, LookupResult.MISS, LookupResult.HIT


def key(i, group=0, length=32):
    return hashlib.sha256(b"%d" % i).digest()[:length] + group.to_bytes(4, "big")


class Rig:
    """A tier of one version, with the engine's memory and the pool that it found."""

    def __init__(self, version, monkeypatch, tmp_path, mapped=True, rows=ROWS, stride=STRIDE, spec=None, address="unix:/s", **config):
        self.version, self.vllm = version, stub_vllm.Vllm(version, monkeypatch)
        self.pools = []

        def connect(address, **options):
            options.pop("required")
            self.pools.append(Pool(address, **options))
            return self.pools[-1]

        monkeypatch.setattr(kvtier, "connect", connect)
        if mapped:
            with open(tmp_path / "region", "w+b") as file:
                file.truncate(rows * stride)
                self.memory = mmap.mmap(file.fileno(), rows * stride)
        else:
            self.memory = mmap.mmap(-1, rows * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self.memory).cast("B", (rows, stride))
        self.stride = stride
        self.tier = self.vllm.tier(self.view, spec or stub_vllm.spec(version), address=address, **config)
        self.pool = self.pools[-1]
        self.jobs = 0

    def request(self, name="r1"):
        request = Request(name, self.version)
        self.tier.on_new_request(request)
        return request

    def row(self, i):
        return self.memory[i * self.stride : (i + 1) * self.stride]

    def fill(self, i, seed):
        self.memory[i * self.stride : (i + 1) * self.stride] = bytes([seed]) * self.stride

    def step(self):
        self.tier.on_schedule_end(None)
        for lane in self.tier._lanes.values():
            lane.join()

    def look(self, keys, request, steps=4):
        for _ in range(steps):
            answers = [self.tier.lookup(k, request) for k in keys]
            if RETRY not in answers:
                return answers
            self.step()
        return answers

    def submit(self, keys, rows, request, load):
        self.jobs += 1
        job = self.vllm.job(self.jobs, keys, rows, request, load)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        for lane in self.tier._lanes.values():
            lane.join()
        return self.jobs

    def finished(self):
        return {result.job_id: result for result in self.tier.get_finished_jobs()}

    def wait(self, job):
        for _ in range(1000):
            results = self.finished()
            if results:
                return results[job]
            time.sleep(0.002)
        raise AssertionError(f"job {job} does not end")

    def close(self):
        self.tier.shutdown()
        self.view.release()
        self.memory.close()  # a BufferError: the tier kept a view


@pytest.fixture(params=stub_vllm.VERSIONS)
def rig(request, monkeypatch, tmp_path):
    rig = Rig(request.param, monkeypatch, tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def make(monkeypatch, tmp_path):
    rigs = []

    def make(**config):
        rigs.append(Rig(config.pop("version", "0.33"), monkeypatch, tmp_path, **config))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_store_then_load_moves_rows_by_region(rig):
    request, keys = rig.request(), [key(i) for i in range(3)]
    assert rig.look(keys, request) == [MISS] * 3
    for i in range(3):
        rig.fill(i + 4, i + 1)
    stored = rig.submit(keys, [4, 5, 6], request, load=False)
    assert rig.finished()[stored].success
    assert rig.look(keys, request) == [HIT] * 3
    for i in range(16):
        rig.fill(i, 0)
    loaded = rig.submit(keys, [9, 2, 11], request, load=True)
    assert rig.finished()[loaded].success
    assert [rig.row(i)[0] for i in (9, 2, 11)] == [1, 2, 3]
    assert sum(any(rig.row(i)) for i in range(16)) == 3
    assert [call[0] for call in rig.pool.calls] == ["match", "put_region", "get_region"]
    assert [len(h) for _, _, hashes in rig.pool.calls for h in hashes] == [32] * 9
    assert not rig.tier.has_pending_work()


def test_lookups_of_a_step_are_one_question(rig):
    one, two = rig.request("one"), rig.request("two")
    for i in range(5):
        assert rig.tier.lookup(key(i), one) is RETRY
        assert rig.tier.lookup(key(i), two) is RETRY
    assert rig.tier.has_pending_work()
    assert not rig.pool.calls
    rig.step()  # opens the namespace
    rig.step()
    assert [(kind, len(hashes)) for kind, _, hashes in rig.pool.calls] == [("match", 5)]
    assert rig.tier.lookup(key(0), two) is MISS


def test_a_lookup_that_is_out_does_not_block(make):
    rig = make()
    rig.look([key(9)], rig.request())
    rig.pool.slow = True
    request = rig.request("r2")
    assert rig.look([key(1)], request) == [RETRY]
    rig.pool.go_on()
    assert rig.look([key(1)], request) == [MISS]


def test_a_failed_load_is_a_miss_until_it_is_stored_again(rig):
    request, keys = rig.request(), [key(i) for i in range(4)]
    rig.submit(keys, [0, 1, 2, 3], request, load=False)
    rig.finished()
    assert rig.look(keys, request) == [HIT] * 4
    rig.pool.bad = {keys[1][:-4]}
    job = rig.submit(keys, [4, 5, 6, 7], request, load=True)
    result = rig.finished()[job]
    assert not result.success
    if rig.version >= "0.28":
        assert set(result.successful_keys) == {keys[0], keys[2], keys[3]}
    other = rig.request("other")
    for r in (request, other):
        assert rig.look(keys, r) == [HIT, MISS, HIT, HIT]
    rig.tier.on_request_finished(request)
    rig.tier.on_request_finished(other)
    assert rig.look(keys, rig.request("third")) == [HIT, MISS, HIT, HIT]
    rig.submit([keys[1]], [1], rig.request("fourth"), load=False)
    assert rig.finished()
    assert rig.look(keys, rig.request("fifth")) == [HIT] * 4


def test_failures_are_forgotten_when_the_daemon_is_there_again_but_not_by_who_saw_them(make):
    rig = make()
    request = rig.request()
    rig.submit([key(1)], [0], request, load=False)
    rig.finished()
    rig.pool.bad = {key(1)[:-4]}
    rig.submit([key(1)], [1], request, load=True)
    rig.finished()
    rig.pool.bad, rig.pool.reconnects = set(), 1
    rig.step()
    assert rig.look([key(1)], rig.request()) == [HIT]  # nobody had asked: nobody holds on to the answer
    rig.pool.bad = {key(1)[:-4]}
    rig.submit([key(1)], [1], request, load=True)
    rig.finished()
    rig.pool.bad, rig.pool.reconnects = set(), 2
    rig.step()
    assert rig.look([key(1)], request) == [MISS]
    rig.tier.on_request_finished(request)
    assert rig.look([key(1)], rig.request("r2")) == [HIT]


def test_what_was_found_is_leased_until_it_is_loaded_or_nobody_wants_it(make):
    rig = make()
    request, keys = rig.request(), [key(i) for i in range(3)]
    rig.submit(keys, [0, 1, 2], request, load=False)
    rig.finished()
    other = rig.request("other")
    assert rig.look(keys, request) == [HIT] * 3 and rig.look(keys[:1], other) == [HIT]
    assert rig.pool.leases == 1
    rig.submit(keys[:2], [3, 4], request, load=True)
    rig.finished()
    assert rig.pool.leases == 1
    rig.submit(keys[2:], [5], request, load=True)
    rig.finished()
    assert rig.pool.leases == 0
    third = rig.request("third")
    for r in (request, other):
        rig.tier.on_request_finished(r)
    rig.look(keys, third)
    assert rig.pool.leases == 1
    rig.tier.on_request_finished(third)
    assert rig.pool.leases == 0


def test_failed_keys_are_bounded(make):
    rig = make()
    limit = importlib.import_module("kvtier.vllm._lookups").FAILED_KEYS
    rig.tier._lookups.failed(i.to_bytes(36, "big") for i in range(limit + 10))
    assert len(rig.tier._lookups._failed) == limit


def test_a_finished_request_leaves_nothing(rig):
    request = rig.request()
    rig.look([key(i) for i in range(8)], request)
    rig.tier.lookup(key(99), request)  # not sent yet
    rig.tier.on_request_finished(request)
    rig.tier.on_request_finished(request)  # twice is nothing
    rig.step()
    lookups = rig.tier._lookups
    assert not lookups._asked and not lookups._of_request and not lookups._batch
    assert [len(hashes) for _, _, hashes in rig.pool.calls] == [8]


def test_an_answer_for_a_request_that_is_gone_is_dropped(make):
    rig = make()
    rig.look([key(0)], rig.request())
    rig.pool.slow = True
    request = rig.request("gone")
    rig.look([key(1)], request)
    rig.tier.on_request_finished(request)
    again = rig.request("gone")
    assert rig.look([key(1)], again) == [RETRY]
    rig.pool.go_on()
    assert rig.look([key(1)], again) == [MISS]
    rig.submit([key(2)], [0], again, load=False)
    rig.pool.go_on()
    assert rig.finished()
    rig.look([key(2)], request)
    rig.tier.on_request_finished(request)
    rig.pool.go_on()
    rig.step()
    assert rig.pool.leases == 0 and not rig.tier.has_pending_work()


def test_a_hit_that_is_shorter_than_the_row_is_a_failure(make):
    rig = make()
    request = rig.request()
    rig.submit([key(1)], [0], request, load=False)
    rig.finished()
    space = next(iter(rig.pool.store.values()))
    space[key(1)[:-4]] = b"x" * 100
    rig.pool.scatter = lambda segments, block: None
    job = rig.submit([key(1)], [1], request, load=True)
    assert not rig.finished()[job].success
    assert rig.look([key(1)], request) == [MISS]


def test_beyond_the_pools_limit_a_job_waits(rig):
    request = rig.request()
    rig.look([key(0)], request)
    rig.pool.busy = True
    job = rig.submit([key(1)], [0], request, load=False)
    assert not rig.finished() and rig.tier.has_pending_work()
    rig.pool.busy = False
    assert rig.wait(job).success


def test_what_the_daemon_has_no_room_for_is_asked_for_again(make):
    rig = make()
    request, keys = rig.request(), [key(i) for i in range(3)]
    rig.submit(keys, [0, 1, 2], request, load=False)
    rig.finished()
    rig.pool.full = {keys[1][:-4]}
    job = rig.submit(keys, [3, 4, 5], request, load=True)
    assert not rig.finished()
    assert rig.wait(job).success


def test_a_job_that_cannot_be_submitted_ends_by_its_timeout(make):
    rig = make(timeout=0.05)
    request = rig.request()
    rig.look([key(0)], request)
    rig.pool.busy = True
    load = rig.submit([key(1)], [0], request, load=True)
    time.sleep(0.1)
    assert rig.finished()[load].success is False
    assert rig.look([key(1)], request) == [MISS]


def test_a_lost_daemon_is_misses_and_asked_nothing_for_a_while(make):
    rig = make()
    rig.look([key(0)], rig.request())
    rig.pool.lost = True
    request = rig.request("r2")
    assert rig.look([key(1), key(2)], request) == [MISS, MISS]
    count = len(rig.pool.calls)
    assert rig.tier.lookup(key(3), request) is MISS  # at once
    rig.step()
    assert len(rig.pool.calls) == count
    store = rig.submit([key(1)], [1], request, load=False)
    assert rig.wait(store).success is False
    load = rig.submit([key(2)], [2], request, load=True)
    assert rig.wait(load).success is False
    rig.pool.lost, rig.pool.reconnects = False, 1
    rig.step()
    assert rig.look([key(4)], rig.request("r3")) == [MISS]
    assert rig.pool.calls[-1][2] == [key(4)[:-4]]


@pytest.mark.parametrize("error", [kvtier.MismatchError, kvtier.DeniedError, kvtier.InvalidError])
def test_a_refused_namespace_is_misses_and_failed_stores(make, error, caplog):
    rig = make()
    rig.pool.refuses = error("dtype: have float16, want bfloat16")
    request = rig.request()
    assert rig.look([key(1)], request) == [MISS]
    job = rig.submit([key(1)], [0], request, load=False)
    assert rig.finished()[job].success is False
    assert "dtype" in caplog.text and not rig.tier.has_pending_work()


def test_a_namespace_that_cannot_be_opened_now_is_tried_again(make):
    rig = make()
    rig.pool.refuses = kvtier.DeadlineError("slow")
    request = rig.request()
    assert rig.look([key(1)], request) == [RETRY]
    job = rig.submit([key(1)], [0], request, load=False)
    assert not rig.finished()
    rig.pool.refuses = None
    for lane in rig.tier._lanes.values():
        lane._next = 0.0
    rig.step()
    assert rig.wait(job).success


def test_groups_have_namespaces_of_their_own(rig):
    rig.tier._offloading = importlib.import_module("kvtier.vllm._identity").read_spec(stub_vllm.spec(rig.version, groups=2))
    request, keys = rig.request(), [key(1, 0), key(1, 1), key(2, 1)]
    job = rig.submit(keys, [0, 1, 2], request, load=False)
    rig.step()
    assert rig.finished()[job].success
    assert sorted(len(blocks) for blocks in rig.pool.store.values()) == [1, 2]


def test_rows_longer_than_a_block_are_kept_in_parts(make):
    stride = (20 << 20) + 4096
    rig = make(rows=2, stride=stride)
    request = rig.request()
    rig.memory[:stride] = os.urandom(1 << 20) * 20 + bytes(4096)
    want = rig.row(0)
    rig.submit([key(1)], [0], request, load=False)
    while not rig.finished():
        rig.step()
    assert len(rig.pool.store) == 3 and {len(b) for blocks in rig.pool.store.values() for b in blocks.values()} <= set(range(8 << 20 | 1))
    job = rig.submit([key(1)], [1], request, load=True)
    assert rig.finished()[job].success and rig.row(1) == want
    next(iter(rig.pool.store.values())).clear()  # a part is lost: the whole row is
    assert rig.look([key(1)], rig.request("r2")) == [MISS]
    rig.memory[:] = bytes(len(rig.memory))
    rig.submit([key(1)], [1], request, load=True)
    assert rig.look([key(1)], rig.request("r3")) == [MISS]


def test_sixteen_byte_hashes(make):
    rig = make()
    request = rig.request()
    job = rig.submit([key(1, length=16)], [0], request, load=False)
    assert rig.wait(job).success
    assert rig.pool.calls[-1][2] == [key(1, length=16)[:-4]]


def test_parents_are_told_where_the_request_knows_its_order(make):
    rig = make()
    request, keys = rig.request(), [key(i) for i in range(4)]
    for i, k in enumerate(keys):
        request.positions[k] = 64 * (i + 1)
    rig.look(keys[:2], request)
    rig.submit([keys[3], keys[1], keys[0]], [0, 1, 2], request, load=False)
    rig.finished()
    assert rig.pool.parents == {keys[1][:-4]: keys[0][:-4]}
    rig.submit(keys[2:], [0, 1], request, load=False)
    assert rig.pool.parents[keys[2][:-4]] == keys[1][:-4] and rig.pool.parents[keys[3][:-4]] == keys[2][:-4]


@pytest.mark.parametrize("config", [{"mapped": False}, {"address": "host:7"}])
def test_without_regions_the_client_copies(make, config):
    rig = make(**config)
    assert not rig.pool.regions
    request = rig.request()
    rig.fill(0, 7)
    rig.submit([key(1)], [0], request, load=False)
    assert rig.finished()
    job = rig.submit([key(1)], [3], request, load=True)
    assert rig.finished()[job].success and rig.row(3) == bytes([7]) * STRIDE
    assert {call[0] for call in rig.pool.calls} == {"put", "get_into"}


def test_a_region_of_several_files_some_of_them_unlinked(monkeypatch, tmp_path):
    stub_vllm.Vllm("0.33", monkeypatch)
    from kvtier.vllm._rows import Rows

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    whole = mmap.mmap(-1, 6 * STRIDE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    files = []
    for i, rows in enumerate((3, 2, 1)):
        file = open(tmp_path / f"region{i}", "w+b")
        file.truncate(rows * STRIDE)
        at = base + sum((3, 2, 1)[:i]) * STRIDE
        assert libc.mmap(at, rows * STRIDE, 3, 0x11, file.fileno(), 0) == at  # shared, fixed
        files.append(file)
    os.unlink(tmp_path / "region1")
    view = memoryview(whole).cast("B", (6, STRIDE))
    rows = Rows(view)
    assert rows.mapped and [region.length for region in rows.regions()] == [3 * STRIDE, 2 * STRIDE, STRIDE]
    for row in range(6):
        rows.buffer(row, 0)[:4] = b"row%d" % row
        [(region, offset, length)] = rows.segments(row, 0)
        assert length == STRIDE and os.pread(rows.regions()[region].fd, 4, offset) == b"row%d" % row
    odd = Rows(memoryview(whole).cast("B", (2, 3 * STRIDE)))  # a row of two files
    assert odd.segments(1, 0) == [(1, 0, 2 * STRIDE), (2, 0, STRIDE)]
    odd.close()
    os.truncate(files[2].fileno(), 0)
    short = Rows(view)
    assert not short.mapped and "shorter" in short.why
    short.close()
    rows.close()
    rows.close()
    view.release()


def test_wrong_configuration_says_so(make):
    with pytest.raises(ValueError, match="address"):
        make(address="")
    with pytest.raises(ValueError, match="timeout"):
        make(timeout=-1)


def test_unknown_keywords_are_named_and_ignored(make, caplog):
    make(streams=4, n_read_threads=16)
    assert "n_read_threads, streams" in caplog.text and "module_path" not in caplog.text


def test_exceptions_of_its_own_end_the_job_as_failed(rig, caplog):
    request = rig.request()
    job = rig.submit([key(1), key(2)], [0], request, load=True)  # a row too few
    assert rig.finished()[job].success is False
    job = rig.submit([key(1)], [ROWS], request, load=False)
    assert rig.finished()[job].success is False
    assert "rows" in caplog.text
    rig.tier._pool.stats = None
    rig.tier.on_schedule_end(None)
    rig.tier._lookups.ask = None
    assert rig.tier.lookup(key(1), request) is MISS


def test_drain_waits_for_what_is_under_way_and_fails_what_is_not(make):
    rig = make()
    request = rig.request()
    rig.look([key(0)], request)
    rig.pool.slow = True
    running = rig.submit([key(1)], [0], request, load=False)
    rig.pool.busy = True
    waiting = rig.submit([key(2)], [1], request, load=False)
    timer = threading.Timer(0.05, rig.pool.go_on)
    timer.start()
    rig.tier.drain_jobs()
    timer.join()
    results = rig.finished()
    assert results[running].success and not results[waiting].success


def test_shutdown_lets_stores_end_and_gives_loads_up(make):
    rig = make()
    request = rig.request()
    rig.submit([key(1)], [0], request, load=False)
    rig.finished()
    rig.pool.slow = True
    rig.submit([key(2)], [1], request, load=False)
    rig.submit([key(1)], [2], request, load=True)
    store, load = rig.pool.jobs[-2:]
    timer = threading.Timer(0.05, store.run)
    timer.start()
    rig.tier.shutdown()
    rig.tier.shutdown()
    timer.join()
    assert not store.cancelled and load.cancelled and rig.pool.closed
    late = rig.submit([key(3)], [3], request, load=False)
    assert rig.finished()[late].success is False
    assert rig.tier.lookup(key(3), request) in (MISS, RETRY)


def test_statistics(rig):
    request, keys = rig.request(), [key(i) for i in range(4)]
    assert rig.look(keys, request) == [MISS] * 4
    rig.submit(keys, [0, 1, 2, 3], request, load=False)
    rig.pool.bad = {keys[0][:-4]}
    rig.submit(keys, [4, 5, 6, 7], request, load=True)
    assert len(rig.finished()) == 2
    names = rig.tier.build_metric_definitions({})
    stats = rig.tier.get_stats()
    counts = {name.rpartition("kvtier_")[2]: value for (name, _), value in stats.counters.items()}
    assert counts == {
        "lookups": 4,
        "loaded_chunks": 3,
        "loaded_bytes": 3 * STRIDE,
        "load_failures": 1,
        "stored_chunks": 4,
        "stored_bytes": 4 * STRIDE,
    }
    assert {name for name, _ in (*stats.counters, *stats.gauges)} <= set(names)
    assert all(labels == ("KvtierTier",) for _, labels in stats.counters)
    assert rig.tier.get_stats() is None


def test_the_descriptor_is_of_all_that_makes_chunks_alike(make):
    names, rig = {}, None
    for version in ("0.25", "0.32"):
        for changes in ({}, {"dtype": "float16"}, {"layout": "LBHNC"}, {"tp": 1}, {"tokens": 32}, {"layers": ("l0",)}, {"model": "org/other"}):
            if version == "0.25" and "layout" in changes:
                continue
            rig = make(version=version, spec=stub_vllm.spec(version, **changes))
            rig.look([key(1)], rig.request())
            [name] = rig.pool.store
            names[version, str(changes)] = name
    assert len(set(names.values())) == len(names)
    own = make(namespace="mine")
    own.look([key(1)], own.request())
    assert list(own.pool.store) == ["mine"]


def test_the_hash_and_its_seed(monkeypatch):
    vllm = stub_vllm.Vllm("0.33", monkeypatch)
    from kvtier.vllm._identity import hash_identity

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert hash_identity() == ("sha256", "vllm-none-hash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    vllm.hashes.NONE_HASH = stub_vllm._sha256("7")
    assert hash_identity() == ("sha256", "7")
    vllm.hashes.NONE_HASH = os.urandom(32)
    algorithm, seed = hash_identity()
    assert algorithm == "unknown-256" and seed.startswith("fingerprint:")
    del vllm.hashes.NONE_HASH
    assert hash_identity() == ("", "")


def test_importing_needs_no_engine():
    code = "import sys, kvtier.vllm; assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch')]"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
