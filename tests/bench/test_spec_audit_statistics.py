"""The audit's statistics against values of SciPy 1.17 (not a dependency), by hand, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from longtail.bench.spec_audit_statistics import (
    chi2_isf,
    chi2_sf,
    draws_needed,
    goodness_of_fit,
    poisson_limit,
    poisson_sf,
    pool,
    power,
    smallest_bias,
)


@pytest.mark.parametrize(
    ("x", "df", "noncentrality", "want"),
    [
        (80, 26, 0, 2.0964227541285994e-07),
        (30, 10, 0, 0.000856641210775301),
        (1.5, 3, 0, 0.6822703303362125),
        (80, 26, 50, 0.3796203997141942),
        (200, 80, 90, 0.09825788058962623),
        (10, 2, 0.3, 0.012362525450883725),
        (400, 26, 100, 3.284938344952161e-20),
    ],
)
def test_chi2_sf_is_scipys(x: float, df: int, noncentrality: float, want: float) -> None:
    assert chi2_sf(x, df, noncentrality) == pytest.approx(want, rel=1e-9)


def test_chi2_isf_is_scipys() -> None:
    assert chi2_isf(1e-8, 26) == pytest.approx(88.41159423589367, rel=1e-9)
    assert chi2_isf(3e-8, 8) == pytest.approx(50.69804644809115, rel=1e-9)
    assert chi2_isf(1e-6, 26, 5.0) == pytest.approx(88.49019937490624, rel=1e-9)
    assert chi2_isf(math.exp(-3.0), 2) == pytest.approx(6.0, rel=1e-9)  # two degrees: sf is exp(-x / 2)


def test_poisson() -> None:
    assert poisson_sf(5, 1.5) == pytest.approx(0.018575936222140675, rel=1e-9)
    assert poisson_sf(40, 20.0) == pytest.approx(5.320202511246237e-05, rel=1e-9)
    assert poisson_sf(0, 3.0) == 1.0
    assert poisson_sf(1, 0.0) == 0.0
    assert poisson_limit(0.0, 1e-9) == 1
    limit = poisson_limit(20.0, 1e-6)
    assert poisson_sf(limit, 20.0) <= 1e-6 < poisson_sf(limit - 1, 20.0)


def test_pool_by_hand() -> None:
    assert pool(np.array([50.0, 1.0, 30.0, 2.0, 3.0])).tolist() == [2, 0, 1, 0, 0]  # 1 + 2 + 3 = 6
    assert pool(np.array([50.0, 1.0, 30.0])).tolist() == [1, 0, 0]  # 1 alone expects too few
    assert pool(np.array([6.0, 7.0])).tolist() == [0, 1]
    assert pool(np.array([1.0, 2.0])).tolist() == [0, 0]


def test_goodness_of_fit_by_hand() -> None:
    fit = goodness_of_fit(np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25]), 0.01)
    assert fit.statistic == pytest.approx((30 - 25) ** 2 / 25 + 0 + (20 - 25) ** 2 / 25)
    assert (fit.df, fit.passed) == (2, True)
    assert fit.p_value == pytest.approx(math.exp(-fit.statistic / 2))
    assert not goodness_of_fit(np.array([60, 20, 20]), np.array([0.25, 0.5, 0.25]), 0.01).passed
    with pytest.raises(ValueError, match="must be > 0"):
        goodness_of_fit(np.array([1, 2]), np.array([0.0, 1.0]), 0.01)


SKEWED = np.array([0.45, 0.2, 0.1, 0.08, 0.05, 0.04, 0.03, 0.02, 0.01, 0.008, 0.006, 0.003, 0.002, 0.0009, 0.0001])


@pytest.mark.parametrize("draws", [600, 4000])
@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_false_alarms_are_as_rare_as_stated(draws: int, level: float) -> None:
    """Of 200,000 audits of a sound engine. Small cells make the tail a little heavier than the limit law's: allowed is
    a factor of 1.5, which a fair count exceeds with probability below 1e-6."""
    probs = SKEWED / SKEWED.sum()
    runs = 200_000
    counts = np.random.default_rng(draws).multinomial(draws, probs, runs)
    cells = pool(draws * probs)
    observed = np.zeros((runs, cells.max() + 1))
    for k, cell in enumerate(cells):
        observed[:, cell] += counts[:, k]
    expected = np.bincount(cells, draws * probs)
    statistics = ((observed - expected) ** 2 / expected).sum(1)
    assert statistics[0] == pytest.approx(goodness_of_fit(counts[0], probs, level).statistic)
    alarms = int((statistics > chi2_isf(level, len(expected) - 1)).sum())
    assert 0.7 * level * runs <= alarms <= 1.5 * level * runs


@pytest.mark.parametrize("target", [0.9, 0.99])
@pytest.mark.parametrize("outcome", [0, 5, 12])
def test_power_is_what_simulation_finds(target: float, outcome: int) -> None:
    """20,000 audits of an engine with a bias towards a frequent or a rare outcome: the share found is not below the
    computed power, and not far above it. The standard error is at most 0.0025."""
    probs = SKEWED / SKEWED.sum()
    biased = 0.97 * probs + 0.03 * np.eye(len(probs))[outcome]
    level = 1e-6
    draws = draws_needed(probs, biased, level, target, 200_000)
    computed = power(probs, biased, draws, level)
    assert computed >= target
    cells = pool(draws * probs)
    expected = np.bincount(cells, draws * probs)
    counts = np.random.default_rng(1).multinomial(draws, biased, 20_000)
    observed = np.stack([np.bincount(cells, row) for row in counts])
    found = (((observed - expected) ** 2 / expected).sum(1) > chi2_isf(level, len(expected) - 1)).mean()
    assert computed - 0.003 < found < computed + 0.05


def test_noise_costs_power_and_no_false_alarms() -> None:
    probs = SKEWED / SKEWED.sum()
    biased = 0.97 * probs + 0.03 * np.eye(len(probs))[5]
    assert power(probs, biased, 2000, 1e-6, noise=0.01) < power(probs, biased, 2000, 1e-6)
    direction = np.where(np.arange(len(probs)) < 1, 1.0, 0.0) - probs[0]
    off = probs * (1 + 0.05 * direction / math.sqrt((probs * direction**2).sum()))
    assert ((off - probs) ** 2 / probs).sum() == pytest.approx(0.05**2)
    counts = np.random.default_rng(2).multinomial(20_000, off, 4000)
    level, alarms = 1e-2, 0
    for row in counts:
        alarms += not goodness_of_fit(row, probs, level, noise=0.05).passed
    assert alarms <= 75  # expected 40: more with probability 1e-7
    assert not all(goodness_of_fit(row, probs, level).passed for row in counts[:100])


def test_smallest_bias() -> None:
    probs = np.array([0.9, 0.06, 0.04])

    def biased(x: float) -> np.ndarray:
        return (1 - x) * probs + x * np.eye(3)[2]

    bias = smallest_bias(probs, biased, 5000, 1e-7, 0.99)
    assert bias is not None
    assert power(probs, biased(bias), 5000, 1e-7) >= 0.99 > power(probs, biased(0.98 * bias), 5000, 1e-7)
    assert smallest_bias(probs, lambda x: probs, 5000, 1e-7, 0.99) is None
