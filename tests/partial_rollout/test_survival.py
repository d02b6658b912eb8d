"""Survival of lengths, by hand and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from longtail.partial_rollout.survival import Exposure, chance_of_low, kaplan_meier, rank_scores


def test_kaplan_meier_by_hand():
    # 2 ended, 3 longer than, 5 ended, 5 longer than, 8 ended. At risk at 2: 5, at 5: 3, at 8: 1.
    survival = kaplan_meier([5, 2, 8, 3, 5], [True, True, True, False, False])
    np.testing.assert_allclose(survival.longer, [1, 1, 4 / 5, 4 / 5, 4 / 5, 8 / 15, 8 / 15, 8 / 15, 0])
    assert survival.limit == 8
    assert survival.mean() == pytest.approx(2 + 3 * 4 / 5 + 3 * 8 / 15)
    assert [survival.quantile(q) for q in (0.1, 0.2, 0.21, 0.46, 0.47, 1.0)] == [2, 2, 5, 5, 8, 8]


def test_kaplan_meier_without_censoring_is_the_plain_mean():
    lengths = np.random.default_rng(1).integers(1, 400, 301)
    survival = kaplan_meier(lengths, np.ones(301, bool))
    assert survival.mean() == pytest.approx(lengths.mean(), rel=1e-12)
    for q in (0.01, 0.5, 0.9, 1.0):
        assert survival.quantile(q) == np.quantile(lengths, q, method="inverted_cdf")


def test_longest_unfinished_restricts_the_mean():
    survival = kaplan_meier([2, 4], [True, False])
    assert survival.mean() == 3.0  # of min(length, 4): a lower bound
    assert survival.quantile(0.5) == 2 and survival.quantile(0.9) is None


def test_nothing_seen():
    survival = kaplan_meier([], [])
    assert survival.mean() is None and survival.quantile(0.5) is None
    assert kaplan_meier([7], [False], [7]).mean() is None, "no token was made while it was followed"


def test_delayed_entry_by_hand():
    # Followed in (0, 3] and ended; in (0, 4], longer; in (2, 6] and ended. At 3 all are at risk, at 6 one.
    survival = kaplan_meier([3, 4, 6], [True, False, True], [0, 0, 2])
    np.testing.assert_allclose(survival.longer, [1, 1, 1, 2 / 3, 2 / 3, 2 / 3, 0])
    # Not at risk before it entered: at 3 one of one, and not the last word because others enter later.
    early = kaplan_meier([3, 6, 8], [True, True, True], [0, 3, 3])
    np.testing.assert_allclose(early.longer, [1, 1, 1, 1, 1, 1, 1 / 2, 1 / 2, 0])


def test_pieces_make_the_whole():
    """Lives cut at arbitrary places into exposures say what whole lives say."""
    rng = np.random.default_rng(2)
    lengths, ended = rng.integers(1, 200, 300), rng.random(300) < 0.7
    cuts = rng.integers(0, 200, 300).clip(max=lengths)
    pieces = Exposure()
    pieces.add(cuts, ended & (cuts == lengths))
    rest = Exposure()
    rest.add(lengths, ended, cuts)
    pieces += rest
    np.testing.assert_allclose(pieces.survival().longer, kaplan_meier(lengths, ended).longer, rtol=1e-12)


def test_censoring_is_undone():
    """The mean of those that ended is far too low; Kaplan-Meier's is within 5 standard errors (1e-6) of the truth."""
    rng = np.random.default_rng(3)
    lengths, limits = rng.geometric(1 / 100, 20_000), rng.integers(1, 400, 20_000)
    ended = lengths <= limits
    seen = np.minimum(lengths, limits)
    mean = kaplan_meier(seen, ended).mean()
    assert mean is not None and lengths[ended].mean() < 80
    truth = np.minimum(rng.geometric(1 / 100, 1_000_000), 399).mean()  # nothing is seen beyond 399
    assert abs(mean - truth) < 5 * 100 / np.sqrt(ended.sum())


def test_rank_scores_by_hand():
    scores = rank_scores([5, 2, 8, 3, 5], [True, True, True, False, False])
    np.testing.assert_allclose(scores, [4 / 5 + 8 / 15 - 1, 4 / 5, 8 / 15 - 1, 4 / 5 - 1, 8 / 15 - 1])
    assert abs(scores.sum()) < 1e-12
    rng = np.random.default_rng(4)
    assert abs(rank_scores(rng.integers(1, 50, 500), rng.random(500) < 0.5).mean()) < 1e-12


@pytest.mark.parametrize("parts", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]])
@pytest.mark.parametrize("taken", [1, 3, 6])
def test_chance_is_an_upper_bound(parts: list[int], taken: int):
    """Against enumeration of every choice that the lot could have made."""
    rng = np.random.default_rng(taken)
    scores, units = rng.normal(size=8), np.array(parts)
    scores -= scores.mean()
    choices = [np.isin(np.arange(8), c) for c in itertools.combinations(range(8), taken)]
    by_unit = [tuple(np.bincount(units, weights=c)) for c in choices]
    for choice, kind in zip(choices, by_unit, strict=True):
        counts = np.array(kind)
        whole = (counts == 0) | (counts == np.bincount(units))
        if not whole.all() and whole.any() and len(counts) > 1:
            continue  # a mixture of both strata: below
        alike = [c for c, k in zip(choices, by_unit, strict=True) if whole.all() or k == kind]
        totals = [_total(scores, units, c) for c in alike]
        exact = np.mean(np.array(totals) <= _total(scores, units, choice) + 1e-12)
        assert chance_of_low(scores, units, choice) >= exact - 1e-12


def _total(scores: np.ndarray, units: np.ndarray, choice: np.ndarray) -> float:
    means = np.bincount(units, weights=scores) / np.bincount(units)
    counts = np.bincount(units, weights=choice)
    whole = (counts == 0) | (counts == np.bincount(units))
    centre = means[whole].mean() if whole.any() else 0.0
    inside = choice & ~whole[units]
    return float((means - centre)[whole & (counts > 0)].sum() + (scores - means[units])[inside].sum())


def test_chance_is_tight_enough():
    """40 of 200 that are lower by a standard deviation: the bound finds it at 1e-5; the other side gives 1."""
    rng = np.random.default_rng(5)
    chosen = np.arange(200) < 40
    scores = rng.uniform(-1, 1, 200) - 0.58 * chosen
    scores -= scores.mean()
    assert chance_of_low(scores, np.arange(200), chosen) < 1e-5
    assert chance_of_low(-scores, np.arange(200), chosen) == 1.0
    assert chance_of_low(scores, np.arange(200), np.ones(200, bool)) == 1.0
    assert chance_of_low(scores, np.arange(200), np.zeros(200, bool)) == 1.0


def test_chance_counts_prompts_not_responses():
    """Eight equal responses of a prompt are one fact: 5 unlucky prompts of 50 are no 40 unlucky responses."""
    scores = np.repeat(np.linspace(-1, 1, 50), 8)
    units, chosen = np.repeat(np.arange(50), 8), np.repeat(np.arange(50) < 5, 8)
    exact = 1 / math.comb(50, 5)
    assert exact < chance_of_low(scores, units, chosen) < 1e-4
    assert chance_of_low(scores, np.arange(400), chosen) < 1e-12 < exact


@pytest.mark.parametrize(
    ("lengths", "ended", "entries", "message"),
    [
        ([1.5], [True], None, "whole numbers"),
        ([-1], [True], None, "whole numbers"),
        ([float("nan")], [True], None, "whole numbers"),
        ([3], [True], [4], "exceed"),
        ([3, 4], [True], None, "one size"),
    ],
)
def test_bad_input(lengths: list, ended: list, entries: list | None, message: str):
    with pytest.raises(ValueError, match=message):
        kaplan_meier(lengths, ended, entries)
