"""What the layers of a model keep of a sequence, and the tensors that hold it.

    kv      keys and values of every token, or of a window    paged: [blocks, layers, 2, heads, block_size * dim]
    latent  compressed keys and values, for all heads (MLA)   paged: [blocks, layers, block_size, dim]
    routing the experts that computed a token (MoE)           paged: [blocks, layers, block_size, dim]
    state   what a recurrent or convolutional layer keeps     one slot, whatever the length: dim numbers

Layers that keep the same form a *group*: one tensor, one pool of blocks, one block table per sequence. All groups have
the same block size, so that the hash of a block's tokens names it in each of them.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch

Kind = Literal["kv", "latent", "routing", "state"]


class Layout(NamedTuple):
    """Of one group."""

    kind: Kind
    layers: int
    heads: int
    """kv: KV heads; else 1."""
    block_size: int
    """Tokens of a block; state: 0."""
    dim: int
    """kv: channels of a head; latent: rank + rotated channels; routing: experts of a token;
    state: numbers of a sequence, over all layers."""
    window: int = 0
    """Tokens that a row sees, itself included; 0: all."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of a block (state: of a slot)."""
        if self.kind == "kv":
            return (self.layers, 2, self.heads, self.block_size * self.dim)
        return (self.dim,) if self.kind == "state" else (self.layers, self.block_size, self.dim)

    @property
    def block_bytes(self) -> int:
        """In float32."""
        return math.prod(self.block_shape) * torch.float32.itemsize

    def allocate(self, num_blocks: int) -> torch.Tensor:
        """Zeroed float32 [num_blocks, *block_shape]; on a CPU, pages of zeros cost memory only when written."""
        return torch.zeros(num_blocks, *self.block_shape)

    def first_kept(self, num_tokens: int) -> int:
        """The first block that the next token of a sequence of so many computed ones sees."""
        return max(num_tokens - self.window + 1, 0) // self.block_size if self.window else 0

    @property
    def is_valid(self) -> bool:
        """Whether it describes a group at all; for what comes from a disk."""
        numbers = (self.layers, self.heads, self.block_size, self.dim, self.window)
        return (
            self.kind in get_args(Kind)
            and all(type(n) is int and 0 <= n < 1 << 40 for n in numbers)
            and min(self.layers, self.heads, self.dim) > 0
            and (self.block_size == 0) == (self.kind == "state")
            and (self.kind == "kv" or (self.heads == 1 and not self.window))
        )


def split_blocks(budget: int, layouts: tuple[Layout, ...], longest: int, max_num_seqs: int, max_rows: int) -> list[int]:
    """How many blocks each paged group gets of `budget` bytes.

    Every group gets what one sequence of `longest` tokens needs there, ValueError if that does not fit. Then all grow
    to equally many blocks, a group with a window at most to what max_num_seqs sequences can hold there (max_rows:
    tokens of a pass, which stand beside the windows until it is over)."""
    size = layouts[0].block_size
    blocks = -(-longest // size)
    most = [_most_blocks(layout, blocks, max_num_seqs, max_rows) for layout in layouts]
    least = [_most_blocks(layout, blocks, 1, max_rows) for layout in layouts]
    needed = int(sum(n * layout.block_bytes for layout, n in zip(layouts, least, strict=True)))
    if needed > budget:
        raise ValueError(
            f"kv_cache_bytes leaves {budget} bytes for blocks, but one sample of max_model_len {longest} needs "
            f"{blocks} blocks or {needed} bytes; raise kv_cache_bytes or lower max_model_len"
        )

    def counts(n: int) -> list[int]:
        return [int(max(min(n, m), one)) for m, one in zip(most, least, strict=True)]

    low, high = 0, budget // min(layout.block_bytes for layout in layouts)
    while low < high:  # the largest n that fits
        n = (low + high + 1) // 2
        size = sum(count * layout.block_bytes for layout, count in zip(layouts, counts(n), strict=True))
        low, high = (n, high) if size <= budget else (low, n - 1)
    return counts(low)


def _most_blocks(layout: Layout, blocks: int, max_num_seqs: int, max_rows: int) -> float:
    """That so many sequences can use at once; without a window there is always use for more (the prefix cache)."""
    if not layout.window:
        return blocks if max_num_seqs == 1 else math.inf
    size = layout.block_size
    one = (layout.window - 2) // size + 2  # a window that begins and ends within a block
    return min(max_num_seqs * one + -(-max_rows // size), max_num_seqs * blocks)
