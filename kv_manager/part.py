"""A part: a run of saved KV blocks, and where its bytes are. What holds it there is a reference to it (`Tiers`)."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from longtail.kv_manager.host_memory import footprint
from longtail.kv_manager.snapshot_file import PartHeader

if TYPE_CHECKING:
    from longtail.kv_manager.tiers import Tiers


@dataclasses.dataclass(slots=True, eq=False)
class Stored:
    """The bytes of a part. Outlives the part while a thread works on it. Guarded by the lock of its `Tiers`."""

    header: PartHeader
    remaining: int
    """Tokens that its sample may still make."""
    tensors: dict[str, torch.Tensor] | None = None
    file: Path | None = None
    kept: bool = False
    pins: int = 0
    work: Literal["", "write", "read"] = ""
    failure: str | None = None
    dropped: bool = False

    @property
    def host_bytes(self) -> int:
        return footprint(self.header.nbytes)

    @property
    def evictable(self) -> bool:
        return self.tensors is not None and self.file is not None and not self.pins and not self.work


class Part:
    """A run of saved blocks, in host memory, on disk, or both: what holds it there."""

    __slots__ = ("__weakref__", "_stored", "tiers")

    def __init__(self, tiers: Tiers, stored: Stored) -> None:
        self.tiers = tiers
        """Whose it is; a snapshot may be restored by an engine with other tiers."""
        self._stored = stored
        weakref.finalize(self, tiers._dropped.put, stored).atexit = False

    @property
    def header(self) -> PartHeader:
        return self._stored.header

    @property
    def nbytes(self) -> int:
        return self._stored.header.nbytes

    @property
    def in_memory(self) -> bool:
        return self._stored.tensors is not None

    @property
    def is_ready(self) -> bool:
        """Whether `load` would not wait: it is in memory, or has turned out to be lost."""
        return self.in_memory or (self.failure is not None and not self._stored.work)

    @property
    def file(self) -> Path | None:
        """Set when it is whole on the disk."""
        return self._stored.file

    @property
    def failure(self) -> str | None:
        """Why it could not be written or read, in words."""
        return self._stored.failure

    @property
    def is_being_written(self) -> bool:
        return self._stored.work == "write"

    def keep(self) -> None:
        """The file is a store's: it outlives the part."""
        with self.tiers._changed:
            self._stored.kept = True

    def give_back(self) -> None:
        """The file goes with the part again."""
        with self.tiers._changed:
            self._stored.kept = False
