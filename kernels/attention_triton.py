"""Paged attention in Triton: caches of the 6-D layout, on any GPU.

The KV is split (flash-decoding, Dao et al. 2023) into partitions of a fixed number of tokens anchored at position 0,
with one online softmax in each; a second kernel adds the partitions of a row up in order. Where there are tiles enough
to fill a GPU, one program takes all partitions of its tile and adds them up itself, to the same bits. Partitions and
rounds that lie before the window of all rows of a tile are neither planned nor read.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, warp_size
from longtail.kernels.attention_batch import PLAIN, AttentionBatch, AttentionVariant, check_shapes
from longtail.kernels.attention_kernels import attention_kernel, combine_kernel
from longtail.kernels.kv_quant import as_bytes, code_format

TILE = 16
"""Query rows of a program, the fewest that a tensor core takes. One size for decode, verification and prefill: another
one might be another instruction, with other bits."""

PARTITION = 256
"""KV tokens of a program. Never a function of the batch."""

WHOLE_FROM = 256
"""Tiles x KV heads from which a program takes all partitions of its tile, if no tile has far more than the others: some
programs for every multiprocessor, and none that the others would wait for."""

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
    most_items: int
    """Of a tile."""

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
            int(np.diff(starts).max(initial=0)),
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
    form, kv = code_format(kv.dtype), as_bytes(kv)
    # One program a tile where that fills a GPU: nothing is written in between, and the bits are those of the split.
    # Not for what would need too many registers then.
    narrow = block_d <= 128 and not form and plan.tree_masks is None
    even = plan.most_items * tiles <= 2 * items
    whole = narrow and even and tiles * kv_heads >= WHOLE_FROM
    partials = 0 if whole else items
    acc = torch.empty(partials, kv_heads, TILE, block_d, dtype=torch.float32, device=q.device)
    stats = torch.empty(partials, kv_heads, 2, TILE, dtype=torch.float32, device=q.device)
    # KV tokens of a round, warps and stages, so that registers suffice: by dtypes and head size, never by the batch.
    single = q.dtype == torch.float32
    step = 16 if single else 64 if block_d <= 64 and not form else 32
    few_warps = block_d <= 64 or (block_d <= 128 and single)
    with on_device_of(kv):
        attention_kernel[(tiles if whole else items, kv_heads)](
            q,
            kv[:, layer],
            None if scales is None else scales[:, layer],
            variant.sinks,
            plan.context_lens,
            plan.first_seen if variant.window else None,
            plan.tree_masks,
            plan.tree_bases,
            plan.block_tables,
            plan.tiles,
            plan.items,
            plan.item_starts,
            out,
            acc,
            stats,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            0 if scales is None else scales.stride(0),
            plan.block_tables.stride(0),
            scale / variant.softcap if variant.softcap else scale * LOG2_E,
            variant.softcap * LOG2_E,
            WHOLE=whole,
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=dim,
            BLOCK_SIZE=block_size,
            FORMAT=form,
            BOOST=64.0 if form == "int8" and q.dtype == torch.float16 else 1.0,
            WINDOW=variant.window > 0,
            TREE=plan.tree_masks is not None,
            SOFTCAP=variant.softcap > 0,
            SINKS=variant.sinks is not None,
            PARTITION=PARTITION,
            STEP=step,
            TILE=TILE,
            BLOCK_D=block_d,
            num_warps=4 if few_warps else 8,
            num_stages=1 if form and (single or block_d > 128) else 2,
        )
        if whole:
            return out
        more = (single or dim < block_d) and warp_size() == 32  # so that registers suffice
        combine_kernel[(tiles, kv_heads)](
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
            num_warps=num_warps_for(TILE * block_d * (2 if more else 1)),
        )
    return out
