"""A client that puts and reads blocks whose bytes can be told from their hashes, until its time is over.

usage: connector_client.py ADDRESS SECONDS SEED   ->  one line of JSON: {"puts":n,"hits":n,"misses":n,"wrong":n}
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time

import kvtier

BLOCK = 64 << 10
CHAIN = 8
CHAINS = 300  # 150 MiB in all, so that there is not room for them


def chain(number: int) -> list[bytes]:
    hashes = [hashlib.sha256(f"chain {number}".encode()).digest()]
    while len(hashes) < CHAIN:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


def block(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(64) * (BLOCK // 64)


def main(address: str, seconds: str, seed: str) -> None:
    choose, end = random.Random(int(seed)), time.monotonic() + float(seconds)
    counts = {"puts": 0, "hits": 0, "misses": 0, "wrong": 0}
    with kvtier.connect(address, required=True) as pool:
        space = pool.open("clients", model="none", block_bytes=BLOCK)
        buffers = [bytearray(BLOCK) for _ in range(CHAIN)]
        while time.monotonic() < end:
            hashes = chain(choose.randrange(CHAINS))
            match = space.match(hashes, lease=2.0)
            found = hashes[: match.prefix]
            for result, buffer, key in zip(space.get_into(found, buffers[: len(found)]), buffers, found):
                counts["hits" if result.hit else "misses"] += 1
                counts["wrong"] += result.hit and bytes(buffer) != block(key)
            missing = hashes[match.prefix :]
            if missing:
                puts = space.put(missing, [block(key) for key in missing], durable=choose.random() < 0.3)
                counts["puts"] += sum(put.stored for put in puts)
            if match.lease is not None:
                match.lease.release()
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
