"""The audit's statistics: chi-square tests whose power is computed beforehand, and Poisson counts.

Goodness of fit of N independent outcomes to known probabilities p (Pearson 1900): X = sum (observed - N p)^2 / (N p) is
chi-square with cells - 1 degrees of freedom if outcomes follow p. If they follow p', it is larger by N * d(p', p) in
the mean, d = sum (p' - p)^2 / p, and its moments follow from those of multinomial counts. So the sample size that finds
a given p' with a given probability is known before anything is drawn.

Rare outcomes are pooled until a cell expects MIN_EXPECTED draws, because the chi-square law is a limit: how often it
raises false alarms is confirmed by simulation in tests/bench/test_spec_audit_statistics.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

MIN_EXPECTED = 5.0


def chi2_sf(x: float, df: float, noncentrality: float = 0.0) -> float:
    """P(X > x) for a chi-square X with df degrees of freedom; non-central as the Poisson mixture of central ones. Exact
    to about 1e-12 of itself, or 1e-300 if that is more."""
    if x <= 0:
        return 1.0
    import torch

    half = noncentrality / 2.0
    wide = 12.0 * math.sqrt(half) + 60.0  # beyond it the Poisson weights are below 1e-30
    j = torch.arange(max(math.floor(half - wide), 0), math.ceil(half + wide) + 1, dtype=torch.float64)
    tails = torch.special.gammaincc(df / 2.0 + j, torch.full_like(j, x / 2.0))
    if half == 0.0:
        return float(tails[0])
    weights = torch.exp(j * math.log(half) - half - torch.lgamma(j + 1.0))
    return float((weights * tails).sum().clamp(max=1.0))


@functools.lru_cache(4096)
def chi2_isf(level: float, df: float, noncentrality: float = 0.0) -> float:
    """The x with P(X > x) = level."""
    low, high = 0.0, df + noncentrality + 1.0
    while chi2_sf(high, df, noncentrality) > level:
        low, high = high, high * 2.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if chi2_sf(middle, df, noncentrality) > level else (low, middle)
    return high


def poisson_sf(count: int, mean: float) -> float:
    """P(X >= count) for a Poisson count X."""
    if count <= 0:
        return 1.0
    if mean <= 0.0:
        return 0.0
    import torch

    return float(torch.special.gammainc(torch.tensor(float(count)).double(), torch.tensor(mean).double()))


def poisson_limit(mean: float, level: float) -> int:
    """The smallest count that comes up with probability at most `level`."""
    count = math.ceil(mean)
    while poisson_sf(count, mean) > level:
        count += 1
    return max(count, 1)


def pool(expected: np.ndarray, least: float = MIN_EXPECTED) -> np.ndarray:
    """Cells to which outcomes belong, int64 [K]: those that expect fewer than `least` draws share one, which takes in
    the rarest of the others until it expects enough. expected: float64 [K], in draws. Depends on nothing observed."""
    order = np.argsort(expected, kind="stable")
    rare = int(np.searchsorted(expected[order], least))
    while 0 < rare < len(order) and expected[order[:rare]].sum() < least:
        rare += 1
    cells = np.empty(len(order), np.int64)
    cells[order[:rare]] = 0
    cells[order[rare:]] = np.arange(len(order) - rare) + (rare > 0)
    return cells


@dataclasses.dataclass(frozen=True, slots=True)
class GoodnessOfFit:
    statistic: float
    df: int
    threshold: float
    """The statistic is above it with probability `level` if nothing is wrong."""
    p_value: float

    @property
    def passed(self) -> bool:
        return self.statistic <= self.threshold


def goodness_of_fit(counts: np.ndarray, probs: np.ndarray, level: float, noise: float = 0.0) -> GoodnessOfFit:
    """counts: int64 [K] of independent draws; probs: float64 [K], each above 0, sum 1. noise: relative error that the
    probabilities may have; the null is then d(p', p) <= noise^2, the threshold that of its farthest member."""
    total = int(counts.sum())
    if total < 1 or abs(probs.sum() - 1.0) > 1e-6 or not (probs > 0).all():
        raise ValueError(f"goodness_of_fit: {total} draws, probabilities that sum to {probs.sum()}; they must be > 0")
    cells = pool(total * probs)
    expected = np.bincount(cells, total * probs)
    observed = np.bincount(cells, counts)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    df = len(expected) - 1
    if df == 0:
        return GoodnessOfFit(statistic, 0, 0.0, 1.0)
    slack = total * noise**2
    return GoodnessOfFit(statistic, df, chi2_isf(level, df, slack), chi2_sf(statistic, df, slack))


def power(probs: np.ndarray, biased: np.ndarray, draws: int, level: float, noise: float = 0.0) -> float:
    """Probability with which `goodness_of_fit` to `probs` finds that the draws follow `biased` (float64 [K])."""
    cells = pool(draws * probs)
    p, q = np.bincount(cells, probs), np.bincount(cells, biased)
    df = len(p) - 1
    if df == 0:
        return 0.0
    distance = math.sqrt(float(((q - p) ** 2 / p).sum()))
    if distance <= noise:
        return 0.0
    q = p + (q - p) * (1.0 - noise / distance)  # the noise may hide a part of it
    # X = |g + m|^2 with m = sqrt(N) (q - p) / sqrt(p), g of mean 0 and covariance diag(q / p) - (q q') / sqrt(p p').
    # The non-central chi-square (Cohen 1988, chapter 7) takes q = p in the covariance and overstates the power of a
    # bias towards a rare outcome (0.90 where simulation finds 0.84). Here X is taken as normal with its own moments:
    # it is skewed to the right, its lower tail lighter, so that the power is rather understated.
    shift = (q - p) / p
    mean = (q * (1.0 - q) / p).sum() + draws * ((q - p) * shift).sum()
    squares = (q**2 / p**2 * (1.0 - 2.0 * q)).sum() + (q**2 / p).sum() ** 2
    linear = (q * shift**2).sum() - (q * shift).sum() ** 2
    deviation = math.sqrt(float(2.0 * squares + 4.0 * draws * linear))
    threshold = chi2_isf(level, df, draws * noise**2)
    if deviation == 0.0:  # nothing is random under the bias
        return float(mean > threshold)
    return 0.5 * math.erfc((threshold - float(mean)) / deviation / math.sqrt(2.0))


def draws_needed(
    probs: np.ndarray, biased: np.ndarray, level: float, target: float, most: int, noise: float = 0.0
) -> int:
    """The smallest number of draws (to 1 %) that finds the bias with probability `target`; `most` if that is less."""
    return _smallest(lambda n: power(probs, biased, math.ceil(n), level, noise) >= target, 10.0, float(most))


def smallest_bias(
    probs: np.ndarray,
    biased: Callable[[float], np.ndarray],
    draws: int,
    level: float,
    target: float,
    noise: float = 0.0,
) -> float | None:
    """The smallest bias in (0, 1] that is found with probability `target`; None if not even 1 is. biased: the
    probabilities under a bias."""
    if power(probs, biased(1.0), draws, level, noise) < target:
        return None
    low, high = 0.0, 1.0
    while high - low > 0.005 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if power(probs, biased(middle), draws, level, noise) >= target else (middle, high)
    return high


def _smallest(holds: Callable[[float], bool], low: float, most: float) -> int:
    high = low
    while not holds(high):
        low, high = high, high * 2.0
        if low >= most:
            return int(most)
    while high > low * 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return min(math.ceil(high), int(most))


def as_json(result: Any) -> Any:
    """A dataclass's fields with plain numbers."""
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in dataclasses.asdict(result).items()}
