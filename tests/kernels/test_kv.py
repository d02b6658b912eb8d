"""store_kv, and the copying, gathering and scattering of blocks."""

from __future__ import annotations

import math

import pytest
import torch

from longtail.kernels.kv import (
    as_tokens,
    copy_blocks,
    empty_kv,
    empty_scales,
    gather_blocks,
    scatter_blocks,
    store_kv,
    store_kv_reference,
)
from longtail.kernels.kv_quant import dequantise_rows_reference, quantise_rows_reference

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


# ---- the 6-D layout, and 8 bits


def test_empty_kv_layouts() -> None:
    kv = empty_kv(5, 2, 3, 16, 8, layout="hnd", dtype=torch.bfloat16)
    assert kv.shape == (5, 2, 2, 3, 16, 8)
    assert kv.dtype == torch.bfloat16
    assert not kv.any()
    assert kv[:, 1].shape == (5, 2, 3, 16, 8)  # a page of FlashInfer's: [pages, 2, heads, page size, head dim]
    assert kv[:, 1, 0].transpose(1, 2).shape == (5, 16, 3, 8)  # of flash-attn's: [blocks, page size, heads, head dim]
    assert kv[:, 1, 0].transpose(1, 2).stride(-1) == 1
    assert empty_scales(5, 2, 3, 16).shape == (5, 2, 2, 3, 16)
    with pytest.raises(ValueError, match="layout must be 'cpu' or 'hnd', not 'nhd'"):
        empty_kv(5, 2, 3, 16, 8, layout="nhd")  # type: ignore[arg-type]


def test_store_kv_by_hand_in_the_6d_layout() -> None:
    kv = empty_kv(2, 1, 1, 4, 2, layout="hnd")
    store_kv(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]), kv, 0, torch.tensor([5]), 4)
    assert kv[1, 0, 0, 0].tolist() == [[0, 0], [1, 2], [0, 0], [0, 0]]
    assert kv[1, 0, 1, 0].tolist() == [[0, 0], [3, 4], [0, 0], [0, 0]]
    assert not kv[0].any()


CODES = [torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("code", [torch.float32, *CODES], ids=["float32", "e4m3", "int8"])
def test_both_layouts_hold_the_same(code: torch.dtype) -> None:
    slots = torch.tensor([3, -1, 16, 63, 0, -1, 33])
    k, v = randn(7, 2, 20, seed=1), randn(7, 2, 20, seed=2)
    held, scales = [], []
    for layout in ("cpu", "hnd"):
        kv = empty_kv(BLOCKS, LAYERS, 2, 16, 20, layout=layout, dtype=code)
        scales.append(None if code == torch.float32 else empty_scales(BLOCKS, LAYERS, 2, 16))
        store_kv(k, v, kv, 1, slots, 16, scales[-1])
        held.append([x.contiguous().view(torch.uint8) for x in as_tokens(kv, 16)])
    for ours, theirs in zip(*held, strict=True):
        assert torch.equal(ours, theirs)
    if scales[0] is not None and scales[1] is not None:
        assert torch.equal(scales[0], scales[1])
        assert int((scales[0] > 0).sum()) == 5 * 2 * 2  # slots, k and v, heads


def test_quantised_rows_by_hand() -> None:
    """int8: 127 steps of 0.5, ties to even. e4m3: 3 bits behind the point: 17 is a tie between 16 and 18."""
    codes, scales = quantise_rows_reference(torch.tensor([[63.5, -1.0, 0.25, 0.75, 0.0]]), torch.int8)
    assert scales.tolist() == [0.5]
    assert codes.tolist() == [[127, -2, 0, 2, 0]]
    codes, scales = quantise_rows_reference(torch.tensor([[448.0, 17.0, 19.0, -0.0009765625]]), torch.float8_e4m3fn)
    assert scales.tolist() == [1.0]
    assert codes.float().tolist() == [[448.0, 16.0, 20.0, 0.0]]


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
def test_quantised_rows_at_the_edges(code: torch.dtype) -> None:
    x = torch.zeros(6, 8)
    x[1], x[2, 0], x[3, 7], x[4, 2], x[5] = 3e38, math.nan, math.inf, -math.inf, 1e-42
    codes, scales = quantise_rows_reference(x, code)
    assert scales[0] == 0
    back = dequantise_rows_reference(codes, scales)
    assert not back[0].any()  # an all-zero row comes back as zeros
    assert back[2:5].isnan().all()  # what is broken stays visible
    assert back[[1, 5]].isfinite().all()
    torch.testing.assert_close(back[1], x[1])


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
def test_quantisation_is_good_to_half_a_step(code: torch.dtype) -> None:
    x = randn(200, 64) * torch.exp2(torch.arange(200.0) / 4 - 20)[:, None]
    back = dequantise_rows_reference(*quantise_rows_reference(x, code))
    most = x.abs().amax(-1, keepdim=True)
    if code == torch.int8:
        assert ((back - x).abs() <= most / 254 * 1.001).all()
    else:  # relative 2^-4, and 2^-10 of the scale below the smallest normal number
        assert ((back - x).abs() <= x.abs() / 16 * 1.001 + most / 448 / 1024 * 1.001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODES])
def test_blocks_of_any_cache_move(dtype: torch.dtype) -> None:
    """6-D caches of every dtype, and scales."""
    bits = torch.randint(0, 100, (BLOCKS, LAYERS, 2, 2, 16, 4), generator=torch.Generator().manual_seed(0))
    for cache in (bits.to(dtype), bits[..., 0].float()):
        before = cache.clone()
        copy_blocks(cache, [(0, 3), (3, 1)])
        data = gather_blocks(cache, [1, 2])
        scatter_blocks(cache, [2, 0], data)
        assert data.dtype == cache.dtype
        expected = before.float()[[2, 0, 0, 0]]
        assert torch.equal(cache.float(), expected)


def test_scales_belong_to_8_bit_caches() -> None:
    k, slots, scales = torch.ones(1, 1, 8), torch.tensor([0]), empty_scales(2, 1, 1, 4)
    for layout in ("cpu", "hnd"):
        kv = empty_kv(2, 1, 1, 4, 8, layout=layout, dtype=torch.int8)
        with pytest.raises(ValueError, match="empty_scales makes them"):
            store_kv(k, k, kv, 0, slots, 4)
        with pytest.raises(ValueError, match=r"float32 \(2, 1, 2, 1, 4\)"):
            store_kv(k, k, kv, 0, slots, 4, scales.double())
        with pytest.raises(ValueError, match=r"torch\.float32 has no scales"):
            store_kv(k, k, kv.float(), 0, slots, 4, scales)
