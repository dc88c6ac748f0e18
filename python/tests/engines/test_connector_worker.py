"""The connector's worker half on plain bytes, against a pool in this process; no engine package is needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fakepool import FakePool
from kvtier.vllm._counters import Counters
from kvtier.vllm._scheduler import Load, Plan, Save
from kvtier.vllm._settings import Settings
from kvtier.vllm._worker import WorkerSide

SIZE = 64


class Memory:
    """Blocks of one group."""

    block_bytes = SIZE

    def __init__(self, blocks: int) -> None:
        self.data = [bytes([i]) * SIZE for i in range(blocks)]
        self.refuse: Exception | None = None

    def gather(self, block: int, into: memoryview) -> None:
        into[:] = self.data[block]

    def scatter(self, source: memoryview, block: int) -> None:
        if self.refuse:
            raise self.refuse
        self.data[block] = bytes(source)


class Slots:
    def __init__(self, count: int) -> None:
        self.memory = memoryview(bytearray(count * SIZE))

    def slot(self, index: int, length: int) -> memoryview:
        return self.memory[index * SIZE : index * SIZE + length]

    bytes = slot


class Order:
    """Marks are counted, and each must have been waited for before its copy is used."""

    def __init__(self) -> None:
        self.marks = 0
        self.reached: list[Any] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def reach(self, mark: Any) -> None:
        self.reached.append(mark)

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        self.reached.append(mark)
        yield


class Rig:
    def __init__(self, groups: int = 1, slots: int = 12, **settings: Any) -> None:
        self.pool, self.counters, self.order = FakePool(), Counters(), Order()
        self.memory = {i: Memory(40) for i in range(groups)}
        self.settings = Settings(address="unix:x", **settings)
        self.side = WorkerSide(self.settings, self.memory, (Slots(slots), slots), self.order, self.open, self.counters)

    def open(self, group: int, seed: str) -> Any:
        return None if seed == "none" else self.pool.open(f"{group}{seed}")

    def load(self, rid: str, *groups: list[tuple[bytes, int]], seed: str = "s") -> Any:
        self.side.start_load(Plan(seed, [Load(rid, list(enumerate(groups)))], []))
        return self.wait(rid)

    def wait(self, rid: str) -> Any:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            ended = self.side.ended()
            if rid in ended.requests:
                return ended
            time.sleep(0.001)
        raise AssertionError("the load does not end")

    def counts(self) -> dict[str, Any]:
        return {k: v for k, v in self.counters.take().items() if not k.endswith("seconds")}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.pool.stall.set()
    rig.side.close(2)


def keys(n: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(n)]


def test_stored_blocks_are_loaded(rig: Rig) -> None:
    ks = keys(30)
    for k in range(0, 30, 6):  # as much as there are slots at a time
        rig.side.save(Plan("s", [], [Save(0, key, None, i + 1) for i, key in list(enumerate(ks))[k : k + 6]]))
    deadline = time.monotonic() + 5
    while len(rig.pool.open("0s").blocks) < 30 and time.monotonic() < deadline:
        time.sleep(0.001)
    want, rig.memory[0].data = rig.memory[0].data, [b"\0" * SIZE] * 40
    ended = rig.load("r", [(key, i + 1) for i, key in enumerate(ks)])
    assert not ended.failed_blocks and rig.memory[0].data[1:31] == want[1:31]
    assert rig.counts() == {"save_blocks": 30, "save_bytes": 30 * SIZE, "load_blocks": 30, "load_bytes": 30 * SIZE}
    assert set(rig.order.reached) == set(range(1, rig.order.marks + 1))


def test_blocks_may_be_overwritten_when_save_returns(rig: Rig) -> None:
    rig.pool.stall.clear()
    rig.side.save(Plan("s", [], [Save(0, b"k" * 32, b"p" * 32, 7)]))
    rig.memory[0].data[7] = b"!" * SIZE
    rig.pool.stall.set()
    rig.side.close(5)
    space = rig.pool.open("0s")
    assert space.blocks == {b"k" * 32: bytes([7]) * SIZE} and space.parents == {b"k" * 32: b"p" * 32}


def test_full_staging_memory_drops_and_does_not_wait() -> None:
    rig = Rig(slots=12, save_wait=0.01)
    rig.pool.stall.clear()
    begun = time.monotonic()
    rig.side.save(Plan("s", [], [Save(0, key, None, i) for i, key in enumerate(keys(30))]))
    assert time.monotonic() - begun < 1
    dropped = rig.counts()["save_dropped_blocks"]
    assert 0 < dropped < 30
    rig.pool.stall.set()
    rig.side.close(5)
    assert rig.counts()["save_blocks"] == 30 - dropped


def test_loading_ends_at_the_first_block_that_is_not_there(rig: Rig) -> None:
    ks = keys(4)
    rig.pool.open("0s").blocks.update({k: b"v" * SIZE for k in (ks[0], ks[1], ks[3])})
    ended = rig.load("r", [(k, i + 1) for i, k in enumerate(ks)])
    assert ended.failed_blocks == {3, 4} and not ended.failed_requests
    assert rig.memory[0].data[1:4] == [b"v" * SIZE, b"v" * SIZE, bytes([3]) * SIZE]
    assert rig.counts() == {"load_blocks": 2, "load_bytes": 2 * SIZE, "load_failed_blocks": 2}


def test_block_of_another_length_is_not_used(rig: Rig) -> None:
    rig.pool.open("0s").blocks[b"k" * 32] = b"v" * 10
    assert rig.load("r", [(b"k" * 32, 1)]).failed_blocks == {1}
    assert rig.memory[0].data[1] == bytes([1]) * SIZE


@pytest.mark.parametrize("how", ["down", "raises", "memory", "none"])
def test_every_load_ends(rig: Rig, how: str) -> None:
    rig.pool.open("0s").blocks[b"k" * 32] = b"v" * SIZE
    seed = "s"
    if how == "down":
        rig.pool.down = True
    elif how == "raises":
        rig.pool.refuse = RuntimeError("no")
    elif how == "memory":
        rig.memory[0].refuse = RuntimeError("no")
    else:
        seed = "none"
    assert rig.load("r", [(b"k" * 32, 1)], seed=seed).failed_blocks == {1}
    rig.pool.down, rig.pool.refuse, rig.memory[0].refuse = False, None, None
    assert not rig.load("again", [(b"k" * 32, 1)]).failed_blocks, "the thread goes on"


def test_load_beyond_its_time_fails() -> None:
    rig = Rig(timeout=0.0)
    rig.pool.open("0s").blocks[b"k" * 32] = b"v" * SIZE
    assert rig.load("r", [(b"k" * 32, 1)]).failed_blocks == {1}
    assert rig.pool.gets == 0
    rig.side.close(2)


def test_failures_with_several_groups_name_the_request() -> None:
    rig = Rig(groups=2)
    rig.pool.open("0s").blocks[b"k" * 32] = b"v" * SIZE
    ended = rig.load("r", [(b"k" * 32, 1)], [(b"k" * 32, 1)])
    assert ended.failed_requests == {"r"} and not ended.failed_blocks
    rig.side.close(2)


def test_stores_that_fail_are_counted_and_free_their_slots(rig: Rig) -> None:
    rig.pool.down = True
    for i in range(20):
        rig.side.save(Plan("s", [], [Save(0, bytes([i]) * 32, None, 1)]))
        time.sleep(0.002)
    rig.pool.down = False
    rig.side.save(Plan("s", [], [Save(0, b"k" * 32, None, 1)]))
    rig.side.close(5)
    counts = rig.counts()
    assert counts["save_blocks"] == 1
    assert counts.get("save_failed_blocks", 0) + counts.get("save_dropped_blocks", 0) == 20


def test_block_that_is_there_is_no_failure(rig: Rig) -> None:
    rig.pool.open("0s").blocks.update({b"a" * 32: bytes([1]) * SIZE, b"b" * 32: b"?" * SIZE})
    rig.side.save(Plan("s", [], [Save(0, b"a" * 32, None, 1), Save(0, b"b" * 32, None, 2)]))
    rig.side.close(5)
    assert rig.counts() == {"save_existed_blocks": 2}


def test_durable_stores_say_so() -> None:
    rig = Rig(durable=True)
    rig.side.save(Plan("s", [], [Save(0, b"a" * 32, None, 1)]))
    rig.side.close(5)
    assert rig.pool.durable == [True]


def test_close_stores_what_is_staged_within_its_time() -> None:
    rig = Rig()
    rig.pool.stall.clear()
    rig.side.save(Plan("s", [], [Save(0, b"a" * 32, None, 1)]))
    begun = time.monotonic()
    rig.side.close(0.1)
    assert time.monotonic() - begun < 2
    rig.pool.stall.set()
