"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents, weights absorbed.

Of a position the cache holds what all heads share: c, the compressed keys and values (`kv_lora_rank` numbers), and
k_rope, the rotated part of the key (`rope_dim` numbers). Head h has the key [W_UK_h c, k_rope] and the value W_UV_h c.
Both matrices can be moved to the other side (`absorb_query`, `expand_values`), so that attention works on latents:

    q_nope . W_UK c + q_rope . k_rope = (W_UK^T q_nope) . c + q_rope . k_rope
    sum_j p_j W_UV c_j = W_UV sum_j p_j c_j

Layout of the cache, a block being one contiguous piece of memory; `latent[:, layer]` is what other engines call an MLA
page table's pages, [num_blocks, block_size, 576] in DeepSeek-V2 and V3:

    latent: [num_blocks, layers, block_size, rank + rope_dim], a row being [c, k_rope]

The rest is as in kernels/attention.py: a row's bits depend on its own query and the latents of its sequence alone.
On the CPU every sum runs in order of the channels or positions, in chunks anchored at position 0 with an online softmax
over them. The Triton kernels stand in kernels/latent_triton.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange

from longtail.kernels._checks import check_devices, check_layer, check_slots
from longtail.kernels._numba import exp_nonpositive, jit
from longtail.kernels.attention_batch import AttentionBatch
from longtail.kernels.latent_triton import latent_attention_triton, store_latent_triton

ROWS = 16
"""Query rows of a tile on the CPU, which share each latent that is read: a vector of float32."""

CHUNK = 32
"""Positions of a round on the CPU: their latents stay in the second-level cache between scores and sums."""

PARALLEL_FROM = 2048
"""KV positions x heads from which waking other threads pays."""


def empty_latent(num_blocks: int, layers: int, block_size: int, rank: int, rope_dim: int) -> torch.Tensor:
    """A zeroed float32 cache."""
    return torch.zeros(num_blocks, layers, block_size, rank + rope_dim)


def absorb_query(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """q_nope: [T, heads, nope_dim]; w_uk: [heads, nope_dim, rank] (c to keys) -> q_latent [T, heads, rank]."""
    return torch.einsum("thn,hnr->thr", q_nope, w_uk)


def expand_values(out: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """out: [T, heads, rank], of `latent_attention`; w_uv: [heads, v_dim, rank] (c to values) -> [T, heads, v_dim]."""
    return torch.einsum("thr,hvr->thv", out, w_uv)


# ---- storing


def store_latent(
    c: torch.Tensor, k_rope: torch.Tensor, latent: torch.Tensor, layer: int, slots: torch.Tensor, block_size: int
) -> None:
    """c: [T, rank]; k_rope: [T, rope_dim], rotated; slots: int64 [T], a slot is block * block_size + offset and -1 is a
    padding row. Writes in place, cast to the cache's dtype. No two tokens may share a slot. ValueError: shapes that do
    not fit each other, a layer or (on the CPU) a slot that does not exist."""
    width = c.shape[1] + k_rope.shape[1]
    if c.shape[0] != k_rope.shape[0] or slots.shape != c.shape[:1] or latent.shape[2:] != (block_size, width):
        shapes = f"c {tuple(c.shape)}, k_rope {tuple(k_rope.shape)}, slots {tuple(slots.shape)}, "
        shapes += f"latent {tuple(latent.shape)}"
        raise ValueError(f"store_latent: shapes do not fit each other for blocks of {block_size}: {shapes}")
    if not latent.dtype.is_floating_point or latent.itemsize < 2:
        raise ValueError(f"store_latent: latent is {latent.dtype}, use float32, float16 or bfloat16")
    check_layer("store_latent", layer, latent)
    check_devices("store_latent", latent=latent, c=c, k_rope=k_rope, slots=slots)
    check_slots("store_latent", slots, latent.shape[0] * block_size)
    if latent.is_cuda:
        store_latent_triton(c, k_rope, latent, layer, slots, block_size)
    else:
        store_latent_reference(c, k_rope, latent, layer, slots, block_size)


def store_latent_reference(
    c: torch.Tensor, k_rope: torch.Tensor, latent: torch.Tensor, layer: int, slots: torch.Tensor, block_size: int
) -> None:
    """See `store_latent`; any device and dtype. Two copies of whole rows, which is also the CPU's way."""
    live, rank = slots >= 0, c.shape[1]
    block, offset = slots[live] // block_size, slots[live] % block_size
    latent[:, layer, :, :rank][block, offset] = c[live].to(latent.dtype)
    latent[:, layer, :, rank:][block, offset] = k_rope[live].to(latent.dtype)


# ---- attention


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention over latents: scores (q_latent . c + q_rope . k_rope) * scale, values c.

    q_latent: [T, heads, rank], absorbed; q_rope: [T, heads, rope_dim], rotated; latent: see the module; batch: built
    with group = heads, as all heads share one latent; scale: one over the root of nope_dim + rope_dim (times what a
    scaled RoPE asks for) -> [T, heads, rank] in q_latent's dtype, for `expand_values`. Padding rows come back as zeros.
    ValueError: shapes that do not fit each other; a batch, layer or cache that does not fit the queries.
    """
    (tokens, heads, rank), rope = q_latent.shape, q_rope.shape[2]
    if q_rope.shape[:2] != (tokens, heads) or latent.shape[2:] != (block_size, rank + rope):
        shapes = f"q_latent {tuple(q_latent.shape)}, q_rope {tuple(q_rope.shape)}, latent {tuple(latent.shape)}"
        raise ValueError(f"latent_attention: shapes do not fit each other for blocks of {block_size}: {shapes}")
    if q_rope.dtype != q_latent.dtype:
        raise ValueError(f"latent_attention: q_rope is {q_rope.dtype}, q_latent {q_latent.dtype}: give them one dtype")
    check_devices("latent_attention", latent=latent, q_latent=q_latent, q_rope=q_rope)
    batch.check("latent_attention", tokens, heads, latent, layer, block_size)
    if batch.tree_masks is not None:
        raise ValueError("latent_attention: draft trees (tree_masks) are not supported: verify drafts as sequences")
    if latent.is_cuda:
        return latent_attention_triton(q_latent, q_rope, latent, layer, batch, block_size, scale)
    exact = latent.device.type == "cpu" and latent.dtype == q_latent.dtype == torch.float32
    if not exact or rank % 4 or rope % 4 or not latent.is_contiguous():
        return latent_attention_reference(q_latent, q_rope, latent, layer, batch, block_size, scale)
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    out[len(batch.context_lens) :].zero_()
    _kernel(rank, rope, batch.num_context_tokens * heads >= PARALLEL_FROM)(
        q_latent.contiguous().numpy(),
        q_rope.contiguous().numpy(),
        latent.numpy(),
        layer,
        batch.block_tables.numpy(),
        batch.context_lens.numpy(),
        _tiles(batch, heads),
        np.float32(scale),
        block_size,
        out.numpy(),
    )
    return out


def latent_attention_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """See `latent_attention`; any device and dtype, computed in float32, or float64 where the queries are."""
    rank, dtype = q_latent.shape[2], torch.promote_types(q_latent.dtype, torch.float32)
    out = torch.zeros_like(q_latent)
    for i, table in enumerate(batch.block_tables.tolist()):
        for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])):
            n = int(batch.context_lens[t])
            rows = latent[table[: -(-n // block_size)], layer].flatten(0, 1)[:n].to(dtype)
            c, k_rope = rows[:, :rank], rows[:, rank:]
            scores = (q_latent[t].to(dtype) @ c.T + q_rope[t].to(dtype) @ k_rope.T) * scale
            out[t] = torch.softmax(scores, dim=-1) @ c
    return out


def _tiles(batch: AttentionBatch, heads: int) -> np.ndarray:
    """int32 [tiles, 3]: sequence, first row, end of the sequence's rows; a row is token * heads + head."""
    cu = batch.cu_seqlens.numpy() * heads
    counts = -(-np.diff(cu) // ROWS)
    sequence = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([sequence, cu[sequence] + index * ROWS, cu[sequence + 1]], axis=1)
    # Threads take contiguous runs of tiles: deal long and short ones out alternately.
    order = np.argsort(-batch.context_lens.numpy()[tiles[:, 1] // heads], kind="stable")
    return np.ascontiguousarray(tiles[np.concatenate([order[0::2], order[1::2]])], np.int32)


@jit()
def _row(latent: Any, layer: Any, table: Any, position: Any, block_size: Any, longest: Any, blank: Any) -> Any:
    """The latent of a position; beyond the last one that a tile sees the cache may hold anything, NaN included."""
    if position < longest:
        return latent[table[position // block_size], layer, position % block_size]
    return blank


@functools.cache
def _kernel(rank: int, rope: int, parallel: bool) -> Callable[..., None]:
    """The kernel for one size of latents, which are constants to the compiler."""
    RANK, WIDTH, R, C = rank, rank + rope, ROWS, CHUNK

    @jit(parallel=parallel)
    def attend(
        q_latent: Any,
        q_rope: Any,
        latent: Any,
        layer: Any,
        tables: Any,
        contexts: Any,
        tiles: Any,
        scale: Any,
        block_size: Any,
        out: Any,
    ) -> None:
        _variant = parallel  # in the closure only because numba's disk cache tells functions apart by their closures
        heads = q_latent.shape[1]
        for tile in prange(tiles.shape[0]):
            first, end = tiles[tile, 1], tiles[tile, 2]
            table = tables[tiles[tile, 0]]
            # [.., row] where loops run over rows: they vectorise, and what rows are multiplied with is a scalar.
            query = np.empty(WIDTH * R, np.float32)
            scores = np.empty(C * R, np.float32)
            acc = np.zeros(R * RANK, np.float32)
            blank = np.zeros(WIDTH, np.float32)
            own = np.empty(R, np.int32)
            top = np.full(R, np.float32(-1e30), np.float32)
            above = np.empty(R, np.float32)
            shrink = np.empty(R, np.float32)
            total = np.zeros(R, np.float32)
            longest = 0
            for r in range(R):
                row = min(first + r, end - 1)  # a repeated row is only wasted work
                token, head = row // heads, row % heads
                own[r] = contexts[token]
                longest = max(longest, contexts[token])
                for d in range(RANK):
                    query[d * R + r] = q_latent[token, head, d] * scale
                for d in range(WIDTH - RANK):
                    query[(RANK + d) * R + r] = q_rope[token, head, d] * scale
            for start in range(0, longest, C):
                for i in range(C * R):
                    scores[i] = np.float32(0.0)
                for c in range(0, C, 8):
                    p, o = start + c, c * R
                    k0 = _row(latent, layer, table, p, block_size, longest, blank)
                    k1 = _row(latent, layer, table, p + 1, block_size, longest, blank)
                    k2 = _row(latent, layer, table, p + 2, block_size, longest, blank)
                    k3 = _row(latent, layer, table, p + 3, block_size, longest, blank)
                    k4 = _row(latent, layer, table, p + 4, block_size, longest, blank)
                    k5 = _row(latent, layer, table, p + 5, block_size, longest, blank)
                    k6 = _row(latent, layer, table, p + 6, block_size, longest, blank)
                    k7 = _row(latent, layer, table, p + 7, block_size, longest, blank)
                    for d in range(0, WIDTH, 4):
                        a0, a1, a2, a3 = k0[d], k0[d + 1], k0[d + 2], k0[d + 3]
                        b0, b1, b2, b3 = k1[d], k1[d + 1], k1[d + 2], k1[d + 3]
                        c0, c1, c2, c3 = k2[d], k2[d + 1], k2[d + 2], k2[d + 3]
                        d0, d1, d2, d3 = k3[d], k3[d + 1], k3[d + 2], k3[d + 3]
                        e0, e1, e2, e3 = k4[d], k4[d + 1], k4[d + 2], k4[d + 3]
                        f0, f1, f2, f3 = k5[d], k5[d + 1], k5[d + 2], k5[d + 3]
                        g0, g1, g2, g3 = k6[d], k6[d + 1], k6[d + 2], k6[d + 3]
                        h0, h1, h2, h3 = k7[d], k7[d + 1], k7[d + 2], k7[d + 3]
                        for r in range(R):
                            q0, q1 = query[d * R + r], query[(d + 1) * R + r]
                            q2, q3 = query[(d + 2) * R + r], query[(d + 3) * R + r]
                            s = scores[o + r] + q0 * a0
                            s = s + q1 * a1
                            s = s + q2 * a2
                            scores[o + r] = s + q3 * a3
                            s = scores[o + R + r] + q0 * b0
                            s = s + q1 * b1
                            s = s + q2 * b2
                            scores[o + R + r] = s + q3 * b3
                            s = scores[o + 2 * R + r] + q0 * c0
                            s = s + q1 * c1
                            s = s + q2 * c2
                            scores[o + 2 * R + r] = s + q3 * c3
                            s = scores[o + 3 * R + r] + q0 * d0
                            s = s + q1 * d1
                            s = s + q2 * d2
                            scores[o + 3 * R + r] = s + q3 * d3
                            s = scores[o + 4 * R + r] + q0 * e0
                            s = s + q1 * e1
                            s = s + q2 * e2
                            scores[o + 4 * R + r] = s + q3 * e3
                            s = scores[o + 5 * R + r] + q0 * f0
                            s = s + q1 * f1
                            s = s + q2 * f2
                            scores[o + 5 * R + r] = s + q3 * f3
                            s = scores[o + 6 * R + r] + q0 * g0
                            s = s + q1 * g1
                            s = s + q2 * g2
                            scores[o + 6 * R + r] = s + q3 * g3
                            s = scores[o + 7 * R + r] + q0 * h0
                            s = s + q1 * h1
                            s = s + q2 * h2
                            scores[o + 7 * R + r] = s + q3 * h3
                for r in range(R):
                    above[r] = top[r]
                for c in range(C):
                    for r in range(R):
                        s = scores[c * R + r] if start + c < own[r] else np.float32(-1e30)
                        scores[c * R + r] = s
                        above[r] = s if s > above[r] else above[r]
                for r in range(R):
                    shrink[r] = exp_nonpositive(top[r] - above[r])
                    total[r] = total[r] * shrink[r]
                    top[r] = above[r]
                for c in range(C):
                    for r in range(R):
                        x = scores[c * R + r] - top[r]
                        e = exp_nonpositive(x) + (x - x)  # zero, or the NaN that the exponential does not carry
                        scores[c * R + r] = e
                        total[r] = total[r] + e
                for r in range(R):
                    for d in range(RANK):
                        acc[r * RANK + d] = acc[r * RANK + d] * shrink[r]
                for c in range(0, C, 4):
                    p, o = start + c, c * R
                    k0 = _row(latent, layer, table, p, block_size, longest, blank)
                    k1 = _row(latent, layer, table, p + 1, block_size, longest, blank)
                    k2 = _row(latent, layer, table, p + 2, block_size, longest, blank)
                    k3 = _row(latent, layer, table, p + 3, block_size, longest, blank)
                    for r in range(0, R, 2):
                        a0, a1 = scores[o + r], scores[o + R + r]
                        a2, a3 = scores[o + 2 * R + r], scores[o + 3 * R + r]
                        b0, b1 = scores[o + r + 1], scores[o + R + r + 1]
                        b2, b3 = scores[o + 2 * R + r + 1], scores[o + 3 * R + r + 1]
                        i, j = r * RANK, (r + 1) * RANK
                        for d in range(RANK):
                            v0, v1, v2, v3 = k0[d], k1[d], k2[d], k3[d]
                            s = acc[i + d] + a0 * v0
                            s = s + a1 * v1
                            s = s + a2 * v2
                            acc[i + d] = s + a3 * v3
                            s = acc[j + d] + b0 * v0
                            s = s + b1 * v1
                            s = s + b2 * v2
                            acc[j + d] = s + b3 * v3
            for r in range(min(R, end - first)):
                token, head = (first + r) // heads, (first + r) % heads
                share = np.float32(1.0) / total[r]
                for d in range(RANK):
                    out[token, head, d] = acc[r * RANK + d] * share

    return attend
