"""What the reference policy of DPO says of each pair: computed once, kept on disk beside whose it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail.trainer_adapter.dpo import PreferenceBatch
from longtail.trainer_adapter.preferences import Pair
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from longtail.trainer_adapter.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceLogprobs:
    """Log-probabilities of the responses of some pairs, at temperature 1."""

    logprobs: tuple[torch.Tensor, ...]
    """Of each pair: float32 [chosen tokens + rejected tokens], on the CPU."""
    weights: Fingerprint
    """Of the policy."""
    pairs: str
    """Digest of the pairs."""

    def of(self, indices: Iterable[int]) -> torch.Tensor:
        """float32 [N]: of these pairs, one after the other, as `PreferenceBatch` packs them."""
        found = [self.logprobs[i] for i in indices]
        return torch.cat(found) if found else torch.zeros(0)


def reference_logprobs(
    policy: Policy, pairs: Sequence[Pair], *, micro_batch_tokens: int = 8192, cache: Path | None = None
) -> ReferenceLogprobs:
    """Under the weights that the policy has now. cache: a file that is read where it is of the same weights and pairs,
    and else written. ValueError: a log-probability that is not finite."""
    weights, digest = fingerprint(policy.weights()), digest_of(pairs)
    if cache is not None and (found := _read(cache, weights, digest)) is not None:
        return found
    batch = PreferenceBatch.from_pairs(pairs)
    batch = batch.replace(weights=batch.pair_weights())
    device = next(iter(policy.parameters())).device
    with torch.no_grad():
        parts = [policy.logprobs(need_inputs(p.to(device))).float().cpu() for p in batch.split(micro_batch_tokens)]
    logprobs = torch.cat(parts) if parts else torch.zeros(0)
    if not logprobs[batch.mask].isfinite().all():
        raise ValueError("reference: gives log-probabilities that are not finite; is the model whole?")
    sizes = batch.lengths.view(-1, 2).sum(1).tolist()
    made = ReferenceLogprobs(logprobs=tuple(logprobs.split(sizes)), weights=weights, pairs=digest)
    if cache is not None:
        _write(cache, made)
    return made


def need_inputs(batch: PreferenceBatch) -> Any:
    if batch.inputs is None:
        raise ValueError("inputs: this reads them and the batch has none; PreferenceBatch.from_pairs makes them")
    return batch.inputs


def fingerprint(weights: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Names, types, shapes and all bytes (CRC-32 a tensor, about 2 GB/s)."""
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}{checksum:08x}".encode())
    return Fingerprint(digest.hexdigest())


def digest_of(pairs: Sequence[Pair]) -> str:
    """Of their tokens and masks, in order."""
    digest = hashlib.blake2b(digest_size=12)
    for pair in pairs:
        for part in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids, pair.chosen_mask, pair.rejected_mask):
            digest.update(b"-" if part is None else f"{len(part)}:".encode() + array("q", part).tobytes())
    return digest.hexdigest()


def _read(cache: Path, weights: Fingerprint, pairs: str) -> ReferenceLogprobs | None:
    from safetensors import SafetensorError, safe_open

    if not cache.is_file():
        return None
    try:
        with safe_open(cache, framework="pt") as file:
            meta = file.metadata() or {}
            if (meta.get("weights"), meta.get("pairs")) != (weights, pairs):
                return None
            logprobs = file.get_tensor("logprobs")
            sizes = file.get_tensor("sizes").tolist()
    except (SafetensorError, OSError):
        return None  # damaged: it is made again
    if zlib.crc32(logprobs.numpy().data) != int(json.loads(meta.get("checksum", "-1"))):
        return None
    return ReferenceLogprobs(logprobs=tuple(logprobs.split(sizes)), weights=weights, pairs=pairs)


def _write(cache: Path, made: ReferenceLogprobs) -> None:
    from safetensors.torch import save_file

    logprobs = made.of(range(len(made.logprobs)))
    tensors = {"logprobs": logprobs, "sizes": torch.tensor([len(x) for x in made.logprobs], dtype=torch.int64)}
    checksum = zlib.crc32(logprobs.numpy().data)
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_name(f"{cache.name}.part")
    save_file(tensors, part, {"weights": made.weights, "pairs": made.pairs, "checksum": json.dumps(checksum)})
    os.replace(part, cache)
