"""Sample, Segment, Group and the seeds of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from longtail.sample import Group, Sample, Segment, is_zero_variance, sample_seed
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

V0, V1 = PolicyVersion(0), PolicyVersion(1)


def make_sample(**fields: Any) -> Sample:
    known: dict[str, Any] = {"id": "g/0", "group_id": "g", "index": 0, "prompt_ids": [5, 6], "seed": 1}
    return Sample(params=SamplingParams(), **(known | fields))


# ---- construction


@pytest.mark.parametrize("prompt", [[], ()])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt_ids is empty.*BOS"):
        make_sample(prompt_ids=prompt)


@pytest.mark.parametrize("token", [-1, True, 1.0, "1", None])
def test_a_prompt_token_that_is_no_id_is_refused(token: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt_ids must be non-negative integers, not"):
        make_sample(prompt_ids=[3, token])


@pytest.mark.parametrize("short", ["output_ids", "logprobs", "versions"])
def test_records_of_unequal_length_are_refused(short: str) -> None:
    records: dict[str, Any] = {"output_ids": [7, 8], "logprobs": [-0.1, -0.2], "versions": [V0, V0]}
    records[short] = records[short][:1]
    with pytest.raises(ValueError, match="output_ids, logprobs and versions must have one length"):
        make_sample(**records)


def test_a_prompt_is_kept_as_a_tuple() -> None:
    given = [5, 6]
    sample = make_sample(prompt_ids=given)
    given.append(7)
    assert sample.prompt_ids == (5, 6)
    assert (sample.num_tokens, sample.status, sample.is_done, sample.segments) == (2, "waiting", False, [])


def test_samples_share_no_lists() -> None:
    a, b = make_sample(), make_sample()
    a.append(9, -0.5, V0, "e", "computed")
    assert not (b.output_ids or b.logprobs or b.versions or b.segments)


@pytest.mark.parametrize(
    ("status", "done"),
    [("waiting", False), ("running", False), ("paused", False), ("finished", True), ("failed", True)],
)
def test_is_done(status: Any, done: bool) -> None:
    assert make_sample(status=status).is_done is done


# ---- append


def test_append_extends_a_segment_until_version_engine_or_kv_source_changes() -> None:
    sample = make_sample()
    for token, version, engine, kv in [
        (10, V0, "a", "computed"),
        (11, V0, "a", "computed"),
        (12, V1, "a", "computed"),  # new weights
        (13, V1, "b", "computed"),  # another engine
        (14, V1, "b", "restored"),  # another source of the KV
        (15, V1, "b", "restored"),
        (16, V1, "a", "computed"),  # back to an earlier combination: a new segment all the same
    ]:
        sample.append(token, -token / 8, version, engine, kv)  # type: ignore[arg-type]
    assert sample.output_ids == [10, 11, 12, 13, 14, 15, 16]
    assert sample.logprobs == [-1.25, -1.375, -1.5, -1.625, -1.75, -1.875, -2.0]
    assert sample.versions == [0, 0, 1, 1, 1, 1, 1]
    assert [(s.start, s.end, s.version, s.engine, s.kv) for s in sample.segments] == [
        (0, 2, 0, "a", "computed"),
        (2, 3, 1, "a", "computed"),
        (3, 4, 1, "b", "computed"),
        (4, 6, 1, "b", "restored"),
        (6, 7, 1, "a", "computed"),
    ]
    assert [len(s) for s in sample.segments] == [2, 1, 1, 2, 1]
    assert sample.num_tokens == 9
    sample.check_integrity()


# ---- check_integrity


def grow(sample: Sample) -> None:
    for token, version in ((10, V0), (11, V0), (12, V1)):
        sample.append(token, -1.0, version, "a", "computed")


@pytest.mark.parametrize(
    "fault",
    [
        lambda s: s.output_ids.append(9),
        lambda s: s.logprobs.pop(),
        lambda s: s.versions.pop(),
        lambda s: s.segments.pop(),
        lambda s: s.segments.clear(),
        lambda s: s.segments.append(Segment(3, 4, V1, "a")),
        lambda s: s.segments.append(Segment(3, 3, V1, "a")),
        lambda s: s.segments.reverse(),
        lambda s: setattr(s.segments[0], "end", 1),
        lambda s: setattr(s.segments[1], "start", 1),
        lambda s: setattr(s.segments[1], "version", V0),
        lambda s: s.versions.__setitem__(1, V1),
    ],
)
def test_check_integrity_catches(fault: Callable[[Sample], object]) -> None:
    sample = make_sample()
    grow(sample)
    sample.check_integrity()
    fault(sample)
    with pytest.raises(AssertionError):
        sample.check_integrity()


# ---- groups


def test_from_prompt_makes_n_samples_of_one_prompt() -> None:
    params = SamplingParams(n=3, seed=7)
    group = Group.from_prompt("p4", [5, 6], params, task={"answer": 3})
    assert [s.id for s in group.samples] == ["p4/0", "p4/1", "p4/2"]
    assert [s.index for s in group.samples] == [0, 1, 2]
    assert {s.group_id for s in group.samples} == {"p4"}
    assert {s.prompt_ids for s in group.samples} == {(5, 6)}
    assert all(s.params is params for s in group.samples)
    assert [s.seed for s in group.samples] == [sample_seed(7, "p4", i) for i in range(3)]
    assert group.task == {"answer": 3}


def test_a_group_is_complete_when_every_sample_is_done() -> None:
    group = Group.from_prompt("g", [1], SamplingParams(n=2))
    assert not group.is_complete
    group.samples[0].status = "finished"
    assert not group.is_complete
    group.samples[1].status = "failed"
    assert group.is_complete


def test_zero_variance_is_equality() -> None:
    assert is_zero_variance([0.1, 0.1, 0.1])  # whose standard deviation in floats is not 0
    assert is_zero_variance([1.0]) and is_zero_variance([0.0, -0.0, 0])
    assert not is_zero_variance([0.3, 0.1 + 0.2])  # apart by one unit in the last place
    unlike: list[list[float | None]] = [[], [1.0, None], [None, 1.0], [None, None], [math.nan, math.nan]]
    assert not any(is_zero_variance(rewards) for rewards in unlike)


# ---- seeds


def test_sample_seed_is_stable() -> None:
    """Literals: a run of today must be repeatable with the next release (blake2b of "seed:7:0", and so on)."""
    assert sample_seed(7, "x", 0) == 0xC4BBBFA3F3682692
    assert sample_seed(7, "x", 1) == 0xBF5BA7A39A52CAF8
    assert sample_seed(None, "x", 0) == 0xE2D27585FDE06EA0


def test_sample_seed_depends_on_the_seed_or_else_on_the_group() -> None:
    assert sample_seed(7, "a", 0) == sample_seed(7, "b", 0)
    assert sample_seed(None, "a", 0) != sample_seed(None, "b", 0)
    assert sample_seed(None, "7", 0) != sample_seed(7, "7", 0)
    assert sample_seed(0, "a", 0) != sample_seed(None, "a", 0)


def test_sample_seeds_do_not_collide() -> None:
    """250 seeds x 100 indices and 250 groups x 100 indices; by chance 50,000 hashes collide with p = 7e-11."""
    seeds = [sample_seed(s, "g", i) for s in range(250) for i in range(100)]
    seeds += [sample_seed(None, f"g{s}", i) for s in range(250) for i in range(100)]
    assert len(set(seeds)) == 50_000
    assert all(0 <= s < 2**64 for s in seeds)


def test_neighbouring_sample_seeds_share_no_bits() -> None:
    """Seeds of neighbours differ in half of their bits: the mean over 2,000 pairs of 64 bits is 32 with a standard
    deviation of 4 / sqrt(2000) = 0.09, so a distance of 0.5 has a false-alarm probability below 1e-7."""
    for ds, di in ((1, 0), (0, 1)):
        pairs = [(sample_seed(s, "g", i), sample_seed(s + ds, "g", i + di)) for s in range(50) for i in range(40)]
        mean = sum((a ^ b).bit_count() for a, b in pairs) / len(pairs)
        assert abs(mean - 32) < 0.5
