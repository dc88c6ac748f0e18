"""The calls with await."""

import asyncio
import time

import pytest

import kvtier
from conftest import PATIENCE, WAYS, fresh_name, hashes, pattern
from kvtier import aio


@pytest.mark.parametrize("way", WAYS)
def test_aio(shared_daemon, way):
    async def main():
        address = shared_daemon.tcp if way == "tcp" else shared_daemon.unix
        async with await aio.connect(address, shared=way == "shared", required=True) as pool:
            assert pool.connected and pool.shared == (way == "shared")
            ns = await pool.open(fresh_name(), model="m", max_block_bytes=1 << 20)
            keys = hashes(8)
            blocks = [pattern(100_000, i) for i in range(8)]
            puts = await asyncio.gather(*(ns.put([k], [b]) for k, b in zip(keys, blocks)))
            assert all(p[0].stored for p in puts)
            out = [bytearray(100_000) for _ in keys]
            gets = await asyncio.gather(*(ns.get_into([k], [o]) for k, o in zip(keys, out)))
            assert all(g[0].hit for g in gets) and [bytes(o) for o in out] == blocks
            m = await ns.match(keys, lease=5)
            assert m.prefix == 8
            m.lease.release()
            assert (await pool.match_all([(ns, keys)]))[0] == 8
            assert await ns.prefetch(keys, priority=3, within=60.0) == ["hit"] * 8
            assert (await ns.match(keys, conversation="chat")).prefix == 8
            assert await ns.report_prefill(0, 512, 0.02)
            places = await ns.reserve([10])
            places[0].buffer[:] = b"0123456789"
            assert (await ns.commit(places, hashes(1, seed=1)))[0].stored
            assert (await ns.pin(keys))[0] is None and (await ns.unpin(keys))[0] is None
            assert len(await ns.locate(keys)) == 8
            loan = await ns.lease_read(keys, 5)
            assert (loan.views[0] is not None) == pool.shared
            loan.release()
            with pytest.raises(kvtier.MismatchError):
                await pool.open(ns.name, model="other", max_block_bytes=1 << 20)
            with pytest.raises(kvtier.InvalidError):
                await ns.match([b"1"])
            async with ns.watch() as events:
                assert (await events.__anext__()).kind == "start"
                await ns.put(hashes(1, seed=2), [b"x"])
                assert (await events.__anext__()).hash == hashes(1, seed=2)[0]
            async for _ in ns.watch(timeout=0.1):
                pass
            # A task that is cancelled goes on when its memory is quiet.
            out = [bytearray(100_000) for _ in keys]
            task = asyncio.create_task(ns.get_into(keys, out))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for o in out:
                o[:] = b"\xcc" * len(o)
            await asyncio.sleep(0.02)
            assert all(bytes(o) == b"\xcc" * len(o) for o in out)

    asyncio.run(main())


def test_a_watch_that_is_cancelled(shared_daemon):
    """An event that comes for a wait that was cancelled is the next one's, and nothing waits
    for a watch that was left open."""

    async def run():
        pool = await aio.connect(shared_daemon.unix, required=True)
        async with pool:
            ns = await pool.open(fresh_name(), max_block_bytes=4096)
            watch = ns.watch()
            assert (await watch.__anext__()).kind == "start"
            for _ in range(20):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(watch.__anext__(), 0.005)
            keys = hashes(3)
            await ns.put(keys, [b"x" * 100] * 3)
            events = [await asyncio.wait_for(watch.__anext__(), PATIENCE) for _ in keys]
            assert sorted(e.hash for e in events) == keys
            left_open = ns.watch()
            await left_open.__anext__()
            waiting = asyncio.ensure_future(left_open.__anext__())
            await asyncio.sleep(0.05)
            await watch.close()
            assert [e async for e in watch] == []
        with pytest.raises(kvtier.Error):
            await asyncio.wait_for(waiting, PATIENCE)

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 10
