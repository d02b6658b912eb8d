"""Paged attention in Triton: caches of the 6-D layout, on any GPU.

The KV is split (flash-decoding, Dao et al. 2023) into partitions of a fixed number of tokens anchored at position 0,
with one online softmax in each, and the partitions of a row are added up in order (kernels/attention_plan.py says by
whom). Partitions and rounds that lie before the window of all rows of a tile are neither planned nor read.
"""

from __future__ import annotations

import torch

from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, warp_size
from longtail.kernels.attention_batch import PLAIN, AttentionBatch, AttentionVariant, check_shapes
from longtail.kernels.attention_kernels import attention_kernel, combine_kernel
from longtail.kernels.attention_plan import TILE, Programs, SplitPlan
from longtail.kernels.kv_quant import as_bytes, code_format

PARTITION = 256
"""KV tokens of a program. Never a function of the batch."""

WHOLE_FROM = 256
"""Tiles x KV heads from which tiles are computed whole: some programs for every multiprocessor."""

MOST_BLOCK_SIZE = 256
"""A block must be a power of two up to this (flash-attn wants 256)."""

LOG2_E = 1.4426950408889634


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
    batch.check("paged_attention", q.shape[0], q.shape[1] // kv.shape[3], kv, layer, block_size, variant.window)
    if not kv.is_contiguous():
        raise ValueError("paged_attention: the cache must be contiguous, as empty_kv makes it")
    (_, heads, dim), kv_heads = q.shape, kv.shape[3]
    if dim > 256 or MOST_BLOCK_SIZE % block_size:
        what = f"head_dim {dim} (at most 256), block size {block_size} (a divisor of {MOST_BLOCK_SIZE})"
        raise ValueError(f"paged_attention: {what}")
    group = heads // kv_heads
    block_d = max(next_power_of_2(dim), 16)
    # KV tokens of a round, warps and stages, so that registers suffice: by dtypes and head size, never by the batch.
    form, kv = code_format(kv.dtype), as_bytes(kv)
    single = q.dtype == torch.float32
    step = 16 if single else 64 if block_d <= 64 and not form else 32
    # Not whole where that would take too many registers.
    narrow = dim == block_d <= 128 and not (form or single) and batch.tree_masks is None
    plan = SplitPlan.of(
        batch,
        variant.window,
        group,
        PARTITION,
        kv.device,
        whole_from=-(-WHOLE_FROM // kv_heads) if narrow else None,
        item_bytes=kv_heads * TILE * (block_d + 2) * 4,
    )
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[len(batch.context_lens) :].zero_()
    most = max((len(turn.items) for turn in plan.turns), default=0)
    acc = torch.empty(most, kv_heads, TILE, block_d, dtype=torch.float32, device=q.device)
    stats = torch.empty(most, kv_heads, 2, TILE, dtype=torch.float32, device=q.device)

    def attend(programs: Programs, whole: bool) -> None:
        attention_kernel[(len(programs.tiles) if whole else len(programs.items), kv_heads)](
            q,
            kv[:, layer],
            None if scales is None else scales[:, layer],
            variant.sinks,
            plan.context_lens,
            plan.first_seen if variant.window else None,
            plan.tree_masks,
            plan.tree_bases,
            plan.block_tables,
            programs.tiles,
            programs.items,
            programs.item_starts,
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
            num_warps=warps,
            num_stages=1 if form and (single or block_d > 128) else 2,
        )

    with on_device_of(kv):
        warps = 4 if block_d <= 64 and (form or not single or warp_size() == 64) else 8
        more_warps = (single or dim < block_d) and warp_size() == 32  # in combining, so that registers suffice
        if plan.whole is not None:
            attend(plan.whole, whole=True)
        for turn in plan.turns:
            attend(turn, whole=False)
            combine_kernel[(len(turn.tiles), kv_heads)](
                acc,
                stats,
                variant.sinks,
                turn.tiles,
                turn.item_starts,
                out,
                KV_HEADS=kv_heads,
                GROUP=group,
                DIM=dim,
                SINKS=variant.sinks is not None,
                TILE=TILE,
                BLOCK_D=block_d,
                num_warps=num_warps_for(TILE * block_d * (2 if more_warps else 1)),
            )
    return out
