"""Samples of several turns, and output that is dropped again: observations, the loss mask, cuts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from longtail.routing import RoutedExperts
from longtail.sample import OBSERVATION, Sample, Segment
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

V0, V1 = PolicyVersion(0), PolicyVersion(1)


def make_sample(**fields: Any) -> Sample:
    known: dict[str, Any] = {"id": "g/0", "group_id": "g", "index": 0, "prompt_ids": [5, 6], "seed": 1}
    return Sample(params=SamplingParams(), **(known | fields))


def two_turns() -> Sample:
    """p p p(V1) | o o | p p, the second turn ended:

    position  0  1  2  3  4  5  6
    token    10 11 12 30 31 13 14
    version   0  0  1 -1 -1  1  1
    """
    sample = make_sample(multi_turn=True)
    sample.extend([10, 11], [-1.0, -1.1], V0, "a", "computed")
    sample.append(12, -1.2, V1, "a", "kept")
    sample.status, sample.turn_ended = "paused", True
    sample.append_observation([30, 31])
    sample.extend([13, 14], [-1.3, -1.4], V1, "a", "restored")
    sample.turn_ended, sample.stop_reason = True, 14
    sample.check_integrity()
    return sample


def spans(sample: Sample) -> list[tuple[int, int, int, str]]:
    return [(s.start, s.end, s.version, s.engine) for s in sample.segments]


# ---- extend


def test_extend_is_append_for_each() -> None:
    """Random runs of tokens: one by one or at once, the records are the same."""
    rng = random.Random(7)
    one, many = make_sample(), make_sample()
    for version in (V0, V0, V1, V1):
        for engine in ("a", "b"):
            tokens = [rng.randrange(100) for _ in range(rng.randrange(4))]
            for token in tokens:
                one.append(token, -token / 8, version, engine, "computed")
            many.extend(tokens, [-token / 8 for token in tokens], version, engine, "computed")
    for name in ("output_ids", "logprobs", "versions", "segments"):
        assert getattr(one, name) == getattr(many, name)
    many.check_integrity()


def test_extend_wants_a_logprob_for_each_token() -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match="logprobs has 1 entries for 2 tokens"):
        sample.extend([1, 2], [0.0], V0, "a", "computed")
    assert not sample.output_ids


# ---- observations


def test_an_observation_is_a_segment_that_the_policy_did_not_write() -> None:
    sample = two_turns()
    assert sample.output_ids == [10, 11, 12, 30, 31, 13, 14]
    assert sample.logprobs == [-1.0, -1.1, -1.2, 0.0, 0.0, -1.3, -1.4]
    assert sample.versions == [0, 0, 1, -1, -1, 1, 1]
    assert spans(sample) == [(0, 2, 0, "a"), (2, 3, 1, "a"), (3, 5, -1, "environment"), (5, 7, 1, "a")]
    assert (sample.num_tokens, sample.num_generated) == (9, 5)
    assert sample.loss_mask == [True, True, True, False, False, True, True]
    assert sample.status == "paused"


def test_append_observation_answers_the_turn_and_keeps_the_snapshot() -> None:
    sample = two_turns()
    sample.snapshot = kept = object()
    sample.append_observation((40,))
    assert (sample.turn_ended, sample.stop_reason, sample.status) == (False, None, "paused")
    assert sample.snapshot is kept
    assert spans(sample)[-1] == (7, 8, -1, "environment")
    sample.check_integrity()


@pytest.mark.parametrize(("masked", "mask"), [(0, [1, 1, 1, 0, 0, 1, 1]), (2, [0, 0, 1, 0, 0, 1, 1]), (7, [0] * 7)])
def test_masked_tokens_are_left_out_of_the_loss(masked: int, mask: list[int]) -> None:
    sample = two_turns()
    sample.masked = masked
    sample.check_integrity()
    assert sample.loss_mask == [bool(one) for one in mask]
    assert sample.num_generated == 5


@pytest.mark.parametrize(
    ("change", "tokens", "says"),
    [
        (lambda s: setattr(s, "turn_ended", False), [1], "is paused and waits for no observation"),
        (lambda s: setattr(s, "status", "running"), [1], "is running and waits for no observation"),
        (lambda s: setattr(s, "status", "finished"), [1], "is finished and waits for no observation"),
        (lambda s: None, [], "token_ids is empty"),
        (lambda s: None, [1, -1], "non-negative integers, not -1"),
        (lambda s: None, [True], "non-negative integers, not True"),
        (lambda s: None, [1.0], "non-negative integers, not 1.0"),
    ],
)
def test_what_is_no_observation_is_refused(change: Callable[[Sample], object], tokens: Any, says: str) -> None:
    sample = two_turns()
    change(sample)
    with pytest.raises(ValueError, match=says):
        sample.append_observation(tokens)
    assert len(sample.output_ids) == 7


@pytest.mark.parametrize(("field", "value"), [("masked", 1), ("masked", -1), ("attempts", -1)])
def test_counts_that_cannot_be_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        make_sample(**{field: value})


# ---- cut


@pytest.mark.parametrize(
    ("length", "kept", "dropped", "turn_ended", "status"),
    [
        (7, 7, 0, True, "paused"),  # nothing goes: its turn has ended as before
        (6, 6, 1, False, "paused"),
        (5, 5, 2, False, "paused"),  # right behind an observation: the policy goes on from it
        (4, 3, 2, True, "paused"),  # inside an observation
        (3, 3, 2, True, "paused"),  # where a turn ended
        (2, 2, 3, False, "paused"),
        (1, 1, 4, False, "paused"),
        (0, 0, 5, False, "waiting"),
    ],
)
def test_cut_by_hand(length: int, kept: int, dropped: int, turn_ended: bool, status: str) -> None:
    sample = two_turns()
    whole = copy.deepcopy(sample)
    sample.status, sample.finish_reason, sample.failure = "failed", "error", "a fault"
    sample.reward, sample.grade_failure, sample.snapshot, sample.masked = 1.0, "slow", object(), 4
    sample.attempts = 2
    sample.timings.submitted, sample.timings.first_token, sample.timings.finished = 1.0, 2.0, 3.0
    assert sample.cut(length) == dropped
    sample.check_integrity()
    for name in ("output_ids", "logprobs", "versions"):
        assert getattr(sample, name) == getattr(whole, name)[:kept]
    assert (sample.turn_ended, sample.status) == (turn_ended, status)
    assert sample.stop_reason == (14 if length == 7 else None)
    for name in ("finish_reason", "failure", "reward", "grade_failure", "snapshot"):
        assert getattr(sample, name) is None
    assert (sample.masked, sample.attempts) == (min(4, kept), 2)
    first = 2.0 if kept else None
    timings = sample.timings
    assert (timings.submitted, timings.first_token, timings.finished) == (1.0, first, None)


def test_what_is_cut_can_be_written_again() -> None:
    sample = two_turns()
    whole = copy.deepcopy(sample)
    sample.cut(3)
    sample.append_observation([30, 31])
    sample.extend([13, 14], [-1.3, -1.4], V1, "a", "restored")
    assert sample.segments == whole.segments
    assert (sample.output_ids, sample.logprobs) == (whole.output_ids, whole.logprobs)


def test_cut_drops_the_routing_of_what_it_drops() -> None:
    """2 prompt tokens and 7 of output have 8 rows; 2 and 3 have 4, and a prompt alone has 1."""
    for length, rows in ((7, 8), (3, 4), (0, 1)):
        sample = two_turns()
        sample.routed_experts = RoutedExperts(1, 1, bytes(16))
        sample.cut(length)
        assert len(sample.routed_experts) == rows
        sample.check_integrity()


@pytest.mark.parametrize("length", [-1, 8, True, 1.0])
def test_cut_wants_a_place_in_the_output(length: Any) -> None:
    sample = two_turns()
    with pytest.raises(ValueError, match="length must be 0 to 7"):
        sample.cut(length)
    assert len(sample.output_ids) == 7


@pytest.mark.parametrize("status", ["running", "waiting"])
def test_a_sample_in_an_engine_is_not_cut(status: Any) -> None:
    sample = two_turns()
    sample.status = status
    with pytest.raises(ValueError, match="is in an engine"):
        sample.cut(3)
    assert len(sample.output_ids) == 7


def test_a_failed_sample_without_output_can_be_started_again() -> None:
    sample = make_sample(status="failed", finish_reason="error", failure="a fault")
    assert sample.cut(0) == 0
    assert (sample.status, sample.finish_reason, sample.failure) == ("waiting", None, None)


# ---- check_integrity


def relabel(sample: Sample, segment: int, version: PolicyVersion) -> None:
    changed = sample.segments[segment]
    changed.version = version
    sample.versions[changed.start : changed.end] = [version] * len(changed)


@pytest.mark.parametrize(
    "fault",
    [
        lambda s: setattr(s, "masked", 8),
        lambda s: setattr(s, "masked", -1),
        lambda s: setattr(s, "multi_turn", False),  # and yet a turn of it has ended
        lambda s: s.logprobs.__setitem__(3, -0.5),  # of an observation
        lambda s: relabel(s, 3, V0),  # falls from V1
        lambda s: relabel(s, 0, PolicyVersion(-2)),
        lambda s: s.segments.__setitem__(
            slice(2, 3), [Segment(3, 4, OBSERVATION, "e"), Segment(4, 5, OBSERVATION, "e")]
        ),
        lambda s: s.extend([9], [0.0], OBSERVATION, "environment", "computed"),  # and turn_ended as before
    ],
)
def test_check_integrity_catches(fault: Callable[[Sample], object]) -> None:
    sample = two_turns()
    fault(sample)
    with pytest.raises(AssertionError):
        sample.check_integrity()


def test_check_integrity_catches_a_sample_that_begins_with_an_observation() -> None:
    sample = make_sample(multi_turn=True)
    sample.extend([9], [0.0], OBSERVATION, "environment", "computed")
    with pytest.raises(AssertionError):
        sample.check_integrity()
