"""Paged causal attention: one op for decode, chunked prefill, verification and resume.

A query row attends to the KV positions 0 .. context-1 of its sequence, read through the block table, or to those of
them that a window (`AttentionVariant`) or the mask of a draft tree (`AttentionBatch`) leaves. The backends:

    "triton"      attention_triton.py: 6-D caches, on a GPU; float32, 16-bit and 8-bit caches
    "cpu"         attention_cpu.py: 5-D caches of float32, on the CPU
    "flash-attn"  attention_flash.py: the flash-attn package, for the variants, dtypes and page sizes that it knows
    "reference"   below: everything, slowly

The first two give a row the same bits whatever else is in the batch, however its sequence is cut into chunks, and
whichever rows share its tile: every sum runs in an order that is anchored at position 0, and what a tile reads beyond
what a row sees contributes exact zeros to it. That holds for finite KV: 0 * NaN is NaN, so a NaN or an infinity in V
may reach rows of its sequence that do not see it. It is never hidden.
"""

from __future__ import annotations

from typing import Literal

import torch

from longtail.kernels.attention_batch import PLAIN, AttentionBatch, AttentionVariant, check_shapes
from longtail.kernels.attention_cpu import attend, fits_cpu, paged_attention_cpu
from longtail.kernels.attention_flash import paged_attention_flash
from longtail.kernels.attention_triton import paged_attention_triton
from longtail.kernels.kv import as_tokens
from longtail.kernels.kv_quant import as_bytes, dequantise_rows_reference

__all__ = [
    "AttentionBatch",
    "AttentionVariant",
    "Backend",
    "paged_attention",
    "paged_attention_cpu",
    "paged_attention_flash",
    "paged_attention_reference",
    "paged_attention_triton",
]

Backend = Literal["triton", "reference", "cpu", "flash-attn"]


def paged_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
    variant: AttentionVariant = PLAIN,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `paged_attention`; any device and dtype and either layout, computed in float32."""
    check_shapes(q, kv, block_size, variant, scales)
    batch.check("paged_attention", q.shape[0], q.shape[1] // kv.shape[3], kv, layer, block_size, variant.window)
    heads, dim, kv_heads = q.shape[1], q.shape[2], kv.shape[3]
    low = batch.first_seen(variant.window)
    out = torch.zeros_like(q)
    for i, table in enumerate(batch.block_tables.tolist()):
        for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])):
            first, end = int(low[t]), int(batch.context_lens[t])
            start = first // block_size * block_size
            blocks = table[start // block_size : -(-end // block_size)]
            k, v = _read_blocks(kv, layer, blocks, block_size, scales)
            positions = torch.arange(first, end, device=q.device)
            if batch.tree_masks is not None and batch.tree_bases is not None and (mask := int(batch.tree_masks[t])):
                base = int(batch.tree_bases[t])
                positions = torch.tensor(
                    [p for p in range(first, end) if p < base or mask >> (p - base) & 1], device=q.device
                )
            rows = q[t].view(kv_heads, heads // kv_heads, dim).float()
            scores = rows @ k[:, positions - start].transpose(1, 2) * scale
            if variant.softcap:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            if variant.sinks is not None:
                scores = torch.cat([scores, variant.sinks.view(kv_heads, -1, 1)], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : len(positions)]
            out[t] = (weights @ v[:, positions - start]).view(heads, dim)
    return out


def _read_blocks(
    kv: torch.Tensor, layer: int, blocks: list[int], block_size: int, scales: torch.Tensor | None
) -> list[torch.Tensor]:
    """-> K and V of a layer, float32 [kv_heads, len(blocks) * block_size, head_dim]."""
    out = []
    for i, cache in enumerate(as_tokens(as_bytes(kv), block_size)):
        x = cache[blocks, layer].view(kv.dtype)
        x = x.float() if scales is None else dequantise_rows_reference(x, scales[blocks, layer, i])
        out.append(x.transpose(0, 1).flatten(1, 2))
    return out


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
    variant: AttentionVariant = PLAIN,
    scales: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """q: [T, heads, head_dim]; kv, scales: see kernels/kv.py -> [T, heads, head_dim]; padding rows come back as zeros.

    ValueError: a batch, layer or cache that does not fit the queries; contexts that the block tables do not hold (on a
    GPU: for which the tables are too narrow).

    backend None: Triton where the cache is on a GPU, the CPU kernel where it can, else the reference. A backend that is
    named computes, or says in a ValueError (or an ImportError) why it cannot.
    """
    if backend is None:
        if scales is None and fits_cpu(q, kv, block_size):
            return attend(q, kv, layer, batch, block_size, scale, variant)
        backend = "triton" if kv.is_cuda else "reference"
    if backend == "cpu":
        if scales is not None:
            raise ValueError("paged_attention: backend 'cpu' takes no scales, take 'reference' for a quantised cache")
        return paged_attention_cpu(q, kv, layer, batch, block_size, scale, variant)
    if backend == "triton":
        return paged_attention_triton(q, kv, layer, batch, block_size, scale, variant, scales)
    if backend == "reference":
        return paged_attention_reference(q, kv, layer, batch, block_size, scale, variant, scales)
    if backend == "flash-attn":
        return paged_attention_flash(q, kv, layer, batch, block_size, scale, variant, scales)
    raise ValueError(f"paged_attention: backend {backend!r} is none of 'triton', 'reference', 'cpu', 'flash-attn'")
