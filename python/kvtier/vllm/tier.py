"""KvtierTier: a secondary tier of vLLM's offloading that keeps its chunks in a kvtier daemon.

vLLM copies finished KV blocks into rows of host memory (its primary tier) and hands
the rows to its secondary tiers. This one registers that memory with the daemon, once,
and from then on names rows: the daemon moves the bytes, this process touches none.
Where that cannot be (a daemon on another host, memory that no file is behind), the
client's sockets move them, from and to the rows themselves.

Named in --kv-transfer-config, inside "secondary_tiers":

    {"type": "KvtierTier", "module_path": "kvtier.vllm", "address": "unix:/run/kvtier/session.sock"}

vLLM calls one method at a time, and each returns at once. Nothing that a daemon does
or fails to do raises: it is a miss, or a store that did not happen.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import kvtier
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ._identity import read_spec
from ._lanes import Lane
from ._lookups import Lookups
from ._rows import Rows
from ._tier_stats import Counters, metric_definitions
from ._transfers import Transfer

# A child of vLLM's logger, whose handler it has.
_log = logging.getLogger("vllm.kvtier")

#: How long a lookup may be out, at most, before its request computes instead.
_LOOKUP_SECONDS = 2.0

#: How often complaints of one kind are logged, at most.
_COMPLAIN_SECONDS = 10.0

# What this version of vLLM has: found by looking, not by its number.
_MEDIUM = getattr(offload, "Medium", None)  # 0.28
_LOCALITY = getattr(offload, "Locality", None)  # 0.26
_RESULT_FIELDS = frozenset(field.name for field in dataclasses.fields(JobResult))
_HAS_BACKPRESSURE = "backpressure_detector" in inspect.signature(SecondaryTierManager.__init__).parameters  # 0.31

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _never_raises(answer: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Have a method log what it raises and answer something instead."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: KvtierTier, *args: Any, **kw: Any) -> Any:
            try:
                return method(self, *args, **kw)
            except Exception as error:
                self._complain("%s: %s: %s", method.__name__, type(error).__name__, error, exc_info=True)
                return answer()

        return call  # type: ignore[return-value]

    return wrap


class KvtierTier(SecondaryTierManager):
    """A secondary tier in a kvtier daemon.

    Keys of its configuration, beside type and module_path:

    address: "unix:PATH" of `kvtier serve --socket`, or "HOST:PORT" of its --xfer.
    token: what the daemon's --access file, or its --token-file, wants from this engine.
    namespace: the namespace's name; without it one is made of everything that chunks must
        have in common. With a name of one's own an engine that differs loads and stores
        nothing, and the log names the field.
    timeout: seconds that a load or a store may take, 10 by default.
    locality: "LOCAL" or "REMOTE", what vLLM's filters of tiers compare.

    Others are logged and ignored.
    """

    if _MEDIUM is not None:
        medium = _MEDIUM.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        address: str = "",
        token: str | None = None,
        namespace: str | None = None,
        timeout: float = 10.0,
        locality: str | None = None,
        **unknown: Any,
    ) -> None:
        more = {"backpressure_detector": backpressure_detector} if _HAS_BACKPRESSURE else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        if not isinstance(address, str) or not address:
            raise ValueError(f"{tier_type}: address is {address!r}, want unix:PATH or HOST:PORT")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"{tier_type}: timeout is {timeout!r}, want seconds")
        unknown.pop("module_path", None)  # before 0.28 it was not taken out of the configuration
        if unknown:
            _log.warning("%s: ignoring unknown keys %s", tier_type, ", ".join(sorted(unknown)))
        if locality is not None and _LOCALITY is not None:
            self.locality = _LOCALITY(locality)
        self._name, self._timeout = namespace, float(timeout)
        self._offloading = read_spec(offloading_spec)
        self._counters = Counters(tier_type)
        self._complained: dict[str, tuple[float, int]] = {}
        self._lanes: dict[int, Lane] = {}
        self._transfers: dict[int, Transfer] = {}
        self._finished: list[Any] = []
        self._lookups = Lookups(self._lane, min(self._timeout, _LOOKUP_SECONDS), self._complain, self._reconnected)
        self._rows = Rows(primary_kv_view)
        try:
            self._pool = self._connect(address, token, getattr(offloading_spec, "config", None))
        except BaseException:
            self._rows.close()
            raise
        self._reconnects = 0
        self._closed = False
        _log.info(
            "%s: %d rows of %d bytes at %s, %s",
            tier_type,
            self._rows.count,
            self._rows.stride,
            address,
            "moved by the daemon" if self._rows.mapped else f"copied through the connection ({self._rows.why})",
        )

    def _connect(self, address: str, token: str | None, config: Any) -> Any:
        """Return a pool: with the rows as its regions if that can be."""
        options: dict[str, Any] = {
            "token": token,
            "name": "vllm-tier " + str(getattr(config, "engine_id", ""))[:64],
            "timeout": self._timeout,
            "shared": False,  # rows are moved by regions, or copied once: never through the store's memory
        }
        if not address.startswith("unix:") and self._rows.mapped:
            self._rows.unmap("the daemon is reached by TCP")
        if self._rows.mapped:
            try:
                return kvtier.connect(address, regions=self._rows.regions(), required=True, **options)
            except (kvtier.DisconnectedError, kvtier.DeadlineError) as error:
                _log.warning("%s: no daemon at %s yet (%s): all is a miss until there is one", self.tier_type, address, error)
                return kvtier.connect(address, regions=self._rows.regions(), required=False, **options)
            except kvtier.Error as error:  # what else is wrong shows without the regions, too
                _log.warning("%s: the daemon does not take the engine's memory as a region: %s", self.tier_type, error)
                self._rows.unmap("not taken as a region")
        return kvtier.connect(address, required=False, **options)

    # Namespaces.

    def _lane(self, group: int) -> Lane:
        lane = self._lanes.get(group)
        if lane is None:
            lane = self._lanes[group] = Lane(group, self._open, self._complain)
        lane.want()
        return lane

    def _open(self, lane: Lane) -> list[Any]:
        """Open a lane's namespaces. Runs in the lane's thread."""
        parts = self._rows.parts
        spaces = []
        for part, (_, length) in enumerate(parts):
            fields = self._offloading.descriptor(lane.group, length)
            name = self._offloading.name(self._name, fields, lane.group, part, len(parts))
            spaces.append(self._pool.open(name, **fields))
            _log.info("%s: group %d is in namespace %s: %s", self.tier_type, lane.group, name, fields)
        return spaces

    # Lookups.

    @_never_raises(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Answer whether a chunk is there, RETRY as long as the answer is out."""
        there = self._lookups.ask(bytes(key), req_context.req_id)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    @_never_raises(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Answer that chunks are offloaded as they come."""
        return RequestOffloadingContext()

    @_never_raises(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Drop what the request has asked for. Its transfers go on."""
        self._lookups.forget(req_context.req_id)

    @_never_raises(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Ask for the chunks of this step, all at once."""
        self._lookups.flush()
        self._advance()

    def _reconnected(self) -> bool:
        """Return whether the daemon was lost and is there again since the last call."""
        before, self._reconnects = self._reconnects, self._pool.stats().reconnects
        self._counters.add("reconnects", self._reconnects - before)
        return self._reconnects != before

    # Transfers.

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks from the engine's rows."""
        self._submit(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks into the engine's rows."""
        self._submit(job_metadata)

    def _submit(self, job: Any) -> None:
        try:
            if self._closed:
                raise kvtier.ClosedError("the tier is shut down")
            parents = {} if job.is_promotion else self._parents(job)
            transfer = Transfer(job, self._rows, self._lane, self._timeout, self._complain, parents)
        except Exception as error:  # vLLM waits for each job that it has submitted
            self._complain("job %s: %s: %s", job.job_id, type(error).__name__, error, exc_info=True)
            if job.is_promotion:
                self._lookups.failed(bytes(key) for key in job.keys)
            self._finished.append(_result(job_id=job.job_id, success=False))
            return
        self._transfers[transfer.id] = transfer
        self._advance()

    def _parents(self, job: Any) -> dict[bytes, bytes]:
        """Return the hash before each key's, where the request tells where its keys are (0.31 on)."""
        position = getattr(job.req_context, "get_offload_key_position", None)
        if position is None:
            return {}
        places = {}
        for key in (*self._lookups.asked_by(job.req_context.req_id), *(bytes(key) for key in job.keys)):
            end = position(key)
            if end is not None:
                places[key[-4:], end] = key
        parents = {}
        for (group, end), key in places.items():
            known = self._offloading.groups.get(int.from_bytes(group, "big"))
            before = places.get((group, end - known.tokens_per_chunk)) if known else None
            if before is not None:
                parents[key] = before[:-4]
        return parents

    @_never_raises(list)
    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended since the last call."""
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    def _advance(self) -> None:
        self._pool.completions()  # else the pool keeps jobs that have ended, with all their results
        for transfer in list(self._transfers.values()):
            try:
                transfer.advance()
            except Exception as error:  # a fault of this package: end the job rather than stop the engine
                self._complain("job %s: %s: %s", transfer.id, type(error).__name__, error, exc_info=True)
                transfer.cancel()
            if transfer.done:
                del self._transfers[transfer.id]
                self._finished.append(self._end(transfer))

    def _end(self, transfer: Transfer) -> Any:
        bad = [transfer.keys[i] for i in sorted(transfer.failed)]
        good = [key for i, key in enumerate(transfer.keys) if i not in transfer.failed]
        if transfer.load:
            self._lookups.loaded(good)
            self._lookups.failed(bad)
        else:
            self._lookups.stored(good)
        done, failed = ("loaded", "load_failures") if transfer.load else ("stored", "store_failures")
        self._counters.add(done + "_chunks", len(good))
        self._counters.add(done + "_bytes", transfer.bytes_moved)
        self._counters.add(failed, len(bad))
        return _result(
            job_id=transfer.id,
            success=not bad,
            successful_keys=tuple(good) if transfer.load and bad and good else None,
            transfer_time=time.monotonic() - transfer.since,
            transfer_bytes=transfer.bytes_moved,
        )

    @_never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Return whether there is something to poll for."""
        return bool(self._transfers or self._finished) or self._lookups.pending()

    def drain_jobs(self) -> None:
        """Wait until nothing touches the rows. What was not yet submitted fails."""
        for transfer in self._transfers.values():
            transfer.drop_waiting()
        while self._transfers:
            self._advance()
            for transfer in self._transfers.values():
                transfer.drop_waiting()
            if self._transfers:
                time.sleep(0.001)

    # Statistics.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics that get_stats tells."""
        return metric_definitions()

    @_never_raises(lambda: None)
    def get_stats(self) -> Any:
        """Return what was counted since the last call, None when it is nothing."""
        asked, hits = self._lookups.take_counts()
        self._counters.add("lookups", asked)
        self._counters.add("hits", hits)
        return self._counters.take(bool(self._pool.connected))

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the label of vLLM's info metric that this tier fills (0.33)."""
        return ("kvtier_transfer",)

    def config_info(self) -> dict[str, str]:
        """Return how bytes are moved: by regions, or copied."""
        return {"kvtier_transfer": "region" if self._rows.mapped else "copy"}

    def _complain(self, text: str, *args: Any, exc_info: bool = False) -> None:
        """Log a warning, but not the same one again and again."""
        now = time.monotonic()
        last, silent = self._complained.get(text, (-_COMPLAIN_SECONDS, 0))
        if now - last < _COMPLAIN_SECONDS:
            self._complained[text] = (last, silent + 1)
            return
        self._complained[text] = (now, 0)
        if silent:
            text += f" ({silent} more like this)"
        _log.warning("%s: " + text, self.tier_type, *args, exc_info=exc_info)

    def shutdown(self) -> None:
        """End loads, let stores end if they do so in time, and let go of the engine's memory."""
        if self._closed:
            return
        self._closed = True
        try:
            deadline = time.monotonic() + self._timeout
            for transfer in self._transfers.values():
                if transfer.load:
                    transfer.cancel()
            while self._transfers and time.monotonic() < deadline:
                self._advance()
                time.sleep(0.001)
            for transfer in self._transfers.values():
                transfer.cancel()
        except Exception as error:
            self._complain("shutdown: %s: %s", type(error).__name__, error, exc_info=True)
        self._pool.close()  # when it returns the daemon has let go of the regions
        for lane in self._lanes.values():
            lane.join()
        self._rows.close()


def _result(**fields: Any) -> Any:
    return JobResult(**{name: value for name, value in fields.items() if name in _RESULT_FIELDS})
