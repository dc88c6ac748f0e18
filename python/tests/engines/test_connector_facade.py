"""KvtierConnector's hooks, called as the engine calls them, on stand-ins for vLLM's modules and for torch.

The stand-ins have the signatures of vLLM 0.32's base classes; test_connector_vllm.py runs on the real ones.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

import kvtier
from connector_rig import PATHS
from fakepool import FakePool
from kvtier.vllm._describe import FULL, Group, Rank
from test_connector_scheduler import key, request, step
from test_connector_worker import SIZE, Memory, Order, Slots


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._connector_metadata = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


class Results:
    def __init__(self, finished_sending: Any = (), finished_recving: Any = (), failed_recving: Any = ()) -> None:
        self.finished_recving, self.failed_recving = finished_recving, failed_recving


class Stats:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


class PromBase:
    def __init__(self, config: Any, types_: Any, labelnames: list[str], values: Any) -> None:
        self._counter_cls, self._histogram_cls, self.per_engine_labelvalues = types_["c"], types_["h"], values


def module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    return made


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module kvtier.vllm.connector on the stand-ins."""
    at = "vllm.distributed.kv_transfer.kv_connector.v1"
    base = module(
        f"{at}.base",
        KVConnectorBase_V1=Base,
        KVConnectorHandshakeMetadata=object,
        KVConnectorMetadata=object,
        KVConnectorRole=Role,
        SupportsHMA=type("SupportsHMA", (), {}),
        KVConnectorTransferResults=Results,
    )
    for made in (
        module("vllm", __version__="0.32.0"),
        module("vllm.distributed"),
        module("vllm.distributed.kv_transfer"),
        module("vllm.distributed.kv_transfer.kv_connector"),
        module(at, base=base),
        base,
        module(f"{at}.metrics", KVConnectorStats=Stats, KVConnectorPromMetrics=PromBase),
        module("kvtier.vllm._memory", Staging=lambda slots, size, device: Slots(slots), Stream=lambda device: Order()),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("kvtier.vllm.connector", "kvtier.vllm._connector_stats"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loaded = importlib.import_module("kvtier.vllm.connector")
    monkeypatch.setattr(loaded, "hash_tokens", lambda config, caches: 16)
    monkeypatch.setattr(loaded, "hash_seed", lambda: "seed")
    monkeypatch.setattr(loaded, "rank_of", lambda config: Rank(0, 1, 0, 1, ()))
    yield loaded
    for name in ("kvtier.vllm.connector", "kvtier.vllm._connector_stats"):
        sys.modules.pop(name, None)


class Engine:
    """A scheduler's and a worker's connector on one pool, and the calls of one step."""

    def __init__(self, loaded: Any, monkeypatch: pytest.MonkeyPatch, role: str = "kv_both", **extra: Any) -> None:
        self.pool = FakePool()
        monkeypatch.setattr(kvtier, "connect", lambda *a, **kw: self.pool, raising=False)
        self.memory = Memory(20)
        self.memory.device = None
        group = Group(0, FULL, 0, 16, SIZE, "m", "", "bfloat16", "L", "sha256", "0/1 full")
        monkeypatch.setattr(loaded, "facts_of", lambda config, caches, kv: [(group, self.memory)])
        transfer = types.SimpleNamespace(
            kv_connector_extra_config={"address": "unix:x", **extra},
            kv_load_failure_policy="recompute",
            is_kv_consumer=role != "kv_producer",
            is_kv_producer=role != "kv_consumer",
        )
        config = types.SimpleNamespace(kv_transfer_config=transfer, speculative_config=None)
        caches = types.SimpleNamespace(num_blocks=20)
        self.scheduler = loaded.KvtierConnector(config, Role.SCHEDULER, caches)
        self.worker = loaded.KvtierConnector(config, Role.WORKER, caches)
        self.worker.register_kv_caches({})
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def ask(self, r: Any, local: int = 0) -> tuple[int, bool]:
        for _ in range(500):
            tokens, later = self.scheduler.get_num_new_matched_tokens(r, local)
            if tokens is not None:
                return tokens, later
            time.sleep(0.002)
        raise AssertionError("the lookup does not end")

    def step(self, output: Any) -> Any:
        """What the worker reports of a step that the scheduler has planned."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        self.worker.wait_for_layer_load("l")
        self.worker.save_kv_layer("l", None, None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        out = types.SimpleNamespace(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
        )
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(out)
        return out

    def until_loaded(self, rid: str) -> set[int]:
        invalid: set[int] = set()
        for _ in range(1000):
            out = self.step(step())
            invalid |= out.invalid_block_ids
            if rid in out.finished_recving:
                return invalid
            time.sleep(0.002)
        raise AssertionError("the load does not end")

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def blocks(*ids: int) -> Any:
    return types.SimpleNamespace(get_block_ids=lambda: (list(ids),))


def test_what_one_request_stores_another_loads(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(connector, monkeypatch)
    first = request("a", 40)
    assert engine.ask(first) == (0, False)
    engine.scheduler.update_state_after_alloc(first, blocks(1, 2, 3), 0)
    engine.step(step(new=[("a", ([1, 2, 3],), 0)], scheduled={"a": 40}))
    assert engine.scheduler.request_finished_all_groups(first, ([1, 2, 3],)) == (False, None)
    (space,) = engine.pool.spaces.values()
    while len(space.blocks) < 2:
        time.sleep(0.001)
    second = request("b", 40)
    assert engine.ask(second) == (32, True)
    engine.scheduler.update_state_after_alloc(second, blocks(11, 12, 13), 32)
    assert engine.until_loaded("b") == set()
    assert engine.memory.data[11:13] == engine.memory.data[1:3]
    engine.close()
    assert not engine.pool.leases and engine.pool.closed


def test_lost_pool_ends_the_load_and_is_a_miss(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(connector, monkeypatch)
    r = request("r", 40)
    assert engine.ask(r) == (0, False)
    (space,) = engine.pool.spaces.values()
    space.blocks.update({key(0): b"v" * SIZE, key(1): b"v" * SIZE})
    other = request("o", 40)
    assert engine.ask(other) == (32, True)
    engine.scheduler.update_state_after_alloc(other, blocks(11, 12, 13), 32)
    engine.pool.down = True
    assert engine.until_loaded("o") == {11, 12}
    engine.pool.down = False
    assert engine.ask(other) == (0, False), "else it would be loaded for ever"
    engine.close()


def test_another_namespace_is_no_hit_and_one_line(
    connector: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(connector, monkeypatch, namespace="mine")
    engine.pool.descriptors["mine"] = {"model": "m", "revision": "", "dtype": "float32"}
    assert engine.ask(request("r", 40)) == (0, False)
    assert engine.ask(request("s", 40)) == (0, False)
    r = request("r", 40)
    engine.scheduler.update_state_after_alloc(r, blocks(1, 2, 3), 0)
    engine.step(step(new=[("r", ([1, 2, 3],), 0)], scheduled={"r": 40}))
    engine.close()
    lines = [line for line in caplog.messages if "mismatch" in line]
    assert (
        len(lines) == 1 and lines[0].startswith("kvtier: no hits") and "dtype is 'float32', not 'bfloat16'" in lines[0]
    )


def test_worker_that_stays_out_says_why_and_ends_loads(
    connector: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(connector, monkeypatch)

    def refuse(*args: Any) -> Any:
        raise ValueError("KV cache group 1 is MambaSpec")

    monkeypatch.setattr(connector, "facts_of", refuse)
    engine.close()
    engine.worker = connector.KvtierConnector(engine.worker._config, Role.WORKER, None)
    engine.worker.register_kv_caches({})
    engine.scheduler = connector.KvtierConnector(engine.worker._config, Role.SCHEDULER, None)
    engine.scheduler.set_xfer_handshake_metadata({0: engine.worker.get_handshake_metadata()})
    assert engine.ask(request("r", 40)) == (0, False)
    assert "stays out: KV cache group 1 is MambaSpec" in caplog.text
    engine.close()


@pytest.mark.parametrize(("role", "loads", "saves"), [("kv_producer", False, True), ("kv_consumer", True, False)])
def test_roles(connector: Any, monkeypatch: pytest.MonkeyPatch, role: str, loads: bool, saves: bool) -> None:
    engine = Engine(connector, monkeypatch, role=role)
    r = request("r", 40)
    assert engine.ask(r) == (0, False)
    engine.scheduler.update_state_after_alloc(r, blocks(1, 2, 3), 0)
    engine.step(step(new=[("r", ([1, 2, 3],), 0)], scheduled={"r": 40}))
    engine.close()
    assert bool(engine.pool.matches) == loads
    assert bool(engine.pool.spaces and next(iter(engine.pool.spaces.values())).blocks) == saves
    assert not engine.scheduler.requires_kv_delivery


def test_statistics_and_prometheus(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(connector, monkeypatch)
    assert engine.worker.get_kv_connector_stats() is None
    engine.worker._counters.add("load_blocks", 3)
    engine.worker._counters.observe("load_seconds", 0.5)
    stats = engine.worker.get_kv_connector_stats()
    engine.scheduler._counters.add("lookups")
    total = stats.aggregate(engine.scheduler.get_kv_connector_stats())
    assert total.reduce() == {"load_blocks": 3, "load_seconds_max": 0.5, "lookups": 1} and not total.is_empty()

    class Metric:
        made: dict[str, Metric] = {}

        def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: Any = None) -> None:
            self.got: list[Any] = []
            self.made[name] = self

        def labels(self, *values: Any) -> Metric:
            return self

        def inc(self, n: float) -> None:
            self.got.append(n)

        observe = inc

    cls = connector.KvtierConnector
    prom = cls.build_prom_metrics(None, {"c": Metric, "h": Metric}, ["engine"], {0: ["0"]})
    prom.observe(cls.build_kv_connector_stats(total.data).data)
    assert Metric.made["vllm:kvtier_load_blocks"].got == [3] and Metric.made["vllm:kvtier_load_seconds"].got == [0.5]
    engine.close()


def test_constructor_takes_the_cache_config_by_keyword(connector: Any) -> None:
    assert list(inspect.signature(connector.KvtierConnector).parameters) == ["vllm_config", "role", "kv_cache_config"]


def test_wrong_configuration_ends_the_start(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="kvtier: timeout is 'soon'"):
        Engine(connector, monkeypatch, timeout="soon")


def test_importing_the_package_imports_no_engine() -> None:
    code = "import sys, kvtier.vllm; assert not {'vllm', 'torch'} & set(sys.modules); kvtier.vllm.Nothing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | PATHS)
    assert "AttributeError: module 'kvtier.vllm' has no attribute 'Nothing'" in ran.stderr
