"""Sequences in a paged cache, as the tests of attention ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longtail.kernels.attention import AttentionBatch, AttentionVariant
from longtail.kernels.kv import empty_kv, empty_scales, store_kv_reference

GONE = 10**6
"""A block that does not exist: the interpreter's guard sees a read of it."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Sequences:
    """Sequences with given numbers of query rows and context lengths, their blocks in disorder, one block unused. What
    no table uses, and what lies before the window of all rows asked, has a block number that does not exist."""

    def __init__(
        self,
        queries: list[int],
        contexts: list[int],
        block: int,
        heads_of_a_tile: int,
        trees: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.queries, self.contexts, self.block, self.group = queries, contexts, block, heads_of_a_tile
        self.trees = trees
        sizes = [-(-n // block) for n in contexts]
        self.num_blocks = sum(sizes) + 1
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [[order.pop() for _ in range(size)] for size in sizes]

    @property
    def window(self) -> int:
        """0: none."""
        return 0

    def slots(self, i: int) -> torch.Tensor:
        """Of every position of sequence i."""
        table, size = self.tables[i], self.block
        return torch.tensor([table[p // size] * size + p % size for p in range(self.contexts[i])], dtype=torch.long)

    def batch(self, which: list[int] | None = None) -> AttentionBatch:
        """All sequences, or some."""
        which = list(range(len(self.queries))) if which is None else which
        return self.ask(
            [self.queries[i] for i in which],
            [self.contexts[i] for i in which],
            [self.tables[i] for i in which],
            None if self.trees is None else [self.trees[i] for i in which],
        )

    def row(self, i: int, t: int) -> AttentionBatch:
        """Query row t of sequence i alone, as decode would have computed it."""
        seen = self.contexts[i] - self.queries[i] + 1 + t
        return self.ask([1], [seen], [self.tables[i][: -(-seen // self.block)]])

    def ask(
        self, queries: list[int], contexts: list[int], tables: list[list[int]], trees: Any = None
    ) -> AttentionBatch:
        if self.window:
            firsts = [n - q + 1 - self.window for q, n in zip(queries, contexts, strict=True)]
            dead = [max(first, 0) // self.block for first in firsts]
            tables = [[-1] * k + table[k:] for k, table in zip(dead, tables, strict=True)]
        batch = AttentionBatch.build(queries, contexts, tables, self.group, trees)
        batch.block_tables[batch.block_tables < 0] = GONE
        return batch


class KVCase(Sequences):
    """Keys and values, of 8 bits too, in layer 1 of a cache whose other slots are NaN; queries, and how they attend."""

    def __init__(
        self,
        queries: list[int],
        contexts: list[int],
        heads: int = 3,
        kv_heads: int = 1,
        dim: int = 16,
        block: int = 16,
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        variant: AttentionVariant | None = None,
        trees: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.scale, self.variant = dim**-0.5, variant or AttentionVariant()
        super().__init__(queries, contexts, block, heads // kv_heads, trees)
        self.kv = empty_kv(self.num_blocks, 2, kv_heads, block, dim, layout="hnd", dtype=cache or dtype)
        self.scales = empty_scales(self.num_blocks, 2, kv_heads, block).fill_(torch.nan) if cache else None
        if cache is None:
            self.kv.fill_(torch.nan)
        for i, n in enumerate(contexts):
            k, v = randn(2, n, kv_heads, dim, seed=10 + i).to(dtype)
            store_kv_reference(k, v, self.kv, 1, self.slots(i), block, self.scales)
        self.q = [randn(n, heads, dim, seed=100 + i).to(dtype) for i, n in enumerate(queries)]

    @property
    def window(self) -> int:
        return self.variant.window

    def run(self, op: Any, q: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        out: torch.Tensor = op(q, self.kv, 1, batch, self.block, self.scale, self.variant, self.scales)
        return out
