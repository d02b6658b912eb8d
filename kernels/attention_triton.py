"""Paged attention in Triton: caches of the 6-D layout, on any GPU.

The KV is split (flash-decoding, Dao et al. 2023) into partitions of a fixed number of tokens anchored at position 0,
with one online softmax in each; a second kernel adds the partitions of a row up in order. Partitions and rounds that
lie before the window of all rows of a tile are neither planned nor read.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl
from longtail.kernels.attention_batch import PLAIN, AttentionBatch, AttentionVariant, check_shapes
from longtail.kernels.kv_quant import as_bytes, code_format, decode, unit_of

TILE = 16
"""Query rows of a program, the fewest that a tensor core takes. One size for decode, verification and prefill: another
one might be another instruction, with other bits."""

PARTITION = 256
"""KV tokens of a program. Never a function of the batch."""

MOST_BLOCK_SIZE = 256
"""A block must be a power of two up to this (flash-attn wants 256)."""

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(slots=True)
class SplitPlan:
    """The programs of one forward pass for layers of one window, on the device of the cache."""

    context_lens: torch.Tensor
    """int32 [T], as in the batch."""
    block_tables: torch.Tensor
    """int32 [sequences, most blocks], as in the batch."""
    tree_masks: torch.Tensor | None
    """int64 [T], as in the batch."""
    tree_bases: torch.Tensor | None
    """int32 [T], as in the batch."""
    tiles: torch.Tensor
    """int32 [tiles, 3]: sequence, first row, end of its rows; a row is token * group + head in group."""
    first_seen: torch.Tensor
    """int32 [T]: first position of each row's window."""
    items: torch.Tensor
    """int32 [items, 2]: tile, partition; the partitions of a tile stand in order."""
    item_starts: torch.Tensor
    """int32 [tiles + 1]: items item_starts[i] .. item_starts[i+1] are those of tile i."""

    @classmethod
    def of(cls, batch: AttentionBatch, window: int, group: int, partition: int, device: torch.device) -> SplitPlan:
        """Of the batch, made by the first layer that asks. group: query heads of a KV head; partition: KV tokens of a
        program."""
        key = (window, group, partition)
        if key not in batch.plans:
            batch.plans[key] = cls._build(batch, window, group, partition, device)
        return batch.plans[key]

    @classmethod
    def _build(cls, batch: AttentionBatch, window: int, group: int, partition: int, device: torch.device) -> SplitPlan:
        cu, contexts = batch.cu_seqlens.cpu().numpy() * group, batch.context_lens.cpu().numpy()
        low = batch.first_seen(window)
        per_sequence = -(-np.diff(cu) // TILE)
        sequence = np.repeat(np.arange(len(per_sequence)), per_sequence)
        number = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
        first = cu[sequence] + number * TILE
        end = np.minimum(first + TILE, cu[sequence + 1])
        starts, items = np.zeros(1, np.int64), np.zeros((0, 2), np.int64)
        if len(first):
            from_part = np.minimum.reduceat(np.repeat(low, group), first) // partition
            counts = -(-np.maximum.reduceat(np.repeat(contexts, group), first) // partition) - from_part
            starts = np.concatenate([[0], np.cumsum(counts)])
            tile = np.repeat(np.arange(len(first)), counts)
            items = np.stack([tile, np.arange(len(tile)) - np.repeat(starts[:-1] - from_part, counts)], axis=1)

        def on_device(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

        alike = (plan for (_, heads, _), plan in batch.plans.items() if heads == group)
        other = next(alike, None)  # of another window: the same but for the partitions
        return cls(
            other.context_lens if other else batch.context_lens.to(device),
            other.block_tables if other else batch.block_tables.to(device),
            None if batch.tree_masks is None else batch.tree_masks.to(device),
            None if batch.tree_bases is None else batch.tree_bases.to(device),
            other.tiles if other else on_device(np.stack([sequence, first, end], axis=1)),
            on_device(low),
            on_device(items),
            on_device(starts),
        )


def paged_attention_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
    variant: AttentionVariant = PLAIN,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `paged_attention`; q float32, float16 or bfloat16, sums in float32, head_dim up to 256."""
    if kv.dim() != 6:
        raise ValueError(
            "paged_attention: the Triton kernels take a 6-D cache [num_blocks, layers, 2, kv_heads, block_size, "
            f"head_dim], got {tuple(kv.shape)}: make it with empty_kv(..., layout='hnd')"
        )
    check_shapes(q, kv, block_size, variant, scales)
    if not kv.is_contiguous():
        raise ValueError("paged_attention: the cache must be contiguous, as empty_kv makes it")
    (_, heads, dim), kv_heads = q.shape, kv.shape[3]
    if dim > 256 or MOST_BLOCK_SIZE % block_size:
        what = f"head_dim {dim} (at most 256), block size {block_size} (a divisor of {MOST_BLOCK_SIZE})"
        raise ValueError(f"paged_attention: {what}")
    group = heads // kv_heads
    plan = SplitPlan.of(batch, variant.window, group, PARTITION, kv.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[len(batch.context_lens) :].zero_()
    items, tiles = len(plan.items), len(plan.tiles)
    if not tiles:
        return out
    block_d = max(next_power_of_2(dim), 16)
    acc = torch.empty(items, kv_heads, TILE, block_d, dtype=torch.float32, device=q.device)
    stats = torch.empty(items, kv_heads, 2, TILE, dtype=torch.float32, device=q.device)
    # KV tokens of a round, warps and stages, so that registers suffice: by dtypes and head size, never by the batch.
    form, kv = code_format(kv.dtype), as_bytes(kv)
    single = q.dtype == torch.float32
    step = 16 if single else 64 if block_d <= 64 and not form else 32
    few_warps = block_d <= 64 or (block_d <= 128 and (single or not form))
    with on_device_of(kv):
        _partition_kernel[(items, kv_heads)](
            q,
            kv[:, layer],
            None if scales is None else scales[:, layer],
            plan.context_lens,
            plan.first_seen if variant.window else None,
            plan.tree_masks,
            plan.tree_bases,
            plan.block_tables,
            plan.tiles,
            plan.items,
            acc,
            stats,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            0 if scales is None else scales.stride(0),
            plan.block_tables.stride(0),
            scale / variant.softcap if variant.softcap else scale * LOG2_E,
            variant.softcap * LOG2_E,
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=dim,
            BLOCK_SIZE=block_size,
            FORMAT=form,
            BOOST=64.0 if form == "int8" and q.dtype == torch.float16 else 1.0,
            WINDOW=variant.window > 0,
            TREE=plan.tree_masks is not None,
            SOFTCAP=variant.softcap > 0,
            PARTITION=PARTITION,
            STEP=step,
            TILE=TILE,
            BLOCK_D=block_d,
            num_warps=4 if few_warps else 8,
            num_stages=1 if form and (single or block_d > 128) else 2,
        )
        _combine_kernel[(tiles, kv_heads)](
            acc,
            stats,
            variant.sinks,
            plan.tiles,
            plan.item_starts,
            out,
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=dim,
            SINKS=variant.sinks is not None,
            TILE=TILE,
            BLOCK_D=block_d,
            num_warps=num_warps_for(TILE * block_d),
        )
    return out


@triton_jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Of float32, about 2 ulp (Cephes: a polynomial up to 0.625, the exponential beyond)."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, p * z * x + x, tl.where(x < 0, -large, large))


@triton_jit
def _partition_kernel(
    q: tl.tensor,
    kv: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size, head_dim]
    scales: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size], or None
    contexts: tl.tensor,
    first_seen: tl.tensor,  # or None
    tree_masks: tl.tensor,  # or None
    tree_bases: tl.tensor,  # or None
    tables: tl.tensor,
    tiles: tl.tensor,
    items: tl.tensor,
    out_acc: tl.tensor,  # [items, kv_heads, TILE, BLOCK_D]: sums of p * v, not yet divided
    out_stats: tl.tensor,  # [items, kv_heads, 2, TILE]: the largest score (in powers of 2), the sum of p
    q_token: tl.tensor,
    q_head: tl.tensor,
    kv_block: tl.tensor,
    scales_block: tl.tensor,
    table_row: tl.tensor,
    factor: tl.tensor,  # of the products q k, to powers of 2; with a cap, to shares of the cap
    cap_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,  # see code_format
    BOOST: tl.constexpr,  # keeps p * value_scale within float16's normal numbers
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTITION: tl.constexpr,
    STEP: tl.constexpr,  # KV tokens of a round
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
    start_at = part * PARTITION
    if WINDOW:
        low = tl.load(first_seen + token, mask=live, other=2147483647)
        lowest = tl.min(low, axis=0)  # blocks before it may be gone
        start_at = tl.maximum(start_at, lowest // STEP * STEP)
    if TREE:
        tree = tl.load(tree_masks + token, mask=live, other=0)
        tree_low, tree_high = tree.to(tl.int32), (tree >> 32).to(tl.int32)
        base = tl.load(tree_bases + token, mask=live, other=0)

    kv_head = kv + head * (BLOCK_SIZE * DIM)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for start in range(start_at, last, STEP):
        position = start + tl.arange(0, STEP)
        exists = position < last
        if WINDOW:
            exists = exists & (position >= lowest)
        in_block = position % BLOCK_SIZE
        block = tl.load(tables + sequence * table_row + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        at = block * kv_block + in_block * DIM
        key = tl.load(kv_head + at[None, :] + d[:, None], mask=exists[None, :] & (d < DIM)[:, None], other=0)
        v_at = at[:, None] + (KV_HEADS * BLOCK_SIZE * DIM + d[None, :])
        value = tl.load(kv_head + v_at, mask=exists[:, None] & (d < DIM)[None, :], other=0)
        if FORMAT != "":
            scale_at = scales + block * scales_block + head * BLOCK_SIZE + in_block
            key_scale = tl.load(scale_at, mask=exists, other=0.0) * unit_of(FORMAT)
            value_scale = tl.load(scale_at + KV_HEADS * BLOCK_SIZE, mask=exists, other=0.0) * (unit_of(FORMAT) * BOOST)
            key, value = decode(key, query.dtype, FORMAT), decode(value, query.dtype, FORMAT)
            scores = tl.dot(query, key, input_precision="ieee") * (key_scale * factor)[None, :]
        else:
            scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * factor
        if SOFTCAP:
            scores = _tanh(scores) * cap_log2
        if TREE:
            bit = tl.minimum(tl.maximum(position[None, :] - base[:, None], 0), 63)  # bit 63 is never set
            word = tl.where(bit < 32, tree_low[:, None], tree_high[:, None])
            seen = (position[None, :] < base[:, None]) | (((word >> (bit & 31)) & 1) != 0)
        else:
            seen = position[None, :] < context[:, None]
        if WINDOW:
            seen = seen & (position[None, :] >= low[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(above == -float("inf"), 0.0, above)  # a row that has seen nothing yet
        shrink = tl.exp2(top - shift)
        p = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        if FORMAT != "":
            p = p * value_scale[None, :]
        acc = acc * shrink[:, None] + tl.dot(p.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        top = above
    if FORMAT != "":
        acc = acc / BOOST
    at_out = item * KV_HEADS + head
    # Rows that do not exist are written too, into room of their own: a mask would cost registers through the loop.
    tl.store(out_stats + at_out * (2 * TILE) + m, top)
    tl.store(out_stats + at_out * (2 * TILE) + TILE + m, total)
    tl.store(out_acc + at_out * (TILE * BLOCK_D) + m[:, None] * BLOCK_D + d[None, :], acc)


@triton_jit
def _combine_kernel(
    acc_of: tl.tensor,
    stats_of: tl.tensor,
    sinks: tl.tensor,  # [heads], or None
    tiles: tl.tensor,
    item_starts: tl.tensor,
    out: tl.tensor,  # [T, heads, head_dim], contiguous
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A program adds up, in order, the partitions of one tile for one KV head."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for item in range(tl.load(item_starts + tile), tl.load(item_starts + tile + 1)):
        at = tl.cast(item, tl.int64) * KV_HEADS + head
        part_top = tl.load(stats_of + at * (2 * TILE) + m, mask=live, other=-float("inf"))
        part_total = tl.load(stats_of + at * (2 * TILE) + TILE + m, mask=live, other=0.0)
        acc_at = acc_of + at * (TILE * BLOCK_D) + m[:, None] * BLOCK_D + d[None, :]
        part_acc = tl.load(acc_at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        above = tl.maximum(top, part_top)
        shift = tl.where(above == -float("inf"), 0.0, above)
        shrink, weight = tl.exp2(top - shift), tl.exp2(part_top - shift)
        total = total * shrink + part_total * weight
        acc = acc * shrink[:, None] + part_acc * weight[:, None]
        top = above
    if SINKS:
        sink = tl.load(sinks + head * GROUP + row % GROUP, mask=live, other=0.0) * 1.4426950408889634
        above = tl.maximum(top, sink)
        shrink = tl.exp2(top - above)
        total = total * shrink + tl.exp2(sink - above)
        acc = acc * shrink[:, None]
    out_at = (row // GROUP * (KV_HEADS * GROUP) + head * GROUP + row % GROUP)[:, None] * DIM + d[None, :]
    total = tl.where(live, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=live[:, None] & (d < DIM)[None, :])
