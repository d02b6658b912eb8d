"""Judges with a known preference and a known position bias; intervals against the literature and by coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from longtail.trainer_adapter.intervals import Z, paired_difference, wilson
from longtail.trainer_adapter.order_swap import KEPT, Question, order_swap
from longtail.trainer_adapter.preferences import Pair, Verdict


def make(i: int, verdicts: tuple[Verdict, Verdict] | None = None) -> Pair:
    """The chosen response ends with an even token."""
    return Pair(prompt_ids=(i,), chosen_ids=(1, 2), rejected_ids=(1, 3), reason="r", verdicts=verdicts)


PAIRS = [make(i) for i in range(40)]


def test_every_combination_by_hand() -> None:
    names: tuple[Verdict, ...] = ("A", "B", "tie")
    pairs = [make(i, verdicts) for i, verdicts in enumerate(itertools.product(names, names))]
    found = order_swap([*pairs, make(9)])
    assert found.counts == {
        "agrees": 1,  # A B
        "opposed": 1,  # B A
        "no difference": 1,  # tie tie
        "first place": 1,  # A A
        "second place": 1,  # B B
        "half a tie": 4,
        "not asked": 1,
    }
    assert sum(found.counts.values()) == len(pairs) + 1
    assert found.kept == (pairs[1], make(9))
    assert len(found.kept) + len(found.set_aside) == 10
    assert not any(outcome in KEPT for _, outcome in found.set_aside)
    assert found.consistency == pytest.approx(3 / 9)
    assert found.position_bias == 0.0 and not found.is_biased


def test_a_judge_that_reads() -> None:
    """It sees both orders, and not which response was chosen."""
    seen: list[Question] = []

    def judge(question: Question) -> Verdict:
        seen.append(question)
        return "A" if question.a_ids[-1] % 2 == 0 else "B"

    found = order_swap(PAIRS, judge)
    assert found.counts["agrees"] == 40 and found.consistency == 1.0 and found.position_bias == 0.0
    assert all(pair.verdicts == ("A", "B") for pair in found.kept)
    assert [(q.a_ids, q.b_ids) for q in seen[:2]] == [((1, 2), (1, 3)), ((1, 3), (1, 2))]
    assert not found.is_biased


def test_a_judge_that_prefers_the_rejected_response() -> None:
    found = order_swap(PAIRS, lambda question: "B" if question.a_ids[-1] % 2 == 0 else "A")
    assert found.counts["opposed"] == 40 and found.consistency == 1.0
    assert found.kept == () and {outcome for _, outcome in found.set_aside} == {"opposed"}


@pytest.mark.parametrize(("always", "bias"), [("A", 1.0), ("B", -1.0)])
def test_a_judge_that_reads_one_place_only(always: Verdict, bias: float) -> None:
    found = order_swap(PAIRS, lambda question: always)
    assert (found.consistency, found.position_bias, found.kept) == (0.0, bias, ())
    assert found.is_biased


@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_position_bias_is_measured(bias: float) -> None:
    """1,000 pairs; the judge reads with probability 1 - |bias| and else takes the first place. The standard error is
    sqrt(0.3 x 0.7 / 1000) = 0.0145; within 5 of them, a false alarm in 1 of 1.7 million runs."""
    rng = np.random.default_rng(0)
    takes_first = iter(np.repeat(rng.random(1000) < bias, 2))

    def judge(question: Question) -> Verdict:
        return "A" if next(takes_first) or question.a_ids[-1] % 2 == 0 else "B"

    found = order_swap([make(i) for i in range(1000)], judge)
    assert found.position_bias == pytest.approx(bias, abs=5 * math.sqrt(bias * (1 - bias) / 1000))
    assert found.position_interval is not None
    assert found.position_interval[0] <= bias <= found.position_interval[1]
    assert found.is_biased == (bias > 0)


def test_what_a_judge_may_not_do() -> None:
    with pytest.raises(ValueError, match=r"verdict 'C'.*A, B, tie"):
        order_swap(PAIRS, lambda question: "C")  # type: ignore[arg-type,return-value]

    def broken(question: Question) -> Verdict:
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        order_swap(PAIRS, broken)


def test_nothing_asked() -> None:
    found = order_swap(PAIRS)
    assert found.kept == tuple(PAIRS) and found.counts["not asked"] == 40
    assert (found.consistency, found.position_bias, found.position_interval) == (None, None, None)
    assert not found.is_biased


# ---- intervals


@pytest.mark.parametrize(
    ("share", "n", "expected"),
    [
        (0.0, 10, (0.0, 0.2775)),
        (1.0, 10, (0.7225, 1.0)),
        (81 / 263, 263, (0.2553, 0.3662)),
        (15 / 148, 148, (0.0624, 0.1605)),
    ],
)
def test_wilson(share: float, n: int, expected: tuple[float, float]) -> None:
    """The last two: Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I."""
    assert wilson(share, n) == pytest.approx(expected, abs=1e-4)


def test_paired_difference_by_hand() -> None:
    """5 times +1, once -1, 4 times 0: with the two added, (6 - 2) / 12, and a mean square of 8 / 12."""
    mean, square = 4 / 12, 8 / 12
    half = Z * math.sqrt((square - mean**2) / 12)
    assert paired_difference([1] * 5 + [-1] + [0] * 4) == pytest.approx((mean - half, mean + half), abs=1e-15)


@pytest.mark.parametrize("n", [10, 40])
@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.3, 0.05), (0.5, 0.4)])
def test_intervals_cover_what_they_say(n: int, shares: tuple[float, float]) -> None:
    """Of 4,000 samples at least 93 % have the truth in the interval: coverage is 95 % or more here, whose standard
    error is 0.34 %, and 2 % below is 5.8 of them (the seed is fixed besides)."""
    rng = np.random.default_rng(1)
    drawn = rng.choice([1, -1, 0], size=(4000, n), p=[*shares, 1 - sum(shares)])
    truth = shares[0] - shares[1]
    covered = [low <= truth <= high for low, high in (paired_difference(row) for row in drawn.tolist())]
    assert np.mean(covered) > 0.93


def test_bad_intervals() -> None:
    for call, says in (
        (lambda: wilson(1.1, 5), "share"),
        (lambda: wilson(0.5, 0), "n must"),
        (lambda: paired_difference([]), "values is empty"),
        (lambda: paired_difference([2.0]), "values has 2"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
