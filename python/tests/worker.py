"""A process that works on a pool with others, for tests of many: what a key's block holds
follows from the key, so that everybody can tell right bytes from wrong ones.

    worker.py engine|script|victim ADDRESS NAMESPACE SECONDS SEED
"""

import json
import mmap
import os
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvtier  # noqa: E402

KEYS = 1600
SIZES = (16 << 10, 64 << 10, 256 << 10, 300_001)
ROW = 384 << 10  # of a region
ROWS = 32

# What a put may fail with while all are short of room.
SHORT = (kvtier.NoSpaceError, kvtier.BusyError, kvtier.LeaseExpiredError)


def key_of(i):
    return b"key %012d" % i


_blocks = {}


def block_of(i):
    """The bytes of key i, which no other key has."""
    if i not in _blocks:
        n = SIZES[i % len(SIZES)]
        step = b"%016d" % i * 256
        data = bytearray((step * (n // len(step) + 1))[:n])
        for at in range(0, n - 8, 4096):
            data[at : at + 8] = (i << 32 | at).to_bytes(8, "big")
        _blocks[i] = bytes(data)
        if len(_blocks) > 128:
            _blocks.pop(next(iter(_blocks)))
    return _blocks[i]


def resident():
    """Bytes of this process's own memory."""
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


class Work:
    """What is counted, and the parts that all kinds of work have."""

    def __init__(self, address, name, seed, regions=()):
        self.rng = random.Random(seed)
        self.pool = kvtier.connect(address, required=True, regions=regions, timeout=30.0)
        self.ns = self.pool.open(name, model="many", max_block_bytes=1 << 20)
        self.hits = self.misses = self.puts = self.wrong = self.short = 0
        self.odd = []

    def some(self, n):
        """Distinct keys, a few of them more often than others."""
        return list({int(KEYS * self.rng.random() ** 2) for _ in range(n)})

    def got(self, i, result, data):
        if result.hit:
            self.hits += 1
            self.wrong += data != block_of(i)
        else:
            self.misses += 1
            if result.reason not in ("absent", "pending", "no_room"):
                self.odd.append(str(result))

    def stored(self, results):
        for r in results:
            self.puts += r.ok
            self.short += isinstance(r.error, SHORT)
            if not r.ok and not isinstance(r.error, SHORT):
                self.odd.append(repr(r.error))

    def report(self, before, after):
        s = self.pool.stats()
        if s.corrupt or s.reconnects or s.disconnected_calls:
            self.odd.append(str(s))
        self.pool.close()
        counts = {n: getattr(self, n) for n in ("hits", "misses", "puts", "wrong", "short")}
        print(json.dumps({**counts, "odd": self.odd[:5], "before": before, "after": after}), flush=True)


class Script(Work):
    """Calls that wait, one after the other."""

    def step(self):
        self.rng.choice((self.put, self.get, self.get, self.match, self.lend, self.reserve, self.prefetch, self.pin))()

    def put(self):
        some = self.some(4)
        self.stored(self.ns.put([key_of(i) for i in some], [block_of(i) for i in some]))

    def get(self):
        some = self.some(6)
        out = [bytearray(SIZES[i % len(SIZES)]) for i in some]
        for i, r, data in zip(some, self.ns.get_into([key_of(i) for i in some], out), out):
            self.got(i, r, data)

    def match(self):
        some = self.some(8)
        m = self.ns.match([key_of(i) for i in some], lease=5.0)
        held = some[: m.prefix]
        if m.lease is not None and held:
            out = [bytearray(SIZES[i % len(SIZES)]) for i in held]
            for i, r, data in zip(held, self.ns.get_into([key_of(i) for i in held], out), out):
                self.got(i, r, data)
            m.lease.release()

    def lend(self):
        some = self.some(3)
        with self.ns.lease_read([key_of(i) for i in some], 5.0) as loan:
            for i, r, view in zip(some, loan.results, loan.views):
                self.got(i, r, view)
                view = None

    def reserve(self):
        some = self.some(2)
        places = self.ns.reserve([SIZES[i % len(SIZES)] for i in some])
        for i, place in zip(some, places):
            place.buffer[:] = block_of(i)
        if places and self.rng.random() < 0.2:
            places.pop().abort()
        if places:
            self.stored(self.ns.commit(places, [key_of(i) for i in some[: len(places)]]))

    def prefetch(self):
        self.ns.prefetch([key_of(i) for i in self.some(4)])

    def pin(self):
        keys = [key_of(i) for i in self.some(2)]
        self.ns.pin(keys)
        self.ns.unpin(keys)


class Engine(Work):
    """Jobs on rows of a region, polled as an engine's scheduler does."""

    def __init__(self, address, name, seed):
        self.fd = os.memfd_create("region")
        os.ftruncate(self.fd, ROW * ROWS)
        self.memory = mmap.mmap(self.fd, ROW * ROWS)
        super().__init__(address, name, seed, [kvtier.Region(fd=self.fd)])
        self.free = list(range(ROWS))
        self.running = {}

    def step(self):
        while len(self.free) >= 4 and len(self.running) < 6:
            self.submit()
        for job in self.pool.completions():
            self.done(job)
        time.sleep(0.0005)

    def submit(self):
        some = self.some(4)
        rows = [self.free.pop() for _ in some]
        keys = [key_of(i) for i in some]
        segments = [(0, row * ROW, SIZES[i % len(SIZES)]) for i, row in zip(some, rows)]
        if self.rng.random() < 0.4:
            for i, (_, at, n) in zip(some, segments):
                self.memory[at : at + n] = block_of(i)
            job, load = self.ns.submit_put_region(keys, segments), False
        else:
            there = self.ns.lookup(keys)  # None: the answer is out; then it is a guess
            if there is not None and not any(there):
                self.free += rows
                return
            job, load = self.ns.submit_get_region(keys, segments), True
        self.running[job.id] = (load, some, rows, segments)

    def done(self, job):
        load, some, rows, segments = self.running.pop(job.id, (None,) * 4)
        if load is None:
            return  # a lookup's
        if not load:
            self.stored(job.result())
        else:
            for i, r, (_, at, n) in zip(some, job.result(), segments):
                self.got(i, r, self.memory[at : at + n])
        self.free += rows

    def finish(self):
        end = time.monotonic() + 20
        while self.running and time.monotonic() < end:
            for job in self.pool.completions():
                self.done(job)
            time.sleep(0.001)
        if self.running:
            self.odd.append(f"{len(self.running)} jobs do not end")


class Victim(Script):
    """Holds leases, loans and places while it works, and moves bytes of a region: it is to
    be killed."""

    def __init__(self, address, name, seed):
        self.fd = os.memfd_create("victim")
        os.ftruncate(self.fd, 1 << 20)
        self.memory = mmap.mmap(self.fd, 1 << 20)
        super().__init__(address, name, seed, [kvtier.Region(fd=self.fd)])
        self.held = []

    def step(self):
        keys = [key_of(i) for i in self.some(6)]
        kind = self.rng.randrange(5)
        if kind == 0:
            self.held.append(self.ns.match(keys, lease=3600.0))
        elif kind == 1:
            self.held.append(self.ns.lease_read(keys, 3600.0))
        elif kind == 2:
            self.held.append(self.ns.reserve([50_000, 200_000]))
        elif kind == 3:
            i = self.some(1)[0]
            n = len(block_of(i))
            self.memory[:n] = block_of(i)
            self.ns.put_region([key_of(i)], [(0, 0, n)])
            self.ns.submit_get_region([key_of(i)], [(0, 512 << 10, n)])
        else:
            super().step()
        if len(self.held) > 12:
            self.held.pop(0)


def main(kind, address, name, seconds, seed):
    work = {"engine": Engine, "script": Script, "victim": Victim}[kind](address, name, int(seed))
    print("ready", flush=True)
    begin = time.monotonic()
    before = 0
    while (now := time.monotonic() - begin) < float(seconds):
        if not before and now > 0.4 * float(seconds):
            before = resident()
        work.step()
    if kind == "engine":
        work.finish()
    work.report(before, resident())


if __name__ == "__main__":
    main(*sys.argv[1:])
