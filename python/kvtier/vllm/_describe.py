"""Which namespace a rank's blocks of one KV cache group belong to.

Blocks may be exchanged between two engines only when everything that makes their bytes is the same. All of it
is in the descriptor of the namespace, so that the server keeps apart what differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence

#: How a group's blocks are needed for a prefix to count: all of them, or those of the window at its end.
FULL, WINDOW = "full", "window"


@dataclasses.dataclass(frozen=True)
class Group:
    """One KV cache group of one rank, as its worker sees it. It travels from the worker to the scheduler.

    Attributes:
        index: of the group in vLLM's KV cache config.
        kind: FULL or WINDOW.
        window: tokens of the sliding window, 0 for FULL.
        tokens: of a block.
        block_bytes: of a block, all layers of the group that the rank has.
    """

    index: int
    kind: str
    window: int
    tokens: int
    block_bytes: int
    model: str
    revision: str
    dtype: str
    layout: str
    hash_algorithm: str
    kv_group: str


@dataclasses.dataclass(frozen=True)
class Rank:
    """One worker: its place and its groups."""

    tp: int
    tp_size: int
    pp: int
    pp_size: int
    groups: tuple[Group, ...]


def descriptor(rank: Rank, group: Group, hash_seed: str) -> dict[str, str | int]:
    """The namespace's descriptor, as ``Pool.open`` takes it."""
    return {
        "model": group.model,
        "revision": group.revision,
        "dtype": group.dtype,
        "layout": group.layout,
        "tokens_per_block": group.tokens,
        "block_bytes": group.block_bytes,
        "hash_algorithm": group.hash_algorithm,
        "hash_seed": hash_seed,
        "rank_layout": f"tp{rank.tp}/{rank.tp_size} pp{rank.pp}/{rank.pp_size}",
        "kv_group": group.kv_group,
    }


def name(rank: Rank, group: Group, hash_seed: str, configured: str | None) -> str:
    """The namespace's name.

    Derived: ``vllm-MODEL-DIGEST``, the digest being over the whole descriptor. A configured name is taken as it
    is for an engine of one rank and one group; with several, each has the name and its place behind it.
    """
    if configured is None:
        fields = descriptor(rank, group, hash_seed)
        text = "\n".join(f"{key}={fields[key]}" for key in sorted(fields))
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", group.model.rstrip("/").rsplit("/", 1)[-1])[:48]
        return f"vllm-{model}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    place = ""
    if rank.tp_size * rank.pp_size > 1:
        place += f".tp{rank.tp}.pp{rank.pp}"
    if len(rank.groups) > 1:
        place += f".group{group.index}"
    return configured + place


def hashes_of(block_hashes: Sequence[bytes], hash_tokens: int, tokens: int, first: int, end: int) -> list[bytes]:
    """The hashes of a group's blocks from ``first`` up to ``end``.

    vLLM hashes once per ``hash_tokens`` and chains: where a group's block spans several of these, the last one
    identifies the block and all before it.
    """
    step = tokens // hash_tokens
    return [bytes(block_hashes[i * step + step - 1]) for i in range(first, end)]
