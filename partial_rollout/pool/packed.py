"""Saved KV and weights as plain bytes, so that they travel through an object store without being copied.

numpy arrays of bytes are what pickle (protocol 5) and Ray pass on as they lie in memory; torch's tensors are not.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from longtail.errors import SnapshotMismatch
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.part import Part
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.snapshot_file import PartHeader
from longtail.kv_manager.tiers import Tiers
from longtail.version import Fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class PackedTensor:
    dtype: str
    """As torch names it without "torch."."""
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8 [bytes]."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PackedTensor:
        """Shares the memory of a contiguous tensor on the CPU."""
        whole = tensor.detach().cpu().contiguous()
        name = str(whole.dtype).removeprefix("torch.")
        return cls(name, tuple(whole.shape), whole.view(-1).view(torch.uint8).numpy())

    def tensor(self) -> torch.Tensor:
        """On the same memory: to read, not to write."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that memory of an object store is read-only
            flat = torch.from_numpy(self.data)
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedSnapshot:
    sample_id: str
    fingerprint: Fingerprint
    layouts: tuple[Layout, ...]
    num_tokens: int
    digest: bytes
    parts: tuple[tuple[PartHeader, dict[str, PackedTensor]], ...]


def pack_snapshot(snapshot: Snapshot) -> PackedSnapshot:
    """Waits for the disk if need be. SnapshotMismatch if a part is lost or there is no room to read it."""
    return pack_parts(snapshot, ((part, part.tiers.load(part)) for part in snapshot.parts))


def pack_parts(snapshot: Snapshot, loaded: Iterable[tuple[Part, Mapping[str, torch.Tensor]]]) -> PackedSnapshot:
    """loaded: its parts, in order."""
    return PackedSnapshot(
        snapshot.sample_id,
        snapshot.fingerprint,
        snapshot.layouts,
        snapshot.num_tokens,
        snapshot.digest,
        tuple((part.header, {name: PackedTensor.of(t) for name, t in tensors.items()}) for part, tensors in loaded),
    )


def unpack_snapshot(packed: PackedSnapshot, tiers: Tiers) -> Snapshot:
    """A copy of it in these tiers. SnapshotMismatch if there is no room."""
    parts: list[Part] = []
    for header, tensors in packed.parts:

        def fill(out: Mapping[str, torch.Tensor], tensors: dict[str, PackedTensor] = tensors) -> None:
            for name, tensor in tensors.items():
                out[name].copy_(tensor.tensor())

        part = tiers.put(header, fill, shared=not header.sample_id)
        if part is None:
            raise SnapshotMismatch(tiers.no_room(header.nbytes))
        parts.append(part)
    return Snapshot(
        packed.sample_id, packed.fingerprint, packed.layouts, packed.num_tokens, packed.digest, tuple(parts)
    )


def pack_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {k: PackedTensor.of(v) if isinstance(v, torch.Tensor) else v for k, v in weights.items()}


def unpack_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.tensor() if isinstance(v, PackedTensor) else v for k, v in weights.items()}
