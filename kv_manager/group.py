"""The blocks of one paged group of layers: the tensor, the pool, and what is done with one block table."""

from __future__ import annotations

import torch

from longtail.kernels.kv import as_tokens, copy_blocks, scatter_blocks
from longtail.kv_manager.block_pool import BlockHash, BlockPool
from longtail.kv_manager.layout import Layout

NONE = -1
"""In a block table: a block that lies before the window, and is not kept."""


class PagedGroup:
    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self.layout = layout
        self.cache = layout.allocate(num_blocks)
        self.pool = BlockPool(num_blocks)

    def missing(self, table: list[int], first: int, num_tokens: int) -> tuple[int, list[int]]:
        """What it takes to write positions from block `first` to `num_tokens`: blocks to add, and places in the table
        whose block is shared and must be copied."""
        shared = [i for i in range(first, len(table)) if table[i] != NONE and self.pool.ref_counts[table[i]] > 1]
        return max(-(-num_tokens // self.layout.block_size) - len(table), 0), shared

    def extend(self, table: list[int], first: int, covered: int, shared: list[int], count: int) -> None:
        """Does it. covered: tokens of block `first` that stay. There must be enough free blocks."""
        blocks = self.pool.allocate(count + len(shared))
        assert blocks is not None, "the caller counts first"
        for i in shared:
            source, copy = table[i], blocks.pop()
            copy_blocks(self.cache, [(source, copy)])
            table[i] = copy
            self.pool.free([source])
        for i in range(first, len(table)):
            if table[i] != NONE:
                self.pool.truncate(table[i], covered if i == first else 0)
        table.extend(blocks)

    def write(self, table: list[int], low: int, high: int, data: torch.Tensor, keep: int = 0) -> None:
        """data: [high - low, *block shape], for these places of the table. keep: tokens at the start of the first of
        these blocks that stay as they are: a key may promise them, and the data may be of other weights."""
        if keep:
            data = data.clone()  # it may be the saved copy itself
            held = self.cache[table[low] : table[low] + 1]
            for new, old in zip(self._tokens(data[:1]), self._tokens(held), strict=True):
                new[..., :keep, :] = old[..., :keep, :]
        scatter_blocks(self.cache, table[low:high], data)

    def _tokens(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of blocks, each [..., block_size, dim]."""
        return as_tokens(blocks, self.layout.block_size) if self.layout.kind == "kv" else (blocks,)

    def adopt(self, table: list[int], key: BlockHash) -> None:
        """Appends the block of a key that was found."""
        block = self.pool.find(key)
        assert block is not None, "the caller looks first"
        self.pool.share(block)
        table.append(block)

    def trim(self, table: list[int], since: int, first: int) -> None:
        """Gives up the blocks before `first`, which no later token sees; those before `since` are gone already."""
        self.pool.free([block for block in table[since:first] if block != NONE])
        table[since:first] = [NONE] * (min(first, len(table)) - since)

    def release(self, table: list[int]) -> None:
        self.pool.free([block for block in table if block != NONE])
        table.clear()
