"""The connector's scheduler half against a pool in this process; no engine package is needed."""

from __future__ import annotations

import types
from typing import Any

import pytest

from fakepool import FakePool
from kvtier.vllm._counters import Counters
from kvtier.vllm._describe import FULL, WINDOW, Group, Rank, descriptor, name
from kvtier.vllm._scheduler import FAILED_FOR, SchedulerSide
from kvtier.vllm._settings import Settings

BLOCK = 16


def group(index: int = 0, kind: str = FULL, window: int = 0, tokens: int = BLOCK) -> Group:
    return Group(index, kind, window, tokens, 64, "m", "", "bfloat16", "L", "sha256", f"{index}/1 {kind}")


def key(i: int, prompt: str = "p") -> bytes:
    return f"{prompt}{i}".encode().ljust(32, b".")


def request(rid: str, tokens: int, per_hash: int = BLOCK, prompt: str = "p", **more: Any) -> Any:
    hashes = [key(i, prompt) for i in range(tokens // per_hash)]
    return types.SimpleNamespace(request_id=rid, num_tokens=tokens, block_hashes=hashes, **more)


class Rig:
    """One scheduler half with its pool and clock."""

    def __init__(self, *groups: Group, ranks: int = 1, hash_tokens: int = BLOCK, **more: Any) -> None:
        self.pool, self.now, self.counters = FakePool(), 0.0, Counters()
        groups = groups or (group(),)
        self.ranks = [Rank(tp, ranks, 0, 1, groups) for tp in range(ranks)]
        self.side = SchedulerSide(
            Settings(address="unix:x", lookup_wait=0.0),
            lambda: "seed",
            hash_tokens,
            self.open,
            self.later,
            self.counters,
            clock=lambda: self.now,
            **more,
        )
        self.side.set_ranks(self.ranks)

    def open(self, rank: Rank, of: Group, seed: str) -> Any:
        return self.pool.open(name(rank, of, seed, None), **descriptor(rank, of, seed))

    def later(self, fn: Any) -> None:
        fn()

    def store(self, *indices: int, rank: int = 0, of: int = 0) -> None:
        space = self.open(self.ranks[rank], self.ranks[rank].groups[of], "seed")
        space.blocks.update({key(i): b"x" * 64 for i in indices})


def step(
    new: list[Any] = (),
    cached: list[Any] = (),
    scheduled: dict[str, int] | None = None,
    resumed: set[str] = frozenset(),
    **more: Any,
) -> Any:
    """new: (id, blocks, computed); cached: (id, new blocks or None, computed)."""
    return types.SimpleNamespace(
        scheduled_new_reqs=[types.SimpleNamespace(req_id=r, block_ids=b, num_computed_tokens=n) for r, b, n in new],
        scheduled_cached_reqs=types.SimpleNamespace(
            req_ids=[r for r, _, _ in cached],
            new_block_ids=[b for _, b, _ in cached],
            num_computed_tokens=[n for _, _, n in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
        **more,
    )


def worked(done: set[str] = frozenset(), blocks: set[int] = frozenset(), failed: set[str] = frozenset()) -> Any:
    return types.SimpleNamespace(finished_recving=done, invalid_block_ids=blocks, failed_recving=failed)


def test_prefix_is_found_and_asked_for_once() -> None:
    rig = Rig()
    rig.store(0, 1, 3)
    r = request("r", 100)
    assert [rig.side.matched(r, 0) for _ in range(3)] == [32, 32, 32]
    assert rig.pool.matches == 1 and len(rig.pool.leases) == 1


def test_only_what_the_engine_lacks_is_counted() -> None:
    rig = Rig()
    rig.store(0, 1, 2)
    assert rig.side.matched(request("r", 100), 32) == 16
    assert rig.side.matched(request("s", 100), 48) == 0


def test_one_token_is_left_to_compute() -> None:
    rig = Rig()
    rig.store(0, 1)
    assert rig.side.matched(request("r", 32), 0) == 31
    assert rig.side.matched(request("s", 33), 0) == 32


def test_unpublished_hashes_are_neither_asked_for_nor_stored() -> None:
    rig = Rig()
    rig.store(0, 1, 2)
    r = request("r", 64, num_publishable_block_hashes=1)
    assert rig.side.matched(r, 0) == 16
    rig.side.allocated(r, ([1, 2, 3, 4],), 0)
    plan = rig.side.plan(step(new=[("r", ([1, 2, 3, 4],), 0)], scheduled={"r": 64}))
    assert [s.hash for s in plan.saves] == [key(0)]


def test_answer_that_is_out_is_asked_for_again_until_the_timeout() -> None:
    rig = Rig()
    rig.store(0)
    rig.pool.rounds = 10**6
    r = request("r", 100)
    assert rig.side.matched(r, 0) is None
    assert rig.side.matched(r, 0) is None and rig.pool.matches == 1
    rig.now += 11
    assert rig.side.matched(r, 0) == 0
    assert rig.pool.jobs[0].cancelled and not rig.pool.leases
    assert rig.counters.take()["lookup_timeouts"] == 1


def test_stale_answers_are_asked_for_anew() -> None:
    rig = Rig()
    r = request("r", 100)
    assert rig.side.matched(r, 0) == 0
    rig.store(0)
    assert rig.side.matched(r, 0) == 0
    rig.now += 2
    assert rig.side.matched(r, 0) == 16
    rig.now += 6
    assert rig.side.matched(r, 0) == 16
    assert rig.pool.matches == 3 and len(rig.pool.leases) == 1


def test_full_queue_and_lost_pool_are_misses() -> None:
    rig = Rig()
    rig.store(0)
    rig.pool.busy = True
    assert rig.side.matched(request("r", 100), 0) == 0
    rig.pool.busy, rig.pool.down = False, True
    assert rig.side.matched(request("s", 100), 0) == 0


def test_hit_is_what_all_ranks_have() -> None:
    rig = Rig(ranks=2)
    rig.store(0, 1, 2, rank=0)
    rig.store(0, rank=1)
    assert rig.side.matched(request("r", 100), 0) == 16


def test_missing_rank_is_no_part() -> None:
    rig = Rig(ranks=2)
    rig.side = SchedulerSide(Settings(address="x"), lambda: "", BLOCK, rig.open, rig.later, rig.counters)
    rig.side.set_ranks(rig.ranks[:1])
    rig.store(0)
    assert rig.side.matched(request("r", 100), 0) == 0
    assert rig.pool.matches == 0


def test_window_group_needs_its_tail_only() -> None:
    rig = Rig(group(0), group(1, WINDOW, window=32))
    rig.store(*range(6), of=0)
    rig.store(3, 4, of=1)
    r = request("r", 200)
    assert rig.side.matched(r, 0) == 80  # blocks 3 and 4 of the window cover the 31 tokens before 80
    rig.side.allocated(r, ([1, 2, 3, 4, 5], [0, 0, 0, 9, 10]), 80)
    load = rig.side.plan(step()).loads[0]
    assert load.groups == [(0, [(key(i), i + 1) for i in range(5)]), (1, [(key(3), 9), (key(4), 10)])]


def test_group_of_larger_blocks_is_keyed_by_its_last_hash() -> None:
    rig = Rig(group(0, tokens=32), hash_tokens=16)
    rig.store(1, 3)
    assert rig.side.matched(request("r", 100), 0) == 64


def test_load_goes_to_the_blocks_behind_the_local_hit() -> None:
    rig = Rig()
    rig.store(0, 1, 2)
    r = request("r", 100)
    assert rig.side.matched(r, 16) == 32
    rig.side.allocated(r, ([5, 6, 7],), 32)
    plan = rig.side.plan(step())
    assert plan.loads[0].groups == [(0, [(key(1), 6), (key(2), 7)])] and plan.hash_seed == "seed"
    assert rig.side.plan(step()).loads == []
    assert len(rig.pool.leases) == 1
    rig.side.worked(worked({"r"}))
    assert not rig.pool.leases


def test_full_blocks_are_stored_once_with_their_parents() -> None:
    rig = Rig()
    r = request("r", 40)
    rig.side.matched(r, 0)
    rig.side.allocated(r, ([5, 6, 7],), 0)
    saves = rig.side.plan(step(new=[("r", ([5, 6, 7],), 0)], scheduled={"r": 20})).saves
    assert [(s.hash, s.parent, s.block) for s in saves] == [(key(0), None, 5)]
    saves = rig.side.plan(step(cached=[("r", None, 20)], scheduled={"r": 20})).saves
    assert [(s.hash, s.parent, s.block) for s in saves] == [(key(1), key(0), 6)]
    r.block_hashes.append(key(2))  # tokens were generated
    assert rig.side.plan(step(cached=[("r", ([8],), 40)], scheduled={"r": 1})).saves == []
    saves = rig.side.plan(step(cached=[("r", None, 47)], scheduled={"r": 1})).saves
    assert [(s.hash, s.block) for s in saves] == [(key(2), 7)]


def test_loaded_blocks_are_not_stored_again() -> None:
    rig = Rig()
    rig.store(0, 1)
    r = request("r", 32)
    assert rig.side.matched(r, 0) == 31
    rig.side.allocated(r, ([5, 6],), 31)
    rig.side.plan(step())
    rig.side.worked(worked({"r"}))
    assert rig.side.plan(step(new=[("r", ([5, 6],), 31)], scheduled={"r": 1})).saves == []


def test_preempted_request_has_new_blocks() -> None:
    rig = Rig()
    r = request("r", 64)
    rig.side.matched(r, 0)
    rig.side.allocated(r, ([1, 2, 3, 4],), 0)
    assert len(rig.side.plan(step(new=[("r", ([1, 2, 3, 4],), 0)], scheduled={"r": 32})).saves) == 2
    plan = rig.side.plan(step(cached=[("r", ([7, 8, 9, 10],), 0)], scheduled={"r": 64}, resumed={"r"}))
    assert [s.block for s in plan.saves] == [7, 8, 9, 10]


def test_current_block_table_is_used_where_the_engine_gives_it() -> None:
    rig = Rig(group(0, WINDOW, window=16))
    r = request("r", 64)
    rig.side.allocated(r, ([1, 2, 3],), 0)
    state = types.SimpleNamespace(get_block_ids=lambda rid: ([0, 2, 3],))
    saves = rig.side.plan(step(new=[("r", ([1, 2, 3],), 0)], scheduled={"r": 48}, kv_connector_block_state=state)).saves
    assert [s.block for s in saves] == [2, 3]


@pytest.mark.parametrize("by", ["block", "request"])
def test_failed_key_is_a_miss_afterwards(by: str) -> None:
    rig = Rig(*((group(0), group(1)) if by == "request" else (group(),)))
    rig.store(0, 1, 2)
    if by == "request":
        rig.store(0, 1, 2, of=1)
    r = request("r", 100)
    assert rig.side.matched(r, 0) == 48
    rig.side.allocated(r, tuple([[5, 6, 7]] * (2 if by == "request" else 1)), 48)
    rig.side.plan(step())
    rig.side.worked(worked({"r"}, failed={"r"}) if by == "request" else worked({"r"}, {6, 7}))
    want = 0 if by == "request" else 16
    assert rig.side.matched(r, 0) == want and rig.side.matched(request("other", 100), 0) == want
    rig.now += FAILED_FOR + 1
    assert rig.side.matched(request("later", 100), 0) == 48, "another request may try again after a while"
    assert rig.side.matched(r, 0) == want, "the same request never"


def test_key_that_is_stored_again_is_a_hit() -> None:
    rig = Rig()
    rig.store(0)
    r = request("r", 30)
    assert rig.side.matched(r, 0) == 16
    rig.side.allocated(r, ([5, 6],), 16)
    rig.side.plan(step())
    rig.side.worked(worked({"r"}, {5}))
    assert len(rig.side.plan(step(new=[("r", ([5, 6],), 0)], scheduled={"r": 30})).saves) == 1
    assert rig.side.matched(request("s", 30), 0) == 16


def test_end_of_a_request_leaves_nothing() -> None:
    rig = Rig()
    rig.store(0)
    waiting, running = request("w", 30), request("r", 30)
    rig.side.matched(waiting, 0), rig.side.matched(running, 0)
    rig.side.allocated(running, ([5, 6],), 16)
    rig.side.finished(waiting)
    rig.side.finished(running)  # aborted while its load is under way
    rig.side.worked(worked({"r"}, {5}))
    assert not rig.pool.leases
    assert not any(
        [
            rig.side._requests,
            rig.side._lookups,
            rig.side._loading,
            rig.side._loaded,
            rig.side._tracks,
            rig.side._failed_of,
        ]
    )


def test_engine_that_does_not_want_a_cache_gets_none() -> None:
    rig = Rig()
    rig.store(0)
    assert rig.side.matched(request("r", 30, skip_reading_prefix_cache=True), 0) == 0
    assert Rig(loads=False).side.matched(request("r", 30), 0) == 0
    rig = Rig(saves=False)
    rig.side.allocated(request("r", 30), ([5, 6],), 0)
    assert rig.side.plan(step(new=[("r", ([5, 6],), 0)], scheduled={"r": 30})).saves == []


def test_drafter_recomputes_the_last_block_of_a_hit() -> None:
    rig = Rig(last_block_again=True)
    rig.store(0, 1)
    assert rig.side.matched(request("r", 100), 0) == 16


def test_names_and_descriptors() -> None:
    g = group()
    one, two = Rank(0, 1, 0, 1, (g,)), Rank(1, 2, 0, 1, (g, group(1)))
    assert name(one, g, "s", "mine") == "mine"
    assert name(two, g, "s", "mine") == "mine.tp1.pp0.group0"
    derived = {name(one, g, "s", None), name(one, g, "t", None), name(two, g, "s", None)}
    assert len(derived) == 3 and all(n.startswith("vllm-m-") for n in derived)
    assert descriptor(two, g, "s")["rank_layout"] == "tp1/2 pp0/1"


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"address": 3},
        {"address": "x", "timeout": "1"},
        {"address": "x", "durable": 1},
        {"address": "x", "token": 1},
    ],
)
def test_wrong_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kvtier: "):
        Settings.parse(bad)


def test_unknown_setting_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.parse({"address": "h:1", "adress": 1}).address == "h:1"
    assert "'adress'" in caplog.text
