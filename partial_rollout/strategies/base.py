"""What a strategy decides: whom to admit next, whom to take out, when to stop waiting.

Strategies see a `RolloutState` and change nothing themselves; the same code runs on real and simulated engines.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from longtail.sample import Sample


@dataclasses.dataclass(slots=True)
class RolloutState:
    """One iteration as a strategy sees it. Samples are in order of submission."""

    iteration: int
    paused: list[Sample]
    """Unfinished work of earlier iterations, not admitted yet."""
    fresh: list[Sample]
    """Never started."""
    running: dict[str, Sample]
    """In the engine."""
    started_with: dict[str, int]
    """Output tokens that each admitted sample brought into this iteration, by sample id."""
    num_output_tokens: int = 0
    """Generated in this iteration so far."""

    def new_tokens(self, sample: Sample) -> int:
        """Output tokens that a sample has gained in this iteration."""
        return len(sample.output_ids) - self.started_with.get(sample.id, len(sample.output_ids))


class Strategy(Protocol):
    @property
    def name(self) -> str: ...

    def next_sample(self, state: RolloutState) -> Sample | None:
        """The sample that gets the free slot, out of `paused` and `fresh`; None leaves the slot empty."""
        ...

    def to_pause(self, state: RolloutState) -> list[Sample]:
        """Running samples to take out now; asked after every step."""
        ...

    def stop_waiting(self, state: RolloutState) -> bool:
        """Whether to end the iteration with what is complete; asked after every step. The rest is paused."""
        ...


def unfinished_first(state: RolloutState) -> Sample | None:
    """Earlier iterations' work before new work, oldest first."""
    if state.paused:
        return state.paused[0]
    return state.fresh[0] if state.fresh else None
