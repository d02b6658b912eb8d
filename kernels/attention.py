"""Paged causal attention: one op for decode, chunked prefill, verification and resume.

A query row attends to the KV positions 0 .. context-1 of its sequence, read through the block table. The CPU kernel
works on tiles of four rows that share a KV head (grouped queries are rows of one tile), two passes: all scores, one
softmax, then the weighted sum. Every sum runs in position order, or in 16 fixed lanes, anchored at position 0, so a
row's bits depend on its own query and KV alone: not on the batch, the chunking, or the rows that share its tile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange

from longtail.kernels._numba import LANES, exp_nonpositive, jit

ROWS = 4
"""Query rows of a tile."""

PARALLEL_FROM = 4096
"""KV positions x KV heads from which waking other threads pays (about 0.1 ms of work)."""


@dataclasses.dataclass(slots=True)
class AttentionBatch:
    """Where the packed query rows of one forward pass belong. Built once per step, used by every layer."""

    cu_seqlens: torch.Tensor
    """int32 [sequences + 1]: rows cu_seqlens[i] .. cu_seqlens[i+1] belong to sequence i; later rows are padding."""
    context_lens: torch.Tensor
    """int32 [T]: KV positions that each row may see (its own position + 1)."""
    block_tables: torch.Tensor
    """int32 [sequences, most blocks]; unused entries are -1."""
    num_context_tokens: int
    """KV positions read, over all rows."""
    tiles: np.ndarray
    """int32 [tiles, 1 + ROWS]: sequence, then the row of each tile lane, as token * group + head in group."""

    @classmethod
    def build(
        cls, query_lens: list[int], context_lens: list[int], block_tables: list[list[int]], group: int
    ) -> AttentionBatch:
        """query_lens: rows per sequence; context_lens: KV length of each sequence including these rows;
        group: query heads per KV head."""
        cu = np.zeros(len(query_lens) + 1, np.int32)
        np.cumsum(query_lens, out=cu[1:])
        per_row = np.empty(int(cu[-1]), np.int32)
        for i, (q, n) in enumerate(zip(query_lens, context_lens, strict=True)):
            per_row[cu[i] : cu[i + 1]] = np.arange(n - q + 1, n + 1, dtype=np.int32)
        width = max((len(table) for table in block_tables), default=0)
        tables = np.full((len(block_tables), max(width, 1)), -1, np.int32)
        for i, table in enumerate(block_tables):
            tables[i, : len(table)] = table
        tiles = _build_tiles(cu, np.asarray(context_lens, np.int32), group)
        return cls(torch.from_numpy(cu), torch.from_numpy(per_row), torch.from_numpy(tables), int(per_row.sum()), tiles)


def _build_tiles(cu: np.ndarray, context_lens: np.ndarray, group: int) -> np.ndarray:
    tiles = []
    for i in range(len(cu) - 1):
        rows = np.arange(cu[i] * group, cu[i + 1] * group, dtype=np.int32)
        pad = -len(rows) % ROWS
        rows = np.concatenate([rows, np.repeat(rows[-1:], pad)]).reshape(-1, ROWS)  # a repeated row is only wasted work
        tiles.append(np.concatenate([np.full((len(rows), 1), i, np.int32), rows], axis=1))
    if not tiles:
        return np.zeros((0, 1 + ROWS), np.int32)
    out = np.concatenate(tiles)
    # Threads take contiguous runs of tiles: deal long and short sequences out alternately.
    order = np.argsort(-context_lens[out[:, 0]], kind="stable")
    return np.ascontiguousarray(out[np.concatenate([order[0::2], order[1::2]])])


def paged_attention_reference(
    q: torch.Tensor, kv: torch.Tensor, layer: int, batch: AttentionBatch, block_size: int, scale: float
) -> torch.Tensor:
    """See `paged_attention`; any device and dtype, computed in float32."""
    heads, dim, kv_heads = q.shape[1], q.shape[2], kv.shape[3]
    out = torch.zeros_like(q)
    for i, table in enumerate(batch.block_tables.tolist()):
        for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])):
            n = int(batch.context_lens[t])
            blocks = table[: -(-n // block_size)]
            k = kv[blocks, layer, 0].view(-1, kv_heads, dim, block_size).permute(1, 0, 3, 2).reshape(kv_heads, -1, dim)
            v = kv[blocks, layer, 1].view(-1, kv_heads, block_size, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
            rows = q[t].view(kv_heads, heads // kv_heads, dim).float()
            weights = torch.softmax(rows @ k[:, :n].float().transpose(1, 2) * scale, dim=-1)
            out[t] = (weights @ v[:, :n].float()).view(heads, dim)
    return out


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, layer: int, batch: AttentionBatch, block_size: int, scale: float
) -> torch.Tensor:
    """q: [T, heads, head_dim]; kv: see kernels/kv.py -> [T, heads, head_dim]; padding rows come back as zeros."""
    dim = q.shape[2]
    if kv.device.type != "cpu" or kv.dtype != torch.float32 or dim % 4 or block_size % LANES:
        return paged_attention_reference(q, kv, layer, batch, block_size, scale)
    rows = len(batch.context_lens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows < q.shape[0]:
        out[rows:].zero_()
    parallel = batch.num_context_tokens * kv.shape[3] >= PARALLEL_FROM
    _kernel(dim, block_size, parallel)(
        q.contiguous().numpy(),
        kv.numpy(),
        layer,
        batch.block_tables.numpy(),
        batch.context_lens.numpy(),
        batch.tiles,
        np.float32(scale),
        out.numpy(),
    )
    return out


@functools.cache
def _kernel(dim: int, block_size: int, parallel: bool) -> Callable[..., None]:
    """The kernel for one head size and block size; both are constants to the compiler."""
    D, C, R = dim, block_size, ROWS

    @jit(parallel=parallel)
    def attention(q: Any, kv: Any, layer: Any, tables: Any, contexts: Any, tiles: Any, scale: Any, out: Any) -> None:
        _variant = parallel  # in the closure only because numba's disk cache tells functions apart by their closures
        kv_heads = kv.shape[3]
        group = q.shape[1] // kv_heads
        for item in prange(tiles.shape[0] * kv_heads):
            tile, head = item // kv_heads, item % kv_heads
            query = np.empty((R, D), np.float32)
            acc = np.zeros((R, D), np.float32)
            lanes = np.empty(LANES, np.float32)
            longest = 0
            for r in range(R):
                token, lane = tiles[tile, 1 + r] // group, tiles[tile, 1 + r] % group
                longest = max(longest, contexts[token])
                for d in range(D):
                    query[r, d] = q[token, head * group + lane, d] * scale
            blocks = (longest + C - 1) // C
            # scores[(block * R + row) * C + column]: constant strides let the compiler vectorise over columns.
            scores = np.empty(blocks * R * C, np.float32)
            table = tables[tiles[tile, 0]]
            for j in range(blocks):
                k = kv[table[j], layer, 0, head]
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
                n = contexts[tiles[tile, 1 + r] // group]
                own = (n + C - 1) // C
                for c in range(n - (own - 1) * C, C):
                    scores[((own - 1) * R + r) * C + c] = np.float32(-1e30)
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
                for i in range(LANES):
                    lanes[i] = np.float32(0.0)
                for j in range(own):
                    o = (j * R + r) * C
                    for c in range(0, C, LANES):
                        for i in range(LANES):
                            p = exp_nonpositive(scores[o + c + i] - top)
                            scores[o + c + i] = p
                            lanes[i] += p
                for j in range(own, blocks):  # positions that only longer rows of this tile see
                    for c in range(C):
                        scores[(j * R + r) * C + c] = np.float32(0.0)
                total = np.float32(0.0)
                for i in range(LANES):
                    total += lanes[i]
                query[r, 0] = np.float32(1.0) / total  # the query is no longer needed
            for j in range(blocks):
                v = kv[table[j], layer, 1, head]
                o = j * R * C
                filled = min(C, longest - j * C)  # beyond it the block may hold anything, NaN included
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
