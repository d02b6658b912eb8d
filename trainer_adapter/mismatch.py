"""Train-rollout mismatch: how far the trainer's log-probabilities are from those that the rollout recorded, measured at
every step and told apart from staleness.

A *fresh* token was sampled by the version whose weights the trainer has now. What differs there is arithmetic alone,
and exactly 0.0 with an `ExactPolicy` (exact numerics); of older tokens the weights differ as well.

    meter = MismatchMeter()
    for part in batch.split(max_tokens):
        logprobs = policy.logprobs(part.inputs, temperature=temperature)
        meter.add(part.replace(logprobs=logprobs.detach()))
        ...
    print(meter.report())           # mismatch of 512 fresh tokens: max 0, mean 0, KL 0; 1 version behind (96): max ...

Measure before the weights change: after an optimiser step nothing is fresh, whatever the versions say. A token that was
sampled on KV of older weights (`kv_on_update="keep"`) counts by its version, and is a mixture of two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from longtail.trainer_adapter.batch import TrainBatch
from longtail.trainer_adapter.diagnostics import Mismatch, diagnose

METRICS = ("max_difference", "mean_difference", "kl", "kl_k3")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """Over the tokens in the mask."""

    overall: Mismatch
    by_staleness: dict[int, Mismatch]
    """Ascending, of what there is."""

    @property
    def fresh(self) -> Mismatch | None:
        """Of the tokens of the trainer's own version; None where none is in the mask."""
        found = self.by_staleness.get(0)
        return found if found is not None and found.trained else None

    @property
    def is_exact(self) -> bool:
        """Whether no fresh token differs by one bit. True where there is none."""
        return self.fresh is None or self.fresh.max_difference == 0.0

    def metrics(self, prefix: str = "mismatch/") -> dict[str, float]:
        """Flat, for a line of JSON or TensorBoard: of the fresh tokens `mismatch/max_difference` and its like; of the
        older ones `mismatch/stale1/...`. What has no tokens has no entry."""
        found: dict[str, float] = {}
        for staleness, own in self.by_staleness.items():
            if own.trained:
                start = prefix if staleness == 0 else f"{prefix}stale{staleness}/"
                found[f"{start}tokens"] = own.trained
                found |= {f"{start}{name}": getattr(own, name) for name in METRICS}
        return found

    def __str__(self) -> str:
        parts = []
        for staleness, own in self.by_staleness.items():
            if own.trained:
                what = "fresh" if staleness == 0 else f"{staleness} version{'s' * (staleness > 1)} behind"
                parts.append(
                    f"{own.trained:,} tokens {what}: max {own.max_difference:.3g}, mean {own.mean_difference:.3g}, "
                    f"KL {own.kl_k3:.3g}"
                )
        return "mismatch, " + ("; ".join(parts) or "no token is trained on")


class MismatchMeter:
    """Of a step's micro-batches, together. Keeps five numbers a token until `report`."""

    def __init__(self) -> None:
        self._parts: list[TrainBatch] = []

    def add(self, batch: TrainBatch) -> None:
        """A micro-batch with its `logprobs`. ValueError without them, or for another version than the ones before."""
        logprobs = batch.need("logprobs").detach()
        if self._parts and batch.version != self._parts[0].version:
            raise ValueError(f"batch.version is {batch.version}, of the parts before {self._parts[0].version}")
        self._parts.append(_bare(batch.replace(logprobs=logprobs)))

    def report(self) -> MismatchReport:
        """Of everything added since the last report, which it forgets. ValueError if that is nothing."""
        if not self._parts:
            raise ValueError("nothing was added: call add for each micro-batch first")
        parts, self._parts = self._parts, []
        return measure(_joined(parts))


def measure(batch: TrainBatch) -> MismatchReport:
    """Of a batch with its `logprobs`, in float64."""
    found = diagnose(batch)
    return MismatchReport(overall=found.overall, by_staleness=found.by_staleness)


_FIELDS = ("lengths", "mask", "advantages", "rollout_logprobs", "versions", "groups", "logprobs")


def _bare(batch: TrainBatch) -> TrainBatch:
    return TrainBatch(version=batch.version, **{name: getattr(batch, name).cpu() for name in _FIELDS})


def _joined(parts: Sequence[TrainBatch]) -> TrainBatch:
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in _FIELDS}
    return TrainBatch(version=parts[0].version, **joined)
