"""The tier in vLLM's own classes, with a real daemon: what it answers, and every byte."""

from __future__ import annotations

import importlib
import logging
import signal
import threading
import time

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make engines")

import numpy as np
import vllm
from connector_rig import Proxy, until
from tier_rig import HIT, MISS, PAGE, Daemon, Engine, contents, cut, key, regions
from vllm.v1.kv_offload.tiering.base import JobResult


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path)
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture
def engine(daemon):
    """A factory of engines; at the end all have let go of all."""
    before, engines = regions(), []

    def engine(**config):
        engines.append(Engine(config.pop("address", daemon.address), **config))
        return engines[-1]

    yield engine
    for one in engines:
        one.shutdown()
    assert regions() == before


KEYS = [key(i) for i in range(8)]
PARTIAL = "successful_keys" in JobResult.__dataclass_fields__  # 0.28


def check(engine, keys, want, context=None):
    """Find and read chunks: what is a hit must be right, and the answers are returned."""
    context = context or engine.request()
    answers = engine.find(keys, context)
    found = [k for k, answer in zip(keys, answers) if answer is HIT]
    for k, row in zip(found, engine.read(found, context) if found else []):
        assert np.array_equal(row, want[k]), "wrong bytes"
    engine.finish(context)
    return answers


def test_store_drop_promote(engine, daemon):
    one, want = engine(), contents(KEYS)
    assert one.tier._rows.mapped
    assert check(one, KEYS, want) == [MISS] * 8
    one.store(KEYS, want)
    assert daemon.blocks() == 8 and daemon.hits() == 0
    assert check(one, KEYS, want) == [HIT] * 8  # in the primary tier
    assert daemon.hits() == 0
    one.drop()
    assert check(one, KEYS, want) == [HIT] * 8
    assert daemon.hits() == 8
    one.drop()
    two = engine()
    assert check(two, KEYS, want) == [HIT] * 8
    assert daemon.hits() == 16


def test_by_tcp_the_client_copies(daemon, engine):
    one, want = engine(address=daemon.tcp), contents(KEYS)
    assert not one.tier._rows.mapped
    one.store(KEYS, want)
    one.drop()
    assert check(one, KEYS, want) == [HIT] * 8
    assert daemon.hits() == 8


def test_from_the_slab_after_a_restart(engine, daemon):
    one, want = engine(), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    daemon.restart()
    until(one.attached)
    assert check(one, KEYS, want) == [HIT] * 8
    assert daemon.hits() == 8


def test_a_damaged_row_is_refused_and_the_others_are_kept(engine, daemon):
    one, want = engine(), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    daemon.stop()
    daemon.damage(want[KEYS[3]].tobytes())
    daemon.start()
    until(one.attached)
    context = one.request()
    assert check(one, KEYS, want, context) == [HIT] * 3 + [MISS] + [HIT] * 4
    # A version that knows of no partial success asks for the good ones a second time.
    hits = 7 if PARTIAL else 14
    assert daemon.hits() == hits
    # It is computed and stored anew, and there again.
    one.drop()
    one.store([KEYS[3]], want)
    one.drop()
    assert check(one, KEYS, want) == [HIT] * 8
    assert daemon.hits() == hits + 8


def test_a_load_that_fails_after_a_hit_is_a_miss_and_no_livelock(engine, daemon):
    one, want = engine(), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    context = one.request()
    one.until(lambda: one.tier.lookup(KEYS[0], context) is HIT)
    [lane] = one.tier._lanes.values()
    daemon.call("rm", "--namespace", lane.spaces[0].name, "--all", "--yes")
    assert one.until(lambda: one.manager.lookup(KEYS[0], context) is MISS) < 100
    other = one.request()
    assert one.manager.lookup(KEYS[0], other) is MISS
    for each in (context, other):
        one.finish(each)
    one.store([KEYS[0]], want)
    one.drop()
    assert check(one, KEYS[:2], want) == [HIT, MISS]


def test_a_killed_daemon_is_misses_and_hits_again_when_it_is_back(engine, daemon):
    one, want = engine(), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    daemon.restart()  # all is on the slab
    until(one.attached)
    daemon.kill()
    began = time.monotonic()
    assert check(one, KEYS, want) == [MISS] * 8
    more = [key(i) for i in range(100, 104)]
    one.store(more, contents(more))
    assert time.monotonic() - began < 3
    one.drop()
    daemon.start()
    until(one.attached)
    assert check(one, KEYS, want) == [HIT] * 8
    assert daemon.hits() == 8


def test_killed_in_the_middle_of_loads(engine, daemon):
    keys = [key(i) for i in range(200)]
    one, want = engine(rows=256), contents(keys)
    one.store(keys, want)
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        one.drop()
        daemon.restart()
        until(one.attached)
        timer = threading.Timer(delay, daemon.send, [signal.SIGKILL])
        context = one.request()
        for k in keys:
            one.manager.lookup(k, context)
        timer.start()
        check(one, keys, want, context)
        timer.join()
        daemon.kill()
        daemon.start()
        until(one.attached)
        one.drop()
        assert check(one, keys, want) == [HIT] * 200


def test_a_load_by_tcp_that_is_cut(engine, daemon):
    proxy = Proxy(daemon.port)
    one, want = engine(address=proxy.address), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    daemon.restart()
    until(one.attached)
    proxy.after(3 * PAGE, cut(daemon))
    answers = check(one, KEYS, want)
    assert answers.count(HIT) < 3
    one.drop()
    daemon.start()
    until(one.attached)
    assert check(one, KEYS, want) == [HIT] * 8
    proxy.close()


def test_a_daemon_that_hangs(engine, daemon):
    one, want = engine(timeout=1), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    daemon.send(signal.SIGSTOP)
    began = time.monotonic()
    assert check(one, KEYS, want) == [MISS] * 8
    assert check(one, KEYS, want) == [MISS] * 8  # at once
    assert time.monotonic() - began < 4
    daemon.send(signal.SIGCONT)


def test_cancelled_requests(engine, daemon):
    one, want = engine(), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    for steps in range(6):
        context = one.request()
        for _ in range(steps):
            [one.manager.lookup(k, context) for k in KEYS]
            one.step()
        one.manager.on_request_finished(context)
    one.quiet()
    assert check(one, KEYS, want) == [HIT] * 8
    lookups = one.tier._lookups
    assert not lookups._asked and not lookups._batch


def test_what_was_found_stays_until_it_is_loaded(engine, daemon):
    one, want = engine(), contents(KEYS)
    one.store(KEYS, want)
    one.drop()
    context = one.request()
    one.until(lambda: {one.tier.lookup(k, context) for k in KEYS} == {HIT})
    assert daemon.stat()["leases"] >= 1
    assert check(one, KEYS, want, context) == [HIT] * 8
    until(lambda: daemon.stat()["leases"] == 0, 2)


@pytest.mark.parametrize("lease", [5.0, 0.001])
def test_more_chunks_than_there_is_room_for(tmp_path, engine, monkeypatch, lease):
    """Whatever is evicted between the answer and the load: the right bytes or a miss."""
    monkeypatch.setattr(importlib.import_module("kvtier.vllm._lookups"), "_LEASE_SECONDS", lease)
    small = Daemon(tmp_path / "small", "32MiB", "32MiB", "--grace", "0s")
    small.start()
    try:
        keys = [key(i) for i in range(800)]
        one, two, want = engine(address=small.address), engine(address=small.address), contents(keys)
        rng, hits = np.random.default_rng(7), 0
        for round in range(30):
            at = int(rng.integers(0, len(keys) - 24))
            some = keys[at : at + 24]
            for each in (one, two):
                answers = check(each, some, want)
                hits += answers.count(HIT)
                missing = [k for k, answer in zip(some, answers) if answer is MISS]
                if missing:
                    each.store(missing, want)
                each.drop()
        assert hits and small.stat()["removed"]["evicted"]
        until(lambda: small.stat()["leases"] == 0)
    finally:
        for each in (one, two):
            each.shutdown()
            each.shutdown = lambda: None
        small.close()


def test_groups(engine, daemon):
    one = engine(groups=2)
    keys = [key(i, group) for i in range(3) for group in range(2)]
    want = contents(keys)
    one.store(keys, want)
    one.drop()
    assert check(one, keys, want) == [HIT] * 6
    assert daemon.hits() == 6 and daemon.stat()["namespaces"] == 2


def test_rows_longer_than_a_block(engine, daemon):
    page, keys = 9 << 20, KEYS[:2]
    one, want = engine(rows=3, page=page), contents(keys, page=page)
    one.store(keys, want)
    one.drop()
    assert check(one, keys, want) == [HIT] * 2
    assert daemon.hits() == 4  # two parts each


@pytest.mark.parametrize("change, field", [({"dtype": "float16"}, "dtype"), ({"layout": "LBNHC"}, "layout"), ({"page": 2 * PAGE}, "block_bytes")])
def test_an_engine_that_differs_finds_nothing_and_is_told_why(engine, daemon, caplog, change, field):
    if field == "layout" and tuple(int(x) for x in vllm.__version__.split(".")[:2]) < (0, 29):
        pytest.skip(f"vllm {vllm.__version__} does not tell the layout")
    one, want = engine(namespace="own"), contents(KEYS)
    one.store(KEYS, want)
    other = engine(namespace="own", **change)
    caplog.clear()
    caplog.set_level("WARNING", "vllm.kvtier")
    logging.getLogger("vllm").propagate = True
    assert check(other, KEYS, want) == [MISS] * 8
    assert field in caplog.text
    aside = engine(**change)
    assert check(aside, KEYS, want) == [MISS] * 8
    assert daemon.hits() == 0


def test_no_daemon_at_the_start(engine, daemon, tmp_path):
    daemon.kill()
    one, want = engine(), contents(KEYS)
    assert check(one, KEYS, want) == [MISS] * 8
    one.store(KEYS, want)
    one.drop()
    daemon.start()
    until(one.attached)
    assert check(one, KEYS, want) == [MISS] * 8
    one.store(KEYS, want)
    one.drop()
    assert check(one, KEYS, want) == [HIT] * 8


def test_statistics(engine, daemon):
    one, want = engine(), contents(KEYS)
    check(one, KEYS, want)
    one.store(KEYS, want)
    one.drop()
    check(one, KEYS, want)
    stats = one.manager.get_stats().reduce()
    counts = {name.split("kvtier_")[1].split(":")[0]: value for name, value in stats.items() if "kvtier_" in name}
    assert counts == {
        "lookups": 16,
        "hits": 8,
        "stored_chunks": 8,
        "stored_bytes": 8 * PAGE,
        "loaded_chunks": 8,
        "loaded_bytes": 8 * PAGE,
        "connected": 1,
    }
    known = type(one.spec).build_metric_definitions(one.spec.extra_config)
    assert set(one.tier.build_metric_definitions({})) <= set(known)
