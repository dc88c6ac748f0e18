"""Puts some blocks, finds their prefix, reads them back in each way, and says how fast.

python roundtrip.py unix:/path/of/session.sock
"""

import os
import sys
import time

import kvtier

BLOCKS, BYTES = 16, 1 << 20


def main(address: str) -> None:
    with kvtier.connect(address, required=True) as pool:
        ns = pool.open("example-roundtrip", model="example", max_block_bytes=BYTES)
        keys = [os.urandom(16) for _ in range(BLOCKS)]
        blocks = [os.urandom(BYTES) for _ in range(BLOCKS)]
        began = time.perf_counter()
        puts = ns.put(keys, blocks, parents=[None, *keys[:-1]])
        seconds = time.perf_counter() - began
        print(f"put {sum(p.ok for p in puts)} of {BLOCKS} blocks, {BLOCKS * BYTES / seconds / 1e9:.2f} GB/s")
        found = ns.match(keys).prefix
        buffers = [bytearray(BYTES) for _ in range(found)]
        began = time.perf_counter()
        results = ns.get_into(keys[:found], buffers)
        seconds = time.perf_counter() - began
        right = all(r.hit and b == block for r, b, block in zip(results, buffers, blocks))
        print(f"got {found} of {BLOCKS} blocks, {found * BYTES / seconds / 1e9:.2f} GB/s, shared memory: {pool.shared}")
        if pool.shared:
            with ns.lease_read(keys[:1], seconds=10) as loan:
                right = right and loan.views[0] == blocks[0]
        print("ok" if right and found else "not what was put")


if __name__ == "__main__":
    main(sys.argv[1])
