"""What becomes of a group, from submission to the trainer.

    waiting -> started -> complete -> handed over
                  |          |
                  |          +-> dropped: zero variance (the rewards of all samples are equal)
                  +------------> dropped: cancelled, a sample failed, too stale

A group is *complete* when as many of its samples as are needed have finished and, where there is a grader, were graded.
A sample that fails is tried again `retries` times, from its prompt, with its own seed; then `failed` says what becomes
of its group.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from longtail.sample import Group, Sample

Failed = Literal["smaller", "replace", "drop"]
ZeroVariance = Literal["keep", "drop"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Checked at construction."""

    retries: int = 1
    """Times that a failed sample is started again."""
    failed: Failed = "smaller"
    """Then: "smaller": the failed sample stays in its group as what it is (status failed, and why), and the trainer
    leaves it out; "drop": the group is thrown away; "replace": and another takes its place (`Rollout(refill=)`)."""
    zero_variance: ZeroVariance = "keep"
    """"drop": a group whose rewards are all the same number teaches nothing, is thrown away, and another takes its
    place (dynamic sampling, as in DAPO, arXiv 2503.14476). Needs a grader."""

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries must be an integer of at least 0, not {self.retries!r}")
        if self.failed not in ("smaller", "replace", "drop"):
            raise ValueError(f'failed must be "smaller", "replace" or "drop", not {self.failed!r}')
        if self.zero_variance not in ("keep", "drop"):
            raise ValueError(f'zero_variance must be "keep" or "drop", not {self.zero_variance!r}')


@dataclasses.dataclass(slots=True, eq=False)
class GroupState:
    """A group that is not handed over. Changed by the rollout only."""

    group: Group
    number: int
    """In order of submission: smaller is older."""
    needed: int
    """Samples that make it complete."""
    started: bool = False
    """Whether a sample of it was ever admitted."""
    first_iteration: int | None = None
    """In which that was, if this process saw it."""
    ended: list[Sample] = dataclasses.field(default_factory=list)
    """Samples that are done and graded (or need no grade, or could not be graded), in the order in which they were."""
    measured: set[str] = dataclasses.field(default_factory=set)
    """Ids of samples whose length the estimates have learnt from."""
    restarted_stale: bool = False
    """Something of it was too old once and was made again: now it is waited for."""

    @property
    def id(self) -> str:
        return self.group.id

    @property
    def samples(self) -> list[Sample]:
        return self.group.samples

    @property
    def num_unfinished(self) -> int:
        return sum(not sample.is_done for sample in self.samples)

    @property
    def is_ready(self) -> bool:
        return len(self.ended) >= min(self.needed, len(self.samples))

    def oldest_version(self) -> int | None:
        """Of the tokens that count in the loss: versions never fall along a sample, so it is that of a first one."""
        found = [version for sample in self.samples if (version := oldest_version(sample)) is not None]
        return min(found, default=None)


def oldest_version(sample: Sample) -> int | None:
    """Policy version of the sample's first token that counts in the loss; None if there is none."""
    for segment in sample.segments:
        if segment.version >= 0 and segment.end > sample.masked:
            return segment.version
    return None
