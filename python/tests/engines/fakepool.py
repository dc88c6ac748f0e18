"""A pool in this process, for tests of what uses one: it has the calls that the vLLM connector makes."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class Block(NamedTuple):
    state: int
    tier: int
    length: int


class Match(NamedTuple):
    prefix: int
    blocks: list[Block]
    lease: Any


class Got(NamedTuple):
    hit: bool
    reason: str
    length: int


class Put(NamedTuple):
    stored: bool
    existed: bool
    error: Exception | None


class ConflictError(Exception):
    """Named as the client's."""


class Lease:
    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        pool.leases.add(self)

    def release(self) -> None:
        self.pool.leases.discard(self)


class Job:
    """Done when it was asked for its result often enough."""

    def __init__(self, value: Any, rounds: int = 0) -> None:
        self.value, self.rounds, self.cancelled = value, rounds, False

    def done(self) -> bool:
        return self.rounds <= 0

    def result(self, timeout: float | None = None) -> Any:
        if self.rounds > 0:
            self.rounds -= 1
            raise TimeoutError
        if isinstance(self.value, Exception):
            raise self.value
        return self.value()

    def cancel(self) -> bool:
        self.cancelled = True
        return True


class Namespace:
    def __init__(self, pool: FakePool, name: str) -> None:
        self.pool, self.name = pool, name
        self.blocks: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}

    def submit_match(
        self, hashes: list[bytes], lease: float | None = None, all: bool = False, timeout: float | None = None
    ) -> Job:
        self.pool.matches += 1
        if self.pool.busy:
            raise RuntimeError("busy")

        def answer() -> Match:
            there = [h in self.blocks and not self.pool.down for h in hashes]
            prefix = there.index(False) if False in there else len(there)
            blocks = [Block(2 if t else 0, 2, len(self.blocks.get(h, b""))) for h, t in zip(hashes, there)]
            return Match(
                prefix, blocks if all else blocks[: prefix + 1], Lease(self.pool) if lease and any(there) else None
            )

        job = Job(answer, self.pool.rounds)
        self.pool.jobs.append(job)
        return job

    def get_into(self, hashes: list[bytes], buffers: list[Any], timeout: float | None = None) -> list[Got]:
        results = []
        for key, buffer in zip(hashes, buffers):
            self.pool.gets += 1
            data = self.blocks.get(key)
            if self.pool.down or data is None or key in self.pool.corrupt:
                results.append(Got(False, "corrupt" if key in self.pool.corrupt else "absent", 0))
                continue
            memoryview(buffer).cast("B")[: len(data)] = data
            results.append(Got(True, "hit", len(data)))
        return results

    def put(
        self,
        hashes: list[bytes],
        buffers: list[Any],
        parents: Any = None,
        durable: bool = False,
        timeout: float | None = None,
    ) -> list[Put]:
        self.pool.stall.wait()
        results = []
        for i, (key, buffer) in enumerate(zip(hashes, buffers)):
            data = bytes(memoryview(buffer).cast("B"))
            self.pool.durable.append(durable)
            if self.pool.down:
                results.append(Put(False, False, ConnectionError("down")))
            elif key in self.blocks:
                same = self.blocks[key] == data
                results.append(Put(False, same, None if same else ConflictError("other bytes")))
            else:
                self.blocks[key] = data
                self.parents[key] = parents[i] if parents else None
                results.append(Put(True, False, None))
        return results


class FakePool:
    """Knobs: down, busy, corrupt (keys), rounds (answers come when they were asked for so often), stall (of puts)."""

    def __init__(self) -> None:
        self.spaces: dict[str, Namespace] = {}
        self.descriptors: dict[str, dict[str, Any]] = {}
        self.leases: set[Lease] = set()
        self.corrupt: set[bytes] = set()
        self.jobs: list[Job] = []
        self.durable: list[bool] = []
        self.down = self.busy = self.closed = False
        self.rounds = self.matches = self.gets = 0
        self.stall = threading.Event()
        self.stall.set()
        self.refuse: Exception | None = None

    def open(self, name: str, **descriptor: Any) -> Namespace:
        if self.refuse:
            raise self.refuse
        known = self.descriptors.setdefault(name, descriptor)
        for field, value in descriptor.items():
            if known[field] != value:
                raise ValueError(f"namespace mismatch: {name}: {field} is {known[field]!r}, not {value!r}")
        return self.spaces.setdefault(name, Namespace(self, name))

    def completions(self) -> list[Job]:
        return []

    def close(self) -> None:
        self.closed = True
