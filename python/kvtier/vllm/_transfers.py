"""Loads and stores under way: jobs of vLLM, cut into what one message should carry."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvtier

from ._lanes import Lane
from ._rows import Rows

#: Bytes of one call to the daemon, about. Its calls run side by side, and end one by one.
_CALL_BYTES = 32 << 20


class _Call:
    """Some keys of a transfer, of one part of one lane: waiting, or under way as job."""

    __slots__ = ("buffers", "indices", "job", "lane", "not_before", "part")

    def __init__(self, lane: Lane, part: int, indices: list[int], not_before: float = 0.0) -> None:
        self.lane, self.part, self.indices, self.not_before = lane, part, indices, not_before
        self.job: Any = None
        self.buffers: list[memoryview] = []

    def release(self) -> None:
        for buffer in self.buffers:
            with contextlib.suppress(BufferError):  # somebody still looks: it goes with them
                buffer.release()
        self.buffers = []


class Transfer:
    """One job of vLLM: keys and the rows that they are loaded to, or stored from.

    It is done when every call of it has ended, which the client says only when nothing
    touches the rows any more. What cannot be submitted at once waits here, for at most
    the timeout.
    """

    def __init__(
        self,
        job: Any,
        rows: Rows,
        lane: Callable[[int], Lane],
        timeout: float,
        complain: Callable[..., None],
        parents: Mapping[bytes, bytes],
    ) -> None:
        self.id, self.load, self.request = job.job_id, bool(job.is_promotion), job.req_context.req_id
        self.keys: list[bytes] = [bytes(key) for key in job.keys]
        chunks = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # before 0.30
        self.rows = [int(chunk) for chunk in chunks]
        self.since = time.monotonic()
        self.failed: set[int] = set()
        self._memory, self._timeout, self._complain, self._parents = rows, timeout, complain, parents
        self._waiting: deque[_Call] = deque()
        self._out: list[_Call] = []
        if len(self.keys) != len(self.rows) or not all(0 <= row < rows.count for row in self.rows):
            raise ValueError(f"job {self.id}: {len(self.keys)} keys, rows {self.rows} of {rows.count}")
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for i, key in enumerate(self.keys):
            by_group[int.from_bytes(key[-4:], "big")].append(i)
        for group, indices in by_group.items():
            for part, (_, length) in enumerate(rows.parts):
                step = max(1, _CALL_BYTES // length)
                for i in range(0, len(indices), step):
                    self._waiting.append(_Call(lane(group), part, indices[i : i + step]))

    @property
    def done(self) -> bool:
        return not self._waiting and not self._out

    @property
    def bytes_moved(self) -> int:
        return (len(self.keys) - len(self.failed)) * self._memory.stride

    def advance(self) -> None:
        """Take in the calls that have ended, and submit those that wait and can be."""
        for call in [call for call in self._out if call.job.done()]:
            self._out.remove(call)
            self._end(call)
        now = time.monotonic()
        for call in list(self._waiting):
            if call.lane.refused or now - self.since > self._timeout:
                self._waiting.remove(call)
                self.failed.update(call.indices)
                continue
            if call.lane.spaces is None:
                call.lane.want()
                continue
            if now < call.not_before:
                continue
            if not self._submit(call):
                return
            self._waiting.remove(call)

    def _submit(self, call: _Call) -> bool:
        """Submit a call. False: the pool takes no more now."""
        space = (call.lane.spaces or ())[call.part]
        hashes = [self.keys[i][:-4] for i in call.indices]
        rows = [self.rows[i] for i in call.indices]
        options: dict[str, Any] = {"timeout": self._timeout}
        if not self.load:
            parents = [self._parents.get(self.keys[i]) for i in call.indices]
            if any(parents):
                options["parents"] = parents
        try:
            if self._memory.mapped:
                segments = [self._memory.segments(row, call.part) for row in rows]
                submit = space.submit_get_region if self.load else space.submit_put_region
                call.job = submit(hashes, segments, **options)
            else:
                call.buffers = [self._memory.buffer(row, call.part) for row in rows]
                submit = space.submit_get_into if self.load else space.submit_put
                call.job = submit(hashes, call.buffers, **options)
        except Exception as error:
            call.release()
            if isinstance(error, kvtier.BusyError):
                return False
            self._complain("%s %d chunks: %s: %s", self._verb, len(rows), type(error).__name__, error)
            self.failed.update(call.indices)
            return True
        self._out.append(call)
        return True

    def _end(self, call: _Call) -> None:
        """Take in the results of a call that has ended."""
        busy: list[int] = []
        why: object = None
        try:
            results: Sequence[Any] = call.job.result(0)
            if len(results) != len(call.indices):
                raise ValueError(f"{len(results)} results for {len(call.indices)} keys")
            length = self._memory.parts[call.part][1]
            for i, result in zip(call.indices, results):
                if self.load:
                    # A block of another length than the row's would leave old bytes in it.
                    good = result.hit and result.length == length
                    wait, text = result.status == kvtier.Status.BUSY, result.reason
                else:
                    good = result.error is None
                    wait, text = isinstance(result.error, kvtier.BusyError), result.error
                if wait:
                    busy.append(i)
                elif not good:
                    self.failed.add(i)
                    why = why or text
        except Exception as error:
            self.failed.update(call.indices)
            why = error
        call.release()
        if why is not None:
            self._complain("%s %d chunks: %s", self._verb, len(call.indices), why)
        if busy:
            self._waiting.append(_Call(call.lane, call.part, busy, time.monotonic() + 0.01))

    @property
    def _verb(self) -> str:
        return "loading" if self.load else "storing"

    def drop_waiting(self) -> None:
        """Fail what has not been submitted."""
        for call in self._waiting:
            self.failed.update(call.indices)
        self._waiting.clear()

    def cancel(self) -> None:
        """End the calls under way. When it returns nothing touches the rows."""
        self.drop_waiting()
        for call in self._out:
            call.job.cancel()
            self.failed.update(call.indices)
            call.release()
        self._out = []
