"""Paged causal attention: one op for decode, chunked prefill, verification and resume.

A query row attends to the KV positions 0 .. context-1 of its sequence, read through the block table. The CPU kernel
works on tiles of four rows that share a KV head (grouped queries are rows of one tile), two passes: all scores, one
softmax, then the weighted sum. Every sum runs in position order, or in 16 fixed lanes, anchored at position 0, so a
row's bits depend on its own query and KV alone: not on the batch, the chunking, or the rows that share its tile.

The Triton kernels split the KV (flash-decoding, Dao et al. 2023) into partitions of a fixed number of tokens anchored
at position 0, with one online softmax in each, and add the partitions up in order. What a tile reads beyond a row's own
context contributes exact zeros to it, so the same holds for them.
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
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl

ROWS = 4
"""Query rows of a tile."""

PARALLEL_FROM = 4096
"""KV positions x KV heads from which waking other threads pays (about 0.1 ms of work)."""

TILE = 16
"""Query rows of a Triton program, the fewest that a tensor core takes. One size for decode, verification and prefill:
another one might be another instruction, with other bits."""

PARTITION = 256
"""KV tokens of a Triton program. Never a function of the batch."""

MOST_BLOCK_SIZE = 64
"""A block must be a power of two up to this."""

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(slots=True)
class SplitPlan:
    """The Triton programs of one forward pass, on the device of the cache."""

    context_lens: torch.Tensor
    """int32 [T], as in the batch."""
    block_tables: torch.Tensor
    """int32 [sequences, most blocks], as in the batch."""
    tiles: torch.Tensor
    """int32 [tiles, 3]: sequence, first row, end of its rows; a row is token * group + head in group."""
    items: torch.Tensor
    """int32 [items, 2]: tile, partition; the partitions of a tile stand in order."""
    item_starts: torch.Tensor
    """int32 [tiles + 1]: items item_starts[i] .. item_starts[i+1] are those of tile i."""

    @classmethod
    def build(cls, batch: AttentionBatch, group: int, device: torch.device) -> SplitPlan:
        cu, contexts = batch.cu_seqlens.cpu().numpy(), batch.context_lens.cpu().numpy()
        tiles = [
            (i, first, min(first + TILE, end * group))
            for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True))
            for first in range(start * group, end * group, TILE)
        ]
        counts = [-(-int(contexts[first // group : -(-end // group)].max()) // PARTITION) for _, first, end in tiles]
        items = [(tile, part) for tile, count in enumerate(counts) for part in range(count)]
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int32)])

        def on_device(values: Any, width: int) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, np.int32).reshape(-1, width)).to(device)

        return cls(
            batch.context_lens.to(device),
            batch.block_tables.to(device),
            on_device(tiles, 3),
            on_device(items, 2),
            on_device(starts, 1),
        )


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
    plan: SplitPlan | None = None
    """Of the Triton kernels; made by the first layer."""

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
    if kv.is_cuda:
        return paged_attention_triton(q, kv, layer, batch, block_size, scale)
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


def paged_attention_triton(
    q: torch.Tensor, kv: torch.Tensor, layer: int, batch: AttentionBatch, block_size: int, scale: float
) -> torch.Tensor:
    """See `paged_attention`; float32, float16 and bfloat16, sums in float32, head_dim up to 256."""
    (_, heads, dim), kv_heads = q.shape, kv.shape[3]
    if heads % kv_heads or kv.shape[4] != block_size * dim or not kv.is_contiguous():
        raise ValueError(
            f"paged_attention: q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}, blocks of {block_size}"
        )
    if dim > 256 or MOST_BLOCK_SIZE % block_size:
        what = f"head_dim {dim} (at most 256), block size {block_size} (a divisor of {MOST_BLOCK_SIZE})"
        raise ValueError(f"paged_attention: {what}")
    group = heads // kv_heads
    plan = batch.plan = batch.plan or SplitPlan.build(batch, group, kv.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[len(batch.context_lens) :].zero_()
    items, tiles = len(plan.items), len(plan.tiles)
    if not tiles:
        return out
    block_d = max(next_power_of_2(dim), 16)
    acc = torch.empty(items, kv_heads, TILE, block_d, dtype=torch.float32, device=q.device)
    stats = torch.empty(items, kv_heads, 2, TILE, dtype=torch.float32, device=q.device)
    # KV tokens of a round, so that registers suffice: by dtype and head size, never by the batch.
    step = 16 if q.dtype == torch.float32 else 64 if block_d <= 64 else 32
    with on_device_of(kv):
        _partition_kernel[(items, kv_heads)](
            q,
            kv[:, layer],
            plan.context_lens,
            plan.block_tables,
            plan.tiles,
            plan.items,
            acc,
            stats,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            plan.block_tables.stride(0),
            scale * LOG2_E,
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=dim,
            BLOCK_SIZE=block_size,
            PARTITION=PARTITION,
            STEP=step,
            UNIT=min(step, block_size),
            TILE=TILE,
            BLOCK_D=block_d,
            num_warps=4 if block_d <= 128 else 8,
            num_stages=2,
        )
        _combine_kernel[(tiles, kv_heads)](
            acc,
            stats,
            plan.tiles,
            plan.item_starts,
            out,
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=dim,
            TILE=TILE,
            BLOCK_D=block_d,
            num_warps=num_warps_for(TILE * block_d),
        )
    return out


@triton_jit
def _partition_kernel(
    q: tl.tensor,
    kv: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size * head_dim]
    contexts: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    items: tl.tensor,
    out_acc: tl.tensor,  # [items, kv_heads, TILE, BLOCK_D]: sums of p * v, not yet divided
    out_stats: tl.tensor,  # [items, kv_heads, 2, TILE]: the largest score (in powers of 2), the sum of p
    q_token: tl.tensor,
    q_head: tl.tensor,
    kv_block: tl.tensor,
    table_row: tl.tensor,
    scale_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTITION: tl.constexpr,
    STEP: tl.constexpr,  # KV tokens of a round
    UNIT: tl.constexpr,  # of them in one block
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A program attends from the rows of one tile, for one KV head, to one partition of the KV."""
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.load(items + item * 2).to(tl.int64)
    part = tl.load(items + item * 2 + 1)
    sequence = tl.load(tiles + tile * 3).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    token = row // GROUP
    context = tl.load(contexts + token, mask=live, other=0)
    q_at = token[:, None] * q_token + (head * GROUP + row % GROUP)[:, None] * q_head + d[None, :]
    query = tl.load(q + q_at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    last = tl.minimum(tl.max(context, axis=0), (part + 1) * PARTITION)

    # Tokens of one block are a dimension of their own, which tells the compiler that they lie next to each other.
    unit = tl.arange(0, STEP // UNIT) * UNIT
    offset = tl.arange(0, UNIT)
    k_base = kv + head * (BLOCK_SIZE * DIM)
    v_base = k_base + KV_HEADS * BLOCK_SIZE * DIM
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for start in range(part * PARTITION, last, STEP):
        begin = start + unit
        in_block = tl.multiple_of(begin % BLOCK_SIZE, UNIT)
        exists = begin < last
        table = tables + sequence * table_row + begin // BLOCK_SIZE
        block = tl.load(table, mask=exists, other=0).to(tl.int64) * kv_block
        # K of a block is read whole, so that the mask does not narrow the loads: what lies beyond `last` may be
        # anything, in scores that are replaced below.
        k_start = block + in_block
        k_at = k_base + k_start[None, :, None] + (d[:, None, None] * BLOCK_SIZE + offset[None, None, :])
        key = tl.load(k_at, mask=exists[None, :, None] & (d < DIM)[:, None, None], other=0.0)
        key = tl.reshape(key, [BLOCK_D, STEP]).to(query.dtype)
        v_start = block + in_block * DIM
        v_at = v_base + v_start[:, None, None] + (offset[None, :, None] * DIM + d[None, None, :])
        filled = begin[:, None] + offset[None, :] < last
        value = tl.load(v_at, mask=filled[:, :, None] & (d < DIM)[None, None, :], other=0.0)
        value = tl.reshape(value, [STEP, BLOCK_D]).to(query.dtype)
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        seen = (start + tl.arange(0, STEP))[None, :] < context[:, None]
        scores = tl.where(seen, scores, -float("inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(above == -float("inf"), 0.0, above)  # a row that has seen nothing yet
        shrink = tl.exp2(top - shift)
        p = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(query.dtype), value, input_precision="ieee")
        top = above
    at = item * KV_HEADS + head
    tl.store(out_stats + at * (2 * TILE) + m, top)
    tl.store(out_stats + at * (2 * TILE) + TILE + m, total)
    tl.store(out_acc + at * (TILE * BLOCK_D) + m[:, None] * BLOCK_D + d[None, :], acc)


@triton_jit
def _combine_kernel(
    acc_of: tl.tensor,
    stats_of: tl.tensor,
    tiles: tl.tensor,
    item_starts: tl.tensor,
    out: tl.tensor,  # [T, heads, head_dim], contiguous
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A program adds up, in order, the partitions of one tile for one KV head."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for item in range(tl.load(item_starts + tile), tl.load(item_starts + tile + 1)):
        at = tl.cast(item, tl.int64) * KV_HEADS + head
        part_top = tl.load(stats_of + at * (2 * TILE) + m)
        part_total = tl.load(stats_of + at * (2 * TILE) + TILE + m)
        part_acc = tl.load(acc_of + at * (TILE * BLOCK_D) + m[:, None] * BLOCK_D + d[None, :])
        above = tl.maximum(top, part_top)
        shift = tl.where(above == -float("inf"), 0.0, above)
        shrink, weight = tl.exp2(top - shift), tl.exp2(part_top - shift)
        total = total * shrink + part_total * weight
        acc = acc * shrink[:, None] + part_acc * weight[:, None]
        top = above
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    out_at = (row // GROUP * (KV_HEADS * GROUP) + head * GROUP + row % GROUP)[:, None] * DIM + d[None, :]
    total = tl.where(live, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=live[:, None] & (d < DIM)[None, :])
