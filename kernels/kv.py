"""Writing, copying and moving paged KV.

Layout of the cache, one tensor for all layers so that a block is one contiguous piece of memory:

    kv: [num_blocks, layers, 2, kv_heads, block_size * head_dim]
         K (index 0) of a block is stored [head_dim, block_size]: scores vectorise over tokens
         V (index 1)            is stored [block_size, head_dim]: the output vectorises over channels

A *slot* is block * block_size + offset; slot -1 is a padding row and is not written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._numba import LANES, jit


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
    """k, v: [T, kv_heads, head_dim]; slots: int64 [T]. Writes in place."""
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
    """See `rope_store_kv`."""
    from longtail.kernels.norm import rms_norm_reference

    tokens, dim = qkv.shape[0], cos.shape[1] * 2
    q, k, v = qkv.view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    c, s = cos[positions][:, None].repeat(1, 1, 2), sin[positions][:, None].repeat(1, 1, 2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * c + torch.cat((-high, low), dim=-1) * s

    store_kv_reference(rotate(k), v, kv, layer, slots, block_size)
    return rotate(q).contiguous()


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
    """Splits a fused projection, normalises q and k per head where weights are given (Qwen3), rotates them (RoPE in the
    half-split form, Su et al. 2021), writes k and v into the cache and returns q.

    qkv: [T, (heads + 2 kv_heads) * head_dim]; cos, sin: [max positions, head_dim / 2]; positions, slots: int64 [T];
    q_weight, k_weight: [head_dim] or None -> q: [T, heads, head_dim].
    """
    if kv.device.type != "cpu" or kv.dtype != torch.float32 or (q_weight is None) != (k_weight is None):
        return rope_store_kv_reference(
            qkv, cos, sin, positions, q_weight, k_weight, eps, kv, layer, slots, block_size, heads, kv_heads
        )
    dim = cos.shape[1] * 2
    q = torch.empty(qkv.shape[0], heads, dim)
    norm = q_weight is not None
    _rope_store_kv(
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
    return q


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
) -> None:
    tokens, heads, dim = q_out.shape
    half = dim // 2
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


def copy_blocks(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copies whole blocks, source to destination, in place and in order (copy-on-write)."""
    for source, destination in pairs:
        kv[destination].copy_(kv[source])


def gather_blocks(kv: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """-> a contiguous host copy [len(blocks), layers, 2, kv_heads, block_size * head_dim]."""
    return kv[torch.tensor(blocks, dtype=torch.long)].cpu()


def scatter_blocks(kv: torch.Tensor, blocks: list[int], data: torch.Tensor) -> None:
    """The inverse of `gather_blocks`, in place."""
    kv[torch.tensor(blocks, dtype=torch.long)] = data.to(kv.device)
