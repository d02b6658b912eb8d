"""Saved KV of an engine whose vLLM core has another process: it travels packed, as between the engines of a pool.

    pause    core saves into tiers of its own -> packed -> a snapshot in this process's tiers
    resume   verified here, packed -> comes with the request -> the core's saver and connector restore it
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from longtail.errors import SnapshotMismatch
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.snapshot import Snapshot
from longtail.partial_rollout.engines.vllm.core import IN_CORE, CoreDied
from longtail.partial_rollout.engines.vllm.kv_link import SNAPSHOT, Admission
from longtail.partial_rollout.engines.vllm.saver import KVSaver
from longtail.partial_rollout.pool.packed import pack_parts, unpack_snapshot
from longtail.sample import Sample

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm.core import Core
    from longtail.partial_rollout.engines.vllm.stay import Stay


@dataclasses.dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Caches of another process: what a snapshot is checked against."""

    layout: Layout
    dtype: str


class RemoteSaver(KVSaver):
    """The half in the engine's process: its tiers, and what may be used of a snapshot."""

    def config(self) -> dict[str, Any]:
        config = super().config()
        config |= {"kv_connector": "CoreConnector", "kv_connector_module_path": IN_CORE}
        config["kv_connector_extra_config"] |= {
            "encoding": self.encoding,
            "keep_older": self.keep_older,
            "by_version": self._by_version,
        }
        return config

    def start(self, core: Core, version: int) -> None:
        self._core = core
        self.fingerprint, self.unavailable, form = self._core.call("start_saver", version)
        self.device = None if form is None else _Elsewhere(*form)  # type: ignore[assignment]
        self._know(core.config)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        super().update_weights(weights, version)
        self._core.call("weights_updated", self.fingerprint)

    def offer(self, sample: Sample, refused: str | None = None) -> dict[str, Any]:
        """Waits for the disk if need be."""
        params, snapshot = super().offer(sample, refused), sample.snapshot
        entry = self._entries[sample.id]
        if snapshot is None:
            return params
        start = self.now()
        self._prepare(entry, snapshot, [*sample.prompt_ids, *sample.output_ids], True)
        if entry.data is not None:
            params[SNAPSHOT] = pickle.dumps(pack_parts(snapshot, entry.data))
        entry.seconds = self.now() - start
        self._release(entry)
        return params

    def admitted(self, stay: Stay, told: Admission | None) -> Admission:
        assert told is not None, stay.request_id
        entry = self._entries[stay.sample.id]
        seconds, refused = entry.seconds, entry.refused
        entry.seconds, entry.refused = 0.0, None
        return dataclasses.replace(told, seconds=told.seconds + seconds, refused=refused or told.refused)

    def save_request(self, stay: Stay) -> Snapshot | None:
        try:
            packed = self._core.call("save", (stay.request_id, len(stay.token_ids)))
            return None if packed is None else unpack_snapshot(packed, self.tiers)
        except (CoreDied, SnapshotMismatch):  # gone, or no room
            return None
