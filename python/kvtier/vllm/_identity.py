"""What makes chunks of vLLM's offload tier interchangeable, as a namespace's descriptor.

Two engines share chunks only when all of this is the same.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import Any

_DEFAULT_SEED = "vllm-none-hash"
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
_ALGORITHMS = (*_CRYPTOGRAPHIC, "xxhash", "xxhash_cbor")


def hash_identity() -> tuple[str, str]:
    """Return the algorithm of vLLM's block hashes, and what stands for its seed.

    Both are told by the hash that stands before a first block, which is the hash of the
    seed and is known once the engine's core has started. The seed is told by its text
    when it is vLLM's default or PYTHONHASHSEED with an algorithm that needs no secret,
    else by a fingerprint: then it was drawn at random, for this process only.
    """
    from vllm.v1.core import kv_cache_utils

    first = getattr(kv_cache_utils, "NONE_HASH", None)
    if first is None:
        return "", ""
    fingerprint = "fingerprint:" + hashlib.sha256(bytes(first)).hexdigest()[:16]
    seeds = [s for s in (os.environ.get("PYTHONHASHSEED"), _DEFAULT_SEED) if s is not None]
    for algorithm in _ALGORITHMS:
        try:
            from vllm.utils.hashing import get_hash_fn_by_name

            function = get_hash_fn_by_name(algorithm)
            match = next((seed for seed in seeds if function(seed) == first), None)
        except Exception:  # an algorithm that this version, or this installation, lacks
            continue
        if match is not None:
            return algorithm, match if algorithm in _CRYPTOGRAPHIC else fingerprint
    return f"unknown-{8 * len(first)}", fingerprint


@dataclass(frozen=True)
class Group:
    """A group of layers that share block tables, as vLLM numbers it in a key's last four bytes."""

    tokens_per_chunk: int
    text: str


@dataclass(frozen=True)
class Offloading:
    """What vLLM's offloading spec says of the chunks, whichever version it is."""

    model: str
    dtype: str
    layout: str
    ranks: str
    groups: dict[int, Group]

    def name(self, override: str | None, fields: dict[str, Any], group: int, part: int, parts: int) -> str:
        """Return the name of the namespace of a part of a group's chunks.

        Made of the descriptor, vllm-tier-MODEL-DIGEST, so that engines that differ live
        side by side; or as it is wanted, and with several groups the group's number.
        """
        if override is None:
            text = "\n".join(f"{key}={fields[key]}" for key in sorted(fields))
            model = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model.rstrip("/").rsplit("/", 1)[-1])[:48]
            name = f"vllm-tier-{model}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        else:
            name = override + (f".group{group}" if len(self.groups) > 1 else "")
        return name + (f".part{part + 1}of{parts}" if parts > 1 else "")

    def descriptor(self, group: int, block_bytes: int) -> dict[str, Any]:
        """Return the fields of a group's descriptor but its name. Needs the engine's core, for the hash."""
        algorithm, seed = hash_identity()
        known = self.groups.get(group)
        return {
            "model": self.model,
            "dtype": self.dtype,
            "layout": self.layout,
            "tokens_per_block": known.tokens_per_chunk if known else 0,
            "block_bytes": block_bytes,
            "hash_algorithm": algorithm,
            "hash_seed": seed,
            "rank_layout": self.ranks,
            "kv_group": known.text if known else str(group),
        }


def read_spec(spec: Any) -> Offloading:
    """Read an OffloadingSpec: its config (0.26 on), or vLLM's own (0.25)."""
    config = getattr(spec, "config", None)
    return _read_config(config) if config is not None else _read_vllm(spec)


def _read_config(config: Any) -> Offloading:
    parallel = config.parallel
    layout = getattr(config, "kv_cache_layout", None) or "default"
    if getattr(config, "canonical_layout", False):
        layout = _canonical(layout)
    replicated = getattr(config, "replicated_layout", False)
    if parallel.is_parallelism_agnostic or replicated:
        ranks = "any" + (" replicated" if replicated else "")
    else:
        ranks = _ranks(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    chunk = config.cache.blocks_per_chunk
    groups = {
        getattr(group, "group_id", index): _group(index, len(config.groups), group.tokens_per_block, chunk, group.layer_names)
        for index, group in enumerate(config.groups)
    }
    return Offloading(config.model.name, config.model.dtype, f"chunk {layout}", ranks, groups)


def _read_vllm(spec: Any) -> Offloading:
    vllm, groups = spec.vllm_config, spec.kv_cache_config.kv_cache_groups
    parallel, dtype = vllm.parallel_config, vllm.cache_config.cache_dtype
    if dtype == "auto":
        dtype = vllm.model_config.dtype
    return Offloading(
        vllm.model_config.model,
        str(dtype).removeprefix("torch."),
        "chunk default",
        _ranks(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        ),
        {
            index: _group(index, len(groups), tokens, spec.block_size_factor, group.layer_names)
            for index, (group, tokens) in enumerate(zip(groups, spec.gpu_block_size))
        },
    )


def _group(index: int, count: int, tokens: int, blocks: int, layers: Any) -> Group:
    names = hashlib.sha256("\n".join(layers).encode()).hexdigest()[:12]
    return Group(tokens * blocks, f"{index + 1} of {count}, {len(layers)} layers {names}, {tokens} tokens x {blocks}")


def _ranks(tp: int, pp: int, pcp: int, dcp: int) -> str:
    return f"tp{tp} pp{pp} pcp{pcp} dcp{dcp}"


def _canonical(layout: str) -> str:
    """Return the name of vLLM's format of canonical pages, in which workers' layouts do not show."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

        return "canonical " + canonical_format_id(layout)
    except (ImportError, TypeError, KeyError):  # before 0.30 the format had no name for each layout
        return f"canonical {layout}"
