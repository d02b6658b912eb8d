"""Confidence intervals of shares, for counts that may be small or one-sided. All are of 95 %."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


def wilson(share: float, n: float) -> tuple[float, float]:
    """Of a share observed among n independent units (Wilson 1927): never outside [0, 1], and not empty where the share
    is 0 or 1. ValueError: a share outside [0, 1], or n not above 0."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must be 0 to 1, not {share}")
    if not n > 0:
        raise ValueError(f"n must be above 0, not {n}")
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def paired_difference(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean of values in [-1, 1], such as the difference of two answers of 0 or 1 to one question: the normal
    interval after a -1 and a +1 are added to the sample (Bonett and Price 2012, "Adjusted Wald confidence interval for
    a difference of binomial proportions based on paired data"). ValueError: no value, or one outside."""
    if not values:
        raise ValueError("values is empty; an interval needs at least one")
    for value in values:
        if not -1 <= value <= 1:
            raise ValueError(f"values has {value}; they must be -1 to 1")
    n = len(values) + 2
    mean = math.fsum(values) / n
    half = Z * math.sqrt(((math.fsum(x * x for x in values) + 2) / n - mean * mean) / n)
    return max(mean - half, -1.0), min(mean + half, 1.0)
