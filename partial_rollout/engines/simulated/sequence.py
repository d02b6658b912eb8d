"""What the simulated engine runs: a sample, and counters instead of KV.

    |<-------------- num_tokens (known) -------------->|
    |<--- num_computed_tokens --->|<- to be computed ->|

A *decoding* sequence has one token to compute and gets one in every pass, so that its counters follow from the number
of passes and nobody has to touch it. A *prefilling* one has more to compute, or has just been admitted.
"""

from __future__ import annotations

import dataclasses

from longtail.partial_rollout.engines.simulated.script import Ending
from longtail.sample import KVSource, Sample
from longtail.version import PolicyVersion


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedSnapshot:
    """Saved KV: so many tokens, made by weights of this version. Good in every simulated engine."""

    num_tokens: int
    version: PolicyVersion
    nbytes: int = 0
    engine: str = ""
    """That saved it."""


@dataclasses.dataclass(slots=True)
class Passes:
    """Forward passes made so far, of one engine."""

    count: int = 0


@dataclasses.dataclass(slots=True)
class SharedPrompt:
    """The KV of a group's prompt, all but its last token, which each sample computes itself."""

    key: tuple[str, PolicyVersion]
    """Group, and weights that made it."""
    ids: tuple[int, ...]
    holders: int = 1

    def __len__(self) -> int:
        return len(self.ids) - 1


@dataclasses.dataclass(slots=True, eq=False)
class SimulatedSequence:
    """Owned by the engine; where it stands in its queues and what it holds of the KV by the scheduler."""

    sample: Sample
    passes: Passes
    ending: Ending
    kv_version: PolicyVersion
    """Of the weights that made the oldest of its KV."""
    known: int
    """Known tokens; of a decoding sequence less the passes made."""
    computed: int = 0
    """Tokens with KV, unless it is decoding: then all but one."""
    decoding: bool = False
    order: int = -1
    """Number of its admission, while it runs."""
    limit: int | None = None
    """Output length at which it is to be reported."""
    stamp: int = 0
    """Of its entry in the scheduler's agenda that counts."""
    kv: KVSource = "computed"
    """Source that the next tokens' segment records."""
    prompt: SharedPrompt | None = None
    """Its prompt's KV, if its group shares it."""
    leads: bool = False
    """It computes a prompt that siblings wait for."""
    admitted_at: float = 0.0
    num_cached_tokens: int = 0
    """At the last admission: tokens of the prompt that the group had computed,"""
    num_restored_tokens: int = 0
    """tokens brought by a snapshot,"""
    refused: str | None = None
    """and why a snapshot was not used."""

    @property
    def num_tokens(self) -> int:
        return self.known + self.passes.count if self.decoding else self.known

    @property
    def num_computed_tokens(self) -> int:
        return self.known + self.passes.count - 1 if self.decoding else self.computed

    @property
    def num_output_tokens(self) -> int:
        known = self.known + self.passes.count if self.decoding else self.known
        return known - len(self.sample.prompt_ids)

    @property
    def is_running(self) -> bool:
        return self.order >= 0

    @property
    def next_emission(self) -> int:
        """Output length at which something happens to it next (a failure: would happen)."""
        emission = self.ending.emission
        return emission if self.limit is None else min(emission, self.limit)
