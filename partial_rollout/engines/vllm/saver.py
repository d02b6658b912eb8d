"""What the engine asks of whoever saves the KV of paused requests and brings it back (`connector.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tiers import Tiers
from longtail.sample import KVSource, Sample

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm.core import Core


class KVSaver(Protocol):
    """One an engine. Called between steps, in the engine's process."""

    @property
    def tiers(self) -> Tiers:
        """Where snapshots lie."""
        ...

    def engine_args(self) -> Mapping[str, Any]:
        """Fields of vLLM's EngineArgs that it needs, such as kv_transfer_config. Before there is a core."""
        ...

    def start(self, core: Core, version: int) -> None:
        """The engine has its core, with weights of this version."""
        ...

    def save(self, sample: Sample, request_id: str, num_tokens: int) -> Snapshot | None:
        """The first `num_tokens` tokens' KV of a request that runs, before it is withdrawn. None: no room."""
        ...

    def load_params(self, sample: Sample) -> Mapping[str, Any] | None:
        """For a request that is to go on from `sample.snapshot`: kv_transfer_params for the connector. None: it has
        none that can be used, and `refused` says why."""
        ...

    def loaded(self, sample: Sample) -> KVSource:
        """What the KV is that the connector has just brought for a request of this sample."""
        ...

    def refused(self, sample: Sample) -> str | None:
        """Why `sample.snapshot` was not used, or not wholly; None: it was, or there is none."""
        ...

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """These are in place: what is saved from here on is theirs."""
        ...
