"""Measured acceptance: what is judged, what is expected of a draft, and the warning after a weight update."""

from __future__ import annotations

import random
import warnings

import pytest

from longtail.spec_decode.acceptance import Acceptance, AcceptanceConfig, AcceptanceFell
from longtail.spec_decode.drafter import Draft


def test_positions_are_counted_up_to_the_rejected_one() -> None:
    acceptance = Acceptance()
    acceptance.judge(Draft([1, 2, 3, 4], "a"), 2, rejected=True)  # the fourth was not judged
    acceptance.judge(Draft([1, 2], "a"), 2, rejected=False)
    acceptance.judge(Draft([1, 2, 3], "a"), 1, rejected=False)  # the sample ended
    acceptance.judge(Draft([1], "b"), 0, rejected=True)
    acceptance.judge(Draft([], "c"), 0, rejected=False)
    assert acceptance.by_position() == {"a": [(3, 3), (2, 2), (1, 0)], "b": [(1, 0)]}
    assert acceptance.first_token("a") == 1.0
    assert acceptance.first_token("b") == 0.0
    assert acceptance.first_token("c") is None


@pytest.mark.parametrize(("accepted", "rejected"), [(2, True), (3, False), (-1, False)])
def test_more_than_was_drafted_is_refused(accepted: int, rejected: bool) -> None:
    with pytest.raises(ValueError, match="the draft has 2 tokens"):
        Acceptance().judge(Draft([1, 2], "a"), accepted, rejected)


def test_estimates_by_hand() -> None:
    """Prior weight 2: nothing known (half of a claim is believed), then one class, then what that says of another
    position, and of other claims of the same drafter."""
    acceptance = Acceptance(AcceptanceConfig(prior_weight=2.0, memory=1e9))
    draft = Draft([1, 2], "a", [0.45, 0.45])
    assert acceptance.estimate([draft])[0].tolist() == [0.225, 0.225]
    for _ in range(3):
        acceptance.judge(draft.cut(1), 0, rejected=True)
    first, second = acceptance.estimate([draft])[0]
    share = (0 + 2 * 0.5) / (3 * 0.45 + 2)  # of what it claims
    at_any_position = (0 + 2 * 0.45 * share) / (3 + 2)
    assert first == pytest.approx((0 + 2 * at_any_position) / (3 + 2))
    assert second == pytest.approx(at_any_position)
    other, unknown, empty, silent = acceptance.estimate(
        [Draft([1], "a", [0.8]), Draft([1], "b", [0.45]), Draft([], "a"), Draft([1, 2], "c")]
    )
    assert other.tolist() == pytest.approx([0.8 * share])
    assert (unknown.tolist(), empty.tolist(), silent.tolist()) == ([0.225], [], [0.25, 0.25])


def test_a_drafter_that_claims_too_little_is_believed_up_to_certainty() -> None:
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.judge(Draft([1], "a", [0.2]), 1, rejected=False)
    (estimate,) = acceptance.estimate([Draft([1], "a", [0.6])])
    assert estimate.tolist() == pytest.approx([1.0])


def test_a_rise_is_told_once() -> None:
    """After 40 tokens that were rejected, three that are accepted: expected 0.5 / 41 each. And no rise where acceptance
    is what it was: 200 judgements of a fair coin, one in every 2; two standard deviations are passed in few of them."""
    acceptance, draft = Acceptance(), Draft([1], "a", [0.45])
    for _ in range(40):
        acceptance.judge(draft, 0, rejected=True)
        assert not acceptance.has_risen()
    for _ in range(3):
        acceptance.judge(draft, 1, rejected=False)
    assert acceptance.has_risen()
    assert not acceptance.has_risen()
    rng, told = random.Random(0), 0
    acceptance = Acceptance()
    for _ in range(200):
        hit = rng.random() < 0.5
        acceptance.judge(draft, int(hit), rejected=not hit)
        told += acceptance.has_risen()
    assert told <= 20  # of one look each, 1 in 44 by chance were they independent; looks overlap


def test_estimates_come_to_what_is_true() -> None:
    """Of a drafter that claims .9 and is right in .3, later in .7, of its tokens (standard error .02)."""
    acceptance, rng = Acceptance(), random.Random(0)
    draft = Draft([1], "a", [0.9])
    for truth in (0.3, 0.7):
        for _ in range(3000):
            hit = rng.random() < truth
            acceptance.judge(draft, int(hit), rejected=not hit)
        assert acceptance.estimate([draft])[0][0] == pytest.approx(truth, abs=0.08)


def judge_many(acceptance: Acceptance, name: str, truth: float, count: int, rng: random.Random) -> None:
    for _ in range(count):
        hit = rng.random() < truth
        acceptance.judge(Draft([1], name), int(hit), rejected=not hit)


def test_a_fall_after_a_weight_update_is_reported_once_by_name() -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    judge_many(acceptance, "group", 0.6, 500, rng)
    judge_many(acceptance, "mtp", 0.6, 500, rng)
    acceptance.weights_updated(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        judge_many(acceptance, "group", 0.6, 1000, rng)
        judge_many(acceptance, "mtp", 0.35, 1000, rng)
    assert [w.category for w in caught] == [AcceptanceFell]
    message = str(caught[0].message)
    assert message.startswith("drafter mtp: ")
    assert "version 7" in message


def test_no_fall_no_warning() -> None:
    """200 updates at one acceptance, and one that is too small or too little known to report."""
    acceptance, rng = Acceptance(), random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AcceptanceFell)
        for version in range(200):
            judge_many(acceptance, "a", 0.5, 250, rng)
            acceptance.weights_updated(version)
        judge_many(acceptance, "a", 0.45, 1000, rng)
        acceptance.weights_updated(200)
        judge_many(acceptance, "a", 0.0, 199, rng)
        acceptance.weights_updated(201)
        judge_many(acceptance, "b", 0.9, 199, rng)
        acceptance.weights_updated(202)
        judge_many(acceptance, "b", 0.1, 500, rng)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="memory"):
        AcceptanceConfig(memory=0.0)
    with pytest.raises(ValueError, match="prior must"):
        AcceptanceConfig(prior=1.5)
