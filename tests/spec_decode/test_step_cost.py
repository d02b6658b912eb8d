"""The cost of a step: what was measured comes back; gaps, noise, spikes, contexts and prompts are dealt with."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.spec_decode.break_even import advise, break_even_acceptance, speedups
from longtail.spec_decode.step_cost import KNOWN, LATELY, WINDOW, StepCost, isotonic


def test_isotonic_by_hand() -> None:
    ones = np.ones(5)
    assert isotonic(np.array([1.0, 3.0, 2.0, 2.0, 5.0]), ones).tolist() == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 5])
    assert isotonic(np.array([3.0, 1.0]), np.array([1.0, 3.0])).tolist() == [1.5, 1.5]
    assert isotonic(np.array([]), np.array([])).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_is_the_nearest(seed: int) -> None:
    """No small change that keeps the order is nearer."""
    rng = np.random.default_rng(seed)
    values, weights = rng.random(12), rng.random(12) + 0.1
    fit = isotonic(values, weights)
    assert (np.diff(fit) >= 0).all()
    assert (fit * weights).sum() == pytest.approx((values * weights).sum())
    best = (weights * (fit - values) ** 2).sum()
    for _ in range(300):
        other = np.sort(fit + rng.normal(0, 0.02, 12))
        assert (weights * (other - values) ** 2).sum() >= best


def test_what_was_measured_comes_back_and_gaps_are_filled() -> None:
    cost = StepCost.from_points([(1, 0.010), (4, 0.016), (8, 0.024)])
    curve = cost.curve(10)
    assert curve[[1, 4, 8]].tolist() == pytest.approx([0.010, 0.016, 0.024])
    assert curve[2] == pytest.approx(0.012)
    assert curve[6] == pytest.approx(0.020)
    assert curve[10] == pytest.approx(0.028)  # on, as between the last two
    assert curve[0] == curve[1]


def test_rows_of_a_padded_block_cost_the_same() -> None:
    cost = StepCost.from_points([(2, 0.010), (8, 0.018), (12, 0.026)], row_multiple=4)
    curve = cost.curve(17)
    assert curve[1:5].tolist() == pytest.approx([0.010] * 4)
    assert curve[5:9].tolist() == pytest.approx([0.018] * 4)
    assert curve[13:17].tolist() == pytest.approx([0.034] * 4)
    # A block whose rows turn out to differ is believed.
    for _ in range(5):
        cost.record(4, 0.014)
        cost.record(2, 0.010)
    assert cost.curve(4)[2] < cost.curve(4)[3] < cost.curve(4)[4]


def test_within_a_block_only_what_was_run_lately_is_told_apart() -> None:
    """Rows 1 and 4 of one block, 4 from when the machine was slow: after LATELY steps of 1 alone the block is flat."""
    cost = StepCost(4)
    for _ in range(8):
        cost.record(1, 0.010)
        cost.record(4, 0.020)
    assert cost.curve(4)[4] == pytest.approx(0.020)
    for _ in range(LATELY + 16):
        cost.record(1, 0.010)
    assert cost.curve(4)[1:].tolist() == pytest.approx([0.010] * 4)
    cost.record(4, 0.020)
    for _ in range(16):
        cost.record(1, 0.010)
    assert cost.curve(4)[4] > 0.015


def test_beyond_what_was_measured_neighbours_do_not_set_the_slope() -> None:
    """16 rows 26 ms, 32 rows 42 ms, and by chance 33 rows 46 ms: on with 1.18 ms a row, not 4."""
    cost = StepCost.from_points([(16, 0.026), (32, 0.042), (33, 0.046)])
    curve = cost.curve(50)
    assert curve[50] - curve[33] == pytest.approx(17 * (curve[33] - curve[16]) / 17)
    assert (curve[50] - curve[33]) / 17 < 0.0013


def test_one_measurement_alone_says_that_half_grows() -> None:
    assert StepCost.from_points([(4, 0.010)]).curve(8)[8] == pytest.approx(0.015)


def test_noise_and_spikes() -> None:
    """Standard deviation 20 %, one step in ten takes ten times as long. A row count's cost comes from
    47 steps, so its standard error is 3 %: all of 32 within 12 % of the truth (4 errors), and never falling."""
    rng = np.random.default_rng(0)
    cost = StepCost(4)
    for step in range(3000):
        rows = int(rng.integers(1, 33))
        truth = 0.008 + 0.004 * -(-rows // 4)
        cost.record(rows, truth * max(0.2, rng.normal(1.0, 0.2)) * (10.0 if step % 10 == 0 else 1.0))
    curve = cost.curve(32)
    assert (np.diff(curve) >= 0).all()
    exact = 0.008 + 0.004 * -(-np.arange(1, 33) // 4)
    assert np.abs(curve[1:] / exact - 1.0).max() < 0.12


def test_a_machine_that_slows_down_is_followed() -> None:
    cost = StepCost()
    for seconds in (0.01, 0.03):
        for _ in range(WINDOW):
            cost.record(4, seconds)
    assert cost.seconds(4) == pytest.approx(0.03)


def test_context_and_prompts_have_their_own_price() -> None:
    """seconds = 10 ms + 1 ms a row + 1 us a context token + 0.2 ms a prompt token."""
    rng = np.random.default_rng(0)
    cost = StepCost()
    for step in range(600):
        rows, context = int(rng.integers(1, 5)), float(rng.integers(0, 5000))
        prefill = int(rng.integers(1, 100)) if step % 7 == 0 else 0
        seconds = 0.010 + 0.001 * rows + 1e-6 * context + 2e-4 * prefill
        cost.record(rows, seconds * rng.normal(1.0, 0.01), context=context, prefill=prefill)
    assert cost.seconds(2) == pytest.approx(0.012, rel=0.04)
    assert cost.seconds(2, context=4000) == pytest.approx(0.016, rel=0.04)
    assert cost.seconds(2, context=4000, prefill=50) == pytest.approx(0.026, rel=0.04)


def test_prompts_tell_what_further_rows_cost_until_it_is_measured() -> None:
    """One row takes 20 ms; 100 rows of a prompt take 69.5 ms, so 0.5 ms each, and rows that are verified up to twice
    that. Without prompts, or with such that tell nothing (few rows, a pass that compiled something): 10 ms each."""
    cost = StepCost()
    cost.record(1, 0.020)
    assert cost.curve(9)[[1, 2, 9]].tolist() == pytest.approx([0.020, 0.030, 0.100])
    cost.record_prompts(1, 0.005)
    cost.record_prompts(100, 5.0)
    assert cost.curve(9)[[1, 2, 9]].tolist() == pytest.approx([0.020, 0.030, 0.100])
    cost.record_prompts(100, 0.0695)
    assert cost.curve(9)[[1, 2, 9]].tolist() == pytest.approx([0.020, 0.021, 0.028])
    assert not cost.is_known(4)
    for _ in range(8):
        cost.record(1, 0.020)
        cost.record(5, 0.040)
    assert cost.curve(9)[[1, 5, 9]].tolist() == pytest.approx([0.020, 0.040, 0.060])


def test_what_is_known() -> None:
    cost = StepCost(4)
    assert cost.is_empty
    assert not cost.is_known(1)
    for _ in range(KNOWN):
        assert not cost.is_known(3)
        cost.record(2, 0.01)
    assert [cost.is_known(rows) for rows in (1, 2, 4, 5)] == [True, True, True, False]
    assert cost.is_measured(2)
    assert not cost.is_measured(3)
    assert cost.most_known == 2
    cost.record(20, 0.03)
    assert cost.most_known == 2
    for _ in range(KNOWN):
        cost.record(20, 0.03)
    assert cost.most_known == 20
    assert not cost.is_empty


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="row_multiple"):
        StepCost(0)
    with pytest.raises(ValueError, match="no step was measured"):
        StepCost().seconds(1)
    for rows, seconds in ((0, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="takes time"):
            StepCost().record(rows, seconds)


# ---- break-even


def test_break_even_by_hand() -> None:
    """Two sequences; 10 ms and 2 ms a row. One draft each: (2 + 2 a) / 18 = 2 / 14 at a = 2 / 7; a single one:
    (2 + a) / 16 = 2 / 14 at the same; more drafts need more."""
    curve = 0.010 + 0.002 * np.arange(19)
    assert break_even_acceptance(curve, 2, 8) == pytest.approx(2 / 7, abs=2e-4)
    assert break_even_acceptance(curve, 2, 1, draft_seconds=0.001) == pytest.approx(2.5 / 7, abs=2e-4)
    assert speedups(curve, 2, 0.5, 8)[:5].tolist() == pytest.approx(
        [1.0, 2.5 / 16 * 7, 3.0 / 18 * 7, 3.25 / 20 * 7, 3.5 / 22 * 7]
    )


def test_where_rows_are_free_anything_pays_and_where_they_are_dear_nothing_does() -> None:
    assert break_even_acceptance(np.ones(10), 1, 8) == pytest.approx(0.0, abs=2e-4)
    assert break_even_acceptance(np.arange(10) ** 2 + 1e-9, 1, 8) is None


def test_speedups_by_position_by_hand() -> None:
    """One sequence, rows free: 1 + .5 + .5 * .8 tokens, and nothing behind the last position that is given."""
    assert speedups(np.ones(6), 1, [0.5, 0.8], 4).tolist() == pytest.approx([1.0, 1.5, 1.9, 1.9, 1.9])
    assert speedups(np.ones(7), 2, [0.5, 0.8], 2).tolist() == pytest.approx([1.0, 1.25, 1.5, 1.7, 1.9])


def test_advice() -> None:
    cost = StepCost.from_points([(n, 0.008 + 0.001 * n) for n in range(4, 290, 4)], row_multiple=4)
    drafters: dict[str, float | list[float]] = {"none": 0.0, "half": 0.5, "good": 0.9, "short": [0.9]}
    one, four, many = advise(cost, [1, 4, 32], drafters, max_drafts=8)
    assert one.acceptance == pytest.approx(0.0, abs=2e-4)
    assert one.acceptance is not None and four.acceptance is not None and many.acceptance is not None
    assert four.acceptance == pytest.approx(16 / 12 - 1, abs=0.01)
    assert many.acceptance > four.acceptance  # the fixed part is spread over more rows
    assert one.step_seconds == pytest.approx(0.012, rel=0.02)
    assert one.speedups["none"] == four.speedups["none"] == 1.0
    assert one.speedups["half"] == pytest.approx(1.875, rel=0.02)
    assert one.lengths["half"] == 3.0
    assert one.speedups["good"] > four.speedups["good"] > many.speedups["good"] > 1.0
    assert one.speedups["short"] == pytest.approx(1.9)
    assert one.lengths["short"] == 1.0
    assert many.speedups["half"] == 1.0
    assert many.lengths["half"] == 0.0
    (slow,) = advise(cost, [1], {"half": 0.5}, draft_seconds=0.02)
    assert slow.acceptance is not None
    assert slow.acceptance > 0.5
    assert slow.speedups["half"] == 1.0


def test_bad_questions_are_named() -> None:
    cost = StepCost.from_points([(1, 0.01)])
    with pytest.raises(ValueError, match="batches"):
        advise(cost, [0], {})
    for acceptance in (1.5, [0.5, -0.1]):
        with pytest.raises(ValueError, match="an acceptance of a is"):
            advise(cost, [1], {"a": acceptance})
    with pytest.raises(ValueError, match="max_drafts"):
        advise(cost, [1], {"a": 0.5}, max_drafts=0)
