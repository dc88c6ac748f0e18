"""The parts of vLLM that a secondary tier touches, with the signatures of each version.

Recorded from the packages 0.25.0, 0.26.0, 0.27.1, 0.28.0, 0.29.0, 0.30.0, 0.31.0, 0.32.0 and 0.33.0. Only
what the tier could trip over: names of fields, parameters, abstract methods.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import hashlib
import importlib
import inspect
import pickle
import sys
import types
from types import SimpleNamespace

VERSIONS = ("0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")

_ABSTRACT = ("lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "drain_jobs")


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclasses.dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclasses.dataclass(frozen=True)
class _Metadata:
    documentation: str
    labelnames: tuple = ()


class Stats:
    def __init__(self):
        self.counters, self.gauges = {}, {}

    def increase_counter(self, name, value=1, labelvalues=()):
        self.counters[name, labelvalues] = self.counters.get((name, labelvalues), 0) + value

    def set_gauge(self, name, value, labelvalues=()):
        self.gauges[name, labelvalues] = value


def _tier_class(version):
    def plain(self, offloading_spec, primary_kv_view, tier_type):
        self._primary_kv_view, self.tier_type = primary_kv_view, tier_type

    def detecting(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        plain(self, offloading_spec, primary_kv_view, tier_type)
        self.detector, self.locality = backpressure_detector, None

    members = {name: abc.abstractmethod(lambda self, *args: None) for name in _ABSTRACT}
    members["__init__"] = detecting if version >= "0.31" else plain
    return abc.ABCMeta("SecondaryTierManager", (abc.ABC,), members)


def _job_types(version):
    rows = "chunk_ids" if version >= "0.30" else "block_ids"
    job = dataclasses.make_dataclass("TransferJob", ["job_id", "keys", rows, "is_promotion", "req_context"])
    more = []
    if version >= "0.28":
        more += [("successful_keys", object, None), ("transfer_time", object, None)]
    if version >= "0.31":
        more.append(("transfer_bytes", object, None))
    return job, dataclasses.make_dataclass("JobResult", ["job_id", "success", *more])


class Request:
    """A ReqContext. Only from 0.31 on it knows where its keys are."""

    def __init__(self, req_id, version="0.33"):
        self.req_id, self.kv_transfer_params, self.positions = req_id, None, {}
        if version >= "0.31":
            self.get_offload_key_position = self.positions.get


def spec(version, layers=("l0", "l1"), groups=1, **changes):
    """An OffloadingSpec: two groups, or one, of blocks of 16 tokens, four a chunk."""
    fields = {"model": "org/tiny", "dtype": "bfloat16", "layout": "LBNHC", "tp": 2, "agnostic": False, "tokens": 16, **changes}
    if version == "0.25":
        group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=SimpleNamespace(block_size=fields["tokens"]))
        parallel = SimpleNamespace(
            tensor_parallel_size=fields["tp"], pipeline_parallel_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1
        )
        vllm = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(model=fields["model"], dtype="torch." + fields["dtype"]),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        return SimpleNamespace(
            vllm_config=vllm,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group] * groups),
            gpu_block_size=(fields["tokens"],) * groups,
            block_size_factor=4,
        )
    group_fields = {"tokens_per_block": fields["tokens"], "layer_names": tuple(layers)}
    config = SimpleNamespace(
        engine_id="engine",
        groups=[SimpleNamespace(**group_fields, **({"group_id": i} if version >= "0.30" else {})) for i in range(groups)],
        model=SimpleNamespace(name=fields["model"], dtype=fields["dtype"]),
        cache=SimpleNamespace(tokens_per_hash=fields["tokens"], blocks_per_chunk=4),
        parallel=SimpleNamespace(tp_size=fields["tp"], pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=fields["agnostic"]),
    )
    if version >= "0.28":
        config.replicated_layout = config.canonical_layout = False
    if version >= "0.29":
        config.kv_cache_layout = fields["layout"]
    return SimpleNamespace(config=config)


def _sha256(value):
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _by_name(name):
    if name != "sha256":
        raise ValueError(name)
    return _sha256


class Vllm:
    """A version's stub in sys.modules, and the tier's class on top of it."""

    def __init__(self, version, monkeypatch):
        self.version = version
        self.TransferJob, self.JobResult = _job_types(version)
        base = {
            "LookupResult": LookupResult,
            "RequestOffloadingContext": RequestOffloadingContext,
            "OffloadingCounterMetadata": _Metadata,
            "OffloadingGaugeMetadata": _Metadata,
        }
        if version >= "0.26":
            base["Locality"] = Locality
        if version >= "0.28":
            base["Medium"] = Medium
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name.startswith("kvtier.vllm")]:
            monkeypatch.delitem(sys.modules, name)
        self.hashes = self._module(monkeypatch, "vllm.v1.core.kv_cache_utils", NONE_HASH=_sha256("vllm-none-hash"))
        self._module(monkeypatch, "vllm.utils.hashing", get_hash_fn_by_name=_by_name)
        self._module(monkeypatch, "vllm.v1.kv_offload.base", **base)
        self._module(
            monkeypatch,
            "vllm.v1.kv_offload.tiering.base",
            JobResult=self.JobResult,
            SecondaryTierManager=_tier_class(version),
        )
        self._module(
            monkeypatch, "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics", OffloadingConnectorStats=Stats
        )
        self.Tier = importlib.import_module("kvtier.vllm").KvtierTier

    def _module(self, monkeypatch, name, **members):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                module = types.ModuleType(path)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
        module = sys.modules[name]
        for key, value in members.items():
            setattr(module, key, value)
        return module

    def tier(self, view, spec_, **config):
        """Construct the tier as this version's factory does."""
        arguments = {"offloading_spec": spec_, "primary_kv_view": view, "tier_type": "KvtierTier"}
        if self.version >= "0.31":
            arguments["backpressure_detector"] = None
        if self.version < "0.28":
            arguments["module_path"] = "kvtier.vllm"
        assert inspect.signature(self.Tier).bind(**arguments, **config)
        return self.Tier(**arguments, **config)

    def job(self, job_id, keys, rows, request, load):
        return self.TransferJob(job_id, keys, rows, load, request)
