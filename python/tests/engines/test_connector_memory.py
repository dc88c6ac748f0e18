"""Blocks of KV tensors as bytes: every arrangement that vLLM's backends have, gathered and scattered back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch (see make engines)")

from kvtier.vllm._memory import GroupMemory, Staging, Stream, group_memory

BLOCKS = 6


def fused() -> torch.Tensor:
    """Block, head, token, content: keys and values packed."""
    return torch.randn(BLOCKS, 2, 16, 32).to(torch.bfloat16)


def apart() -> torch.Tensor:
    """Keys and values in a dimension before the blocks."""
    return torch.randn(2, BLOCKS, 16, 2, 8)


def finer() -> torch.Tensor:
    """Kernels divide each block into four."""
    return torch.randn(BLOCKS * 4, 2, 4, 32)


def interleaved() -> torch.Tensor:
    """All layers of a block lie together: one layer's share is a view with gaps."""
    return torch.randn(BLOCKS, 3, 2, 16, 32)[:, 1]


def strided() -> torch.Tensor:
    """Token-major memory seen head-major."""
    return torch.randn(BLOCKS, 16, 2, 32).transpose(1, 2)


def bytes_of_8bits() -> torch.Tensor:
    return torch.randint(0, 255, (BLOCKS, 2, 16, 32), dtype=torch.uint8)


@pytest.mark.parametrize("make", [fused, apart, finer, interleaved, strided, bytes_of_8bits])
def test_blocks_come_back_where_they_are_put(make) -> None:
    layers = {"a": make(), "b": make()}
    memory = group_memory(layers, ["a", "b"], BLOCKS)
    assert memory.block_bytes == sum(t.numel() * t.element_size() for t in layers.values()) // BLOCKS
    staging = Staging(BLOCKS, memory.block_bytes, torch.device("cpu"))
    before = {name: t.clone() for name, t in layers.items()}
    for block in range(BLOCKS):
        memory.gather(block, staging.slot(block, memory.block_bytes))
    for block in range(BLOCKS):
        memory.scatter(staging.slot(block, memory.block_bytes), BLOCKS - 1 - block)
    for block in range(BLOCKS):
        memory.gather(BLOCKS - 1 - block, staging.slot(0, memory.block_bytes))
        want = b"".join(
            bytes(p.contiguous().view(torch.uint8).flatten().tolist())
            for p in (GroupMemory([before[n]], BLOCKS).parts[0].blocks[block] for n in layers)
        )
        assert bytes(staging.bytes(0, memory.block_bytes)) == want


def test_one_block_touches_no_other() -> None:
    tensor = apart()
    memory = GroupMemory([tensor], BLOCKS)
    before = tensor.clone()
    buffer = torch.zeros(memory.block_bytes, dtype=torch.uint8)
    memory.scatter(buffer, 2)
    assert not tensor[:, 2].any()
    tensor[:, 2] = before[:, 2]
    assert torch.equal(tensor, before)


def test_layers_that_share_memory_count_once() -> None:
    tensor = fused()
    assert GroupMemory([tensor, tensor], BLOCKS).block_bytes == GroupMemory([tensor], BLOCKS).block_bytes


def test_layout_tells_bytes_apart() -> None:
    def layout(*tensors: torch.Tensor, tokens: int = 16) -> str:
        return GroupMemory(tensors, BLOCKS).layout(tokens)

    different = {layout(make()) for make in (fused, apart, finer, bytes_of_8bits)}
    different |= {layout(fused(), fused()), layout(fused(), apart()), layout(apart(), fused())}
    assert len(different) == 7
    assert layout(interleaved()) == layout(strided()), "the same bytes when they are gathered"
    assert layout(fused()) == layout(torch.randn(BLOCKS, 2, 32, 32).to(torch.bfloat16), tokens=32), (
        "tokens are a field of their own"
    )
    assert layout(finer()) == layout(torch.randn(BLOCKS * 8, 2, 4, 32), tokens=32)


def test_what_is_not_made_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="not divided into 6 blocks"):
        GroupMemory([torch.zeros(5, 4)], BLOCKS)
    with pytest.raises(ValueError, match="the KV cache of a is list"):
        group_memory({"a": [torch.zeros(6, 4)]}, ["a"], BLOCKS)
    with pytest.raises(ValueError, match="no layer"):
        group_memory({}, [], BLOCKS)


def test_stream_on_the_cpu_does_nothing() -> None:
    stream = Stream(torch.device("cpu"))
    mark = stream.mark()
    stream.reach(mark)
    with stream.behind(mark):
        pass
