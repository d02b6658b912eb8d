"""Writing, copying and moving paged KV.

One tensor holds all layers, so that a block is one contiguous piece of memory. There are two layouts, told apart by
their rank:

    5-D, "cpu": [num_blocks, layers, 2, kv_heads, block_size * head_dim], for the CPU kernels
                K (index 0) of a block is stored [head_dim, block_size]: scores vectorise over tokens
                V (index 1)            is stored [block_size, head_dim]: the output vectorises over channels
    6-D, "hnd": [num_blocks, layers, 2, kv_heads, block_size, head_dim], for the Triton kernels
                kv[:, layer] is a page layout of FlashInfer and vLLM ("HND"), and kv[:, layer, i].transpose(1, 2) one
                that flash-attn takes; both are views

The references take both. A *slot* is block * block_size + offset; slot -1 is a padding row and is not written.

A cache of float8_e4m3fn or int8 comes with scales, float32 [num_blocks, layers, 2, kv_heads, block_size]
(kernels/kv_quant.py). Whole blocks of scales are copied, gathered and scattered like those of the cache.

The Triton kernels run where the cache is on a GPU. Their results equal the references' bit for bit: without scales they
only move elements (a cast to the cache's dtype is the one arithmetic), with scales every operation rounds as IEEE says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from longtail.kernels._checks import beyond_cache, check_devices, check_layer, check_slots
from longtail.kernels._numba import jit
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl
from longtail.kernels.kv_quant import (
    as_bytes,
    check_cache_dtype,
    check_scales,
    code_format,
    quantise_rows,
    quantise_rows_reference,
)

STORE_TOKENS = 16
"""Tokens of a store_kv program: enough for full-width accesses by a whole block of threads."""

MOVE_ELEMENTS = 4096
"""Elements of a block that one program copies: two (8 bits), four (16) or eight (32) 16-byte loads a thread."""


def empty_kv(
    num_blocks: int,
    layers: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    layout: Literal["cpu", "hnd"] = "cpu",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A zeroed cache in one of the layouts above (on the CPU, pages of zeros cost memory only when first written).

    dtype: float32, float16, bfloat16, or float8_e4m3fn and int8, which come with `empty_scales`."""
    if layout not in ("cpu", "hnd"):
        raise ValueError(f"empty_kv: layout must be 'cpu' or 'hnd', not {layout!r}")
    check_cache_dtype("empty_kv", dtype)
    block = (block_size * head_dim,) if layout == "cpu" else (block_size, head_dim)
    return torch.zeros(num_blocks, layers, 2, kv_heads, *block, dtype=dtype, device=device)


def empty_scales(
    num_blocks: int, layers: int, kv_heads: int, block_size: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Zeroed scales for a quantised cache: float32 [num_blocks, layers, 2, kv_heads, block_size]."""
    return torch.zeros(num_blocks, layers, 2, kv_heads, block_size, device=device)


def as_tokens(kv: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of either layout -> views of K and V, both [num_blocks, layers, kv_heads, block_size, head_dim]."""
    if kv.dim() == 6:
        return kv[:, :, 0], kv[:, :, 1]
    k = kv[:, :, 0].unflatten(-1, (-1, block_size)).transpose(-1, -2)
    return k, kv[:, :, 1].unflatten(-1, (block_size, -1))


def _check_store(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    scales: torch.Tensor | None,
) -> None:
    tokens, heads, dim = k.shape
    block = (block_size * dim,) if kv.dim() == 5 else (block_size, dim)
    if v.shape != k.shape or slots.shape != (tokens,) or kv.shape[2:] != (2, heads, *block):
        shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}, kv {tuple(kv.shape)}"
        raise ValueError(f"store_kv: shapes do not fit each other for blocks of {block_size}: {shapes}")
    check_layer("store_kv", layer, kv)
    check_devices("store_kv", kv=kv, k=k, v=v, slots=slots)
    check_scales("store_kv", kv, scales, block_size)


def store_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    scales: torch.Tensor | None = None,
) -> None:
    """See `store_kv`; either layout, any device and dtype."""
    _check_store(k, v, kv, layer, slots, block_size, scales)
    check_slots("store_kv", slots, kv.shape[0] * block_size)
    live = slots >= 0
    block, offset = slots[live].long() // block_size, slots[live].long() % block_size
    for i, (rows, cache) in enumerate(zip((k, v), as_tokens(as_bytes(kv), block_size), strict=True)):
        values = rows[live]
        if scales is not None:
            values, scales[block, layer, i, :, offset] = quantise_rows_reference(values, kv.dtype)
        cache[block, layer, :, offset] = as_bytes(values.to(kv.dtype))


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    scales: torch.Tensor | None = None,
) -> None:
    """k, v: [T, kv_heads, head_dim]; slots: int64 [T]. Writes in place. No two tokens may share a slot.

    On a GPU the cache must be 6-D. scales belong to a quantised cache and are written with it. ValueError, with nothing
    written: shapes that do not fit each other, a layer and (on the CPU) a slot that do not exist, a cache of a dtype
    that `empty_kv` does not make.
    """
    if kv.is_cuda:
        store_kv_triton(k, v, kv, layer, slots, block_size, scales)
        return
    floats = kv.dtype == k.dtype == v.dtype == torch.float32
    if not floats or kv.device.type != "cpu" or kv.dim() != 5 or scales is not None:
        store_kv_reference(k, v, kv, layer, slots, block_size, scales)
        return
    _check_store(k, v, kv, layer, slots, block_size, scales)
    wrong = _store_kv(k.contiguous().numpy(), v.contiguous().numpy(), kv.numpy(), layer, slots.numpy(), block_size)
    if wrong >= 0:
        raise beyond_cache("store_kv", wrong, int(slots[wrong]), kv.shape[0] * block_size)


@jit()
def _store_kv(k: Any, v: Any, kv: Any, layer: Any, slots: Any, block_size: Any) -> Any:
    """-> the first row whose slot lies beyond the cache, and nothing is written; -1: all is."""
    tokens, heads, dim = k.shape
    for t in range(tokens):
        if slots[t] >= kv.shape[0] * block_size:
            return t
    for t in range(tokens):
        if slots[t] < 0:
            continue
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for h in range(heads):
            for d in range(dim):
                kv[block, layer, 0, h, d * block_size + offset] = k[t, h, d]
                kv[block, layer, 1, h, offset * dim + d] = v[t, h, d]
    return -1


def store_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    scales: torch.Tensor | None = None,
) -> None:
    """See `store_kv`; a 6-D cache; float32, float16 and bfloat16, k and v may differ from the cache."""
    if kv.dim() != 6:
        raise ValueError(
            "store_kv: the Triton kernel takes a 6-D cache [num_blocks, layers, 2, kv_heads, block_size, head_dim], "
            f"got {tuple(kv.shape)}: make it with empty_kv(..., layout='hnd')"
        )
    _check_store(k, v, kv, layer, slots, block_size, scales)
    if not kv.is_contiguous():
        raise ValueError("store_kv: the cache must be contiguous, as empty_kv makes it")
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    form, kv = code_format(kv.dtype), as_bytes(kv)
    with on_device_of(kv):
        _store_kv_kernel[(-(-tokens // STORE_TOKENS), heads)](
            k,
            v,
            kv[:, layer],  # a view: the layer becomes part of the pointer, and its number no reason to compile again
            None if scales is None else scales[:, layer],
            slots.contiguous(),
            tokens,
            kv.shape[0] * block_size,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            kv.stride(0),
            0 if scales is None else scales.stride(0),
            HEADS=heads,
            DIM=dim,
            BLOCK_SIZE=block_size,
            FORMAT=form,
            BLOCK_D=next_power_of_2(dim),
            BLOCK_T=STORE_TOKENS,
            num_warps=num_warps_for(STORE_TOKENS * next_power_of_2(dim)),
        )


@triton_jit
def _store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size, head_dim]
    scales: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size], or None
    slots: tl.tensor,
    tokens: tl.tensor,
    num_slots: tl.tensor,
    k_token: tl.tensor,  # strides, in elements
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    kv_block: tl.tensor,
    scales_block: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,  # see code_format
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
    key = tl.load(k + t[:, None] * k_token + head * k_head + d[None, :], mask=mask, other=0.0)
    value = tl.load(v + t[:, None] * v_token + head * v_head + d[None, :], mask=mask, other=0.0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_out = kv + block * kv_block + head * (BLOCK_SIZE * DIM) + offset * DIM
    v_out = k_out + HEADS * BLOCK_SIZE * DIM
    if FORMAT != "":
        key, key_scale = quantise_rows(key.to(tl.float32), FORMAT)
        value, value_scale = quantise_rows(value.to(tl.float32), FORMAT)
        scale_out = scales + block * scales_block + head * BLOCK_SIZE + offset
        tl.store(scale_out, key_scale, mask=live)
        tl.store(scale_out + HEADS * BLOCK_SIZE, value_scale, mask=live)
    tl.store(k_out[:, None] + d[None, :], key, mask=mask)
    tl.store(v_out[:, None] + d[None, :], value, mask=mask)


def copy_blocks_reference(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """See `copy_blocks`."""
    for rows in zip(*pairs, strict=True):
        _check_blocks("copy_blocks", rows, kv)
    kv = as_bytes(kv)
    for source, destination in pairs:
        kv[destination].copy_(kv[source])


def copy_blocks(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copies whole blocks, source to destination, in place and in order (copy-on-write).

    kv: any contiguous tensor [num_blocks, ...]: a cache of either layout, or its scales. ValueError, with nothing
    copied: a block that does not exist.
    """
    if kv.is_cuda:
        copy_blocks_triton(kv, pairs)
    else:
        copy_blocks_reference(kv, pairs)


def copy_blocks_triton(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """See `copy_blocks`. One launch, unless a pair touches what an earlier one wrote or overwrites what it read."""
    for rows in zip(*pairs, strict=True):
        _check_blocks("copy_blocks", rows, kv)
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
    _check_blocks("gather_blocks", blocks, kv)
    return as_bytes(kv)[torch.tensor(blocks, dtype=torch.long)].cpu().view(kv.dtype)


def gather_blocks(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """kv: as for `copy_blocks` -> a contiguous host copy [len(blocks), ...]. ValueError: a block that does not
    exist."""
    return gather_blocks_triton(kv, blocks) if kv.is_cuda else gather_blocks_reference(kv, blocks)


def gather_blocks_triton(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """See `gather_blocks`: gathered on the device, then one transfer."""
    _check_blocks("gather_blocks", blocks, kv)
    out = kv.new_empty(len(blocks), *kv.shape[1:])
    _move(kv, blocks, out, list(range(len(blocks))))
    return out.cpu()


def scatter_blocks_reference(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """See `scatter_blocks`."""
    _check_scatter(kv, blocks, data)
    as_bytes(kv)[torch.tensor(blocks, dtype=torch.long)] = as_bytes(data.to(kv.device))


def scatter_blocks(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """The inverse of `gather_blocks`, in place. ValueError, with nothing written: a block that does not exist or is
    listed twice, data of another dtype or shape."""
    if kv.is_cuda:
        scatter_blocks_triton(kv, blocks, data)
    else:
        scatter_blocks_reference(kv, blocks, data)


def scatter_blocks_triton(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """See `scatter_blocks`: one transfer, then scattered on the device."""
    _check_scatter(kv, blocks, data)
    _move(data.to(kv.device).contiguous(), list(range(len(blocks))), kv, blocks)


def _check_blocks(op: str, blocks: Sequence[int], kv: torch.Tensor) -> None:
    if len(blocks) and not 0 <= min(blocks) <= max(blocks) < kv.shape[0]:
        wrong = next(block for block in blocks if not 0 <= block < kv.shape[0])
        raise ValueError(f"{op}: block {wrong} does not exist, there are {kv.shape[0]}")


def _check_scatter(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    if data.shape != (len(blocks), *kv.shape[1:]) or data.dtype != kv.dtype:
        wanted = f"{len(blocks)} blocks of {kv.dtype} {tuple(kv.shape[1:])}"
        raise ValueError(f"scatter_blocks: {wanted} wanted, got {data.dtype} {tuple(data.shape)}")
    _check_blocks("scatter_blocks", blocks, kv)
    if len(set(blocks)) < len(blocks):
        raise ValueError("scatter_blocks: a block is written twice: list each destination once")


def _move(source: torch.Tensor, from_rows: list[int], destination: torch.Tensor, to_rows: list[int]) -> None:
    """destination[to_rows[i]] = source[from_rows[i]], all at once. Both contiguous, of one dtype and row shape; the
    rows exist, and none is written twice."""
    if not (source.is_contiguous() and destination.is_contiguous()):
        raise ValueError("blocks can only be moved in a contiguous cache, as empty_kv makes it")
    size = destination[:1].numel()
    if not to_rows or size == 0:
        return
    source, destination = as_bytes(source), as_bytes(destination)
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
