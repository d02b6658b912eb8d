"""Sequences in a 6-D cache, the same values on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longtail.kernels.attention import AttentionBatch
from longtail.kernels.kv import empty_kv, empty_scales, store_kv_reference


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Paged:
    """Layer 1 of a cache of two layers; every other slot is NaN (or, of a quantised cache, has a scale of NaN)."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        queries: list[int],
        contexts: list[int],
        heads: int = 8,
        kv_heads: int = 2,
        dim: int = 128,
        block: int = 16,
        cache: torch.dtype | None = None,
        trees: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.queries, self.contexts, self.trees, self.block = queries, contexts, trees, block
        self.group, self.scale = heads // kv_heads, dim**-0.5
        sizes = [-(-n // block) for n in contexts]
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [[order.pop() for _ in range(size)] for size in sizes]
        kv = empty_kv(sum(sizes), 2, kv_heads, block, dim, layout="hnd", dtype=cache or dtype)
        scales = empty_scales(sum(sizes), 2, kv_heads, block).fill_(torch.nan) if cache else None
        if cache is None:
            kv.fill_(torch.nan)
        for i, (table, n) in enumerate(zip(self.tables, contexts, strict=True)):
            k, v = randn(2, n, kv_heads, dim, seed=10 + i).to(dtype)
            slots = torch.tensor([table[p // block] * block + p % block for p in range(n)], dtype=torch.long)
            store_kv_reference(k, v, kv, 1, slots, block, scales)
        self.kv, self.scales = kv.to(device), None if scales is None else scales.to(device)
        self.q = randn(sum(queries), heads, dim, seed=5).to(device, dtype)

    def batch(self) -> AttentionBatch:
        return AttentionBatch.build(self.queries, self.contexts, self.tables, self.group, self.trees)

    def alone(self, sequence: int, row: int) -> AttentionBatch:
        """A row of a sequence as decode computes it."""
        context = self.contexts[sequence] - self.queries[sequence] + row + 1
        return AttentionBatch.build([1], [context], [self.tables[sequence]], self.group)
