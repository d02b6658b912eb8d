"""How far the trained policy is from the one that sampled: KL, ratios, effective sample size, what is left out; of all
tokens and of those of each staleness."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from longtail.trainer_adapter.batch import TrainBatch

QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Of some tokens. rho = pi / mu of a token in the mask, mu the behaviour policy. Values are None where no token is
    in the mask."""

    tokens: int
    """Written by the policy (no observations)."""
    trained: int
    """Of them in the mask."""
    dropped: int
    """Of those, with factor 0 by a correction."""
    max_difference: float | None
    """max |log rho|: 0.0 where the trainer reproduces the rollout bit for bit."""
    mean_difference: float | None
    """Mean of |log rho|."""
    kl: float | None
    """KL(rollout || trainer), mean of -log rho: unbiased, may be negative."""
    kl_k3: float | None
    """The same quantity, mean of rho - 1 - log rho: unbiased, never negative, of lower variance while rho is near 1."""
    mean_ratio: float | None
    """Mean of rho, of expectation 1."""
    ratio_quantiles: tuple[float, ...] | None
    """Of rho, at `QUANTILES`, interpolated linearly."""
    effective_sample_size: float | None
    """(sum rho)^2 / (n sum rho^2), of the tokens: 1 where all count the same, 1 / n where one counts for all (Kong
    1992)."""

    @property
    def share_masked(self) -> float | None:
        """Of the policy's tokens, what no loss sees: out of the mask, or dropped."""
        return 1 - (self.trained - self.dropped) / self.tokens if self.tokens else None

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON, quantiles by name: ratio_q0.5."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "ratio_quantiles"}
        quantiles = self.ratio_quantiles or [None] * len(QUANTILES)
        found |= {f"ratio_q{q:g}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
        return found | {"share_masked": self.share_masked}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    overall: Mismatch
    by_staleness: dict[int, Mismatch]
    """Ascending. Token counts add up to those of `overall`."""


def diagnose(batch: TrainBatch, factors: torch.Tensor | None = None, *, of: str = "logprobs") -> Diagnostics:
    """of: the field that has pi's log-probabilities ("proximal_logprobs" for what decoupled PPO weighs with).
    factors: float [N], those of the corrections (`PolicyLoss.factors`). Computed in float64, no gradients."""
    log_ratio = (batch.need(of).detach().double() - batch.rollout_logprobs.double()).cpu()
    mask, sampled = batch.mask.cpu(), batch.sampled.cpu()
    dropped = torch.zeros_like(mask) if factors is None else mask & (factors == 0).cpu()
    staleness = batch.staleness.cpu()

    def at(chosen: torch.Tensor) -> Mismatch:
        counts = [int((chosen & x).sum()) for x in (sampled, mask, dropped)]
        return _mismatch(log_ratio[chosen & mask], *counts)

    steps = torch.unique(staleness[sampled]).tolist()
    return Diagnostics(overall=at(sampled), by_staleness={k: at(sampled & (staleness == k)) for k in steps})


def _mismatch(d: torch.Tensor, tokens: int, trained: int, dropped: int) -> Mismatch:
    """d: log rho, float64 [trained]."""
    if not trained:
        return Mismatch(
            tokens=tokens,
            trained=trained,
            dropped=dropped,
            max_difference=None,
            mean_difference=None,
            kl=None,
            kl_k3=None,
            mean_ratio=None,
            ratio_quantiles=None,
            effective_sample_size=None,
        )
    scaled = (d - d.max()).exp()  # the effective sample size does not change, and nothing overflows
    return Mismatch(
        tokens=tokens,
        trained=trained,
        dropped=dropped,
        max_difference=float(d.abs().max()),
        mean_difference=float(d.abs().mean()),
        kl=0.0 - float(d.mean()),  # and not -0.0
        kl_k3=float((torch.expm1(d) - d).mean()),
        mean_ratio=float(d.exp().mean()),
        ratio_quantiles=_quantiles(d.exp()),
        effective_sample_size=float(scaled.sum() ** 2 / (trained * (scaled * scaled).sum())),
    )


def _quantiles(x: torch.Tensor) -> tuple[float, ...]:
    """As torch.quantile, which takes no more than 16 million. NaN anywhere makes all of them NaN, as there."""
    if x.isnan().any():
        return (float("nan"),) * len(QUANTILES)
    ordered = x.sort().values
    found = []
    for q in QUANTILES:
        place = q * (len(x) - 1)
        below = int(place)
        low, high = float(ordered[below]), float(ordered[min(below + 1, len(x) - 1)])
        found.append(low if place == below else low + (place - below) * (high - low))
    return tuple(found)
