"""store_kv, and the copying, gathering and scattering of blocks."""

from __future__ import annotations

import pytest
import torch

from longtail.kernels.kv import (
    copy_blocks,
    empty_kv,
    gather_blocks,
    scatter_blocks,
    store_kv,
    store_kv_reference,
)

LAYERS, BLOCKS = 3, 4


def make_kv(kv_heads: int, block: int, dim: int) -> torch.Tensor:
    """A cache whose every number is different, so that a stray write shows."""
    kv = empty_kv(BLOCKS, LAYERS, kv_heads, block, dim)
    return kv.copy_(torch.arange(kv.numel()).view_as(kv))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_empty_kv() -> None:
    kv = empty_kv(5, 2, 3, 16, 8)
    assert kv.shape == (5, 2, 2, 3, 128)
    assert kv.dtype == torch.float32
    assert kv.is_contiguous()
    assert not kv.any()


def test_store_kv_by_hand() -> None:
    """Slot 5 of blocks of 4 is block 1, offset 1. K lies [head dim, block], V lies [block, head dim]."""
    kv = torch.zeros(2, 1, 2, 1, 4 * 2)
    store_kv(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]), kv, 0, torch.tensor([5]), 4)
    assert kv[1, 0, 0, 0].tolist() == [0, 1, 0, 0, 0, 2, 0, 0]
    assert kv[1, 0, 1, 0].tolist() == [0, 0, 3, 4, 0, 0, 0, 0]
    assert not kv[0].any()


@pytest.mark.parametrize(("kv_heads", "block", "dim"), [(1, 16, 16), (2, 16, 4), (3, 32, 20), (1, 8, 10)])
@pytest.mark.parametrize("layer", [0, 2])
def test_store_kv_is_the_reference(kv_heads: int, block: int, dim: int, layer: int) -> None:
    slots = torch.tensor([3, -1, block, 4 * block - 1, 0, -1, 2 * block + 1])
    k, v = randn(7, kv_heads, dim, seed=1), randn(7, kv_heads, dim, seed=2)
    ours, theirs = make_kv(kv_heads, block, dim), make_kv(kv_heads, block, dim)
    store_kv(k, v, ours, layer, slots, block)
    store_kv_reference(k, v, theirs, layer, slots, block)
    assert torch.equal(ours, theirs)
    changed = (ours != make_kv(kv_heads, block, dim)).sum().item()
    assert changed == 5 * 2 * kv_heads * dim  # five slots, k and v, and nothing else


def test_store_kv_takes_views() -> None:
    """k and v come as slices of one projection."""
    both = randn(3, 2, 2, 8)
    ours, theirs = make_kv(2, 16, 8), make_kv(2, 16, 8)
    store_kv(both[:, 0], both[:, 1], ours, 0, torch.tensor([1, 2, 3]), 16)
    store_kv_reference(both[:, 0].clone(), both[:, 1].clone(), theirs, 0, torch.tensor([1, 2, 3]), 16)
    assert torch.equal(ours, theirs)


def test_store_kv_padding_only() -> None:
    kv = make_kv(2, 16, 4)
    store_kv(randn(3, 2, 4), randn(3, 2, 4), kv, 0, torch.full((3,), -1), 16)
    store_kv(randn(0, 2, 4), randn(0, 2, 4), kv, 0, torch.empty(0, dtype=torch.int64), 16)
    assert torch.equal(kv, make_kv(2, 16, 4))


# ---- blocks


def test_copy_blocks_copies_all_layers_and_nothing_else() -> None:
    kv, before = make_kv(2, 16, 4), make_kv(2, 16, 4)
    copy_blocks(kv, [(0, 3)])
    assert torch.equal(kv[3], before[0])
    assert torch.equal(kv[:3], before[:3])


def test_copy_blocks_runs_in_order() -> None:
    """0 -> 1 -> 2: the second copy sees the first one's result."""
    kv, before = make_kv(1, 16, 4), make_kv(1, 16, 4)
    copy_blocks(kv, [(0, 1), (1, 2)])
    assert torch.equal(kv[1], before[0])
    assert torch.equal(kv[2], before[0])
    copy_blocks(kv, [])
    assert torch.equal(kv[3], before[3])


def test_gather_blocks_is_a_copy_in_the_order_asked() -> None:
    kv = make_kv(2, 16, 4)
    data = gather_blocks(kv, [2, 0])
    assert data.is_contiguous()
    assert torch.equal(data[0], kv[2])
    assert torch.equal(data[1], kv[0])
    kv.zero_()
    assert data.any()


def test_scatter_blocks_inverts_gather_blocks() -> None:
    kv, before = make_kv(2, 16, 4), make_kv(2, 16, 4)
    data = gather_blocks(kv, [3, 1])
    kv[[3, 1]] = float("nan")
    scatter_blocks(kv, [3, 1], data)
    assert torch.equal(kv, before)
    scatter_blocks(kv, [0, 2], data)  # to another place: block 0 gets 3's, block 2 gets 1's
    assert torch.equal(kv[[0, 2]], before[[3, 1]])
    assert torch.equal(kv[[1, 3]], before[[1, 3]])


def test_gather_and_scatter_nothing() -> None:
    kv = make_kv(1, 16, 4)
    scatter_blocks(kv, [], gather_blocks(kv, []))
    assert torch.equal(kv, make_kv(1, 16, 4))
