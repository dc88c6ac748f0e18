"""The worker that `kvtier bench attach` measures: passes on command.

The program starts it with a daemon's socket, and says by lines of JSON on standard input
what to do; each is answered by one line. So figure and limit are taken by turns, and what
either needs is made ready outside the time.
"""

from __future__ import annotations

import json
import mmap
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Sequence

from . import _wire as wire
from ._buffers import copy_sum
from ._dial import Region
from ._pool import Pool, connect

DEPTH = 16  # blocks of one call
_LEASE = 10.0  # seconds
_CALL = 30.0  # seconds that one may take

# Descriptors of memory files that the program made: one as the store's memory, and the
# region.
_STORE_FD, _REGION_FD = 3, 4


class Worker:
    """A worker that is attached to the daemon, and to a server that only answers."""

    def __init__(self, socket: str, bare: str, payload: int, blocks: int) -> None:
        self.payload = payload
        self.blocks = blocks
        size = payload * blocks
        self.pool = connect("unix:" + socket, name="bench", regions=[Region(fd=_REGION_FD)], required=True)
        if not self.pool.shared:
            raise SystemExit("the daemon does not share its memory")
        self.bare = connect("unix:" + bare, name="bench", required=True)
        self.ns = self.pool.open("attach", max_block_bytes=max(payload, 4096))
        own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        own[:] = mmap.mmap(_REGION_FD, size)[:]
        self.buffers = self._cut(own)
        self.store = self._cut(mmap.mmap(_STORE_FD, size))

    def _cut(self, memory: mmap.mmap) -> List[memoryview]:
        view, n = memoryview(memory), self.payload
        return [view[i * n : (i + 1) * n] for i in range(self.blocks)]

    def _in_calls(self, call: Callable[[int, int], bool]) -> float:
        """Seconds for all blocks, DEPTH a call, each of which must go well."""
        began = time.perf_counter()
        for at in range(0, self.blocks, DEPTH):
            if not call(at, min(at + DEPTH, self.blocks)):
                raise SystemExit(f"blocks {at} to {at + DEPTH}: not all went well: {self.pool.stats()}")
        return time.perf_counter() - began

    # Copies

    def put(self, keys: Sequence[bytes]) -> float:
        return self._in_calls(lambda i, j: all(r.stored for r in self.ns.put(keys[i:j], self.buffers[i:j])))

    def get(self, keys: Sequence[bytes]) -> float:
        return self._in_calls(lambda i, j: all(r.hit for r in self.ns.get_into(keys[i:j], self.buffers[i:j])))

    def region_put(self, keys: Sequence[bytes]) -> float:
        rows = [(0, i * self.payload, self.payload) for i in range(self.blocks)]
        return self._in_calls(lambda i, j: all(r.stored for r in self.ns.put_region(keys[i:j], rows[i:j])))

    def region_get(self, keys: Sequence[bytes]) -> float:
        rows = [(0, i * self.payload, self.payload) for i in range(self.blocks)]
        return self._in_calls(lambda i, j: all(r.hit for r in self.ns.get_region(keys[i:j], rows[i:j])))

    def copy_in(self, keys: Sequence[bytes]) -> float:
        """The limit of put: the bare loop."""
        began = time.perf_counter()
        for dst, src in zip(self.store, self.buffers):
            copy_sum(dst, src)
        return time.perf_counter() - began

    def copy_out(self, keys: Sequence[bytes]) -> float:
        """The limit of get."""
        began = time.perf_counter()
        for dst, src in zip(self.buffers, self.store):
            copy_sum(dst, src)
        return time.perf_counter() - began

    # Calls, figure and limit by turns

    def small_put(self, keys: Sequence[bytes]) -> float:
        """Puts blocks for match, of a size that does not matter."""
        began = time.perf_counter()
        if not all(r.stored for r in self.ns.put(keys, [b"\0" * 64] * len(keys))):
            raise SystemExit("the blocks of match could not be put")
        return time.perf_counter() - began

    def lease_read(self, keys: Sequence[bytes], calls: int) -> Dict[str, float]:
        """Microseconds to a byte of a lent block, and of an empty call."""
        values, limits = [], []
        for _ in range(calls):
            t0 = time.perf_counter_ns()
            loan = self.ns.lease_read(keys, _LEASE, verify=False)
            view = loan.views[0]
            if view is None:
                raise SystemExit(f"no loan: {loan.results}")
            view[0]
            t1 = time.perf_counter_ns()
            loan.release()
            self._empty(self.pool)  # takes the release along
            t2 = time.perf_counter_ns()
            self._empty(self.pool)
            t3 = time.perf_counter_ns()
            values.append(t1 - t0)
            limits.append(t3 - t2)
        return _medians(values, limits)

    def _empty(self, pool: Pool) -> None:
        """A call with nothing in it."""
        conn = pool._conn
        assert conn is not None
        conn.trip(wire.RELEASE, wire.release((), ()), time.monotonic() + _CALL)

    def match(self, keys: Sequence[bytes], calls: int) -> Dict[str, float]:
        """Microseconds of a match with a lease, and of a call with the same bytes, which
        nobody looks at, plus a match in the process that answers it."""
        h, conn = self.ns._handle, self.bare._conn
        assert h is not None and conn is not None
        named = wire.Keys(h.id, h.tag, len(keys[0]), keys)
        values, limits, matches = [], [], []
        for _ in range(calls):
            t0 = time.perf_counter_ns()
            m = self.ns.match(keys, lease=_LEASE)
            t1 = time.perf_counter_ns()
            if m.prefix != len(keys) or m.lease is None:
                raise SystemExit(f"matched {m.prefix} of {len(keys)}")
            m.lease.release()
            self._empty(self.pool)
            request = wire.match(named, 0, 10_000, 10_000)
            t2 = time.perf_counter_ns()
            reply = conn.trip(wire.MATCH, request, time.monotonic() + _CALL)
            t3 = time.perf_counter_ns()
            if wire.read_matched(reply).many != len(keys):
                raise SystemExit("the bare server answers something else")
            took = conn.trip(wire.LOCATE, b"", time.monotonic() + _CALL)
            values.append(t1 - t0)
            limits.append(t3 - t2)
            matches.append(int.from_bytes(took, "little"))
        figures = _medians(values, limits)
        figures["limit"] += statistics.median(matches) / 1e3
        return figures


def _medians(values: List[int], limits: List[int]) -> Dict[str, float]:
    return {"value": statistics.median(values) / 1e3, "limit": statistics.median(limits) / 1e3}


def main() -> None:
    socket, bare, payload, blocks = sys.argv[1:]
    worker = Worker(socket, bare, int(payload), int(blocks))
    print("ready", flush=True)
    for line in sys.stdin:
        order: Dict[str, Any] = json.loads(line)
        keys = [bytes.fromhex(k) for k in order["keys"]]
        do = getattr(worker, order["do"])
        answer = do(keys, order["calls"]) if order["calls"] else {"value": do(keys)}
        print(json.dumps(answer), flush=True)
    worker.pool.close()
    worker.bare.close()


if __name__ == "__main__":
    main()
