"""vLLM's own tiering around the tier, without an engine: spec, manager, factory, region."""

from __future__ import annotations

import glob
import hashlib
import inspect
import itertools
import signal
import time
from types import SimpleNamespace

import connector_rig
import numpy as np
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

try:
    from vllm.v1.kv_offload import config as settings  # 0.26
except ImportError:
    settings = None

HIT, MISS, RETRY, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING
PAGE = 1 << 17  # bytes of a row, two layers
_numbers = itertools.count()


class Daemon(connector_rig.Daemon):
    """A daemon that is also held up, and whose slab is damaged."""

    def __init__(self, directory, dram="64MiB", nvme="256MiB", *flags):
        super().__init__(directory, dram, nvme)
        self._arguments += flags

    def kill(self):
        self.stop(signal.SIGKILL)

    def restart(self):
        self.stop()
        self.start()

    def send(self, sig):
        self._process.send_signal(sig)

    def stat(self):
        return self.call("stat")

    def damage(self, content):
        """Change a byte of a block on the slab, while no daemon runs."""
        data = self.slab.read_bytes()
        assert data.count(content) == 1, "the block is not on the slab, or twice"
        at = data.index(content) + len(content) // 2
        with self.slab.open("r+b") as slab:
            slab.seek(at)
            slab.write(bytes([data[at] ^ 1]))


def cut(daemon):
    """Return what a proxy is to do: kill the daemon, and let nothing through of what it had sent before."""

    def then():
        daemon.kill()
        raise OSError("cut")

    return then


def regions():
    """Return the files of offload regions there are."""
    return set(glob.glob("/dev/shm/vllm_offload_*"))


def key(i, group=0):
    return make_offload_key(hashlib.sha256(b"key %d" % i).digest(), group)


def _make(cls, **values):
    """Construct one of vLLM's classes with those of the values that this version knows."""
    known = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in values.items() if name in known})


def _spec(tiers, rows, engine, groups, model, dtype, layout, page):
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": page * rows, "secondary_tiers": tiers}
    if settings is None:
        return TieringOffloadingSpec(*_vllm_0_25(extra, engine, groups, model, dtype, page))
    parallel = _make(
        settings.OffloadingParallelConfig,
        **dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1),
        **{"rank": 0, "data_parallel_index": 0, "data_parallel_rank_local": None, "is_parallelism_agnostic": True},
    )
    config = _make(
        settings.OffloadingConfig,
        groups=tuple(
            _make(settings.OffloadingGroupConfig, tokens_per_block=128, layer_names=(f"l{g}a", f"l{g}b"), group_id=g) for g in range(groups)
        ),
        worker_kv_bytes_per_block=page,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=engine,
        model=settings.OffloadingModelConfig(name=model, dtype=dtype),
        cache=settings.OffloadingCacheConfig(tokens_per_hash=128, blocks_per_chunk=1),
        parallel=parallel,
        kv_cache_layout=layout,
    )
    return TieringOffloadingSpec(config)


def _vllm_0_25(extra, engine, groups, model, dtype, page):
    """Return the parts of a VllmConfig and a KVCacheConfig that 0.25 reads."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    names = [[f"l{g}a", f"l{g}b"] for g in range(groups)]
    cache = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[KVCacheTensor(size=2 * page, shared_by=[name[i] for name in names]) for i in range(2)],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=name, kv_cache_spec=spec) for name in names],
    )
    vllm = SimpleNamespace(
        instance_id=engine,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, engine_id=engine),
        kv_events_config=None,
        use_v2_model_runner=False,
        model_config=SimpleNamespace(model=model, dtype=dtype, use_mla=False),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=128, enable_prefix_caching=True, hash_block_size=None, prefix_match_unit="block", mamba_cache_mode="none"
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0
        ),
    )
    return vllm, cache


class Engine:
    """What stands where an engine does: it offers chunks, drops them, and asks for them."""

    def __init__(self, address, rows=32, groups=1, model="m", dtype="bfloat16", layout="LBHNC", page=PAGE, **config):
        if "Medium" not in vars(base):  # before 0.28 the name is told by an entry point
            import kvtier.vllm

            kvtier.vllm.register()
        tier = {"type": "KvtierTier", "module_path": "kvtier.vllm", "address": address, "timeout": 5, **config}
        self.name = f"kvtier-test-{time.time_ns()}-{next(_numbers)}"
        self.spec = _spec([tier], rows, self.name, groups, model, dtype, layout, page)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        view = self.spec._scheduler_mmap.create_kv_memoryview()
        self.rows = np.frombuffer(view.cast("B"), np.uint8).reshape(view.shape)

    def attached(self):
        """Return whether there is a session, and in it every namespace that was opened."""
        spaces = [space for lane in self.tier._lanes.values() for space in lane.spaces or ()]
        return self.tier._pool.connected and all(space.is_open for space in spaces)

    def request(self, name=None):
        context = ReqContext(name or f"r{next(_numbers)}")
        self.manager.on_new_request(context)
        return context

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def until(self, condition, seconds=20.0):
        """Step until a condition holds; return how many steps that took."""
        end = time.monotonic() + seconds
        for n in itertools.count():
            if condition():
                return n
            assert time.monotonic() < end, "the engine makes no progress"
            self.step()
            time.sleep(0.001)

    def quiet(self):
        self.until(lambda: not self.manager.has_pending_work())

    def store(self, keys, contents, request=None):
        """Offload chunks as a finished forward pass does, and wait until the tier has them."""
        context = request or self.request()
        out = self.manager.prepare_store(keys, context)
        for k, row in zip(out.keys_to_store, self.chunks(out.store_spec)):
            self.rows[row] = contents[k]
        self.manager.complete_store(keys, context)
        self.quiet()
        if request is None:
            self.finish(context)

    @staticmethod
    def chunks(spec):
        return [int(row) for row in spec.block_ids]

    def finish(self, context):
        self.manager.on_request_finished(context)
        self.step()

    def drop(self):
        """Empty the primary tier: all must come from the secondary one."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()
        self.rows[:] = 0

    def find(self, keys, context, seconds=20.0):
        """Look chunks up as the scheduler does, until none is on its way; return the answers."""
        answers = []

        def settled():
            answers[:] = [self.manager.lookup(k, context) for k in keys]
            return not {RETRY, PENDING} & set(answers)

        self.until(settled, seconds)
        return list(answers)

    def read(self, keys, context):
        """Return the rows of chunks that were found."""
        spec = self.manager.prepare_load(keys, context)
        contents = [self.rows[row].copy() for row in self.chunks(spec)]
        self.manager.complete_load(keys, context)
        return contents

    def shutdown(self):
        self.rows = None
        self.manager.shutdown()


def contents(keys, seed=1, page=PAGE):
    rng = np.random.default_rng(seed)
    return {k: rng.integers(0, 256, page, np.uint8) for k in keys}
