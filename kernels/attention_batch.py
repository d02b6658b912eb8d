"""What the backends of paged attention share: where the rows belong, and which variant a layer computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from longtail.kernels._checks import check_devices, check_layer
from longtail.kernels.kv_quant import check_scales

if TYPE_CHECKING:
    from longtail.kernels.attention_flash import FlashPlan
    from longtail.kernels.attention_plan import SplitPlan

ROWS = 4
"""Query rows of a CPU tile."""

MOST_TREE_ROWS = 63
"""Rows of a draft tree: bits of an int64 that leave its sign alone."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """What a layer's attention does beside the plain softmax. The default is plain attention."""

    window: int = 0
    """Tokens that a row sees, itself included (sliding window); 0: all."""
    softcap: float = 0.0
    """scores = softcap * tanh(score / softcap), of the scaled score (Gemma 2); 0: as they are."""
    sinks: torch.Tensor | None = None
    """float32 [heads]: logits that join the denominator of the softmax only (gpt-oss)."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"attention: window must be 0 (off) or a number of tokens, not {self.window}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"attention: softcap must be 0 (off) or positive and finite, not {self.softcap}")
        if (s := self.sinks) is not None and (s.dtype != torch.float32 or s.dim() != 1 or not s.is_contiguous()):
            got = f"{s.dtype} {tuple(s.shape)} with strides {s.stride()}"
            raise ValueError(f"attention: sinks must be float32 [heads] and contiguous, got {got}")

    @property
    def is_plain(self) -> bool:
        return not self.window and not self.softcap and self.sinks is None


PLAIN = AttentionVariant()


@dataclasses.dataclass(slots=True)
class AttentionBatch:
    """Where the packed query rows of one forward pass belong. Built once per step, used by every layer.

    A draft tree (several continuations verified at once) has its rows in KV slots that follow each other, whatever the
    paths; its rows' masks say who sees whom:

        positions   0 .. base-1            base .. base+q-1
                    committed: all seen    the tree's rows: bit j of a row's mask stands for position base + j
    """

    cu_seqlens: torch.Tensor
    """int32 [sequences + 1]: rows cu_seqlens[i] .. cu_seqlens[i+1] belong to sequence i; later rows are padding."""
    context_lens: torch.Tensor
    """int32 [T]: KV positions from 0 that each row may see (its own position + 1); a tree's row: up to its last bit."""
    block_tables: torch.Tensor
    """int32 [sequences, most blocks]; unused entries are -1, and so may be blocks before the window of every row."""
    num_context_tokens: int
    """KV positions read, over all rows."""
    tiles: np.ndarray
    """int32 [tiles, 1 + ROWS]: sequence, then the row of each tile lane, as token * group + head in group."""
    group: int
    """Query heads of a KV head."""
    tree_masks: torch.Tensor | None = None
    """int64 [T], or None without trees: which of the tree's rows each row sees, 0 for the rows of no tree."""
    tree_bases: torch.Tensor | None = None
    """int32 [T]: positions below are seen regardless of the mask; of a row of no tree, its whole context."""
    plans: dict[Any, SplitPlan] = dataclasses.field(default_factory=dict)
    """Of the Triton kernels, by the arguments of `SplitPlan.of`."""
    flash_plan: FlashPlan | None = None
    """Of flash-attn; made by the first layer."""
    _windows: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    _checked: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)
    """Block sizes, numbers of blocks and windows with which the tables were found to hold what the rows read."""

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        context_lens: list[int],
        block_tables: list[list[int]],
        group: int,
        tree_masks: Sequence[Sequence[int] | None] | None = None,
    ) -> AttentionBatch:
        """query_lens: rows per sequence; context_lens: KV length of each sequence including these rows;
        group: query heads per KV head; tree_masks: per sequence None, or a mask for each of its rows. ValueError: a
        sequence with more rows than KV, lists of different lengths, masks that are no tree's."""
        if not len(query_lens) == len(context_lens) == len(block_tables):
            lens = f"{len(query_lens)} query_lens, {len(context_lens)} context_lens, {len(block_tables)} block_tables"
            raise ValueError(f"attention: {lens}: give one of each for a sequence")
        for i, (q, n) in enumerate(zip(query_lens, context_lens, strict=True)):
            if not 0 <= q <= n:
                raise ValueError(
                    f"attention: sequence {i} has query_len {q} and context_len {n}, which includes the query's rows: "
                    "pass 0 <= query_len <= context_len"
                )
        cu = np.zeros(len(query_lens) + 1, np.int32)
        np.cumsum(query_lens, out=cu[1:])
        per_row = np.empty(int(cu[-1]), np.int32)
        for i, (q, n) in enumerate(zip(query_lens, context_lens, strict=True)):
            per_row[cu[i] : cu[i + 1]] = np.arange(n - q + 1, n + 1, dtype=np.int32)
        masks = bases = None
        if tree_masks is not None and any(tree_masks):
            masks, bases = np.zeros(len(per_row), np.int64), per_row.copy()
            for i, (q, n, own) in enumerate(zip(query_lens, context_lens, tree_masks, strict=True)):
                if own:
                    _check_tree(i, q, own)
                    rows = slice(cu[i], cu[i + 1])
                    masks[rows], bases[rows] = own, n - q
                    per_row[rows] = [n - q + mask.bit_length() for mask in own]
        width = max((len(table) for table in block_tables), default=0)
        tables = np.full((len(block_tables), max(width, 1)), -1, np.int32)
        for i, table in enumerate(block_tables):
            tables[i, : len(table)] = table
        return cls(
            torch.from_numpy(cu),
            torch.from_numpy(per_row),
            torch.from_numpy(tables),
            int(per_row.sum()),
            _build_tiles(cu, np.asarray(context_lens, np.int32), group),
            group,
            None if masks is None else torch.from_numpy(masks),
            None if bases is None else torch.from_numpy(bases),
        )

    def check(
        self, op: str, rows: int, group: int, cache: torch.Tensor, layer: int, block_size: int, window: int = 0
    ) -> None:
        """ValueError where the batch does not fit queries [rows, ...] or the cache [num_blocks, layers, ...]. The
        tables are looked at once, by the first layer; on a GPU only their width is."""
        check_layer(op, layer, cache)
        if rows < len(self.context_lens):
            raise ValueError(f"{op}: q has {rows} rows, the batch {len(self.context_lens)}: pass a query for each")
        if group != self.group:
            raise ValueError(
                f"{op}: q has {group} heads for each KV head, the batch was built with group = {self.group}: "
                "build it with heads // kv_heads"
            )
        key = (block_size, cache.shape[0], window)
        if key not in self._checked:
            self._check_tables(op, block_size, cache, window)
            self._checked.add(key)

    def _check_tables(self, op: str, block_size: int, cache: torch.Tensor, window: int) -> None:
        cu = self.cu_seqlens.cpu().numpy()
        live = np.flatnonzero(np.diff(cu))
        if not len(live):
            return
        needed = -(-np.maximum.reduceat(self.context_lens.cpu().numpy(), cu[live]) // block_size)
        width = self.block_tables.shape[1]
        wrong = needed > width
        if not cache.is_cuda:
            first = np.minimum.reduceat(self.first_seen(window), cu[live]) // block_size
            column, tables = np.arange(width), self.block_tables.cpu().numpy()[live]
            read = (column >= first[:, None]) & (column < needed[:, None])
            wrong |= (read & ((tables < 0) | (tables >= cache.shape[0]))).any(1)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{op}: block_tables of sequence {live[i]}: {needed[i]} blocks of {block_size} hold what its rows see, "
                f"and not all of them are there (0 .. {cache.shape[0] - 1}, -1 is none): allocate them first"
            )

    def first_seen(self, window: int) -> np.ndarray:
        """-> int32 [T], the first position in each row's window (0: no window). The window of a tree's row ends at its
        depth in the tree and counts from there over its path, then over the committed positions."""
        if window not in self._windows:
            contexts = self.context_lens.cpu().numpy()
            if not window:
                self._windows[window] = np.zeros_like(contexts)
                return self._windows[window]
            ends = contexts
            if self.tree_masks is not None and self.tree_bases is not None:
                depths = np.bitwise_count(self.tree_masks.cpu().numpy()).astype(np.int32)
                if depths.max(initial=0) > window:
                    longest = int(depths.max())
                    raise ValueError(
                        f"attention: a path of {longest} tree rows does not fit in a window of {window}: draft less"
                    )
                ends = self.tree_bases.cpu().numpy() + depths  # of a row of no tree: its context and 0
            self._windows[window] = np.maximum(ends - window, 0).astype(np.int32)
        return self._windows[window]


def _check_tree(sequence: int, rows: int, masks: Sequence[int]) -> None:
    where = f"attention: tree_masks of sequence {sequence}"
    if len(masks) != rows:
        raise ValueError(f"{where}: {len(masks)} masks for {rows} rows, give one for each")
    if rows > MOST_TREE_ROWS:
        raise ValueError(f"{where}: a tree has at most {MOST_TREE_ROWS} rows, not {rows}")
    for row, mask in enumerate(masks):
        if not 0 < mask < 1 << rows:
            raise ValueError(f"{where}: the mask of row {row} is {mask:#x}, its bits must name the {rows} rows")
        if not mask >> row & 1:
            raise ValueError(f"{where}: row {row} must see itself, set bit {row} of its mask")


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


def check_shapes(
    q: torch.Tensor, kv: torch.Tensor, block_size: int, variant: AttentionVariant, scales: torch.Tensor | None
) -> None:
    """ValueError that names what does not fit."""
    shape, (_, heads, dim) = tuple(kv.shape), q.shape
    block = (block_size * dim,) if len(shape) == 5 else (block_size, dim)
    if len(shape) not in (5, 6) or shape[2] != 2 or shape[4:] != block or heads % shape[3]:
        raise ValueError(
            f"paged_attention: q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}, blocks of {block_size}"
        )
    if (sinks := variant.sinks) is not None and (sinks.shape != (heads,) or sinks.device != kv.device):
        wanted = f"[{heads}], one for each head, on {kv.device}"
        raise ValueError(f"paged_attention: sinks must be {wanted}, not {tuple(sinks.shape)} on {sinks.device}")
    check_devices("paged_attention", kv=kv, q=q)
    check_scales("paged_attention", kv, scales, block_size)
