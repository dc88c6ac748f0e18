"""KvtierConnector in real vLLM engines on a real daemon: a tiny random model, greedy, prompts of 600 tokens.

A block has 128 tokens, so a prompt's first 512 tokens are four blocks that another engine can load. A saving counts
when the daemon's own count of served blocks grew by exactly these.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm (see make engines)")

import connector_client
import connector_model
import kvtier
from connector_rig import PATHS, SEEDS, Daemon, Engine, Proxy, closing, transfer, until

BLOCKS = 4  # of a prompt


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "daemon")
    daemon.start()
    yield daemon
    daemon.close()


def stored(daemon: Daemon, count: int) -> None:
    """Waits until so many blocks are there: stores are not waited for by the engine."""
    until(lambda: daemon.blocks() >= count, say=f"{daemon.blocks()} blocks are stored, not {count}")
    assert daemon.blocks() == count


def check(
    engine: Engine, daemon: Daemon, want: dict[int, list[int]], seed: int, blocks: int, *tiers: str
) -> dict[str, Any]:
    """The prompt's tokens are right, and so many blocks came from the pool for it, by both sides' counts."""
    before = daemon.hits(*tiers)
    answer = engine.generate(seed)
    assert answer["tokens"] == [want[seed]]
    assert answer["hits"] == 128 * blocks
    assert daemon.hits(*tiers) - before == blocks
    assert answer["metrics"]["kvtier_load_blocks"] == blocks
    return answer


def test_engines_share_a_pool_and_survive_it(
    daemon: Daemon, engine: Engine, second: Engine, model: pathlib.Path, want: dict[int, list[int]]
) -> None:
    proxy = Proxy(daemon.port)
    with closing(proxy):
        first = engine.start(model, transfer(daemon.address))
        second.start(model, transfer(proxy.address))
        # One computes, the other loads, both ways: through shared memory and over TCP.
        for seed in (1, 2, 3):
            check(first, daemon, want, seed, 0)
        stored(daemon, 3 * BLOCKS)
        check(second, daemon, want, 1, BLOCKS)
        check(second, daemon, want, 4, 0)
        stored(daemon, 4 * BLOCKS)
        check(first, daemon, want, 4, BLOCKS)
        assert daemon.blocks() == 4 * BLOCKS, "what was loaded is not stored again"

        # Both at once.
        before = daemon.hits()
        for each in (first, second):
            each.begin(do="generate", prompts=[2, 5], tokens=600, new=24)
        answers = [each.end() for each in (first, second)]
        assert all(a["tokens"] == [want[2], want[5]] for a in answers)
        assert daemon.hits() - before == sum(a["metrics"]["kvtier_load_blocks"] for a in answers) >= BLOCKS
        stored(daemon, 5 * BLOCKS)

        # Restarted in between, the daemon serves from NVMe.
        daemon.stop()
        daemon.start()
        assert daemon.blocks() == 5 * BLOCKS
        second.attached()
        check(second, daemon, want, 3, BLOCKS, "g3")

        # Killed before a request: it is computed. Killed amid a load: so is what did not come.
        daemon.stop(signal.SIGKILL)
        assert second.generate(6)["tokens"] == [want[6]]
        daemon.start()
        second.attached()
        second.forget()
        proxy.after(200_000, lambda: daemon.stop(signal.SIGKILL))
        answer = second.generate(3)
        assert answer["tokens"] == [want[3]]
        assert answer["metrics"]["kvtier_load_failed_blocks"] > 0 and answer["metrics"]["kvtier_load_blocks"] < BLOCKS
        assert second.generate(7)["tokens"] == [want[7]]

        # Hits again after the restart.
        daemon.start()
        second.attached()
        second.forget()
        check(second, daemon, want, 1, BLOCKS)

        # Bytes that come wrong are refused. The pool goes on saying that it has them; the request ends all the same.
        second.forget()
        proxy.spoils = True
        answer = second.generate(1)
        proxy.spoils = False
        assert answer["tokens"] == [want[1]] and answer["metrics"]["kvtier_load_failed_blocks"] > 0
        second.forget()
        check(second, daemon, want, 8, 0)
        stored(daemon, 6 * BLOCKS)
        first.attached()
        first.forget()
        check(first, daemon, want, 8, BLOCKS)
        assert daemon.call("stat")["leases"] == 0


def test_damaged_block_is_refused_and_computed(
    daemon: Daemon, engine: Engine, model: pathlib.Path, want: dict[int, list[int]]
) -> None:
    engine.start(model, transfer(daemon.address, durable=True, namespace="pool"))
    check(engine, daemon, want, 1, 0)
    stored(daemon, BLOCKS)
    damage(daemon, "pool")
    engine.attached()
    engine.forget()
    answer = engine.generate(1)
    assert answer["tokens"] == [want[1]]
    assert answer["metrics"]["kvtier_load_failed_blocks"] > 0
    assert daemon.hits() == BLOCKS - 1
    assert daemon.call("stat")["corrupt"] == 1
    # What was computed is stored again.
    stored(daemon, BLOCKS)
    engine.forget()
    check(engine, daemon, want, 1, BLOCKS)


def damage(daemon: Daemon, namespace: str) -> None:
    """Flips a bit of one block on the medium while no daemon runs."""
    key = bytes.fromhex(daemon.lines("ls", "--namespace", namespace)[0]["hash"])
    with kvtier.connect(daemon.address, required=True) as pool:
        space = pool.open(namespace, create=False)
        block = bytearray(space.block_bytes)
        assert space.get_into([key], [block])[0].hit
    daemon.stop()
    slab = bytearray(daemon.slab.read_bytes())
    at = slab.index(block[:4096])
    slab[at + 5000] ^= 1
    with daemon.slab.open("r+b") as file:
        file.seek(at + 5000)
        file.write(slab[at + 5000 : at + 5001])
    daemon.start()


def test_other_blocks_are_no_hits(daemon: Daemon, engine: Engine, tmp_path: pathlib.Path) -> None:
    """One engine has made the namespace; another with one thing changed has no hits, and says which."""
    model, kv = tmp_path / "tiny", transfer(daemon.address, namespace="pool")
    connector_model.write(model)
    engine.start(model, kv).generate(1)
    stored(daemon, BLOCKS)
    changes: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": "float32"},
        "hash_seed": {"env": {"PYTHONHASHSEED": "1"}},
        "tokens_per_block": {"block_size": 64},
        "layout": {},
    }
    for field, change in changes.items():
        if field == "layout":  # a model of the same name with other heads
            connector_model.write(model, kv_heads=4)
        engine.start(model, kv, **change)
        for _ in range(2):
            assert engine.generate(1)["hits"] == 0
            engine.forget()
        assert daemon.hits() == 0 and daemon.blocks() == BLOCKS
        lines = [line for line in engine.log().splitlines() if "mismatch" in line]
        assert len(lines) == 1 and field in lines[0], lines


def test_windows_and_full_attention_together(daemon: Daemon, engine: Engine, tmp_path: pathlib.Path) -> None:
    """Two KV cache groups: of the window's group only the end is loaded. A load that fails is computed here too."""
    model = tmp_path / "hybrid"
    connector_model.write(model, window=200)
    want = engine.start(model).generate(1)["tokens"]
    proxy = Proxy(daemon.port)
    with closing(proxy):
        engine.start(model, transfer(proxy.address))
        assert engine.generate(1)["tokens"] == want
        stored(daemon, 2 * BLOCKS)
        engine.forget()
        answer = engine.generate(1)
        assert (answer["tokens"], answer["hits"], daemon.hits()) == (want, 512, BLOCKS + 2)
        engine.forget()
        proxy.after(100_000, lambda: daemon.stop(signal.SIGKILL))
        answer = engine.generate(1)
        assert answer["tokens"] == want and answer["metrics"]["kvtier_load_failed_blocks"] > 0
        engine.forget()
        assert engine.generate(1)["tokens"] == want


def test_engine_of_two_ranks(daemon: Daemon, engine: Engine, model: pathlib.Path) -> None:
    """As vLLM runs by default: a scheduler and two workers in processes of their own, each worker with half of the
    heads and a namespace of its own. A prefix counts as far as both have it."""
    options = {
        "kv": transfer(daemon.address, namespace="pool"),
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        "tensor_parallel_size": 2,
    }
    first = engine.start(model, **options).generate(1)
    stored(daemon, 2 * BLOCKS)
    second = engine.start(model, **options).generate(1)
    assert (first["hits"], second["hits"]) == (0, 512) and second["tokens"] == first["tokens"]
    assert daemon.hits() == 2 * BLOCKS
    assert {n["name"] for n in daemon.call("ns")} == {"pool.tp0.pp0", "pool.tp1.pp0"}


def test_preempted_requests(daemon: Daemon, engine: Engine, model: pathlib.Path) -> None:
    """A KV cache that is too small for what runs: requests lose their blocks and get them back from the pool."""
    engine.start(model)
    want = [engine.generate(seed, tokens=500, new=200)["tokens"][0] for seed in (1, 2, 3)]
    engine.start(model, transfer(daemon.address), num_gpu_blocks_override=13)
    assert engine.generate(1, 2, 3, tokens=500, new=200)["tokens"] == want
    assert daemon.hits() > 0
    engine.forget()
    assert engine.generate(1, 2, 3, tokens=500, new=200)["tokens"] == want


def test_engines_and_clients_amid_eviction(
    engine: Engine, second: Engine, model: pathlib.Path, want: dict[int, list[int]], tmp_path: pathlib.Path
) -> None:
    """Two engines and four other clients in a pool that has not room for all: no wrong byte or token, nothing left."""
    seconds = 60 if os.environ.get("KVTIER_SOAK") else 20
    daemon = Daemon(tmp_path / "daemon", dram="32MiB", nvme="48MiB")
    daemon.start()
    with closing(daemon):
        engines = [each.start(model, transfer(daemon.address)) for each in (engine, second)]
        for each in engines:
            each.ready()
        command = [sys.executable, str(pathlib.Path(connector_client.__file__)), daemon.address, str(seconds)]
        clients = [
            subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True, env=os.environ | PATHS)
            for seed in range(4)
        ]
        choose, loaded, sizes = random.Random(1), 0.0, []
        while any(client.poll() is None for client in clients):
            seeds = [choose.choice(SEEDS) for _ in engines]
            for each, seed in zip(engines, seeds):
                each.begin(do="generate", prompts=[seed], tokens=600, new=24)
            answers = [each.end() for each in engines]
            assert [a["tokens"] for a in answers] == [[want[seed]] for seed in seeds]
            loaded += sum(a["metrics"]["kvtier_load_blocks"] for a in answers)
            for each in engines:
                each.forget()
            sizes.append([process.memory() for process in (daemon, *engines)])
        counts = [json.loads(client.communicate()[0]) for client in clients]
        assert all(c["wrong"] == 0 and c["hits"] and c["puts"] for c in counts), counts
        assert loaded, "nothing came from the pool"
        stat = until(lambda: (s := daemon.call("stat"))["leases"] == 0 and s, say="leases are left")
        assert stat["reservations"] <= 64 and sum(tier["evictions"] for tier in stat["tiers"])
        grown = [last - first for first, last in zip(sizes[len(sizes) // 3], sizes[-1])]
        assert max(grown) < 64 << 20, f"memory grew by {grown} bytes"
