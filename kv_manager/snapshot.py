"""A sequence's saved KV, in host memory. An accelerator: what it holds can always be recomputed from the tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence

import torch

from longtail.errors import SnapshotMismatch
from longtail.version import Fingerprint


def token_digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    sample_id: str
    fingerprint: Fingerprint
    """Of the weights that made the KV."""
    layout: tuple[int, ...]
    """(layers, kv heads, block size, head dim): the cache it came from."""
    num_tokens: int
    """KV positions it holds."""
    digest: bytes
    """Of the token ids at those positions."""
    data: torch.Tensor
    """[blocks, layers, 2, kv heads, block size * head dim], contiguous, on the host."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def check(self, sample_id: str, token_ids: Sequence[int], layout: tuple[int, ...]) -> None:
        """Raises SnapshotMismatch unless this is the KV of the first `num_tokens` of these tokens in this layout.
        Weights are compared by the caller, who may have chosen to keep older KV."""
        if self.sample_id != sample_id:
            raise SnapshotMismatch(f"snapshot of sample {self.sample_id} offered to sample {sample_id}")
        if self.layout != layout:
            raise SnapshotMismatch(f"snapshot of {sample_id} has layout {self.layout}, the cache has {layout}")
        if self.num_tokens > len(token_ids) or token_digest(token_ids[: self.num_tokens]) != self.digest:
            raise SnapshotMismatch(f"snapshot of {sample_id} covers other tokens than the sample holds")
