"""Tenants of one daemon, each of which is passed its own part of the memory."""

import hashlib
import json

import kvtier
from conftest import hashes

SIZE = 1 << 20
BLOCKS = 30  # all that there is room for, and more


def block(tenant, i):
    return hashlib.sha256(f"{tenant} {i}".encode()).digest() * (SIZE // 32)


def test_chunks_pass_on(daemons, tmp_path):
    """Chunks of memory pass from one tenant to the other and back: all that either gets is
    right, in place, what it has a view of stays mapped, and nothing of the other is there."""

    def digest(token):
        return hashlib.sha256(token.encode()).hexdigest()

    access = tmp_path / "access.json"
    access.write_text(
        json.dumps(
            {
                "identities": [
                    {"name": t, "token_sha256": digest(t), "read": [f"{t}-*"], "write": [f"{t}-*"]} for t in "ab"
                ]
                + [{"name": "op", "token_sha256": digest("op"), "read": ["*"], "write": ["*"]}]
            }
        )
    )
    token = tmp_path / "op"
    token.write_text("op")
    d = daemons(dram="32MiB", nvme="", extra=["--access", str(access), "--grace", "0s"])
    pools = {t: kvtier.connect(d.unix, token=t, required=True) for t in "ab"}
    spaces = {t: p.open(f"{t}-1", block_bytes=SIZE) for t, p in pools.items()}
    views = {"a": [], "b": []}
    for turn in range(4):
        t = "ab"[turn % 2]
        ns = spaces[t]
        keys = hashes(BLOCKS, seed=turn)
        for i, k in enumerate(keys):
            assert ns.put([k], [block(t, i)])[0].ok
            out = bytearray(SIZE)
            assert ns.get_into([k], [out])[0].hit and out == block(t, i)
        with ns.lease_read(keys[-1:], 10) as loan:
            assert loan.views[0] == block(t, BLOCKS - 1)
            views[t] += pools[t]._conn.memory._views.values()  # they stay mapped, gone or not
        names = [k.hex() for k in keys]
        d.command("rm", *names, "--namespace", f"{t}-1", "--token-file", str(token))  # its chunks are anybody's
    for t, other in ("ab", "ba"):
        # All that this tenant was ever passed, be it gone, has nothing of the other's.
        seen = [block(other, i)[:64] for i in range(BLOCKS)]
        for v in views[t] + [*pools[t]._conn.memory._views.values()]:
            whole = bytes(v)
            assert not any(x in whole for x in seen)
        assert pools[t].stats().in_place >= 2 * BLOCKS
        assert len(set(map(id, views[t]))) > 4  # some have passed on
    views.clear()
    for p in pools.values():
        p.close()
