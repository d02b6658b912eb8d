"""Slots for the states of recurrent and convolutional layers: fixed in size, whatever the length of the sequence.

A running sequence holds two slots. A pass reads the state from one and writes the state after its last row to the
other; they change places when the pass counts (`advance`). So a pass that failed, or drafts that were rejected, leave
the state from which to try again.

    before a pass   [ state after computed tokens ]  [ anything            ]
    after it        [ as it was                   ]  [ state after the pass]   then they change places

A state stands for one position alone: a prefix can be reused only where somebody left a copy. The end of a prompt is
such a place (`keep`); copies go when their slot is needed, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from longtail.kv_manager.block_pool import BlockHash
from longtail.kv_manager.layout import Layout
from longtail.sequence import Sequence

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that one layer keeps."""


SLOTS = 3
"""For each sequence there is room for: the two that it holds, and a copy."""


class StateSlots:
    """shapes: of each layer that keeps a state. There is room for `most` sequences and as many copies."""

    def __init__(self, shapes: tuple[Shapes, ...], most: int) -> None:
        self.layout = state_layout(shapes)
        self.num_slots = most * SLOTS
        self.tensors = [tuple(torch.zeros(self.num_slots, *shape) for shape in layer) for layer in shapes]
        """Of each layer: float32 [slots, *shape] for each of its shapes."""
        self._flat = [t.flatten(1) for layer in self.tensors for t in layer]
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._held: dict[Sequence, tuple[int, int]] = {}
        """(read, write) slots."""
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()

    def hold(self, seq: Sequence, key: BlockHash | None) -> None:
        """Gives a sequence its slots, with the state that was kept under `key`; None: the state before any token."""
        assert seq not in self._held, seq.sample.id
        if key is not None:
            self._kept.move_to_end(key)  # there are more copies than two where room must be made
        read, write = self._take(), self._take()
        self._held[seq] = read, write
        for t in self._flat:
            t[read] = 0.0 if key is None else t[self._kept[key]]

    def advance(self, seq: Sequence) -> None:
        """The pass counts."""
        read, write = self._held[seq]
        self._held[seq] = write, read

    def release(self, seq: Sequence) -> None:
        self._free += self._held.pop(seq)

    def slots(self, seq: Sequence) -> tuple[int, int]:
        """(read, write)."""
        return self._held[seq]

    def save(self, seq: Sequence, out: torch.Tensor) -> None:
        """Copies a sequence's state to float32 [dim]."""
        torch.cat([t[self._held[seq][0]] for t in self._flat], out=out)

    def restore(self, seq: Sequence, state: torch.Tensor) -> None:
        """The inverse of `save`."""
        for t, part in zip(self._flat, state.split([t.shape[1] for t in self._flat]), strict=True):
            t[self._held[seq][0]] = part

    def keep(self, seq: Sequence, key: BlockHash) -> None:
        """A copy of the present state, for others to find."""
        if key in self._kept or (not self._free and not self._kept):
            return
        slot = self._take()
        for t in self._flat:
            t[slot] = t[self._held[seq][0]]
        self._kept[key] = slot

    def find(self, key: BlockHash) -> bool:
        if key in self._kept:
            self._kept.move_to_end(key)
        return key in self._kept

    def forget_all(self) -> None:
        """Drops the copies."""
        self._free += self._kept.values()
        self._kept.clear()

    def _take(self) -> int:
        if not self._free:
            assert self._kept, "more sequences than there are slots for"
            self._free.append(self._kept.popitem(last=False)[1])
        return self._free.pop()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """AssertionError unless every slot is free, held or kept, once, and exactly these sequences hold some."""
        assert set(sequences) == set(self._held), "sequences that hold states differ from those that run"
        slots = [*self._free, *self._kept.values(), *(slot for pair in self._held.values() for slot in pair)]
        assert sorted(slots) == list(range(self.num_slots)), "slots of states are lost, or used twice"


def state_layout(shapes: tuple[Shapes, ...]) -> Layout:
    """One number after the other, over all layers."""
    dim = sum(torch.Size(shape).numel() for layer in shapes for shape in layer)
    return Layout("state", len(shapes), 1, 0, dim)
