"""A worker's half of the connector: it loads blocks into the KV cache and stores blocks from it.

The engine's thread only hands over lists and copies blocks that are to be stored into staging memory, so that they
may be overwritten when wait_for_save returns. Threads of this module talk to the server.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ._counters import Counters
from ._scheduler import Load, Plan, Save
from ._settings import Settings

log = logging.getLogger("vllm.kvtier")

#: Loads of two requests overlap: one waits for the server while the other copies.
LOADERS = 2
#: Blocks of one call.
BATCH = 16


class BlockMemory(Protocol):
    """Blocks of a group as bytes (see GroupMemory)."""

    block_bytes: int

    def gather(self, block: int, into: Any) -> None: ...

    def scatter(self, source: Any, block: int) -> None: ...


class SlotMemory(Protocol):
    """Memory in slots (see Staging)."""

    def slot(self, index: int, length: int) -> Any: ...

    def bytes(self, index: int, length: int) -> memoryview: ...


class CopyOrder(Protocol):
    """Order against the engine's kernels (see Stream)."""

    def mark(self) -> Any: ...

    def reach(self, mark: Any) -> None: ...

    def behind(self, mark: Any) -> Any: ...


@dataclasses.dataclass
class _Order:
    """A load, on its way to a loader."""

    load: Load
    seed: str
    mark: Any
    begun: float


@dataclasses.dataclass
class _Copy:
    """A block in staging memory, on its way to the server."""

    save: Save
    seed: str
    mark: Any
    slot: int


@dataclasses.dataclass
class Ended:
    """Loads that have ended since the last call, and what of them failed."""

    requests: set[str] = dataclasses.field(default_factory=set)
    failed_blocks: set[int] = dataclasses.field(default_factory=set)
    failed_requests: set[str] = dataclasses.field(default_factory=set)


class WorkerSide:
    """Moves blocks between the KV cache and the pool.

    Args:
        settings: of the connector.
        groups: the block memory of each KV cache group, by its index.
        staging: memory for loads and for stores, and how many slots each has.
        order: of copies against the engine's kernels.
        open_namespace: of a group index and the hash seed; gives the namespace, or None while there is none. It may
            wait; it is called by this object's threads.
        counters: what is counted.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Mapping[int, BlockMemory],
        staging: tuple[SlotMemory, int],
        order: CopyOrder,
        open_namespace: Callable[[int, str], Any | None],
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._staging, slots = staging
        self._order = order
        self._open = open_namespace
        self._count = counters
        self._lock = threading.Lock()
        self._ended = Ended()
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # slots for stores
        self._closed = False
        each = max(1, min(BATCH, slots // (2 * LOADERS)))
        for index in range(LOADERS * each, max(slots, LOADERS * each + 1)):
            self._free.put(index)
        self._threads = [
            threading.Thread(
                target=self._run_loader, args=(range(i * each, (i + 1) * each),), name=f"kvtier-load-{i}", daemon=True
            )
            for i in range(LOADERS)
        ]
        self._saver = threading.Thread(target=self._run_saver, name="kvtier-save", daemon=True)
        for thread in (*self._threads, self._saver):
            thread.start()

    @staticmethod
    def slots(settings: Settings, slot_bytes: int, cache_bytes: int) -> int:
        """How many slots the staging memory has: no more than the KV cache could use, and enough to work at all."""
        return max(2 * LOADERS + 2, min(settings.staging_bytes, 2 * cache_bytes) // slot_bytes)

    # --- the engine's thread

    def start_load(self, plan: Plan) -> None:
        """Hands the loads of a step to the loaders."""
        if not plan.loads:
            return
        mark, now = self._order.mark(), time.monotonic()
        for load in plan.loads:
            self._orders.put(_Order(load, plan.hash_seed, mark, now))

    def save(self, plan: Plan) -> None:
        """Copies the blocks of a step that are to be stored. Those that find no room within save_wait are dropped."""
        if not plan.saves:
            return
        end = time.monotonic() + self._settings.save_wait
        taken: list[tuple[Save, int]] = []
        for save in plan.saves:
            try:
                slot = (
                    self._free.get(timeout=max(0.0, end - time.monotonic()))
                    if self._free.empty()
                    else self._free.get_nowait()
                )
            except queue.Empty:
                break
            memory = self._groups[save.group]
            memory.gather(save.block, self._staging.slot(slot, memory.block_bytes))
            taken.append((save, slot))
        self._count.add("save_dropped_blocks", len(plan.saves) - len(taken))
        mark = self._order.mark()
        for save, slot in taken:
            self._copies.put(_Copy(save, plan.hash_seed, mark, slot))

    def ended(self) -> Ended:
        """The loads that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, Ended()
            return ended

    def close(self, timeout: float) -> None:
        """Brings what is staged to the server, within ``timeout`` seconds, and ends the threads."""
        if self._closed:
            return
        self._closed = True
        self._copies.put(None)
        for _ in self._threads:
            self._orders.put(None)
        end = time.monotonic() + timeout
        for thread in (self._saver, *self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    # --- loads

    def _run_loader(self, slots: range) -> None:
        while (order := self._orders.get()) is not None:
            failed: list[int] = []
            try:
                failed = self._load(order, slots)
            except Exception as err:  # the request must end, whatever happened
                self._count.failure("load", err)
                failed = [block for _, pairs in order.load.groups for _, block in pairs]
            self._count.observe("load_seconds", time.monotonic() - order.begun)
            self._count.add("load_failed_blocks", len(failed))
            with self._lock:
                self._ended.requests.add(order.load.request)
                if failed and len(self._groups) == 1:
                    self._ended.failed_blocks.update(failed)
                elif failed:  # ids of blocks of several groups would be ambiguous
                    self._ended.failed_requests.add(order.load.request)

    def _load(self, order: _Order, slots: range) -> list[int]:
        """Loads a request's blocks, root first; gives the ids of those that are not loaded: the first that failed and
        all behind it."""
        end = order.begun + self._settings.timeout
        failed: list[int] = []
        for group, pairs in order.load.groups:
            memory = self._groups[group]
            namespace = None if failed else self._open(group, order.seed)
            at = 0
            while not failed and namespace is not None and at < len(pairs):
                left = end - time.monotonic()
                batch = pairs[at : at + len(slots)]
                good = self._load_batch(namespace, memory, batch, slots, order.mark, left) if left > 0 else 0
                at += good
                if good < len(batch):
                    break
            failed += [block for _, block in pairs[at:]]
        return failed

    def _load_batch(
        self, namespace: Any, memory: BlockMemory, batch: list[tuple[bytes, int]], slots: range, mark: Any, left: float
    ) -> int:
        """Loads the batch up to the first block that cannot be had, and gives how many these are."""
        used, size = slots[: len(batch)], memory.block_bytes
        results = namespace.get_into(
            [key for key, _ in batch], [self._staging.bytes(slot, size) for slot in used], timeout=left
        )
        good = 0
        while good < len(batch) and results[good].hit and results[good].length == size:
            good += 1
        if good < len(batch):
            self._count.failure("load", f"{results[good].reason}")
        with self._order.behind(mark):
            for slot, (_, block) in zip(used, batch[:good]):
                memory.scatter(self._staging.slot(slot, size), block)
        self._count.add("load_blocks", good)
        self._count.add("load_bytes", good * size)
        return good

    # --- stores

    def _run_saver(self) -> None:
        stop = False
        while not stop:
            copies = [self._copies.get()]
            while len(copies) < BATCH and copies[-1] is not None:
                try:
                    copies.append(self._copies.get_nowait())
                except queue.Empty:
                    break
            stop = copies[-1] is None
            batches: dict[tuple[int, str], list[_Copy]] = {}
            for copy in copies:
                if copy is not None:
                    batches.setdefault((copy.save.group, copy.seed), []).append(copy)
            for (group, seed), batch in batches.items():
                try:
                    self._put(group, seed, batch)
                except Exception as err:
                    self._count.failure("store", err)
                    self._count.add("save_failed_blocks", len(batch))
                finally:
                    for copy in batch:
                        self._free.put(copy.slot)

    def _put(self, group: int, seed: str, batch: list[_Copy]) -> None:
        self._order.reach(batch[-1].mark)
        namespace = self._open(group, seed)
        if namespace is None:
            self._count.add("save_failed_blocks", len(batch))
            return
        memory, begun = self._groups[group], time.monotonic()
        results = namespace.put(
            [copy.save.hash for copy in batch],
            [self._staging.bytes(copy.slot, memory.block_bytes) for copy in batch],
            parents=[copy.save.parent for copy in batch],
            durable=self._settings.durable,
            timeout=self._settings.timeout,
        )
        stored = sum(bool(r.stored) for r in results)
        existed = sum(bool(r.existed) or _other_bytes(r.error) for r in results)
        self._count.observe("save_seconds", time.monotonic() - begun)
        self._count.add("save_blocks", stored)
        self._count.add("save_bytes", stored * memory.block_bytes)
        self._count.add("save_existed_blocks", existed)
        self._count.add("save_failed_blocks", len(batch) - stored - existed)
        for result in results:
            if result.error is not None and not _other_bytes(result.error):
                self._count.failure("store", result.error)


def _other_bytes(err: BaseException | None) -> bool:
    """Another engine has stored the block, with bytes that differ by rounding: the order of a sum is not the same in
    every batch. Either is right."""
    return type(err).__name__ == "ConflictError"
