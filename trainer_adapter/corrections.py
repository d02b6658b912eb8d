"""Off-policy corrections: what each token's policy loss is multiplied with, because older weights or another engine
sampled it.

    behaviour  mu       sampled the token; its log-probability was recorded     rollout_logprobs
    proximal   pi_prox  weights at the start of this update                     proximal_logprobs
    current    pi       weights that are trained                                logprobs

A correction reads rho = pi_prox / mu of every token in the mask (pi without its gradient, where a loss has no proximal
policy) and gives a factor a token, detached. The ratios come from log-probabilities and never from version tags: with
KV kept over a weight update a token of the newest version has been sampled from a mixture of old and new weights.

What is decided by versions alone is left out of the mask before any log-probability is known: staleness beyond a bound
(`TrainBatch.without_stale`) and earlier segments (`TrainBatch.without_earlier_segments`). A token with factor 0 is in
the mask still: it counts in means, so that dropping tokens does not scale up the others.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch

from longtail.trainer_adapter.batch import TrainBatch, expand, means, sums


class Correction(Protocol):
    """A frozen dataclass, so that a loss with it can be compared and printed."""

    @property
    def weighs(self) -> bool:
        """Whether factors other than 0 and 1 come out: importance weights."""

    def __call__(self, batch: TrainBatch, proximal: torch.Tensor) -> torch.Tensor:
        """proximal: log-probabilities [N], detached -> factors [N], detached; without meaning outside the mask."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatioCorrection:
    """The ratio rho, bounded.

    ValueError: bounds that are not 0 <= low < high, or bounds that would do nothing."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Of what rho is: a token; a whole sequence (the product over its tokens in the mask); or the geometric mean of
    those, which does not grow with length."""
    low: float = 0.0
    high: float = math.inf
    outside: Literal["truncate", "mask"] = "truncate"
    """What becomes of a ratio out of [low, high]: the nearer bound, or 0."""
    weigh: bool = True
    """Factor rho; otherwise 1 (outside: 0)."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("level", self.level, ("token", "sequence", "geometric")),
            ("outside", self.outside, ("truncate", "mask")),
        ):
            if value not in choices:
                raise ValueError(f"{name} {value!r} is unknown; there are {', '.join(choices)}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"low {self.low} and high {self.high}: must be 0 <= low < high")
        if not self.weigh and self.outside == "truncate":
            raise ValueError('weigh=False with outside="truncate" changes nothing; use outside="mask"')
        if not self.weigh and self.low == 0 and math.isinf(self.high):
            raise ValueError("weigh=False without low and high changes nothing; give bounds")

    @property
    def weighs(self) -> bool:
        return self.weigh

    def __call__(self, batch: TrainBatch, proximal: torch.Tensor) -> torch.Tensor:
        log_ratio = log_ratios(batch, proximal)
        if self.level == "sequence":
            log_ratio = expand(sums(log_ratio, batch.lengths), batch.lengths)
        elif self.level == "geometric":
            log_ratio = expand(means(log_ratio, batch.mask, batch.lengths), batch.lengths)
        ratio = log_ratio.exp()
        if self.outside == "truncate":
            return ratio.clamp(self.low, self.high)
        # What is outside is selected away, not multiplied by 0: an infinite ratio would become NaN. A NaN stays one.
        beyond = (ratio < self.low) | (ratio > self.high)
        return torch.where(beyond, 0.0, ratio if self.weigh else torch.where(ratio.isnan(), ratio, 1.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DivergentSequenceMask:
    """Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556): drops a sequence's tokens of negative advantage
    where mean_t(log mu - log pi), the mean over its tokens in the mask, is above `max_kl`: what the policy has moved
    away from already is not pushed further. pi is the current policy.

    ValueError: max_kl below 0."""

    max_kl: float

    def __post_init__(self) -> None:
        if not self.max_kl >= 0:
            raise ValueError(f"max_kl must be at least 0, not {self.max_kl}")

    @property
    def weighs(self) -> bool:
        return False

    def __call__(self, batch: TrainBatch, proximal: torch.Tensor) -> torch.Tensor:
        log_ratio = log_ratios(batch, batch.need("logprobs").detach())
        kl = expand(means(-log_ratio, batch.mask, batch.lengths), batch.lengths)
        factors = ((batch.advantages >= 0) | (kl <= self.max_kl)).to(log_ratio.dtype)
        return torch.where(kl.isnan(), kl, factors)


def log_ratios(batch: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """log of logprobs' policy over the behaviour policy, [N], 0 outside the mask."""
    return torch.where(batch.mask, logprobs - batch.rollout_logprobs, 0.0)


# ---- by name


def importance() -> tuple[Correction, ...]:
    """rho itself, unbounded. Unbiased for what a token's own ratio can correct, at any variance."""
    return (RatioCorrection(),)


def tis(cap: float = 2.0, level: Literal["token", "sequence", "geometric"] = "token") -> tuple[Correction, ...]:
    """min(rho, cap): truncated importance sampling (Ionides 2008; for rollouts Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training")."""
    return (RatioCorrection(level=level, high=cap),)


def icepop(low: float = 0.5, high: float = 5.0) -> tuple[Correction, ...]:
    """rho where low <= rho <= high, else 0: a token on which trainer and rollout disagree, either way, is not trained
    on (IcePop, Ling team, arXiv 2510.18855)."""
    return (RatioCorrection(low=low, high=high, outside="mask"),)


def sequence_mask(
    low: float = 0.0,
    high: float = 3.0,
    level: Literal["sequence", "geometric"] = "sequence",
    weigh: bool = True,
) -> tuple[Correction, ...]:
    """Whole sequences are left out whose rho is outside [low, high]; the others are weighted with it, or not (masked
    importance sampling by sequence, Liu et al. 2025, "When speed kills stability"; TRL's "sequence_mask"). A product
    over many tokens leaves its bounds by noise alone: for long responses take level="geometric" and bounds near 1."""
    return (RatioCorrection(level=level, low=low, high=high, outside="mask", weigh=weigh),)


def decoupled(cap: float = math.inf) -> tuple[Correction, ...]:
    """pi_prox / mu for decoupled PPO (`losses.decoupled_ppo`; Hilton et al., arXiv 2110.00641; AReaL, Fu et al., arXiv
    2505.24298, eq. 5); a token above `cap` is left out, as AReaL's behav_imp_weight_cap does."""
    return (RatioCorrection(high=cap, outside="mask"),)


def divergent_sequence_mask(max_kl: float) -> tuple[Correction, ...]:
    return (DivergentSequenceMask(max_kl=max_kl),)


CORRECTIONS: Mapping[str, Callable[..., tuple[Correction, ...]]] = {
    "none": tuple,
    "importance": importance,
    "tis": tis,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
    "decoupled": decoupled,
    "divergent_sequence_mask": divergent_sequence_mask,
}


def correction(name: str, **settings: Any) -> tuple[Correction, ...]:
    """By name, for `PolicyLoss.corrections`. Several are added up as tuples, and their factors multiply."""
    if name not in CORRECTIONS:
        raise ValueError(f"correction {name!r} is unknown; there are {', '.join(CORRECTIONS)}")
    try:
        return CORRECTIONS[name](**settings)
    except TypeError as error:
        known = ", ".join(inspect.signature(CORRECTIONS[name]).parameters) or "none"
        raise ValueError(f"correction {name!r}: {error}; its settings: {known}") from None
