"""The packed input of one forward pass."""

from __future__ import annotations

import dataclasses

import torch

from longtail.kernels.attention import AttentionBatch


@dataclasses.dataclass(slots=True)
class ForwardBatch:
    """Rows of all scheduled sequences, one after the other, then padding rows (their slot is -1)."""

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    slots: torch.Tensor
    """int64 [T]: where each row's KV goes; -1 for padding."""
    attention: AttentionBatch
    logits_rows: torch.Tensor
    """int64 [R]: rows whose logits are wanted (padded like the others)."""
    block_size: int

    @classmethod
    def build(
        cls,
        tokens: list[list[int]],
        starts: list[int],
        slots: list[int],
        block_tables: list[list[int]],
        logits_rows: list[int],
        *,
        group: int,
        block_size: int,
        padded_rows: int,
        padded_logits: int,
    ) -> ForwardBatch:
        """tokens: ids to compute, per sequence; starts: position of the first of each; slots: over all rows."""
        flat = [token for part in tokens for token in part]
        positions = [p for part, start in zip(tokens, starts, strict=True) for p in range(start, start + len(part))]
        padding = padded_rows - len(flat)
        lens = [len(part) for part in tokens]
        contexts = [start + n for start, n in zip(starts, lens, strict=True)]
        rows = logits_rows + logits_rows[:1] * (padded_logits - len(logits_rows))
        return cls(
            input_ids=torch.tensor(flat + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            slots=torch.tensor(slots + [-1] * padding),
            attention=AttentionBatch.build(lens, contexts, block_tables, group),
            logits_rows=torch.tensor(rows, dtype=torch.long),
            block_size=block_size,
        )
