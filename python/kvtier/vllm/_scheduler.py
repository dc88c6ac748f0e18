"""The scheduler's half of the connector: what is there, what to load, what to store.

It runs in the scheduler's loop: nothing here waits longer than Settings.lookup_wait, and nothing raises for what a
server or the network does. It needs no engine package, only objects shaped like vLLM's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._counters import Counters
from ._describe import FULL, WINDOW, Group, Rank, hashes_of
from ._settings import Settings
from ._spaces import Refused

log = logging.getLogger("vllm.kvtier")

#: Seconds for which an answer "nothing there" is given again without asking.
MISS_FRESH = 1.0
#: Keys whose load failed are misses for so long, unless they are stored again.
FAILED_FOR = 10.0
#: How many such keys are remembered.
FAILED_KEYS = 65536
#: State of a block that can be read, as kvtier.State has it.
RESIDENT = 2
#: Block 0 of vLLM's pool stands for "no block".
NULL_BLOCK = 0


@dataclasses.dataclass
class Load:
    """Blocks that a worker is to load for one request: for each group, hash and block id, root first."""

    request: str
    groups: list[tuple[int, list[tuple[bytes, int]]]]


@dataclasses.dataclass
class Save:
    """A full block that a worker is to store."""

    group: int
    hash: bytes
    parent: bytes | None
    block: int


@dataclasses.dataclass
class Plan:
    """What the scheduler tells the workers for one step."""

    hash_seed: str
    loads: list[Load]
    saves: list[Save]


@dataclasses.dataclass
class _Lookup:
    """The question for one request, out or answered."""

    local: int  # tokens that the engine has itself
    count: int  # tokens that have hashes and were asked about
    asked: float
    wanted: list[tuple[Group, list[bytes], int]]  # group, hashes, index of the first
    jobs: list[tuple[int, Any]] | None = None  # which of wanted, its job; None: a namespace is still being opened
    until: int | None = None  # tokens that all ranks and groups have; None: not answered yet
    answered: float = 0.0
    leases: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Loading:
    """A load that the workers have been told of."""

    tokens: int
    blocks: dict[tuple[int, int], bytes]  # (group, block id) -> hash
    leases: list[Any]
    failed: bool = False


@dataclasses.dataclass
class _Track:
    """A scheduled request: where its blocks are, and up to which they were given to the workers to store."""

    blocks: list[list[int]]
    next: dict[int, int]


class SchedulerSide:
    """Answers the scheduler and plans each step.

    Args:
        settings: of the connector.
        seed: gives the hash seed; it is known only after the engine has started.
        hash_tokens: tokens that one of ``request.block_hashes`` stands for.
        open_namespace: of a rank, a group and the hash seed; gives the namespace, or None while it is being opened,
            without waiting for long; Refused when there is none to be had.
        later: calls what it is given on another thread: the end of a lookup can take a while.
        counters: what is counted.
        loads, saves: whether the engine's role wants them.
        last_block_again: the drafter needs the last block of a hit computed again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        seed: Callable[[], str],
        hash_tokens: int,
        open_namespace: Callable[[Rank, Group, str], Any | None],
        later: Callable[[Callable[[], object]], None],
        counters: Counters,
        *,
        loads: bool = True,
        saves: bool = True,
        last_block_again: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._hash_tokens = hash_tokens
        self._open = open_namespace
        self._later = later
        self._count = counters
        self._want_loads = loads
        self._want_saves = saves
        self._last_block_again = last_block_again
        self._clock = clock
        self._ranks: list[Rank] = []
        self._groups: tuple[Group, ...] = ()
        self._align = 1
        self._requests: dict[str, Any] = {}
        self._lookups: dict[str, _Lookup] = {}
        self._loading: dict[str, _Loading] = {}
        self._loaded: dict[str, int] = {}
        self._failed: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        self._failed_of: dict[str, set[bytes]] = {}
        self._tracks: dict[str, _Track] = {}
        self._new_loads: list[Load] = []

    def set_ranks(self, ranks: Sequence[Rank]) -> None:
        """Takes what the workers said of themselves. Until then there are no hits and no stores."""
        ranks = sorted(ranks, key=lambda r: (r.pp, r.tp))
        if not ranks:
            return
        want = ranks[0].tp_size * ranks[0].pp_size
        if len({(r.pp, r.tp) for r in ranks}) != want or any(not r.groups for r in ranks):
            log.warning("kvtier: stays out: %d of %d workers can take part", sum(bool(r.groups) for r in ranks), want)
            return
        shape = [(g.index, g.kind, g.window, g.tokens) for g in ranks[0].groups]
        if any([(g.index, g.kind, g.window, g.tokens) for g in r.groups] != shape for r in ranks):
            log.warning("kvtier: stays out: the workers differ in their KV cache groups")
            return
        if any(g.tokens % self._hash_tokens for g in ranks[0].groups):
            log.warning(
                "kvtier: stays out: a group's block is not a multiple of the %d tokens of a hash", self._hash_tokens
            )
            return
        self._ranks, self._groups = ranks, ranks[0].groups
        self._align = math.lcm(*(group.tokens for group in self._groups))

    # --- lookups

    def matched(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens behind the first ``num_computed_tokens`` can be loaded; None: ask again.

        It may be called as often as the scheduler likes: what it keeps is the answer, and a lease on its blocks.
        """
        rid = request.request_id
        if not (self._groups and self._want_loads) or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        count = self._hashed_tokens(request) // self._align * self._align
        limit = self._limit(request.num_tokens, count)
        if limit <= num_computed_tokens:
            return 0
        now = self._clock()
        look = self._lookups.get(rid)
        if look is not None and not self._fresh(look, num_computed_tokens, count, now):
            self._drop_lookup(rid)
            look = None
        if look is None:
            look = self._lookups[rid] = self._question(request, num_computed_tokens, count, now)
        if look.until is None and not (self._ask(look) and self._answer(look)):
            if now - look.asked < self._settings.timeout:
                return None
            self._count.add("lookup_timeouts")
            self._settle(look, look.local)
        until = self._without_failed(rid, look, min(look.until or 0, limit))
        return max(0, until - num_computed_tokens)

    def _limit(self, num_tokens: int, count: int) -> int:
        """The most tokens that may count as loaded: at least one is computed, since its output is wanted."""
        limit = min(num_tokens - 1, count)
        if limit < num_tokens - 1 or len(self._groups) > 1 or self._groups[0].kind != FULL:
            # Windows are kept for ends on a block's boundary, and what has no hash ends on one.
            limit = limit // self._align * self._align
        return limit

    def _hashed_tokens(self, request: Any) -> int:
        """Tokens from the first on that have hashes, without those that the engine does not want shared yet."""
        hashes = len(request.block_hashes)
        return min(getattr(request, "num_publishable_block_hashes", hashes), hashes) * self._hash_tokens

    def _fresh(self, look: _Lookup, local: int, count: int, now: float) -> bool:
        if look.local != local or look.count != count:
            return False
        if look.until is None:
            return True
        if look.until <= look.local:
            return now - look.answered < MISS_FRESH
        return now - look.answered < self._settings.lease / 2

    def _question(self, request: Any, local: int, count: int, now: float) -> _Lookup:
        wanted: list[tuple[Group, list[bytes], int]] = []
        for group in self._groups:
            first = local // group.tokens
            hashes = hashes_of(request.block_hashes, self._hash_tokens, group.tokens, first, count // group.tokens)
            wanted.append((group, hashes, first))
        return _Lookup(local, count, now, wanted)

    def _ask(self, look: _Lookup) -> bool:
        """Sends the question, if it is not sent. False: not yet."""
        if look.jobs is not None:
            return True
        try:
            spaces: list[tuple[int, Any]] = []
            for rank in self._ranks:
                for index, group in enumerate(rank.groups):
                    namespace = self._open(rank, group, self._seed())
                    if namespace is None:
                        return False
                    spaces.append((index, namespace))
            look.jobs = []
            for index, namespace in spaces:
                group, hashes, _ = look.wanted[index]
                each, lease = group.kind == WINDOW, self._settings.lease or None
                job = namespace.submit_match(hashes, lease=lease, all=each, timeout=self._settings.timeout)
                look.jobs.append((index, job))
            self._count.add("lookups")
        except Exception as err:  # a namespace of other blocks, a full queue: a miss
            if not isinstance(err, Refused):
                self._count.failure("lookup", err)
            self._settle(look, look.local)
        return True

    def _answer(self, look: _Lookup) -> bool:
        """Takes the answers if all are there within lookup_wait."""
        if look.until is not None:
            return True
        jobs = look.jobs or []
        end = self._clock() + self._settings.lookup_wait
        for _, job in jobs:
            if not job.done() and not _wait(job, max(0.0, end - self._clock())):
                return False
        have: list[list[bool]] = [[True] * len(hashes) for _, hashes, _ in look.wanted]
        for index, job in jobs:
            group, hashes, _ = look.wanted[index]
            try:
                match = job.result(0)
            except Exception as err:
                self._count.failure("lookup", err)
                have[index] = [False] * len(hashes)
                continue
            if match.lease is not None:
                look.leases.append(match.lease)
            there = _resident(match, len(hashes), group.kind == WINDOW)
            have[index] = [a and b for a, b in zip(have[index], there)]
        self._settle(look, self._longest(look, have))
        return True

    def _settle(self, look: _Lookup, until: int) -> None:
        """Fixes the answer; what is not needed for it ends."""
        look.until, look.answered = until, self._clock()
        look.jobs = look.jobs or []
        self._end_jobs(look.jobs)
        if until <= look.local:
            self._release_all(look.leases)

    def _longest(self, look: _Lookup, have: list[list[bool]]) -> int:
        """The longest prefix that can be used: ends on a boundary of all groups, and each has what it needs for it."""
        end = look.count
        for (group, _, first), there in zip(look.wanted, have):
            if group.kind == FULL:
                run = next((i for i, ok in enumerate(there) if not ok), len(there))
                end = min(end, (first + run) * group.tokens)
        end = end // self._align * self._align
        if self._last_block_again:
            end -= self._align
        while end > look.local:
            if all(self._window_there(end, group, first, there) for (group, _, first), there in zip(look.wanted, have)):
                return end
            end -= self._align
        return look.local

    @staticmethod
    def _window_there(end: int, group: Group, first: int, there: list[bool]) -> bool:
        if group.kind == FULL:
            return True
        begin = max(first, _window_start(end, group))
        return all(there[i - first] for i in range(begin, end // group.tokens))

    def _without_failed(self, rid: str, look: _Lookup, until: int) -> int:
        """The part of a hit before the first block whose load failed. Else it would be loaded for ever."""
        failed = self._failed_of.get(rid, set())
        if not failed and not self._failed:
            return until
        now = self._clock()
        for group, hashes, first in look.wanted:
            for i, key in enumerate(hashes):
                end = (first + i + 1) * group.tokens
                if end - group.tokens >= until:
                    break
                at = self._failed.get(key)
                if key in failed or (at is not None and now - at < FAILED_FOR):
                    if group.kind == WINDOW:
                        return look.local  # rare: not worth a search for a window without it
                    until = min(until, (end - group.tokens) // self._align * self._align)
        return until

    # --- what the scheduler decided

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The scheduler has given the request blocks; with external tokens they are to be loaded."""
        rid = request.request_id
        self._requests[rid] = request
        look = self._lookups.pop(rid, None)
        if num_external_tokens <= 0 or rid in self._loading:
            if look is not None:
                self._cancel(look)
            return
        local = look.local if look is not None else 0
        end = local + num_external_tokens
        load = Load(rid, [])
        loading = _Loading(end, {}, look.leases if look is not None else [])
        for group in self._groups:
            first = local // group.tokens
            if group.kind == WINDOW:
                first = max(first, _window_start(end, group))
            last = -(-end // group.tokens)
            keys = hashes_of(request.block_hashes, self._hash_tokens, group.tokens, first, last)
            pairs = [
                (key, block) for key, block in zip(keys, block_ids[group.index][first:last]) if block != NULL_BLOCK
            ]
            if group.kind == FULL and len(pairs) < len(keys):
                raise RuntimeError(f"request {rid} has {len(pairs)} of {len(keys)} blocks for what is to be loaded")
            load.groups.append((group.index, pairs))
            loading.blocks.update({(group.index, block): key for key, block in pairs})
        self._count.add("hit_blocks", len(loading.blocks))
        self._new_loads.append(load)
        self._loading[rid] = loading

    def plan(self, output: Any) -> Plan:
        """What the workers do in this step. The output is not changed."""
        loads, self._new_loads = self._new_loads, []
        saves: list[Save] = []
        if self._groups and self._want_saves:
            state = getattr(output, "kv_connector_block_state", None)
            for new in output.scheduled_new_reqs:
                self._track(new.req_id, new.block_ids, new.num_computed_tokens)
                saves += self._full_blocks(new.req_id, new.num_computed_tokens, output, state)
            cached = output.scheduled_cached_reqs
            resumed = _resumed(cached)
            for i, rid in enumerate(cached.req_ids):
                blocks, computed = cached.new_block_ids[i], cached.num_computed_tokens[i]
                if rid in resumed:
                    self._track(rid, blocks or (), computed)
                elif blocks is not None and rid in self._tracks:
                    for mine, more in zip(self._tracks[rid].blocks, blocks):
                        mine.extend(more)
                saves += self._full_blocks(rid, computed, output, state)
        return Plan(self._seed() if loads or saves else "", loads, saves)

    def _track(self, rid: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        # Blocks that were loaded are not stored again, the last one of a hit that ends within a block included.
        loaded = self._loaded.get(rid, 0)
        self._tracks[rid] = _Track(
            [list(ids) for ids in blocks],
            {g.index: max(computed // g.tokens, -(-loaded // g.tokens)) for g in self._groups},
        )

    def _full_blocks(self, rid: str, computed: int, output: Any, state: Any) -> list[Save]:
        """The blocks of the request that are full, and known by their hash, when this step has run."""
        request, track = self._requests.get(rid), self._tracks.get(rid)
        if request is None or track is None:
            return []
        after = computed + output.num_scheduled_tokens.get(rid, 0)
        known = self._hashed_tokens(request)
        saves: list[Save] = []
        blocks: Sequence[Sequence[int]] | None = None
        for group in self._groups:
            begin, end = track.next[group.index], min(after, known) // group.tokens
            if end <= begin:
                continue
            if blocks is None:
                blocks = (state.get_block_ids(rid) if state is not None else None) or track.blocks
            ids = blocks[group.index]
            before = max(0, begin - 1)  # the first one's parent
            keys = hashes_of(request.block_hashes, self._hash_tokens, group.tokens, before, end)
            for i in range(begin, min(end, len(ids))):
                key = keys[i - before]
                if ids[i] != NULL_BLOCK:
                    saves.append(Save(group.index, key, keys[i - before - 1] if i else None, ids[i]))
                    self._failed.pop(key, None)
            track.next[group.index] = end
        return saves

    def worked(self, output: Any) -> None:
        """Takes what the workers report: loads that ended, and blocks that could not be loaded."""
        invalid = set(getattr(output, "invalid_block_ids", None) or ())
        failed = set(getattr(output, "failed_recving", None) or ())
        if invalid or failed:
            for rid, loading in self._loading.items():
                keys = [
                    key
                    for (_, block), key in loading.blocks.items()
                    if rid in failed or (block in invalid and len(self._groups) == 1)
                ]
                if keys or rid in failed:
                    loading.failed = True
                    self._remember_failed(rid, keys)
        for rid in getattr(output, "finished_recving", None) or ():
            if rid not in self._loading:
                continue
            loading = self._loading.pop(rid)
            self._release_all(loading.leases)
            if loading.failed:
                self._loaded.pop(rid, None)
            elif rid in self._requests:
                self._loaded[rid] = loading.tokens

    def _remember_failed(self, rid: str, keys: list[bytes]) -> None:
        now = self._clock()
        if rid in self._requests:
            self._failed_of.setdefault(rid, set()).update(keys)
        for key in keys:
            self._failed[key] = now
            self._failed.move_to_end(key)
        while len(self._failed) > FAILED_KEYS or (
            self._failed and now - next(iter(self._failed.values())) > FAILED_FOR
        ):
            self._failed.popitem(last=False)

    def finished(self, request: Any) -> None:
        """The request is over. Loads that are under way end by themselves."""
        rid = request.request_id
        self._drop_lookup(rid)
        self._requests.pop(rid, None)
        self._tracks.pop(rid, None)
        self._loaded.pop(rid, None)
        self._failed_of.pop(rid, None)

    def close(self) -> None:
        """Gives all leases back."""
        for rid in list(self._lookups):
            self._drop_lookup(rid)
        for loading in self._loading.values():
            self._release_all(loading.leases)
        self._loading.clear()

    def _drop_lookup(self, rid: str) -> None:
        look = self._lookups.pop(rid, None)
        if look is not None:
            self._cancel(look)

    def _cancel(self, look: _Lookup) -> None:
        self._end_jobs(look.jobs or [])
        self._release_all(look.leases)

    def _end_jobs(self, jobs: list[tuple[int, Any]]) -> None:
        """Cancels those that are not done. The lease of an answer that nobody takes ends with it."""
        for _, job in jobs:
            if not job.done():
                self._later(job.cancel)

    def _release_all(self, leases: list[Any]) -> None:
        for lease in leases:
            try:
                lease.release()
            except Exception as err:  # it runs out by itself
                self._count.failure("release of a lease", err)
        leases.clear()


def _window_start(end: int, group: Group) -> int:
    """Index of the first block that the token behind ``end`` still sees."""
    return max(0, end - group.window + 1) // group.tokens


def _resident(match: Any, count: int, each: bool) -> list[bool]:
    if not each:
        return [i < match.prefix for i in range(count)]
    there = [block.state == RESIDENT for block in match.blocks[:count]]
    return there + [False] * (count - len(there))


def _resumed(cached: Any) -> set[str]:
    """Requests that come back from preemption: their block tables are new ones."""
    ids = getattr(cached, "resumed_req_ids", None)
    if ids is not None:
        return set(ids)
    flags = getattr(cached, "resumed_from_preemption", ())
    return {rid for rid, flag in zip(cached.req_ids, flags) if flag}


def _wait(job: Any, seconds: float) -> bool:
    if seconds > 0:
        with contextlib.suppress(Exception):  # its failure is taken when all are there
            job.result(seconds)
    return bool(job.done())
