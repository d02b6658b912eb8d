"""process_logits: each sampling parameter on a handful of logits that a reader can follow. Meanings are vLLM's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from longtail.kernels.sample import process_logits

INF = math.inf


def process(logits: list[float], **params: Any) -> list[float]:
    row = np.array(logits, np.float32)
    known: dict[str, Any] = {"prompt_ids": (), "output_ids": (), "temperature": 1.0}
    process_logits(row, **(known | params))
    return row.tolist()


def kept(logits: list[float], **params: Any) -> list[int]:
    """Tokens that are left; their logits must be what they were."""
    after = process(logits, **params)
    left = [i for i, x in enumerate(after) if x > -INF]
    assert [after[i] for i in left] == pytest.approx([logits[i] for i in left])
    return left


def log(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


def test_defaults_change_nothing() -> None:
    assert process([1.0, -2.0, 3.5], prompt_ids=(0, 1), output_ids=(2, 2)) == [1.0, -2.0, 3.5]


# ---- top-k


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(0, [0, 1, 2, 3]), (1, [2]), (2, [2, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_top_k(top_k: int, expected: list[int]) -> None:
    assert kept([1.0, 0.5, 4.0, 2.0], top_k=top_k) == expected


@pytest.mark.parametrize(
    ("top_k", "expected"), [(1, [1, 3]), (2, [1, 3]), (3, [0, 1, 3, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_top_k_keeps_ties_with_the_last_one_kept(top_k: int, expected: list[int]) -> None:
    assert kept([1.0, 2.0, 0.0, 2.0, 1.0], top_k=top_k) == expected


# ---- top-p


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-6, [1]),  # the most likely one is always kept
        (0.49, [1]),
        (0.51, [1, 3]),
        (0.79, [1, 3]),
        (0.81, [0, 1, 3]),
        (0.94, [0, 1, 3]),
        (0.96, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: list[int]) -> None:
    assert kept(log(0.15, 0.5, 0.05, 0.3), top_p=top_p) == expected


def test_top_p_does_not_need_normalised_logits() -> None:
    assert kept([x + 7 for x in log(0.15, 0.5, 0.05, 0.3)], top_p=0.51) == [1, 3]


def test_top_p_keeps_ties_with_the_last_one_kept() -> None:
    assert kept(log(0.4, 0.2, 0.2, 0.2), top_p=0.5) == [0, 1, 2, 3]
    assert kept([0.0, 0.0, 0.0], top_p=1e-6) == [0, 1, 2]


def test_top_p_looks_at_the_tempered_distribution() -> None:
    """(0.5, 0.3, 0.15, 0.05) to the power of 2 is (0.685, 0.247, 0.062, 0.007) normalised: 0.6 needs one token, not
    two; to the power of 1/2 it is (0.369, 0.285, 0.202, 0.117...): 0.6 still needs two, 0.8 needs three, not two."""
    logits = log(0.5, 0.3, 0.15, 0.05)
    assert kept(logits, top_p=0.6, temperature=1.0) == [0, 1]
    assert kept(logits, top_p=0.6, temperature=0.5) == [0]
    assert kept(logits, top_p=0.79, temperature=1.0) == [0, 1]
    assert kept(logits, top_p=0.79, temperature=2.0) == [0, 1, 2]


# ---- min-p


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(0.0, [0, 1, 2, 3]), (0.09, [0, 1, 2, 3]), (0.11, [0, 1, 3]), (0.5, [1, 3]), (0.7, [1]), (1.0, [1])],
)
def test_min_p_is_a_share_of_the_most_likely(min_p: float, expected: list[int]) -> None:
    assert kept(log(0.15, 0.5, 0.05, 0.3), min_p=min_p) == expected


def test_min_p_looks_at_the_tempered_distribution() -> None:
    """0.3 / 0.5 = 0.6 becomes 0.36 at temperature 1/2 and 0.77 at 2."""
    logits = log(0.5, 0.3)
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.5, temperature=0.5) == [0]
    assert kept(logits, min_p=0.7) == [0]
    assert kept(logits, min_p=0.7, temperature=2.0) == [0, 1]


def test_min_p_of_one_keeps_ties() -> None:
    assert kept([2.0, 1.0, 2.0], min_p=1.0) == [0, 2]


# ---- penalties


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    """Tokens 0 and 1 stand in the prompt, 1 (again) and 2 in the output, several times; 3 nowhere."""
    after = process([4.0, -4.0, 0.0, 4.0], prompt_ids=(0, 1, 0), output_ids=(2, 1, 1), repetition_penalty=2.0)
    assert after == [2.0, -8.0, 0.0, 4.0]


def test_repetition_penalty_below_one_encourages() -> None:
    assert process([4.0, -4.0], prompt_ids=(0, 1), repetition_penalty=0.5) == [8.0, -2.0]


def test_presence_penalty_counts_output_tokens_once_and_not_the_prompt() -> None:
    after = process([1.0, 1.0, 1.0], prompt_ids=(0, 0), output_ids=(1, 1, 1), presence_penalty=0.5)
    assert after == [1.0, 0.5, 1.0]


def test_frequency_penalty_counts_every_occurrence_in_the_output() -> None:
    after = process([1.0, 1.0, -1.0], prompt_ids=(0, 0), output_ids=(1, 2, 1, 1), frequency_penalty=0.5)
    assert after == [1.0, -0.5, -1.5]


def test_penalties_without_output() -> None:
    assert process([1.0, 2.0], prompt_ids=(0,), presence_penalty=1.0, frequency_penalty=1.0) == [1.0, 2.0]


def test_penalties_together_repetition_first() -> None:
    """8 / 2 - 2 * 0.5 - 0.25 = 2.75; presence first would give (8 - 1.25) / 2 = 3.375."""
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    assert process([8.0, 8.0], output_ids=(0, 0), **penalties) == [2.75, 8.0]


# ---- bans


def test_banned_tokens_are_excluded() -> None:
    assert kept([1.0, 2.0, 3.0], banned=(2, 0)) == [1]
    assert kept([1.0, 2.0, 3.0], banned=(2,), temperature=0.0) == [0, 1]


def test_a_banned_token_stays_excluded_under_every_penalty() -> None:
    penalties = {"repetition_penalty": 0.5, "frequency_penalty": -2.0, "presence_penalty": -2.0}
    assert process([1.0, 0.0], output_ids=(0, 0), banned=(0,), **penalties) == [-INF, 0.0]


# ---- the order of operations


def test_bans_come_before_truncation() -> None:
    """The best token is banned: top-k, top-p and min-p choose among the others."""
    logits = log(0.9, 0.05, 0.03, 0.02)
    assert kept(logits, banned=(0,), top_k=1) == [1]
    assert kept(logits, banned=(0,), top_p=0.4) == [1]
    assert kept(logits, banned=(0,), min_p=0.5) == [1, 2]


def test_penalties_come_before_truncation() -> None:
    assert process([3.0, 2.0, 1.0], output_ids=(0,), presence_penalty=1.5, top_k=1) == [-INF, 2.0, -INF]


def test_top_k_comes_before_top_p() -> None:
    """0.4, 0.3, 0.2, 0.1: top-p 0.55 of all keeps two; of the best two, renormalised (0.571, 0.429), it keeps one."""
    logits = log(0.4, 0.3, 0.2, 0.1)
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]


def test_min_p_comes_before_top_p() -> None:
    """min-p 0.6 leaves 0.4 and 0.3; of these, renormalised, top-p 0.55 keeps one."""
    logits = log(0.4, 0.3, 0.2, 0.1)
    assert kept(logits, min_p=0.6) == [0, 1]
    assert kept(logits, min_p=0.6, top_p=0.55) == [0]


def test_greedy_applies_penalties_but_truncates_nothing() -> None:
    truncation = {"top_k": 1, "top_p": 0.1, "min_p": 1.0}
    after = process([3.0, 2.0, 1.0], output_ids=(0,), temperature=0.0, presence_penalty=1.5, **truncation)
    assert after == [1.5, 2.0, 1.0]


# ---- rows that `sample` will refuse


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("value", [math.nan, -INF])
def test_a_hopeless_row_is_left_to_sample_to_refuse(value: float, params: dict[str, float]) -> None:
    """All NaN, or everything banned: no exception here, `sample` names the row."""
    after = process([value] * 3, **params)
    assert all(math.isnan(x) or x == -INF for x in after)


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("value", [math.nan, INF])
def test_a_broken_logit_is_not_hidden(value: float, params: dict[str, float]) -> None:
    assert not process([value, 1.0, 2.0], **params)[0] < INF
