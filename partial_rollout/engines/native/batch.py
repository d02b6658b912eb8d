"""The packed input of one forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf

import torch

from longtail.kernels.attention import AttentionBatch
from longtail.kernels.linear import RowRule
from longtail.kv_manager.manager import KVManager
from longtail.partial_rollout.engines.native.scheduler import Scheduled
from longtail.partial_rollout.engines.native.spec import DecoderSpec


@dataclasses.dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the rows of a pass belong in one group of layers."""

    attention: AttentionBatch
    slots: torch.Tensor
    """int64 [T]: where each row's KV goes; -1 for padding."""


@dataclasses.dataclass(slots=True)
class ForwardBatch:
    """Rows of all scheduled sequences, one after the other, then padding rows (their slot is -1)."""

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    cu_seqlens: torch.Tensor
    """int64 [S + 1]: rows of each sequence; later ones are padding."""
    paged: tuple[PagedRows, ...]
    """Of each group of layers that keep KV or latents."""
    state_read: torch.Tensor
    """int64 [S], or [0] without states: slot of each sequence's state before this pass,"""
    state_write: torch.Tensor
    """and the one for the state after it."""
    logits_rows: torch.Tensor
    """int64 [R]: rows whose logits are wanted (padded like the others)."""
    block_size: int

    @classmethod
    def build(
        cls,
        scheduled: SequenceOf[Scheduled],
        kv: KVManager,
        spec: DecoderSpec,
        rule: RowRule,
        logits_rows: list[int],
    ) -> ForwardBatch:
        """`kv.reserve` has made room for what is scheduled, drafts included."""
        seqs = [item.seq for item in scheduled]
        lens = [item.num_tokens + len(item.drafts) for item in scheduled]
        stops = [seq.num_computed_tokens + n for seq, n in zip(seqs, lens, strict=True)]
        spans = [(seq, seq.num_computed_tokens, stop) for seq, stop in zip(seqs, stops, strict=True)]
        ids: list[int] = []
        for item in scheduled:
            start = item.seq.num_computed_tokens
            ids += item.seq.token_ids[start : start + item.num_tokens]
            ids += item.drafts
        positions = [p for _, start, stop in spans for p in range(start, stop)]
        padding = rule.padded(len(ids)) - len(ids)
        paged = []
        for g, group in enumerate(spec.groups):
            slots = [slot for seq, start, stop in spans for slot in kv.slots(seq, start, stop, g)]
            tables = [seq.block_tables[g] for seq in seqs]
            attention = AttentionBatch.build(lens, stops, tables, group.layer.queries)
            paged.append(PagedRows(attention, torch.tensor(slots + [-1] * padding)))
        states = [] if kv.states is None else [kv.states.slots(seq) for seq in seqs]
        rows = logits_rows or [0]
        return cls(
            input_ids=torch.tensor(ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            cu_seqlens=torch.tensor([0, *lens]).cumsum(0),
            paged=tuple(paged),
            state_read=torch.tensor([read for read, _ in states], dtype=torch.long),
            state_write=torch.tensor([write for _, write in states], dtype=torch.long),
            logits_rows=torch.tensor(rows + rows[:1] * (rule.padded(len(rows)) - len(rows)), dtype=torch.long),
            block_size=kv.block_size,
        )
