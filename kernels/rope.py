"""From the fused projection to the cache: split, per-head norm, rotation (RoPE), and the write of k and v.

The rotation is the half-split form of Su et al. 2021 (as in Llama): channel i of the first half turns with channel i of
the second. Where the tables are narrower than half a head (partial rotary, as in GPT-NeoX and Phi), the channels behind
the rotated ones pass through.

Arithmetic is in float32. Values are rounded to the dtype of qkv in three places, those of the unfused layers: the
normalised head before its weight is applied, the product with a weight of the same dtype (a float32 weight gives a
float32 product), and the rotated head. k and v are then cast to the dtype of the cache. v is never computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._checks import beyond_cache, check_devices, check_layer, check_slots
from longtail.kernels._numba import LANES, jit
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl

PROGRAM_ELEMENTS = 2048
"""Elements of a row that one program takes: with 2 warps, two 16-byte loads of bfloat16 a thread from each half of the
heads (one where a warp has 64 lanes)."""


def rope_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    """Splits a fused projection, normalises q and k per head where weights are given (Qwen3), rotates them, writes k
    and v into the cache and returns q.

    qkv: [T, (heads + 2 kv_heads) * head_dim]; cos, sin: float32 [max positions, rotary_dim / 2], rotary_dim <=
    head_dim; positions, slots: int64 [T], slot -1 is a padding row whose k and v are not written; q_weight, k_weight:
    [head_dim] or None, both or neither; kv: see kernels/kv.py, written in place, no two tokens may share a slot
    -> q: [T, heads, head_dim] in the dtype of qkv. ValueError, with nothing written: shapes that do not fit each other,
    a layer or (on the CPU) a position or slot that does not exist.
    """
    dim = _head_dim(qkv, cos, sin, positions, q_weight, k_weight, kv, layer, slots, block_size, heads, kv_heads)
    if kv.is_cuda:
        return rope_store_kv_triton(
            qkv, cos, sin, positions, q_weight, k_weight, eps, kv, layer, slots, block_size, heads, kv_heads
        )
    floats = [x.dtype for x in (qkv, cos, sin, kv, q_weight, k_weight) if x is not None]
    if kv.device.type != "cpu" or kv.dim() != 5 or set(floats) != {torch.float32}:
        return rope_store_kv_reference(
            qkv, cos, sin, positions, q_weight, k_weight, eps, kv, layer, slots, block_size, heads, kv_heads
        )
    q = torch.empty(qkv.shape[0], heads, dim)
    norm = q_weight is not None
    wrong = _rope_store_kv(
        qkv.contiguous().numpy(),
        cos.numpy(),
        sin.numpy(),
        positions.numpy(),
        norm,
        (q_weight if q_weight is not None else cos[0]).numpy(),
        (k_weight if k_weight is not None else cos[0]).numpy(),
        np.float32(eps),
        kv.numpy(),
        layer,
        slots.numpy(),
        block_size,
        kv_heads,
        q.numpy(),
    )
    if wrong >= 0:
        if 0 <= int(positions[wrong]) < cos.shape[0]:
            raise beyond_cache("rope_store_kv", wrong, int(slots[wrong]), kv.shape[0] * block_size)
        raise _beyond_tables(wrong, positions, cos)
    return q


def _head_dim(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    heads: int,
    kv_heads: int,
) -> int:
    """The head size, once everything fits."""
    tokens, dim = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    cache = (block_size, dim) if kv.dim() == 6 else (block_size * dim,)
    if qkv.shape[1] != (heads + 2 * kv_heads) * dim or kv.shape[2:] != (2, kv_heads, *cache):
        shapes = f"qkv {tuple(qkv.shape)}, kv {tuple(kv.shape)}, blocks of {block_size}"
        raise ValueError(f"rope_store_kv: {shapes} do not fit {heads} heads and {kv_heads} KV heads")
    if not kv.dtype.is_floating_point or kv.itemsize < 2:
        raise ValueError(f"rope_store_kv: kv is {kv.dtype}, which needs scales: write k and v with store_kv instead")
    if cos.shape != sin.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= dim:
        tables = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ValueError(f"rope_store_kv: {tables}: both must be [max positions, at most {dim // 2}]")
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        rows = f"positions {tuple(positions.shape)}, slots {tuple(slots.shape)}"
        raise ValueError(f"rope_store_kv: {rows}: one of each for the {tokens} rows of qkv")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("rope_store_kv: give both q_weight and k_weight, or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (dim,):
            raise ValueError(f"rope_store_kv: {name} {tuple(weight.shape)} must be [{dim}]")
    check_layer("rope_store_kv", layer, kv)
    check_devices(
        "rope_store_kv",
        kv=kv,
        qkv=qkv,
        cos=cos,
        sin=sin,
        positions=positions,
        slots=slots,
        q_weight=q_weight,
        k_weight=k_weight,
    )
    return dim


def _beyond_tables(row: int, positions: torch.Tensor, cos: torch.Tensor) -> ValueError:
    have = f"the tables (cos, sin) have {cos.shape[0]}"
    return ValueError(f"rope_store_kv: positions[{row}] is {int(positions[row])}, {have}: make them longer")


def rope_store_kv_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    """See `rope_store_kv`; any device and dtype."""
    from longtail.kernels.norm import rms_norm_reference

    dim = _head_dim(qkv, cos, sin, positions, q_weight, k_weight, kv, layer, slots, block_size, heads, kv_heads)
    check_slots("rope_store_kv", slots, kv.shape[0] * block_size)
    if positions.device.type == "cpu":
        wrong = ((positions < 0) | (positions >= cos.shape[0])).nonzero()
        if len(wrong):
            raise _beyond_tables(int(wrong[0]), positions, cos)
    half = cos.shape[1]
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    c, s = cos[positions][:, None].float(), sin[positions][:, None].float()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high, rest = x.float().split([half, half, dim - 2 * half], dim=-1)
        return torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1).to(qkv.dtype)

    live = slots >= 0
    block, offset = slots[live] // block_size, slots[live] % block_size
    for which, values in enumerate((rotate(k), v)):
        cache, values = kv[:, layer, which], values[live].to(kv.dtype)
        if kv.dim() == 6:
            cache[block, :, offset] = values
        elif which == 0:
            cache.unflatten(2, (dim, block_size))[block, :, :, offset] = values
        else:
            cache.unflatten(2, (block_size, dim))[block, :, offset] = values
    return rotate(q).contiguous()


@jit()
def _rope_store_kv(
    qkv: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    norm: Any,
    q_weight: Any,
    k_weight: Any,
    eps: Any,
    kv: Any,
    layer: Any,
    slots: Any,
    block_size: Any,
    kv_heads: Any,
    q_out: Any,
) -> Any:
    """-> the first row whose position lies beyond the tables or whose slot beyond the cache, and nothing is written;
    -1: all is."""
    tokens, heads, dim = q_out.shape
    for t in range(tokens):
        if positions[t] < 0 or positions[t] >= cos.shape[0] or slots[t] >= kv.shape[0] * block_size:
            return t
    half = cos.shape[1]
    row = np.empty(dim, np.float32)
    lanes = np.empty(LANES, np.float32)
    for t in range(tokens):
        position = positions[t]
        slot = slots[t]
        block = slot // block_size
        offset = slot % block_size
        for h in range(heads + kv_heads):
            base = h * dim
            for d in range(dim):
                row[d] = qkv[t, base + d]
            if norm:
                for i in range(LANES):
                    lanes[i] = np.float32(0.0)
                for d in range(dim):
                    lanes[d % LANES] += row[d] * row[d]
                total = np.float32(0.0)
                for i in range(LANES):
                    total += lanes[i]
                scale = np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)
                for d in range(dim):
                    weight = q_weight[d] if h < heads else k_weight[d]
                    row[d] = weight * (row[d] * scale)
            for d in range(half):
                low, high = row[d], row[d + half]
                c, s = cos[position, d], sin[position, d]
                row[d] = low * c - high * s
                row[d + half] = high * c + low * s
            if h < heads:
                for d in range(dim):
                    q_out[t, h, d] = row[d]
            elif slot >= 0:
                for d in range(dim):
                    kv[block, layer, 0, h - heads, d * block_size + offset] = row[d]
        if slot >= 0:
            for h in range(kv_heads):
                base = (heads + kv_heads + h) * dim
                for d in range(dim):
                    kv[block, layer, 1, h, offset * dim + d] = qkv[t, base + d]
    return -1


def rope_store_kv_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    block_size: int,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    """See `rope_store_kv`; float32, float16 and bfloat16, a cache [num_blocks, layers, 2, kv_heads, block_size,
    head_dim] of any of them. One launch that reads every element of qkv once; head_dim up to 256."""
    dim = _head_dim(qkv, cos, sin, positions, q_weight, k_weight, kv, layer, slots, block_size, heads, kv_heads)
    if kv.dim() != 6 or not kv.is_contiguous():
        raise ValueError(
            f"rope_store_kv: kv {tuple(kv.shape)} must be contiguous [num_blocks, layers, 2, kv_heads, block_size, "
            "head_dim] on a GPU"
        )
    if dim > 256 or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"rope_store_kv: head_dim {dim} (at most 256), cos {cos.dtype}, sin {sin.dtype} (float32)")
    tokens, half, all_heads = qkv.shape[0], cos.shape[1], heads + 2 * kv_heads
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    if qkv.stride(1) != 1 or qkv.data_ptr() % 16:  # else a row's bits could depend on its place in memory
        qkv = qkv.clone(memory_format=torch.contiguous_format)
    block_half = next_power_of_2(half)
    block_heads = min(next_power_of_2(all_heads), max(PROGRAM_ELEMENTS // (2 * block_half), 1))
    unused = cos  # in place of weights
    with on_device_of(kv):
        _rope_store_kv_kernel[(tokens, -(-all_heads // block_heads))](
            qkv,
            cos.contiguous(),
            sin.contiguous(),
            positions.contiguous(),
            slots.contiguous(),
            unused if q_weight is None else q_weight.contiguous(),
            unused if k_weight is None else k_weight.contiguous(),
            q,
            kv[:, layer],
            qkv.stride(0),
            kv.stride(0),
            cos.shape[0],
            kv.shape[0] * block_size,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            HALF=half,
            BLOCK_SIZE=block_size,
            NORM=q_weight is not None,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            BLOCK_REST=next_power_of_2(dim - 2 * half),
            num_warps=num_warps_for(block_heads * block_half),
        )
    return q


@triton_jit
def _rope_store_kv_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q_out: tl.tensor,  # [T, heads, head_dim], contiguous
    kv: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size, head_dim]
    qkv_row: tl.tensor,  # strides, in elements
    kv_block: tl.tensor,
    num_positions: tl.tensor,
    num_slots: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the rotated channels
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """A program takes BLOCK_HEADS of the heads of one token, counted through q, k and v. Both halves of a head lie in
    one thread, so that the rotation moves nothing between threads."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + t).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    tl.device_assert((position >= 0) & (position < num_positions), "rope_store_kv: a position lies beyond the tables")
    tl.device_assert(slot < num_slots, "rope_store_kv: a slot lies beyond the cache")
    exists = head < HEADS + 2 * KV_HEADS
    mask = exists[:, None] & (d < HALF)[None, :]
    row = qkv + t * qkv_row + head * DIM
    low = tl.load(row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(row[:, None] + HALF + d[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + position * HALF + d, mask=d < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + d, mask=d < HALF, other=0.0)[None, :]

    is_q = head < HEADS
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    to_cache = exists & (head >= HEADS) & (slot >= 0)
    q_at = q_out + t * (HEADS * DIM) + head * DIM
    # K and V of a block lie next to each other, so heads count on from the one into the other.
    slot = tl.maximum(slot, 0)
    kv_at = kv + slot // BLOCK_SIZE * kv_block + (head - HEADS) * (BLOCK_SIZE * DIM) + slot % BLOCK_SIZE * DIM

    square = tl.sum(low * low + high * high, axis=1)
    if DIM > 2 * HALF:
        e = tl.arange(0, BLOCK_REST)
        behind = e < DIM - 2 * HALF
        rest_mask = exists[:, None] & behind[None, :]
        rest = tl.load(row[:, None] + 2 * HALF + e[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, axis=1)
    if NORM:
        scale = (1.0 / tl.sqrt(square / DIM + eps))[:, None]
        low = tl.where(is_value, low, _weighted(low * scale, q_weight, k_weight, is_q, d, d < HALF, qkv))
        high = tl.where(is_value, high, _weighted(high * scale, q_weight, k_weight, is_q, d + HALF, d < HALF, qkv))
        if DIM > 2 * HALF:
            e_at = e + 2 * HALF
            rest = tl.where(is_value, rest, _weighted(rest * scale, q_weight, k_weight, is_q, e_at, behind, qkv))
    first = tl.where(is_value, low, low * c - high * s).to(qkv.dtype.element_ty)
    second = tl.where(is_value, high, high * c + low * s).to(qkv.dtype.element_ty)
    q_mask = is_q[:, None] & (d < HALF)[None, :]
    tl.store(q_at[:, None] + d[None, :], first, mask=q_mask)
    tl.store(q_at[:, None] + HALF + d[None, :], second, mask=q_mask)
    kv_mask = to_cache[:, None] & (d < HALF)[None, :]
    tl.store(kv_at[:, None] + d[None, :], first.to(kv.dtype.element_ty), mask=kv_mask)
    tl.store(kv_at[:, None] + HALF + d[None, :], second.to(kv.dtype.element_ty), mask=kv_mask)
    if DIM > 2 * HALF:
        third = rest.to(qkv.dtype.element_ty)
        tl.store(q_at[:, None] + 2 * HALF + e[None, :], third, mask=is_q[:, None] & behind[None, :])
        third_at = kv_at[:, None] + 2 * HALF + e[None, :]
        tl.store(third_at, third.to(kv.dtype.element_ty), mask=to_cache[:, None] & behind[None, :])


@triton_jit
def _weighted(
    x: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    is_q: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    like: tl.tensor,
) -> tl.tensor:
    """The normalised heads x [heads, channels] times the weights of q or k, rounded as the module says."""
    x = x.to(like.dtype.element_ty).to(tl.float32)
    for_q = tl.load(q_weight + channel, mask=mask, other=0.0).to(tl.float32)
    for_k = tl.load(k_weight + channel, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.where(is_q[:, None], for_q[None, :], for_k[None, :])
    if q_weight.dtype.element_ty == like.dtype.element_ty:
        x = x.to(like.dtype.element_ty).to(tl.float32)
    return x
