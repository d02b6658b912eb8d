"""Paged attention on the CPU: numba, float32, caches of the 5-D layout.

A tile is four rows that share a KV head (grouped queries are rows of one tile), in two passes: all scores, one softmax,
then the weighted sum. Every sum runs in position order, or in 16 fixed lanes, anchored at position 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange

from longtail.kernels._numba import LANES, exp_nonpositive, inline, jit
from longtail.kernels.attention_batch import PLAIN, ROWS, AttentionBatch, AttentionVariant, check_shapes

PARALLEL_FROM = 4096
"""KV positions x KV heads from which waking other threads pays (about 0.1 ms of work)."""

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32))


def fits_cpu(q: torch.Tensor, kv: torch.Tensor, block_size: int) -> bool:
    """Whether the kernel takes this cache and these queries."""
    known = kv.device.type == "cpu" and kv.dtype == q.dtype == torch.float32 and kv.dim() == 5
    return known and q.shape[2] % 4 == 0 and block_size % LANES == 0


def paged_attention_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> torch.Tensor:
    """See `paged_attention`; head_dim a multiple of 4, block size of 16."""
    if not fits_cpu(q, kv, block_size):
        raise ValueError(
            "paged_attention: the CPU kernel takes float32, a 5-D cache, a head_dim that is a multiple of 4 and a block"
            f" size that is one of {LANES}; got q {q.dtype} {tuple(q.shape)}, kv {kv.dtype} {tuple(kv.shape)}, blocks "
            f"of {block_size}: take backend 'reference'"
        )
    return attend(q, kv, layer, batch, block_size, scale, variant)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
    variant: AttentionVariant,
) -> torch.Tensor:
    """`paged_attention_cpu` of what `fits_cpu`."""
    check_shapes(q, kv, block_size, variant, None)
    batch.check("paged_attention", q.shape[0], q.shape[1] // kv.shape[3], kv, layer, block_size, variant.window)
    rows = len(batch.context_lens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows < q.shape[0]:
        out[rows:].zero_()
    tokens = batch.num_context_tokens
    low, masks, sinks = NOTHING
    bases = low
    extras = batch.tree_masks is not None or not variant.is_plain
    if extras:
        low = batch.first_seen(variant.window)
        tokens -= int(low.sum())
        if batch.tree_masks is not None and batch.tree_bases is not None:
            masks, bases = batch.tree_masks.numpy(), batch.tree_bases.numpy()
        sinks = sinks if variant.sinks is None else variant.sinks.numpy()
    _kernel(q.shape[2], block_size, tokens * kv.shape[3] >= PARALLEL_FROM, extras)(
        q.contiguous().numpy(),
        kv.numpy(),
        layer,
        batch.block_tables.numpy(),
        batch.context_lens.numpy(),
        batch.tiles,
        np.float32(scale),
        low,
        masks,
        bases,
        np.float32(variant.softcap),
        sinks,
        out.numpy(),
    )
    return out


@inline
def _exp_or_nan(x: Any) -> Any:
    """exp(x) for x <= 0, and NaN stays NaN."""
    p = exp_nonpositive(x)
    return p if x == x else x


@inline
def _tanh(x: Any) -> Any:
    """tanh in float32, about 2 ulp (Cephes: a polynomial up to 0.625, the exponential beyond)."""
    f = np.float32
    a = abs(x)
    z = x * x
    p = f(-5.70498872745e-3)
    p = p * z + f(2.06390887954e-2)
    p = p * z + f(-5.37397155531e-2)
    p = p * z + f(1.33314422036e-1)
    p = p * z + f(-3.33332819422e-1)
    small = p * z * x + x
    e = exp_nonpositive(f(-2.0) * a)
    large = (f(1.0) - e) / (f(1.0) + e)
    large = large if x > f(0.0) else -large
    large = large if x == x else x
    return small if a < f(0.625) else large


@functools.cache
def _kernel(dim: int, block_size: int, parallel: bool, extras: bool) -> Callable[..., None]:
    """The kernel for one head size and block size, with or without windows, tree masks, caps and sinks; all four are
    constants to the compiler."""
    D, C, R = dim, block_size, ROWS

    @jit(parallel=parallel)
    def attention(
        q: Any,
        kv: Any,
        layer: Any,
        tables: Any,
        contexts: Any,
        tiles: Any,
        scale: Any,
        low: Any,  # [T] first position of each row's window
        masks: Any,  # [T] or []
        bases: Any,
        cap: Any,
        sinks: Any,  # [heads] or []
        out: Any,
    ) -> None:
        _variant = parallel  # in the closure only because numba's disk cache tells functions apart by their closures
        kv_heads = kv.shape[3]
        group = q.shape[1] // kv_heads
        for item in prange(tiles.shape[0] * kv_heads):
            tile, head = item // kv_heads, item % kv_heads
            query = np.empty((R, D), np.float32)
            acc = np.zeros((R, D), np.float32)
            lanes = np.empty(LANES, np.float32)
            longest, first = 0, 0
            if extras:
                first = low[tiles[tile, 1] // group]
                for r in range(1, R):
                    first = min(first, low[tiles[tile, 1 + r] // group])
                first = first // C
            for r in range(R):
                token, lane = tiles[tile, 1 + r] // group, tiles[tile, 1 + r] % group
                longest = max(longest, contexts[token])
                for d in range(D):
                    query[r, d] = q[token, head * group + lane, d] * scale
            blocks = (longest + C - 1) // C - first
            # scores[((block - first) * R + row) * C + column]: constant strides let it vectorise over columns.
            scores = np.empty(blocks * R * C, np.float32)
            table = tables[tiles[tile, 0]]
            for j in range(blocks):
                k = kv[table[first + j], layer, 0, head]
                o = j * R * C
                for c in range(R * C):
                    scores[o + c] = np.float32(0.0)
                for d in range(0, D, 4):
                    for c in range(C):
                        k0, k1 = k[d * C + c], k[(d + 1) * C + c]
                        k2, k3 = k[(d + 2) * C + c], k[(d + 3) * C + c]
                        for r in range(R):
                            s = scores[o + r * C + c]
                            s = s + query[r, d] * k0
                            s = s + query[r, d + 1] * k1
                            s = s + query[r, d + 2] * k2
                            scores[o + r * C + c] = s + query[r, d + 3] * k3
            for r in range(R):
                n = contexts[tiles[tile, 1 + r] // group] - first * C
                own = (n + C - 1) // C
                if extras:
                    token = tiles[tile, 1 + r] // group
                    if cap > np.float32(0.0):
                        for j in range(own):
                            o = (j * R + r) * C
                            for c in range(C):
                                scores[o + c] = cap * _tanh(scores[o + c] / cap)
                    for p in range(low[token] - first * C):
                        scores[(p // C * R + r) * C + p % C] = np.float32(-np.inf)
                    if masks.size > 0 and masks[token] != 0:
                        base = bases[token] - first * C
                        for p in range(base, n):
                            if masks[token] >> (p - base) & 1 == 0:
                                scores[(p // C * R + r) * C + p % C] = np.float32(-np.inf)
                for c in range(n - (own - 1) * C, C):
                    scores[((own - 1) * R + r) * C + c] = np.float32(-np.inf)
                for i in range(LANES):
                    lanes[i] = np.float32(-1e30)
                for j in range(own):
                    o = (j * R + r) * C
                    for c in range(0, C, LANES):
                        for i in range(LANES):
                            s = scores[o + c + i]
                            lanes[i] = s if s > lanes[i] else lanes[i]
                top = lanes[0]
                for i in range(1, LANES):
                    top = max(top, lanes[i])
                if extras and sinks.size > 0:
                    top = max(top, sinks[head * group + tiles[tile, 1 + r] % group])
                for i in range(LANES):
                    lanes[i] = np.float32(0.0)
                for j in range(own):
                    o = (j * R + r) * C
                    for c in range(0, C, LANES):
                        for i in range(LANES):
                            p = _exp_or_nan(scores[o + c + i] - top)
                            scores[o + c + i] = p
                            lanes[i] += p
                for j in range(own, blocks):  # positions that only longer rows of this tile see
                    for c in range(C):
                        scores[(j * R + r) * C + c] = np.float32(0.0)
                total = np.float32(0.0)
                for i in range(LANES):
                    total += lanes[i]
                if extras and sinks.size > 0:
                    total += _exp_or_nan(sinks[head * group + tiles[tile, 1 + r] % group] - top)
                query[r, 0] = np.float32(1.0) / total  # the query is no longer needed
            for j in range(blocks):
                v = kv[table[first + j], layer, 1, head]
                o = j * R * C
                filled = min(C, longest - (first + j) * C)  # beyond it the block may hold anything, NaN included
                whole = filled - filled % 4
                for c in range(0, whole, 4):
                    for d in range(D):
                        v0, v1 = v[c * D + d], v[(c + 1) * D + d]
                        v2, v3 = v[(c + 2) * D + d], v[(c + 3) * D + d]
                        for r in range(R):
                            a = acc[r, d]
                            a = a + scores[o + r * C + c] * v0
                            a = a + scores[o + r * C + c + 1] * v1
                            a = a + scores[o + r * C + c + 2] * v2
                            acc[r, d] = a + scores[o + r * C + c + 3] * v3
                for c in range(whole, filled):
                    for r in range(R):
                        for d in range(D):
                            acc[r, d] = acc[r, d] + scores[o + r * C + c] * v[c * D + d]
            for r in range(R):
                token, lane = tiles[tile, 1 + r] // group, tiles[tile, 1 + r] % group
                for d in range(D):
                    out[token, head * group + lane, d] = acc[r, d] * query[r, 0]

    return attention
