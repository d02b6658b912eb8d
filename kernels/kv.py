"""Writing, copying and moving paged KV.

Layout of the cache, one tensor for all layers so that a block is one contiguous piece of memory:

    kv: [num_blocks, layers, 2, kv_heads, block_size * head_dim]
         K (index 0) of a block is stored [head_dim, block_size]: scores vectorise over tokens
         V (index 1)            is stored [block_size, head_dim]: the output vectorises over channels

A *slot* is block * block_size + offset; slot -1 is a padding row and is not written.

The Triton kernels run where the cache is on a GPU. They only move elements (a cast to the cache's dtype is the one
arithmetic), so they equal the references bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from longtail.kernels._numba import jit
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl

STORE_TOKENS = 16
"""Tokens of a store_kv program: a prefill fills a block of 16 with full-width writes of the transposed K."""

MOVE_ELEMENTS = 4096
"""Elements of a block that one program copies: four (bfloat16) or eight (float32) 16-byte loads a thread."""


def empty_kv(num_blocks: int, layers: int, kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """A zeroed float32 cache (pages of zeros cost memory only when first written)."""
    return torch.zeros(num_blocks, layers, 2, kv_heads, block_size * head_dim)


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, layer: int, slots: torch.Tensor, block_size: int
) -> None:
    """k, v: [T, kv_heads, head_dim]; slots: int64 [T]. Writes in place."""
    heads, dim = k.shape[1], k.shape[2]
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            kv[block, layer, 0].view(heads, dim, block_size)[:, :, offset] = k[t]
            kv[block, layer, 1].view(heads, block_size, dim)[:, offset] = v[t]


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, layer: int, slots: torch.Tensor, block_size: int
) -> None:
    """k, v: [T, kv_heads, head_dim]; slots: int64 [T]. Writes in place. No two tokens may share a slot."""
    if kv.is_cuda:
        store_kv_triton(k, v, kv, layer, slots, block_size)
        return
    if kv.device.type != "cpu" or kv.dtype != torch.float32:
        store_kv_reference(k, v, kv, layer, slots, block_size)
        return
    _store_kv(k.contiguous().numpy(), v.contiguous().numpy(), kv.numpy(), layer, slots.numpy(), block_size)


@jit()
def _store_kv(k: Any, v: Any, kv: Any, layer: Any, slots: Any, block_size: Any) -> None:
    tokens, heads, dim = k.shape
    for t in range(tokens):
        if slots[t] < 0:
            continue
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for h in range(heads):
            for d in range(dim):
                kv[block, layer, 0, h, d * block_size + offset] = k[t, h, d]
                kv[block, layer, 1, h, offset * dim + d] = v[t, h, d]


def store_kv_triton(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, layer: int, slots: torch.Tensor, block_size: int
) -> None:
    """See `store_kv`; float32, float16 and bfloat16, k and v may differ from the cache."""
    tokens, heads, dim = k.shape
    if v.shape != k.shape or slots.shape != (tokens,) or kv.shape[2:] != (2, heads, block_size * dim):
        shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}, kv {tuple(kv.shape)}"
        raise ValueError(f"store_kv: shapes do not fit each other for blocks of {block_size}: {shapes}")
    if not kv.is_contiguous():
        raise ValueError("store_kv: the cache must be contiguous, as empty_kv makes it")
    if tokens == 0:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    with on_device_of(kv):
        _store_kv_kernel[(-(-tokens // STORE_TOKENS), heads)](
            k,
            v,
            kv[:, layer],  # a view: the layer becomes part of the pointer, and its number no reason to compile again
            slots.contiguous(),
            tokens,
            kv.shape[0] * block_size,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            kv.stride(0),
            HEADS=heads,
            DIM=dim,
            BLOCK_SIZE=block_size,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_T=STORE_TOKENS,
            num_warps=num_warps_for(STORE_TOKENS * next_power_of_2(dim)),
        )


@triton_jit
def _store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size * head_dim]
    slots: tl.tensor,
    tokens: tl.tensor,
    num_slots: tl.tensor,
    k_token: tl.tensor,  # strides, in elements
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    kv_block: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """A program stores one head of BLOCK_T tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + t, mask=t < tokens, other=-1).to(tl.int64)
    tl.device_assert(slot < num_slots, "store_kv: a slot lies beyond the cache")
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    mask = live[:, None] & (d < DIM)[None, :]
    key = tl.load(k + t[:, None] * k_token + head * k_head + d[None, :], mask=mask)
    value = tl.load(v + t[:, None] * v_token + head * v_head + d[None, :], mask=mask)
    base = slot // BLOCK_SIZE * kv_block + head * (BLOCK_SIZE * DIM)
    offset = slot % BLOCK_SIZE
    # K lies [head_dim, block_size]: transposed first, so that neighbouring threads write neighbouring tokens.
    k_out = kv + base[None, :] + d[:, None] * BLOCK_SIZE + offset[None, :]
    tl.store(k_out, tl.trans(key), mask=live[None, :] & (d < DIM)[:, None])
    v_out = kv + base[:, None] + HEADS * BLOCK_SIZE * DIM + offset[:, None] * DIM + d[None, :]
    tl.store(v_out, value, mask=mask)


def copy_blocks_reference(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """See `copy_blocks`."""
    for source, destination in pairs:
        kv[destination].copy_(kv[source])


def copy_blocks(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copies whole blocks, source to destination, in place and in order (copy-on-write)."""
    if kv.is_cuda:
        copy_blocks_triton(kv, pairs)
    else:
        copy_blocks_reference(kv, pairs)


def copy_blocks_triton(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """See `copy_blocks`. One launch, unless a pair touches what an earlier one wrote or overwrites what it read."""
    for wave in _independent(pairs):
        _move(kv, [source for source, _ in wave], kv, [destination for _, destination in wave])


def _independent(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in order, cut into runs that may be copied at the same time."""
    waves: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if source == destination:
            continue
        if not waves or source in written or destination in written or destination in read:
            waves.append([])
            read, written = set(), set()
        waves[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return waves


def gather_blocks_reference(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """See `gather_blocks`."""
    return kv[torch.tensor(blocks, dtype=torch.long)].cpu()


def gather_blocks(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """-> a contiguous host copy [len(blocks), layers, 2, kv_heads, block_size * head_dim]."""
    return gather_blocks_triton(kv, blocks) if kv.is_cuda else gather_blocks_reference(kv, blocks)


def gather_blocks_triton(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """See `gather_blocks`: gathered on the device, then one transfer."""
    out = kv.new_empty(len(blocks), *kv.shape[1:])
    _move(kv, blocks, out, list(range(len(blocks))))
    return out.cpu()


def scatter_blocks_reference(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """See `scatter_blocks`."""
    kv[torch.tensor(blocks, dtype=torch.long)] = data.to(kv.device)


def scatter_blocks(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """The inverse of `gather_blocks`, in place. No block may be listed twice."""
    if kv.is_cuda:
        scatter_blocks_triton(kv, blocks, data)
    else:
        scatter_blocks_reference(kv, blocks, data)


def scatter_blocks_triton(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """See `scatter_blocks`: one transfer, then scattered on the device."""
    if data.shape != (len(blocks), *kv.shape[1:]) or data.dtype != kv.dtype:
        wanted = f"{len(blocks)} blocks of {kv.dtype} {tuple(kv.shape[1:])}"
        raise ValueError(f"scatter_blocks: {wanted} wanted, got {data.dtype} {tuple(data.shape)}")
    _move(data.to(kv.device).contiguous(), list(range(len(blocks))), kv, blocks)


def _move(source: torch.Tensor, from_rows: list[int], destination: torch.Tensor, to_rows: list[int]) -> None:
    """destination[to_rows[i]] = source[from_rows[i]], all at once. Both contiguous, of one dtype and row shape."""
    if not (source.is_contiguous() and destination.is_contiguous()):
        raise ValueError("blocks can only be moved in a contiguous cache, as empty_kv makes it")
    for rows, tensor in ((from_rows, source), (to_rows, destination)):
        if wrong := [row for row in rows if not 0 <= row < tensor.shape[0]]:
            raise ValueError(f"block {wrong[0]} does not exist, there are {tensor.shape[0]}")
    if len(set(to_rows)) < len(to_rows):
        raise ValueError("a block is written twice: list each destination once")
    size = destination[:1].numel()
    if not to_rows or size == 0:
        return
    rows_of = torch.tensor([from_rows, to_rows], dtype=torch.long, device=destination.device)
    with on_device_of(destination):
        _move_kernel[(len(to_rows), -(-size // MOVE_ELEMENTS))](
            source, destination, rows_of, len(to_rows), size, CHUNK=MOVE_ELEMENTS, num_warps=4
        )


@triton_jit
def _move_kernel(
    source: tl.tensor,
    destination: tl.tensor,
    rows_of: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """A program copies CHUNK elements of one row."""
    pair = tl.program_id(0)
    column = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    from_row = tl.load(rows_of + pair)
    to_row = tl.load(rows_of + count + pair)
    mask = column < size
    tl.store(destination + to_row * size + column, tl.load(source + from_row * size + column, mask=mask), mask=mask)
