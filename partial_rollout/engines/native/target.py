"""What a drafter that runs a model needs to know of the engine that it drafts for."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from longtail.kernels.linear import RowRule
from longtail.kv_manager.manager import KVManager
from longtail.partial_rollout.engines.native.config import NativeConfig
from longtail.partial_rollout.engines.native.decoder import Decoder
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
