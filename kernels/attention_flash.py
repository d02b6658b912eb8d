"""Paged attention by the flash-attn package (Dao 2023, version 2), where it is installed and a GPU is there.

It reads the 6-D layout as it is. Sequences with equally many rows (decode, verification) go to flash_attn_with_kvcache,
which may split the KV by the size of the batch; others to flash_attn_varlen_func. So a row's bits depend on the batch:
this backend is for fast numerics, not for exact ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from longtail.kernels.attention_batch import PLAIN, AttentionBatch, AttentionVariant, check_shapes

FUNCTIONS = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
"""What is called of the package."""

PAGE = 256
"""flash-attn 2 takes block sizes that are multiples of this."""


@dataclasses.dataclass(slots=True)
class FlashPlan:
    """The sequences that have query rows, as flash-attn wants them, on the device of the cache."""

    query_len: int | None
    """Rows of every sequence, or None where they differ."""
    longest_query: int
    longest_context: int
    cu_queries: torch.Tensor
    """int32 [sequences + 1]"""
    contexts: torch.Tensor
    """int32 [sequences]: KV length including the rows."""
    cu_contexts: torch.Tensor
    """int32 [sequences + 1]"""
    block_tables: torch.Tensor
    """int32 [sequences, most blocks]; what does not exist is block 0 and never attended to."""

    @classmethod
    def build(cls, batch: AttentionBatch, device: torch.device) -> FlashPlan:
        cu = batch.cu_seqlens.cpu()
        queries = cu.diff()
        live = queries > 0
        contexts = batch.context_lens.cpu()[cu[1:][live].long() - 1]
        cu_contexts = torch.zeros(len(contexts) + 1, dtype=torch.int32)
        cu_contexts[1:] = contexts.cumsum(0)
        lens = queries[live]
        longest = int(lens.max()) if len(lens) else 0
        return cls(
            longest if bool((lens == longest).all()) else None,
            longest,
            int(contexts.max()) if len(contexts) else 0,
            torch.cat([cu[:1], cu[1:][live]]).to(device),
            contexts.to(device),
            cu_contexts.to(device),
            batch.block_tables.cpu()[live].clamp(min=0).to(device),
        )


def _flash_attn() -> Any:
    try:
        import flash_attn
    except ImportError as error:
        raise ImportError("backend 'flash-attn' needs the package: pip install 'longtail[gpu]'") from error
    if missing := [name for name in FUNCTIONS if not callable(getattr(flash_attn, name, None))]:
        raise ImportError(
            f"backend 'flash-attn': the installed flash_attn has no {missing[0]}: pip install 'longtail[gpu]'"
        )
    if not torch.cuda.is_available():
        raise ImportError("backend 'flash-attn' needs a CUDA GPU; with one, pip install 'longtail[gpu]'")
    return flash_attn


def paged_attention_flash(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
    variant: AttentionVariant = PLAIN,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `paged_attention`; ValueError for what flash-attn 2 does not compute."""
    unsupported = {
        "attention sinks": variant.sinks is not None,
        "tree masks": batch.tree_masks is not None,
        "a quantised cache": scales is not None or kv.element_size() == 1,
        "the 5-D layout (make the cache with empty_kv(..., layout='hnd'))": kv.dim() == 5,
        f"{q.dtype} queries (float16 and bfloat16 only)": q.dtype not in (torch.float16, torch.bfloat16),
        f"a cache of {kv.dtype} with queries of {q.dtype}": kv.dtype != q.dtype,
        f"a block size of {block_size} (multiples of {PAGE} only)": block_size % PAGE != 0,
        f"head_dim {q.shape[2]} (multiples of 8 up to 256 only)": q.shape[2] % 8 != 0 or q.shape[2] > 256,
    }
    if found := [what for what, is_so in unsupported.items() if is_so]:
        raise ValueError(f"paged_attention: flash-attn does not take {found[0]}; use backend 'triton' or 'reference'")
    check_shapes(q, kv, block_size, variant, scales)
    batch.check("paged_attention", q.shape[0], q.shape[1] // kv.shape[3], kv, layer, block_size, variant.window)
    flash_attn = _flash_attn()
    if batch.flash_plan is None or batch.flash_plan.block_tables.device != kv.device:
        batch.flash_plan = FlashPlan.build(batch, kv.device)
    plan = batch.flash_plan
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    rows = len(batch.context_lens)
    if rows == 0:
        return out
    k, v = (kv[:, layer, i].transpose(1, 2) for i in (0, 1))  # views [num_blocks, block_size, kv_heads, head_dim]
    common = {
        "softmax_scale": scale,
        "causal": True,
        # Tokens to the left of a row, which our window counts in.
        "window_size": (variant.window - 1, 0) if variant.window else (-1, -1),
        "softcap": variant.softcap,
        "block_table": plan.block_tables,
    }
    if plan.query_len is not None:
        packed = q[:rows].reshape(-1, plan.query_len, *q.shape[1:])
        result = flash_attn.flash_attn_with_kvcache(packed, k, v, cache_seqlens=plan.contexts, **common)
    else:
        result = flash_attn.flash_attn_varlen_func(
            q[:rows],
            k,
            v,
            cu_seqlens_q=plan.cu_queries,
            cu_seqlens_k=plan.cu_contexts,
            max_seqlen_q=plan.longest_query,
            max_seqlen_k=plan.longest_context,
            **common,
        )
    out[:rows] = result.reshape(rows, *q.shape[1:])
    return out
