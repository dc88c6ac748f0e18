"""What the connector reads from vLLM's configuration, over its versions from 0.25 on."""

from __future__ import annotations

import os
from typing import Any

from ._describe import FULL, WINDOW, Group, Rank

_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"})
_WINDOW = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
#: The most bytes of a block that a kvtier server takes.
MAX_BLOCK_BYTES = 8 << 20


def hash_seed() -> str:
    """What the chain of block hashes begins with, in hex: the seed itself, whichever way vLLM came to it."""
    from vllm.v1.core import kv_cache_utils

    none = getattr(kv_cache_utils, "NONE_HASH", None)
    return bytes(none).hex() if none else ""


def hash_tokens(config: Any, caches: Any) -> int:
    """Tokens that each of ``request.block_hashes`` stands for."""
    known = getattr(caches, "hash_block_size", None)
    if known:
        return int(known)
    try:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    except ImportError:
        return int(config.cache_config.block_size)
    return int(resolve_kv_cache_block_sizes(caches, config)[1])


def rank_of(config: Any) -> Rank:
    """This worker's place."""
    from vllm.distributed import parallel_state

    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return Rank(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size, ())


def facts_of(config: Any, caches: Any, kv_caches: dict[str, Any]) -> list[tuple[Group, Any]]:
    """The groups of this worker and their memory. Raises ValueError, which says why the connector cannot serve them."""
    import vllm

    from ._memory import group_memory

    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    for axis in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, axis, 1) > 1:
            raise ValueError(f"{axis} is {getattr(parallel, axis)}")
    dtype = str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch.")
    if dtype.startswith("fp8") and getattr(cache, "calculate_kv_scales", False):
        raise ValueError("each process measures its own fp8 scales (calculate_kv_scales)")
    if not cache.enable_prefix_caching:
        raise ValueError("prefix caching is off, so blocks have no hashes")
    groups = [
        (i, g) for i, g in enumerate(caches.kv_cache_groups) if getattr(g.kv_cache_spec, "prefix_cacheable", True)
    ]
    if not groups:
        raise ValueError("no KV cache group can be shared")
    if len(caches.kv_cache_groups) > 1 and not _reports_failed_requests():
        raise ValueError("this vLLM cannot be told of failed loads with several KV cache groups")
    per_hash = hash_tokens(config, caches)
    facts: list[tuple[Group, Any]] = []
    for index, group in groups:
        spec, kind, window = _kind(index, group.kv_cache_spec)
        memory = group_memory(kv_caches, group.layer_names, caches.num_blocks)
        if memory.block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(
                f"a block of {spec.block_size} tokens has {memory.block_bytes} bytes, more than {MAX_BLOCK_BYTES}: "
                "start with a smaller --block-size"
            )
        algorithm = cache.prefix_caching_hash_algo
        device = memory.device.type
        version = ".".join(vllm.__version__.split(".")[:2])
        order = getattr(cache, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT") or "default"
        facts.append(
            (
                Group(
                    index=index,
                    kind=kind,
                    window=window,
                    tokens=spec.block_size,
                    block_bytes=memory.block_bytes,
                    model=str(model.model),
                    revision=_revision(model),
                    dtype=dtype,
                    layout=f"vllm {version} {device} {order} {_heads(spec)}{memory.layout(spec.block_size)}",
                    hash_algorithm=algorithm if per_hash == spec.block_size else f"{algorithm}/{per_hash}",
                    kv_group=f"{index}/{len(caches.kv_cache_groups)} {kind}" + (f" {window}" if window else ""),
                ),
                memory,
            )
        )
    return facts


def _heads(spec: Any) -> str:
    """How a token's bytes are divided, where vLLM says so."""
    heads, size = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
    return f"{heads} heads of {size}, " if heads and size else ""


def _revision(model: Any) -> str:
    """The revision of the weights, and how they are quantised: either makes other blocks."""
    parts = [str(p) for p in (getattr(model, "revision", None), getattr(model, "quantization", None)) if p]
    return " ".join(parts)


def _kind(index: int, spec: Any) -> tuple[Any, str, int]:
    """A group's representative spec, and how its blocks are needed."""
    each = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    names = {type(s).__name__ for s in each}
    if names <= _FULL:
        return each[0], FULL, 0
    if names <= _WINDOW and len({s.sliding_window for s in each}) == 1:
        return each[0], WINDOW, int(each[0].sliding_window)
    raise ValueError(f"KV cache group {index} is {', '.join(sorted(names))}")


def _reports_failed_requests() -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")
