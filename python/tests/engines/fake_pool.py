"""A pool without a daemon: blocks in a dict, jobs that end when the test says so."""

from __future__ import annotations

import mmap
from collections import namedtuple
from types import SimpleNamespace

import kvtier
from kvtier import BlockState, GetResult, PutResult, State, Status, Tier

Match = namedtuple("Match", "prefix blocks lease status")


class Job:
    """A job that runs at once, or later, when the pool is let go on."""

    def __init__(self, pool, work):
        self.pool, self.work, self.answer, self.ended, self.cancelled = pool, work, None, False, False
        pool.jobs.append(self)
        if not pool.slow:
            self.run()

    def run(self):
        if self.ended:
            return
        try:
            self.answer = self.work()
        except Exception as error:
            self.answer = error
        self.ended = True

    def done(self):
        return self.ended

    def result(self, timeout=None):
        assert self.ended, "nobody may wait here"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self):
        if not self.ended:
            self.cancelled, self.ended, self.answer = True, True, kvtier.CancelledError("cancelled")
        return self.cancelled


class Lease:
    def __init__(self, pool):
        self.pool = pool
        pool.leases += 1

    def release(self):
        self.pool.leases -= 1


class Namespace:
    def __init__(self, pool, name, fields):
        self.pool, self.name, self.fields = pool, name, fields
        self.blocks = pool.store.setdefault(name, {})

    def _job(self, kind, hashes, work):
        self.pool.calls.append((kind, self.name, list(hashes)))
        if self.pool.busy:
            raise kvtier.BusyError("busy")
        return Job(self.pool, work)

    def submit_match(self, hashes, *, all=False, lease=None, timeout=None):
        assert all and timeout and lease

        def work():
            if self.pool.lost:
                return Match(0, [], None, Status.DEADLINE)
            there = [h in self.blocks and h not in self.pool.hidden for h in hashes]
            blocks = [
                BlockState(State.RESIDENT if t else State.ABSENT, Tier.MEMORY if t else Tier.NONE, len(self.blocks.get(h, b"")))
                for h, t in zip(hashes, there)
            ]
            leased = Lease(self.pool) if True in there else None
            return Match(there.index(False) if False in there else len(there), blocks, leased, Status.OK)

        return self._job("match", hashes, work)

    def _get(self, hashes, write):
        def work():
            self.pool.check()
            results = []
            for i, h in enumerate(hashes):
                block = self.blocks.get(h)
                if h in self.pool.full:
                    self.pool.full.discard(h)
                    results.append(GetResult(Status.BUSY, "unavailable", Tier.NONE, 0, 0))
                elif block is None or h in self.pool.bad:
                    results.append(GetResult(Status.OK, "corrupt" if block else "absent", Tier.NONE, 0, 0))
                else:
                    write(i, block)
                    self.pool.hits += 1
                    results.append(GetResult(Status.OK, "hit", Tier.MEMORY, len(block), len(block)))
            return results

        return work

    def _put(self, hashes, read, parents):
        def work():
            self.pool.check()
            results = []
            for i, h in enumerate(hashes):
                if h in self.pool.unstorable:
                    results.append(PutResult(False, False, kvtier.NoSpaceError("no space")))
                    continue
                existed = h in self.blocks
                self.blocks[h] = read(i)
                self.pool.bad.discard(h)
                if parents and parents[i]:
                    self.pool.parents[h] = parents[i]
                results.append(PutResult(not existed, existed, None))
            return results

        return work

    def submit_get_region(self, hashes, segments, *, timeout=None, no_promote=False):
        return self._job("get_region", hashes, self._get(hashes, lambda i, block: self.pool.scatter(segments[i], block)))

    def submit_put_region(self, hashes, segments, *, parents=None, durable=False, ttl=0.0, timeout=None):
        return self._job("put_region", hashes, self._put(hashes, lambda i: self.pool.gather(segments[i]), parents))

    def submit_get_into(self, hashes, buffers, *, timeout=None, no_promote=False):
        def write(i, block):
            memoryview(buffers[i])[: len(block)] = block

        return self._job("get_into", hashes, self._get(hashes, write))

    def submit_put(self, hashes, buffers, *, parents=None, durable=False, ttl=0.0, timeout=None):
        return self._job("put", hashes, self._put(hashes, lambda i: bytes(buffers[i]), parents))


class Pool:
    """What kvtier.connect gives. Set its attributes to make it behave badly."""

    def __init__(self, address, regions=(), **options):
        self.address, self.options, self.regions = address, options, regions
        self.maps = [mmap.mmap(region.fd, region.length) for region in regions]
        self.store, self.calls, self.jobs, self.parents = {}, [], [], {}
        self.slow = self.busy = self.lost = False
        self.bad, self.full, self.hidden, self.unstorable = set(), set(), set(), set()
        self.refuses = None  # an error that open raises
        self.connected, self.closed, self.reconnects, self.hits, self.leases = True, False, 0, 0, 0

    def check(self):
        if self.lost:
            raise kvtier.DeadlineError("nobody answers")

    def open(self, name, **fields):
        if self.refuses is not None:
            raise self.refuses
        return Namespace(self, name, fields)

    def stats(self):
        return SimpleNamespace(reconnects=self.reconnects)

    def completions(self):
        return []

    def go_on(self):
        for job in self.jobs:
            job.run()

    def gather(self, segments):
        return b"".join(self.maps[region][offset : offset + length] for region, offset, length in segments)

    def scatter(self, segments, block):
        for region, offset, length in segments:
            self.maps[region][offset : offset + length], block = block[:length], block[length:]
        assert not block

    def close(self):
        self.closed = True
        for job in self.jobs:
            job.cancel()
        for mapped in self.maps:
            mapped.close()
