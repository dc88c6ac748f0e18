"""The connector's counts as vLLM's statistics and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ._counters import COUNTERS, DURATIONS

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class KvtierStats(KVConnectorStats):
    """Counts of one interval, of one or several workers and the scheduler."""

    def reset(self) -> None:
        """Forgets all."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another's counts to these."""
        for key, value in other.data.items():
            mine = self.data.get(key)
            self.data[key] = value if mine is None else mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in few numbers, for the engine's log."""
        few: dict[str, int | float] = {}
        for key, value in sorted(self.data.items()):
            if isinstance(value, list):
                if value:
                    few[f"{key}_max"] = round(max(value), 4)
            else:
                few[key] = value
        return few


class KvtierPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_*``: one counter for each of COUNTERS, one histogram for each of DURATIONS, for each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            key: self._counter_cls(name=f"vllm:kvtier_{key}", documentation=text, labelnames=labelnames)
            for key, text in COUNTERS.items()
        }
        self._histograms = {
            key: self._histogram_cls(
                name=f"vllm:kvtier_{key}", documentation=text, buckets=_BUCKETS, labelnames=labelnames
            )
            for key, text in DURATIONS.items()
        }
        for labels in per_engine_labelvalues.values():  # so that they are there, and 0, before anything happens
            for metric in (*self._counters.values(), *self._histograms.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval's counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key in self._counters:
                self._counters[key].labels(*labels).inc(value)
            elif key in self._histograms:
                for seconds in value:
                    self._histograms[key].labels(*labels).observe(seconds)
