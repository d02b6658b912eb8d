"""What a model's modules ask for while a pass runs: the batch, and where their layer keeps what it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch

from longtail.kernels.attention import AttentionBatch
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache
from longtail.partial_rollout.engines.native.spec import DecoderSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Paged:
    """Of a layer that keeps KV or latents."""

    cache: torch.Tensor
    """[blocks, layers, ...] (kernels/kv.py, kernels/latent.py)."""
    index: int
    """The layer's, in `cache`."""
    attention: AttentionBatch
    slots: torch.Tensor
    """int64 [T]; -1 for padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Of a layer that keeps a state."""

    tensors: tuple[torch.Tensor, ...]
    """float32 [slots, *shape] for each shape that the layer's spec declares."""
    read: torch.Tensor
    """int64 [S]: slot of each sequence's state before this pass; it must stay as it is."""
    write: torch.Tensor
    """int64 [S]: slot for the state after the sequence's last row. No slot is in both."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    batch: ForwardBatch
    cache: Cache
    spec: DecoderSpec

    def paged(self, layer: int) -> Paged:
        group, index = self.spec.places[layer]
        rows = self.batch.paged[group]
        return Paged(self.cache.paged[group], index, rows.attention, rows.slots)

    def state(self, layer: int) -> State:
        _, index = self.spec.places[layer]
        return State(self.cache.states[index], self.batch.state_read, self.batch.state_write)


_running = threading.local()


def current() -> Any:
    """Inside a module's forward: the pass that this thread runs, a `Forward` (a `TrainingPass` of the trainer's)."""
    return _running.forward


@contextlib.contextmanager
def running(forward: Any) -> Iterator[None]:
    """forward: what `current` returns inside; passes may nest (a layer that is computed again within another pass)."""
    before = getattr(_running, "forward", None)
    _running.forward = forward
    try:
        yield
    finally:
        _running.forward = before
