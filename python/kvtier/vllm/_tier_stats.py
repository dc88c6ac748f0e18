"""What the tier counts, and how vLLM shows it."""

from __future__ import annotations

from typing import Any

# Name after the prefix, and what it says.
_COUNTERS = {
    "lookups": "Chunks that were asked for in kvtier.",
    "hits": "Of those, chunks that were there.",
    "loaded_chunks": "Chunks loaded from kvtier.",
    "loaded_bytes": "Bytes loaded from kvtier.",
    "load_failures": "Chunks that were there by a lookup and could not be loaded; they are computed.",
    "stored_chunks": "Chunks that are in kvtier since a store, or were there before it.",
    "stored_bytes": "Bytes of those.",
    "store_failures": "Chunks that could not be stored in kvtier.",
    "reconnects": "Sessions with kvtier that were opened after one was lost.",
}
_PREFIX = "vllm:kv_offload_kvtier_"
_CONNECTED = _PREFIX + "connected"
_LABELS = ("tier",)


def metric_definitions() -> dict[str, Any]:
    """Return the metrics in the terms of vLLM's offloading."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    definitions: dict[str, Any] = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text, labelnames=_LABELS)
        for name, text in _COUNTERS.items()
    }
    definitions[_CONNECTED] = OffloadingGaugeMetadata(
        documentation="Whether there is a session with kvtier (1) or not (0).", labelnames=_LABELS
    )
    return definitions


class Counters:
    """Counts since vLLM last took them."""

    def __init__(self, tier: str) -> None:
        self._labels = (tier,)
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._connected: bool | None = None

    def add(self, name: str, n: int) -> None:
        self._counts[name] += n

    def take(self, connected: bool) -> Any:
        """Return what was counted as vLLM's stats, and begin anew; None when there is nothing to tell."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        if not any(self._counts.values()) and connected == self._connected:
            return None
        stats = OffloadingConnectorStats()
        for name, count in self._counts.items():
            if count:
                stats.increase_counter(_PREFIX + name, count, self._labels)
        stats.set_gauge(_CONNECTED, int(connected), self._labels)
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._connected = connected
        return stats
