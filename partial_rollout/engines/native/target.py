"""What a drafter that runs a model needs to know of the engine that it drafts for."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import torch

from longtail.kernels.linear import RowRule
from longtail.kv_manager.manager import KVManager
from longtail.partial_rollout.engines.native.config import NativeConfig
from longtail.partial_rollout.engines.native.decoder import Decoder
from longtail.sample import Sample
from longtail.spec_decode.choice import parts
from longtail.spec_decode.drafter import Drafter


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    decoder: Decoder
    rule: RowRule
    kv: KVManager
    """Its fingerprint tells the weights apart."""
    config: NativeConfig
    max_model_len: int


@runtime_checkable
class ModelBased(Drafter, Protocol):
    """A drafter that belongs to one engine at a time."""

    def bind(self, target: Target) -> None:
        """Drafts for this engine from here on, and keeps nothing of another one. ValueError if it cannot."""
        ...


@runtime_checkable
class WantsHidden(Drafter, Protocol):
    """A drafter that reads the target's hidden states."""

    wants_hidden: bool

    def take_hidden(self, sample: Sample, start: int, hidden: torch.Tensor) -> None:
        """Told after each pass, before the next `propose`. hidden: float32 [n, hidden], what the target's LM head
        reads (after the final norm) at positions start to start + n - 1, all of committed tokens; a view of the
        pass's, to be copied. Positions that the target did not compute are never told; some are told again."""
        ...


def hidden_takers(drafter: Drafter) -> list[WantsHidden]:
    return [part for part in parts(drafter) if isinstance(part, WantsHidden) and part.wants_hidden]
