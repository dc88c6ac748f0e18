"""A long prefix that has gone to NVMe, or into object storage, comes back by prefetch, before it is needed.

    python long_context.py unix:/path/of/session.sock

The daemon needs less memory than the prefix and what is put behind it, so that the prefix leaves it: see run.sh.
"""

from __future__ import annotations

import collections
import hashlib
import sys
import time

import kvtier

BLOCK = 1 << 20  # bytes
PREFIX = 48  # blocks: of 128 tokens each, a context of 6144 tokens
OTHERS = 160  # blocks of other requests


def chain(prompt: str, count: int) -> list[bytes]:
    """Sequence hashes: each stands for its block and all before it."""
    hashes: list[bytes] = []
    for i in range(count):
        parent = hashes[-1] if hashes else b""
        hashes.append(hashlib.sha256(parent + f"{prompt} {i}".encode()).digest())
    return hashes


def block(key: bytes) -> bytes:
    """What an engine would have computed."""
    return hashlib.shake_128(key).digest(64) * (BLOCK // 64)


def put(space: kvtier.Namespace, hashes: list[bytes]) -> None:
    """Puts blocks, each answered when it is on NVMe."""
    for at in range(0, len(hashes), 16):
        part = hashes[at : at + 16]
        parents = [hashes[i - 1] if i else None for i in range(at, at + len(part))]
        failed = [r.error for r in space.put(part, [block(h) for h in part], parents=parents, durable=True) if not r.ok]
        if failed:
            raise SystemExit(f"put: {failed[0]}")


def tiers(space: kvtier.Namespace, hashes: list[bytes]) -> dict[str, int]:
    """Where the prefix is, in blocks of each tier."""
    match = space.match(hashes)
    return dict(collections.Counter(b.tier.name for b in match.blocks[: match.prefix]))


def read(space: kvtier.Namespace, hashes: list[bytes]) -> float:
    """Reads blocks, checks them, and gives the milliseconds that it took."""
    buffers = [bytearray(BLOCK) for _ in hashes]
    begun = time.perf_counter()
    results = space.get_into(hashes, buffers)
    took = (time.perf_counter() - begun) * 1e3
    if not all(r.hit and bytes(b) == block(h) for r, b, h in zip(results, buffers, hashes)):
        raise SystemExit("not the bytes that were put")
    return took


def main(address: str) -> None:
    with kvtier.connect(address, required=True) as pool:
        space = pool.open("long-context", model="example", block_bytes=BLOCK, tokens_per_block=128)
        prefix = chain("the document", PREFIX)
        put(space, prefix)
        print("stored   ", tiers(space, prefix))
        for i in range(OTHERS // 16):
            put(space, chain(f"another request {i}", 16))
        print("later    ", tiers(space, prefix))

        # A request with this document waits in the engine's queue: its blocks are brought up meanwhile. Where memory has
        # to make room first, blocks are put off with no_room, and asked for again.
        begun = time.perf_counter()
        reasons = space.prefetch(prefix)
        while "no_room" in reasons and time.perf_counter() < begun + 30:
            reasons = space.prefetch(prefix)
        took = (time.perf_counter() - begun) * 1e3
        print(f"prefetch  {reasons.count('hit')} of {PREFIX} blocks in {took:.0f} ms")
        print("now      ", tiers(space, prefix))
        print(f"read      {PREFIX} blocks in {read(space, prefix):.0f} ms, all bytes right")


if __name__ == "__main__":
    main(sys.argv[1])
