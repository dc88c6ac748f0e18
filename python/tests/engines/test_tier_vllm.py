"""OffloadingConnector with the tier in real engines on a real daemon: a tiny random model, greedy, prompts of 600 tokens.

A chunk has 128 tokens, so a prompt's first 512 tokens are four chunks that another engine can load. A saving counts
when the daemon's own count of served blocks grew by exactly these.
"""

from __future__ import annotations

import glob

import pytest

pytest.importorskip("vllm", reason="needs vllm (see make engines)")

import kvtier
from connector_rig import Proxy, closing, until
from tier_rig import Daemon, cut

CHUNKS = 4  # of a prompt


def transfer(address, **tier):
    """--kv-transfer-config of vLLM's offloading with the tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering_spec",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [{"type": "KvtierTier", "module_path": "kvtier.vllm", "address": address, **tier}],
        },
    }


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path / "daemon")
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture(autouse=True)
def nothing_left():
    """No file of an engine's region is there that was not before."""
    before = set(glob.glob("/dev/shm/vllm_offload_*"))
    yield
    assert set(glob.glob("/dev/shm/vllm_offload_*")) <= before


def check(engine, daemon, want, seed, chunks, *tiers):
    """The prompt's tokens are right, and so many chunks came from the daemon, by both sides' counts."""
    before = daemon.hits(*tiers)
    answer = engine.generate(seed)
    assert answer["tokens"] == [want[seed]]
    assert answer["hits"] == 128 * chunks
    assert daemon.hits(*tiers) - before == chunks
    return answer


def stored(daemon, chunks):
    until(lambda: daemon.blocks() >= chunks, say=f"{daemon.blocks()} chunks are stored, not {chunks}")
    assert daemon.blocks() == chunks


def forget(engine):
    """Empty the engine's KV cache and its rows in host memory."""
    engine.begin(do="forget", offloaded=True)
    assert engine.end()["ok"]


def back(daemon):
    """Wait until both engines' sessions are there again."""
    until(lambda: len(daemon.call("sessions")) == 2, 30, "the engines do not come back")


def damage(daemon, namespace, key):
    """Flip a bit of a chunk on the medium, while no daemon runs."""
    with kvtier.connect(daemon.address, required=True) as pool:
        space = pool.open(namespace, create=False)
        chunk = bytearray(space.block_bytes)
        assert space.get_into([bytes.fromhex(key)], [chunk])[0].hit
    daemon.stop()
    daemon.damage(bytes(chunk))
    daemon.start()


def test_engines_share_a_pool_and_survive_it(model, want, daemon, engine, second):
    first = engine.start(model, transfer(daemon.address, namespace="pool"))
    second.start(model, transfer(daemon.address, namespace="pool"))
    # One computes and stores, the other loads.
    keys = {}
    for seed in (1, 2, 3, 4):
        check(first, daemon, want, seed, 0)
        stored(daemon, seed * CHUNKS)
        keys[seed] = {line["hash"] for line in daemon.lines("ls", "--namespace", "pool")}
    check(second, daemon, want, 1, CHUNKS)
    check(second, daemon, want, 5, 0)
    stored(daemon, 5 * CHUNKS)
    check(first, daemon, want, 5, CHUNKS)
    stored(daemon, 5 * CHUNKS)
    assert "moved by the daemon" in first.log()

    # Restarted in between, the daemon serves from NVMe.
    daemon.restart()
    back(daemon)
    check(second, daemon, want, 2, CHUNKS, "g3")

    # A chunk that was damaged on the medium is refused; it and what is behind it are computed.
    damage(daemon, "pool", (keys[3] - keys[2]).pop())
    back(daemon)
    before = daemon.hits()
    answer = second.generate(3)
    assert answer["tokens"] == [want[3]] and answer["hits"] in (0, 128, 256, 384)
    assert daemon.hits() - before == CHUNKS - 1 and daemon.stat()["corrupt"] == 1
    stored(daemon, 5 * CHUNKS)
    forget(first)
    check(first, daemon, want, 3, CHUNKS)

    # Killed: engines compute. Back again: they hit again.
    daemon.kill()
    for each in (first, second):
        assert each.generate(6)["tokens"] == [want[6]]
    daemon.start()
    back(daemon)
    forget(second)
    check(second, daemon, want, 2, CHUNKS)
    assert check(second, daemon, want, 7, 0)
    until(lambda: daemon.stat()["leases"] == 0)
    grown = second.generate(8)["metrics"]
    assert grown["kv_offload_kvtier_lookups"] == CHUNKS


def test_killed_amid_a_load(model, want, daemon, engine):
    """The engine by TCP: its load is cut where the test wants it."""
    proxy = Proxy(daemon.port)
    with closing(proxy):
        engine.start(model, transfer(proxy.address, timeout=5))
        check(engine, daemon, want, 1, 0)
        stored(daemon, CHUNKS)
        daemon.restart()
        until(lambda: len(daemon.call("sessions")) == 1, 30)
        forget(engine)
        proxy.after(200_000, cut(daemon))
        answer = engine.generate(1)
        assert answer["tokens"] == [want[1]]
        assert answer["hits"] < 512
        assert engine.generate(2)["tokens"] == [want[2]]
        daemon.start()
        until(lambda: len(daemon.call("sessions")) == 1, 30)
        forget(engine)
        check(engine, daemon, want, 1, CHUNKS)
        assert "copied through the connection" in engine.log()


def test_an_engine_that_differs_finds_nothing_and_is_told_why(model, daemon, engine, second):
    """One engine has made the namespace; another with one thing changed has no hits, and says which."""
    kv = transfer(daemon.address, namespace="pool")
    engine.start(model, kv).generate(1)
    stored(daemon, CHUNKS)
    engine.stop()
    changes = {
        "dtype": {"dtype": "float32"},
        "hash_seed": {"env": {"PYTHONHASHSEED": "1"}},
        "tokens_per_block": {"block_size": 64},
    }
    for field, change in changes.items():
        second.start(model, kv, **change)
        assert second.generate(1)["hits"] == 0
        forget(second)
        assert second.generate(1)["hits"] == 0
        second.stop()
        assert daemon.hits() == 0 and daemon.blocks() == CHUNKS
        [line] = [line for line in second.log().splitlines() if "nothing is loaded or stored" in line]
        assert field in line
