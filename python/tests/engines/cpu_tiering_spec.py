"""vLLM's TieringOffloadingSpec on CPUs: named by spec_name CpuTieringSpec and spec_module_path cpu_tiering_spec.

vLLM builds the worker that copies between the KV cache and the rows of host memory for
GPUs only. This one copies on the CPU, at once; all else is vLLM's own: the connector,
the manager, the region, the tiers.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies pages between blocks of the KV cache and chunks of the region."""

    def __init__(self, caches, blocks_per_chunk, region):
        self._caches, self._per_chunk, self._region = caches, blocks_per_chunk, region
        self._blocks, self._chunks, self._finished = [], [], []
        for cache in caches.tensors:
            pages = cache.tensor.view(torch.int8).reshape(cache.tensor.shape[0], -1)
            if pages.data_ptr() != cache.tensor.data_ptr():
                raise ValueError("a KV cache tensor with gaps")
            self._blocks.append(pages)
            self._chunks.append(region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk))

    def _pages(self, blocks, chunks):
        """Yield each page in the KV cache, and its place in the region."""
        block_ids, chunk_ids = iter(blocks.block_ids.tolist()), iter(chunks.block_ids.tolist())
        for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices)):
            for position in range(first, first + size):
                block, slot = next(block_ids), position % self._per_chunk
                if slot == 0 or position == first:
                    chunk = next(chunk_ids)
                for ref in self._caches.group_data_refs[group]:
                    page = ref.page_size_bytes
                    yield (
                        self._blocks[ref.tensor_idx][block, :page],
                        self._chunks[ref.tensor_idx][chunk, slot * page : (slot + 1) * page],
                    )

    def _transfer(self, job_id, pairs):
        began, moved = time.monotonic(), 0
        for to, source in pairs:
            to.copy_(source)
            moved += source.numel()
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=time.monotonic() - began)
        )
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._transfer(job_id, ((row, page) for page, row in self._pages(src_spec, dst_spec)))

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._transfer(job_id, self._pages(dst_spec, src_spec))

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        return

    def shutdown(self):
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """The spec with that worker."""

    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
