"""How far one policy is from another on the same tokens, and what that means to a trainer.

p: the distribution that the trainer's forward pass has; q: the one that was sampled from. With importance weights
w = p / q, E_q[w] = 1 and E_q[w^2] = 1 + chi2(p, q), so the effective sample size of a token's weight is 1 / (1 + chi2)
of the number of tokens, and that of the weight of a whole run of tokens 1 / prod(1 + chi2) (both over the vocabulary,
with no noise from sampling; along the run the tokens are the ones given).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

CLIP = 0.2
"""Width of PPO's trust region: ratios from 1 - CLIP to 1 + CLIP."""
ROWS = 8
"""Computed at once, so that what is between stays in the processor's cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """Of the positions of one context, in order; each float64 [T] or bool [T]."""

    kl: np.ndarray
    """KL(p || q), nats."""
    chi2: np.ndarray
    error: np.ndarray
    """log q - log p of the token that is there, nats: what was recorded less what the trainer computes."""
    greedy: np.ndarray
    """Whether the most likely token is another one."""


@torch.inference_mode()
def drift(p_logits: torch.Tensor, q_logits: torch.Tensor, tokens: torch.Tensor) -> Drift:
    """logits: [T, V]; tokens: int64 [T]. At temperature 1, in float64."""
    kl, chi2, error = (torch.empty(len(tokens), dtype=torch.float64) for _ in range(3))
    for rows in torch.arange(len(tokens)).split(ROWS):
        p, q = (torch.log_softmax(logits[rows].double(), -1) for logits in (p_logits, q_logits))
        gap = p - q
        kl[rows] = (p.exp_() * gap).sum(-1)
        error[rows] = -gap.gather(1, tokens[rows, None])[:, 0]
        chi2[rows] = (q.exp_() * gap.expm1_().square_()).sum(-1)
    greedy = p_logits.argmax(-1) != q_logits.argmax(-1)
    return Drift(kl.numpy(), chi2.numpy(), error.numpy(), greedy.numpy())


def summary(drifts: Sequence[Drift]) -> dict[str, Any]:
    """Over all positions of all contexts; JSON-ready. se: standard error of the mean over contexts."""
    kl, chi2, error, greedy = (
        np.concatenate([getattr(d, name) for d in drifts]) for name in ("kl", "chi2", "error", "greedy")
    )
    size = np.abs(error)
    return {
        "positions": len(kl),
        "kl": float(kl.mean()),
        "kl_se": _standard_error([d.kl.mean() for d in drifts]),
        "error_mean": float(size.mean()),
        "error_se": _standard_error([np.abs(d.error).mean() for d in drifts]),
        "error_p99": float(np.quantile(size, 0.99)),
        "error_max": float(size.max()),
        "greedy_changed": float(greedy.mean()),
        "outside_clip": float((np.abs(np.expm1(-error)) > CLIP).mean()),
        "weight_variance": float(chi2.mean()),
        "ess_token": float(1 / (1 + chi2.mean())),
        "ess_run": float(np.mean([math.exp(-np.log1p(d.chi2).sum()) for d in drifts])),
    }


def by_distance(drifts: Sequence[Drift], base: Sequence[Drift] | None) -> list[dict[str, Any]]:
    """By distance from the last stale position: 1, 2, 3-4, 5-8, ... base: of the same positions, to divide by."""
    longest = max(len(d.kl) for d in drifts)
    rows = []
    first = 1
    while first <= longest:
        last = 1 if first == 1 else 2 * (first - 1)
        span = slice(first - 1, last)
        kl = np.concatenate([d.kl[span] for d in drifts])
        row: dict[str, Any] = {"from": first, "to": min(last, longest), "positions": len(kl), "kl": float(kl.mean())}
        row["error_mean"] = float(np.abs(np.concatenate([d.error[span] for d in drifts])).mean())
        if base is not None:
            row["share_of_policy"] = share(float(kl.sum()), float(np.concatenate([d.kl[span] for d in base]).sum()))
        rows.append(row)
        first = last + 1
    return rows


def share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _standard_error(means: Sequence[float]) -> float | None:
    return float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
