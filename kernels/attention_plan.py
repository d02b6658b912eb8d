"""Which Triton program attends from which query rows to which part of the KV.

A *tile* is TILE query rows of one sequence, an *item* one partition of a tile's KV. A tile is computed whole, by one
program that takes its partitions in order, or split, by a program for each, whose results a second kernel adds up in
order. The bits are the same either way, so the choice may depend on the batch: whole where there are tiles enough to
fill a GPU, but for tiles with far more to read than the others, which those would wait for. Split tiles go in *turns*,
as many at once as a bounded workspace holds.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from longtail.kernels.attention_batch import AttentionBatch

TILE = 16
"""Query rows of a program, the fewest that a tensor core takes. One size for decode, verification and prefill: another
one might be another instruction, with other bits."""

UNEVEN = 4
"""Times the mean number of partitions from which a tile is split among whole ones."""

WORKSPACE_BYTES = 256 << 20
"""For the partial results of split tiles, unless a single tile needs more."""


@dataclasses.dataclass(slots=True)
class Programs:
    """Tiles that are launched together."""

    tiles: torch.Tensor
    """int32 [tiles, 3]: sequence, first row, end of its rows; a row is token * group + head in group."""
    items: torch.Tensor
    """int32 [items, 2]: tile, partition; the partitions of a tile stand in order."""
    item_starts: torch.Tensor
    """int32 [tiles + 1]: items item_starts[i] .. item_starts[i+1] are those of tile i."""


@dataclasses.dataclass(slots=True)
class SplitPlan:
    """The programs of one forward pass for layers of one shape, on the device of the cache."""

    context_lens: torch.Tensor
    """int32 [T], as in the batch."""
    block_tables: torch.Tensor
    """int32 [sequences, most blocks], as in the batch."""
    tree_masks: torch.Tensor | None
    """int64 [T], as in the batch."""
    tree_bases: torch.Tensor | None
    """int32 [T], as in the batch."""
    first_seen: torch.Tensor
    """int32 [T]: first position of each row's window."""
    whole: Programs | None
    turns: list[Programs]
    """Of the split tiles."""

    @classmethod
    def of(
        cls,
        batch: AttentionBatch,
        window: int,
        group: int,
        partition: int,
        device: torch.device,
        *,
        whole_from: int | None,
        item_bytes: int,
    ) -> SplitPlan:
        """Of the batch, made by the first layer that asks. group: query heads of a KV head; partition: KV tokens of an
        item; whole_from: tiles from which they are computed whole, None: never; item_bytes: of an item's result."""
        key = (window, group, partition, whole_from, item_bytes, device)
        if key not in batch.plans:
            alike = next((plan for (*_, where), plan in batch.plans.items() if where == device), None)
            batch.plans[key] = cls._build(batch, window, group, partition, device, whole_from, item_bytes, alike)
        return batch.plans[key]

    @classmethod
    def _build(
        cls,
        batch: AttentionBatch,
        window: int,
        group: int,
        partition: int,
        device: torch.device,
        whole_from: int | None,
        item_bytes: int,
        other: SplitPlan | None,
    ) -> SplitPlan:
        cu, contexts = batch.cu_seqlens.cpu().numpy() * group, batch.context_lens.cpu().numpy()
        low = batch.first_seen(window)
        per_sequence = -(-np.diff(cu) // TILE)
        sequence = np.repeat(np.arange(len(per_sequence)), per_sequence)
        number = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
        first = cu[sequence] + number * TILE
        tiles = np.stack([sequence, first, np.minimum(first + TILE, cu[sequence + 1])], axis=1)
        from_part = counts = np.zeros(0, np.int64)
        if len(first):
            from_part = np.minimum.reduceat(np.repeat(low, group), first) // partition
            counts = -(-np.maximum.reduceat(np.repeat(contexts, group), first) // partition) - from_part

        def on_device(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

        def programs(which: np.ndarray) -> Programs:
            """which: int64 [n], tiles."""
            n = counts[which]
            starts = np.concatenate([[0], np.cumsum(n)])
            tile = np.repeat(np.arange(len(which)), n)
            items = np.stack([tile, np.arange(len(tile)) - np.repeat(starts[:-1] - from_part[which], n)], axis=1)
            return Programs(on_device(tiles[which]), on_device(items), on_device(starts))

        is_whole = np.zeros(len(tiles), bool)
        if whole_from is not None and len(tiles) >= whole_from:
            is_whole = counts * len(tiles) <= UNEVEN * counts.sum()
        split = np.flatnonzero(~is_whole)
        turn = np.cumsum(counts[split]) // max(WORKSPACE_BYTES // item_bytes, 1)
        cuts = np.flatnonzero(np.diff(turn)) + 1
        return cls(
            other.context_lens if other else batch.context_lens.to(device),
            other.block_tables if other else batch.block_tables.to(device),
            None if batch.tree_masks is None else batch.tree_masks.to(device),
            None if batch.tree_bases is None else batch.tree_bases.to(device),
            on_device(low),
            programs(np.flatnonzero(is_whole)) if is_whole.any() else None,
            [programs(which) for which in np.split(split, cuts) if len(which)],
        )
