"""The memory of a model's layers: what the spec and the settings make of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from longtail.kv_manager.layout import split_blocks
from longtail.kv_manager.manager import KVManager
from longtail.kv_manager.states import SLOTS, StateSlots, state_layout
from longtail.partial_rollout.engines.native.spec import DecoderSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """The tensors that a pass reads and writes."""

    paged: tuple[torch.Tensor, ...]
    """Of each group."""
    states: tuple[tuple[torch.Tensor, ...], ...]
    """Of each layer that keeps a state."""

    @classmethod
    def of(cls, kv: KVManager) -> Cache:
        states = () if kv.states is None else tuple(kv.states.tensors)
        return cls(tuple(group.cache for group in kv.groups), states)


PREFIXES = 16
"""More blocks are not made than so many times what fills all slots. Each is an object too; a small model's would take
gigabytes."""


def make_kv(
    spec: DecoderSpec,
    *,
    budget: int,
    block_size: int,
    longest: int,
    max_num_seqs: int,
    max_rows: int,
    most_blocks: int | None = None,
    **fields: Any,
) -> KVManager:
    """budget: bytes for all of it; longest: tokens of a sample; max_rows: tokens of a pass; most_blocks: that a group
    gets, whatever the budget; None: PREFIXES times what fills all slots. Further fields as `KVManager`'s. ValueError if
    that is not enough for one sample."""
    shapes = tuple(spec.layers[i].shapes for i in spec.states)
    states = None
    if shapes:
        needed = SLOTS * max_num_seqs * state_layout(shapes).block_bytes
        if needed > budget:
            raise ValueError(
                f"kv_cache_bytes {budget} is not enough: the states of max_num_seqs {max_num_seqs} samples need "
                f"{needed} bytes; raise it or lower max_num_seqs"
            )
        budget -= needed
        states = StateSlots(shapes, max_num_seqs)
    layouts = spec.layouts(block_size)
    num_blocks = split_blocks(budget, layouts, longest, max_num_seqs, max_rows)
    if most_blocks is None:
        most_blocks = PREFIXES * max_num_seqs * -(-longest // block_size)
    num_blocks = [min(n, most_blocks) for n in num_blocks]
    return KVManager(layouts, num_blocks, states=states, **fields)
