"""Samples without an engine, and match verification in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest
from longtail.version import PolicyVersion


def make_sample(name: str, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), version: int = 0) -> Sample:
    sample = Sample(
        id=name,
        group_id=name.partition("/")[0],
        index=0,
        prompt_ids=tuple(prompt),
        params=SamplingParams(),
        seed=0,
    )
    extend(sample, output, version)
    return sample


def extend(sample: Sample, tokens: Sequence[int], version: int = 0) -> None:
    for token in tokens:
        sample.append(token, 0.0, PolicyVersion(version), "test", "computed")


def commit(drafter: Drafter, sample: Sample, tokens: Sequence[int], version: int = 0) -> None:
    extend(sample, tokens, version)
    drafter.observe(sample, len(tokens))


def draft_of(drafter: Drafter, sample: Sample, max_tokens: int = 8) -> Draft:
    (draft,) = drafter.propose([DraftRequest(sample, max_tokens)])
    return draft


def accepted(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Drafts that equal what the target samples, up to the first that does not."""
    count = 0
    while count < min(len(draft), len(truth)) and draft[count] == truth[count]:
        count += 1
    return count
