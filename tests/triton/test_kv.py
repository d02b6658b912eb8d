"""The Triton kernels of kernels/kv.py: equal to the references bit for bit, as they only move elements."""

from __future__ import annotations

import pytest
import torch
from tests.triton.paged import randn
from triton.runtime.errors import InterpreterError

from longtail.kernels.kv import (
    _independent,
    copy_blocks_reference,
    copy_blocks_triton,
    empty_kv,
    gather_blocks_reference,
    gather_blocks_triton,
    scatter_blocks_reference,
    scatter_blocks_triton,
    store_kv_reference,
    store_kv_triton,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS, BLOCKS = 3, 5


def nan_kv(kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return empty_kv(BLOCKS, LAYERS, kv_heads, block_size, dim, layout="hnd", dtype=dtype).fill_(torch.nan)


def random_kv(dtype: torch.dtype, row: int = 10) -> torch.Tensor:
    return randn(BLOCKS, LAYERS, 2, 1, row, seed=3).to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 16, 21])
@pytest.mark.parametrize(("kv_heads", "block_size", "dim"), [(1, 16, 64), (3, 16, 20), (2, 8, 1), (1, 1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv(tokens: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> None:
    """First and last slot of the cache and of blocks, in no order, with padding rows among them."""
    slots = torch.randperm(BLOCKS * block_size, generator=torch.Generator().manual_seed(tokens))
    slots = slots.repeat(2)[:tokens] if tokens <= len(slots) else torch.cat([slots, -torch.ones(tokens - len(slots))])
    slots = slots[:tokens].long()
    if tokens > 1:
        slots[tokens // 2] = -1
    if (BLOCKS * block_size - 1) not in slots.tolist():
        slots[0] = BLOCKS * block_size - 1
    k, v = randn(tokens, kv_heads, dim, seed=1).to(dtype), randn(tokens, kv_heads, dim, seed=2).to(dtype)
    expected, actual = nan_kv(kv_heads, block_size, dim, dtype), nan_kv(kv_heads, block_size, dim, dtype)
    for layer in (0, LAYERS - 1):
        store_kv_reference(k, v, expected, layer, slots, block_size)
        store_kv_triton(k, v, actual, layer, slots, block_size)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("cache", DTYPES)
def test_store_kv_of_strided_views_in_another_dtype(source: torch.dtype, cache: torch.dtype) -> None:
    """k and v as slices of a fused projection, v with a stride between channels; slots of int32."""
    qkv, v = randn(7, 5, 24).to(source), randn(7, 2, 48, seed=1).to(source)[:, :, ::2]
    slots = torch.tensor([3, 9, 0, -1, 19, 5, 6], dtype=torch.int32)
    expected, actual = nan_kv(2, 4, 24, cache), nan_kv(2, 4, 24, cache)
    store_kv_reference(qkv[:, 2:4], v, expected, 1, slots, 4)
    store_kv_triton(qkv[:, 2:4], v, actual, 1, slots, 4)
    assert_same_bits(actual, expected)


def test_store_kv_of_no_tokens_and_of_padding_only() -> None:
    kv = nan_kv(2, 4, 8, torch.float32)
    store_kv_triton(torch.empty(0, 2, 8), torch.empty(0, 2, 8), kv, 0, torch.empty(0, dtype=torch.long), 4)
    store_kv_triton(torch.ones(3, 2, 8), torch.ones(3, 2, 8), kv, 0, torch.full((3,), -1), 4)
    assert kv.isnan().all()


def test_store_kv_of_a_slot_that_does_not_exist() -> None:
    kv = nan_kv(2, 4, 8, torch.float32)
    with pytest.raises(InterpreterError, match="a slot lies beyond the cache"):
        store_kv_triton(torch.ones(1, 2, 8), torch.ones(1, 2, 8), kv, 0, torch.tensor([BLOCKS * 4]), 4)


def test_store_kv_of_two_tokens_in_one_slot_is_a_race() -> None:
    kv, ones = nan_kv(1, 4, 8, torch.float32), torch.ones(17, 1, 8)
    slots = torch.arange(17)
    slots[16] = 2  # tokens 0 to 15 are another program's
    with pytest.raises(InterpreterError, match="race: program"):
        store_kv_triton(ones, ones, kv, 0, slots, 4)


@pytest.mark.parametrize("fault", ["v", "slots", "heads", "block size", "contiguous"])
def test_store_kv_names_what_does_not_fit(fault: str) -> None:
    kv, k, v, slots = nan_kv(2, 4, 8, torch.float32), torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.arange(3)
    v = v[:2] if fault == "v" else v
    slots = slots[:2] if fault == "slots" else slots
    k, v = (k[:, :1], v[:, :1]) if fault == "heads" else (k, v)
    kv = kv.transpose(0, 1).contiguous().transpose(0, 1) if fault == "contiguous" else kv
    with pytest.raises(ValueError, match="contiguous" if fault == "contiguous" else "shapes do not fit"):
        store_kv_triton(k, v, kv, 0, slots, 8 if fault == "block size" else 4)


@pytest.mark.parametrize(
    ("pairs", "waves"),
    [
        ([], []),
        ([(1, 1)], []),
        ([(0, 1), (0, 2), (3, 4)], [[(0, 1), (0, 2), (3, 4)]]),
        ([(0, 1), (1, 2)], [[(0, 1)], [(1, 2)]]),  # reads what was written
        ([(0, 1), (2, 0)], [[(0, 1)], [(2, 0)]]),  # overwrites what was read
        ([(0, 1), (2, 1), (3, 4)], [[(0, 1)], [(2, 1), (3, 4)]]),  # writes twice: the last one stays
    ],
)
def test_copies_are_cut_where_their_order_matters(
    pairs: list[tuple[int, int]], waves: list[list[tuple[int, int]]]
) -> None:
    assert _independent(pairs) == waves
    expected, actual = random_kv(torch.float32), random_kv(torch.float32)
    copy_blocks_reference(expected, pairs)
    copy_blocks_triton(actual, pairs)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("row", [1, 10, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_gather_and_scatter_blocks(row: int, dtype: torch.dtype) -> None:
    """Blocks of 6, 60 and 6,144 elements: less than one program's, and more."""
    kv = random_kv(dtype, row)
    expected, actual = kv.clone(), kv.clone()
    copy_blocks_reference(expected, [(0, 4), (2, 1)])
    copy_blocks_triton(actual, [(0, 4), (2, 1)])
    assert torch.equal(actual, expected)

    blocks = [4, 0, 4]
    gathered = gather_blocks_triton(kv, blocks)
    assert gathered.is_contiguous()
    assert torch.equal(gathered, gather_blocks_reference(kv, blocks))

    scatter_blocks_reference(expected, [4, 0], gathered[1:])
    scatter_blocks_triton(actual, [4, 0], gathered[1:])
    assert torch.equal(actual, expected)


def test_moving_no_blocks() -> None:
    kv = random_kv(torch.float32)
    before = kv.clone()
    copy_blocks_triton(kv, [])
    scatter_blocks_triton(kv, [], gather_blocks_triton(kv, []))
    assert torch.equal(kv, before)


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_does_not_exist_is_named(block: int) -> None:
    kv = random_kv(torch.float32)
    with pytest.raises(ValueError, match=f"block {block} does not exist, there are {BLOCKS}"):
        gather_blocks_triton(kv, [0, block])
    with pytest.raises(ValueError, match=f"block {block} does not exist, there are {BLOCKS}"):
        copy_blocks_triton(kv, [(0, block)])


def test_scatter_blocks_refuses_what_it_cannot_do() -> None:
    kv = random_kv(torch.float32)
    with pytest.raises(ValueError, match="written twice"):
        scatter_blocks_triton(kv, [1, 1], kv[:2])
    with pytest.raises(ValueError, match=r"2 blocks of torch\.float32"):
        scatter_blocks_triton(kv, [1, 2], kv[:1])
    with pytest.raises(ValueError, match=r"got torch\.float16"):
        scatter_blocks_triton(kv, [1], kv[:1].half())
