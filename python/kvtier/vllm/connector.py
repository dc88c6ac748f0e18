"""``KvtierConnector``: a kvtier pool as vLLM's external KV cache, for engines without tiered offloading.

::

    --kv-transfer-config '{"kv_connector":"KvtierConnector","kv_role":"kv_both",
      "kv_connector_module_path":"kvtier.vllm","kv_load_failure_policy":"recompute",
      "kv_connector_extra_config":{"address":"unix:/run/kvtier.sock"}}'

The scheduler's half asks the pool for the longest prefix of a request (several ranks and KV cache groups at once) and
never waits for it; the workers load what was found on threads of their own while other requests run, and the engine
computes what could not be loaded. After each step the blocks that it has filled are copied to staging memory and
stored from there. One block of a group, with all layers that the rank has, is one object; its key is vLLM's own block
hash. A daemon that is away is a miss.

Full attention (MLA too) and sliding windows are served, alone or together. With anything else (state-space layers,
context parallelism, KV scales that each process measures itself) the connector stays out and says so in one line.

On CUDA tensors the same code copies through page-locked staging memory. That half was not run on a GPU.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import kvtier
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ._counters import Counters
from ._describe import Rank
from ._engine import facts_of, hash_seed, hash_tokens, rank_of
from ._scheduler import Plan, SchedulerSide
from ._settings import Settings
from ._spaces import Spaces
from ._worker import Ended, WorkerSide

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.kvtier")


@dataclasses.dataclass
class KvtierMetadata(KVConnectorMetadata):
    """What the scheduler's half tells the workers for one step."""

    plan: Plan


@dataclasses.dataclass
class KvtierHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler's half once: which blocks it has."""

    rank: Rank


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector to a kvtier pool. See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config or {})
        self._counters = Counters()
        self._config = vllm_config
        self._caches = kv_cache_config
        self._loads = transfer.is_kv_consumer
        self._saves = transfer.is_kv_producer
        self._closed = False
        side = "scheduler" if role == KVConnectorRole.SCHEDULER else "worker"
        self._pool = kvtier.connect(
            self._settings.address,
            token=self._settings.token,
            name=f"vllm-{side}-{os.getpid()}",
            timeout=self._settings.timeout,
        )
        self._spaces = Spaces(self._pool, self._settings, quiet=side == "worker" and self._loads)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._rank: Rank | None = None
        self._ended: Ended = Ended()
        if role == KVConnectorRole.SCHEDULER:
            if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
                log.warning(
                    'kvtier: kv_load_failure_policy is not "recompute": a block that cannot be loaded fails its request'
                )
            drafts = getattr(vllm_config, "speculative_config", None)
            self._scheduler = SchedulerSide(
                self._settings,
                hash_seed,
                hash_tokens(vllm_config, kv_cache_config),
                self._spaces.get_soon,
                self._spaces.later,
                self._counters,
                loads=self._loads,
                saves=self._saves,
                last_block_again=drafts is not None and bool(drafts.use_eagle()),
            )
        atexit.register(self.shutdown)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is a later miss."""
        return False

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the KV cache: from here on blocks can be loaded and stored."""
        from ._memory import Staging, Stream

        rank = rank_of(self._config)
        try:
            facts = facts_of(self._config, self._caches, kv_caches)
        except ValueError as err:
            log.warning("kvtier: stays out: %s", err)
            self._rank = dataclasses.replace(rank, groups=())
            return
        self._rank = rank = dataclasses.replace(rank, groups=tuple(group for group, _ in facts))
        memories = {group.index: memory for group, memory in facts}
        device = facts[0][1].device
        largest = max(memory.block_bytes for memory in memories.values())
        slot_bytes = -(-largest // 4096) * 4096
        slots = WorkerSide.slots(self._settings, slot_bytes, self._caches.num_blocks * largest)
        groups = {group.index: group for group in rank.groups}
        self._worker = WorkerSide(
            self._settings,
            memories,
            (Staging(slots, slot_bytes, device), slots),
            Stream(device),
            lambda index, seed: self._spaces.get(rank, groups[index], seed),
            self._counters,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's half must know of this worker."""
        return KvtierHandshake(self._rank) if self._rank is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hands the step's loads to the loaders; they end in get_finished."""
        plan = self._plan()
        if self._worker is not None:
            self._worker.start_load(plan)
        elif plan.loads:
            self._refuse(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when all of its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole when the step has run."""

    def wait_for_save(self) -> None:
        """Copies the blocks that the step has filled; they may be overwritten when it returns."""
        if self._worker is None:
            return
        try:
            self._worker.save(self._plan())
        except Exception as err:
            self._counters.failure("store", err)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose loads have ended. Stores hold no blocks, so none of them is waited for."""
        if self._worker is not None:
            ended = self._worker.ended()
            self._ended.requests |= ended.requests
            self._ended.failed_blocks |= ended.failed_blocks
            self._ended.failed_requests |= ended.failed_requests
        requests, self._ended.requests = self._ended.requests, set()
        return None, requests or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same with the requests whose loads failed, for vLLM from 0.32."""
        _, requests = self.get_finished(finished_req_ids)
        failed, self._ended.failed_requests = self._ended.failed_requests, set()
        return base.KVConnectorTransferResults(finished_recving=requests or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that are to be computed instead."""
        failed, self._ended.failed_blocks = self._ended.failed_blocks, set()
        return failed

    def _plan(self) -> Plan:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, KvtierMetadata) else Plan("", [], [])

    def _refuse(self, plan: Plan) -> None:
        for load in plan.loads:
            self._ended.requests.add(load.request)
            self._ended.failed_blocks.update(block for _, pairs in load.groups for _, block in pairs)

    # --- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        """Takes what the workers said of their blocks."""
        if self._scheduler is not None:
            self._scheduler.set_ranks([m.rank for m in metadata.values() if isinstance(m, KvtierHandshake)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        """The same, from a vLLM that has a key for each stage of a pipeline."""
        self.set_xfer_handshake_metadata(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded; None while the pool has not answered."""
        assert self._scheduler is not None
        try:
            tokens = self._scheduler.matched(request, num_computed_tokens)
        except Exception as err:
            self._counters.failure("lookup", err)
            return 0, False
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes where the tokens are to be loaded to."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's loads and stores."""
        assert self._scheduler is not None
        return KvtierMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes the ends of loads, and remembers what could not be loaded."""
        assert self._scheduler is not None
        self._scheduler.worked(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks may be freed now."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks may be freed now."""
        assert self._scheduler is not None
        self._scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """None: the pool's own events are the server's to publish."""
        return ()

    def reset_cache(self) -> bool | None:
        """Refused: the pool is others' too. Whoever changed the weights gives another revision or namespace."""
        log.warning("kvtier: the pool is not cleared by an engine: start with another model revision or namespace")
        return False

    # --- both

    def get_kv_connector_stats(self) -> Any:
        """What was counted since the last call."""
        from ._connector_stats import KvtierStats

        data = self._counters.take()
        return KvtierStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that came from another process."""
        from ._connector_stats import KvtierStats

        return KvtierStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """The Prometheus metrics ``vllm:kvtier_*``."""
        from ._connector_stats import KvtierPromMetrics

        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Brings what is staged to the pool, within the timeout, and leaves it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close(self._settings.timeout)
        self._spaces.close()
        self._pool.close()
