"""Sequence: known and computed tokens."""

from __future__ import annotations

from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import PolicyVersion


def make_sample(output_ids: list[int]) -> Sample:
    return Sample(
        id="g/0",
        group_id="g",
        index=0,
        prompt_ids=(5, 6, 7),
        params=SamplingParams(),
        seed=0,
        output_ids=output_ids,
        logprobs=[-1.0] * len(output_ids),
        versions=[PolicyVersion(0)] * len(output_ids),
    )


def test_a_fresh_sequence_has_its_prompt_to_compute() -> None:
    seq = Sequence(make_sample([]))
    assert seq.token_ids == [5, 6, 7]
    assert (seq.num_tokens, seq.num_computed_tokens, seq.num_uncomputed_tokens) == (3, 0, 3)
    assert seq.block_tables == []


def test_a_resumed_sequence_knows_its_output_too() -> None:
    seq = Sequence(make_sample([8, 9]), num_computed_tokens=4)
    assert seq.token_ids == [5, 6, 7, 8, 9]
    assert (seq.num_tokens, seq.num_uncomputed_tokens) == (5, 1)


def test_token_ids_are_the_sequences_own_list() -> None:
    sample = make_sample([8])
    seq = Sequence(sample)
    seq.token_ids.append(9)
    assert sample.output_ids == [8]
    assert seq.num_tokens == 5


def test_sequences_are_told_apart_by_identity() -> None:
    """The KV manager keys on the sequence itself: two equal records are two holders."""
    sample = make_sample([])
    a, b = Sequence(sample, 0), Sequence(sample, 0)
    assert a != b
    assert len({a, b}) == 2
    a.block_tables.append([3])
    assert b.block_tables == []
