"""How an engine's loop uses jobs: it submits, polls, and never waits.

python engine_loop.py unix:/path/of/session.sock
"""

import os
import select
import sys

import kvtier

REQUESTS, BLOCKS, BYTES = 8, 4, 256 << 10


def main(address: str) -> None:
    with kvtier.connect(address) as pool:
        ns = pool.open("example-loop", model="example", max_block_bytes=BYTES)
        poll = select.poll()
        poll.register(pool.fileno(), select.POLLIN)
        requests = {i: [os.urandom(16) for _ in range(BLOCKS)] for i in range(REQUESTS)}
        running: "dict[int, tuple[str, int]]" = {}
        for i, keys in requests.items():
            job = ns.submit_put(keys, [keys[0] * (BYTES // 16)] * BLOCKS)
            running[job.id] = ("store", i)
        stored, loaded = 0, 0
        waiting = set(requests)  # for what they have, to be loaded
        ready: "set[int]" = set()
        while running or waiting:
            # This is where an engine computes; here it only waits for a moment.
            poll.poll(5)
            for job in pool.completions():
                kind, i = running.pop(job.id)
                good = job.error is None and all(r.ok if kind == "store" else r.hit for r in job.result())
                if kind == "store":
                    stored += good
                    ready.add(i)
                else:
                    loaded += good
            for i in sorted(waiting & ready):
                there = ns.lookup(requests[i])
                if there is None:
                    continue  # the answer is out: next time
                waiting.discard(i)
                n = there.index(False) if False in there else len(there)
                if n:
                    job = ns.submit_get_into(requests[i][:n], [bytearray(BYTES) for _ in range(n)])
                    running[job.id] = ("load", i)
        print(f"stored {stored} and loaded {loaded} of {REQUESTS} requests")
        print("ok" if loaded == REQUESTS else "some were missed")


if __name__ == "__main__":
    main(sys.argv[1])
