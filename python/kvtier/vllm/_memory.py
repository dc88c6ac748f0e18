"""The engine's KV cache as blocks: the bytes of one block of a group, of all its layers, gathered into a buffer and
scattered from one.

With CUDA tensors the same code copies through pinned host memory: a gather is enqueued on the stream of the
forward pass, behind the kernels that wrote the blocks and before any that write them again; a scatter runs on a
stream of its own behind an event of that stream. That half was not run on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class _Part:
    """One layer's share of a block, and where it lies in the gathered bytes."""

    blocks: torch.Tensor  # dimension 0 counts blocks
    shape: tuple[int, ...]  # of one block
    finer: bool  # its first dimension counts kernels' blocks
    offset: int
    length: int


class GroupMemory:
    """The blocks of one KV cache group.

    Args:
        tensors: of the group's layers in the engine's order; layers that share memory count once.
        num_blocks: of the group, as its block ids count.

    Raises ValueError when a tensor is not divided into so many blocks.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        self.parts: list[_Part] = []
        self.device = tensors[0].device
        seen: set[tuple[Any, ...]] = set()
        offset = 0
        for tensor in tensors:
            same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if same in seen:
                continue
            seen.add(same)
            blocks = _by_block(tensor, num_blocks)
            shape = tuple(blocks.shape[1:])
            length = blocks[0].numel() * blocks.element_size()
            if offset % blocks.element_size():
                raise ValueError(f"a layer of {blocks.dtype} begins at byte {offset} of a block")
            self.parts.append(_Part(blocks, shape, blocks.dim() > tensor.dim(), offset, length))
            offset += length
        self.block_bytes = offset

    def gather(self, block: int, into: torch.Tensor) -> None:
        """Copies block's bytes into a buffer of block_bytes bytes. On CUDA the copy is only enqueued."""
        for part in self.parts:
            _view(into, part).copy_(part.blocks[block], non_blocking=True)

    def scatter(self, source: torch.Tensor, block: int) -> None:
        """Copies a buffer's bytes into block. On CUDA the copy is only enqueued."""
        for part in self.parts:
            part.blocks[block].copy_(_view(source, part), non_blocking=True)

    def layout(self, tokens: int) -> str:
        """Says what the bytes of a block of so many tokens are: the layers, and bytes per token, dimensions, kernel's
        block and type of each. The number of tokens itself is not in it, nor how the engine's memory is strided:
        gathered bytes are in the order of the dimensions."""
        each = []
        for part in self.parts:
            kernel = f"/kernel {tokens // part.shape[0]}" if part.finer else ""
            each.append(f"{part.length / tokens:g} B/{len(part.shape)} dimensions{kernel}/{_dtype(part.blocks.dtype)}")
        if len(set(each)) == 1:
            return f"{len(each)} x {each[0]}"
        return f"{len(each)} x {each[0]}, ... {hashlib.sha256(' '.join(each).encode()).hexdigest()[:12]}"


class Staging:
    """Host memory in slots of one size, page-locked where the KV cache is on a GPU."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self._memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = memoryview(self._memory.numpy())

    def slot(self, index: int, length: int) -> torch.Tensor:
        """The first ``length`` bytes of a slot, to gather into and scatter from."""
        return self._memory[index * self.slot_bytes : index * self.slot_bytes + length]

    def bytes(self, index: int, length: int) -> memoryview:
        """The same bytes, for the server."""
        return self._bytes[index * self.slot_bytes : index * self.slot_bytes + length]


class Stream:
    """Orders copies against the engine's kernels. On the CPU, where they are done when they return, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Any:
        """What has been enqueued on the calling thread's stream up to now."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def reach(mark: Any) -> None:
        """Waits until that is done."""
        if mark is not None:
            mark.synchronize()

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Copies enqueued within run after the mark, and are done at its end."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            if mark is not None:
                self._side.wait_event(mark)
            yield
        self._side.synchronize()


def group_memory(kv_caches: Mapping[str, Any], layers: Sequence[str], num_blocks: int) -> GroupMemory:
    """The memory of a group's layers. Raises ValueError for a cache that is not made of plain blocks."""
    tensors = []
    for layer in layers:
        tensor = kv_caches.get(layer)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"the KV cache of {layer} is {type(tensor).__name__}, not one tensor")
        tensors.append(tensor)
    if not tensors:
        raise ValueError("a KV cache group has no layer on this worker")
    return GroupMemory(tensors, num_blocks)


def _by_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view whose dimension 0 counts blocks. Kernels may divide a block further, in the same dimension; keys and
    values may be apart in a dimension before it."""
    for dim in range(tensor.dim()):
        if tensor.shape[dim] and tensor.shape[dim] % num_blocks == 0:
            view = tensor.movedim(dim, 0)
            if view.shape[0] == num_blocks:
                return view
            return view.unflatten(0, (num_blocks, -1))
    raise ValueError(f"a KV cache of shape {list(tensor.shape)} is not divided into {num_blocks} blocks")


def _view(buffer: torch.Tensor, part: _Part) -> torch.Tensor:
    return buffer[part.offset : part.offset + part.length].view(part.blocks.dtype).view(part.shape)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
