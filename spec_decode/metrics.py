"""What drafting did: counted for a run, for each drafter, and for each sample."""

from __future__ import annotations

import dataclasses

from longtail.events import Event
from longtail.sample import Sample


@dataclasses.dataclass(slots=True)
class Counts:
    """Of verified drafts; what was only made to be judged is not in here, but for the time."""

    steps: int = 0
    """Times that a sequence's draft was verified."""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    """Tokens that these steps committed: those accepted and the target's own one after them, up to where the sample
    ended."""
    draft_seconds: float = 0.0
    """To make drafts, also those not verified."""
    verify_seconds: float = 0.0
    """The sequences' shares, by rows, of the passes that verified them."""

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, the bonus counted; None if no draft was verified."""
        return self.emitted / self.steps if self.steps else None

    def event(self, time: float, engine: str, sample: Sample) -> Event:
        """What the trace says of a sample that is done."""
        return Event(
            "drafts",
            time,
            self.verify_seconds,
            engine,
            sample.id,
            sample.group_id,
            num_output_tokens=self.emitted,
            num_draft_tokens=self.drafted,
            num_accepted_tokens=self.accepted,
            draft_seconds=self.draft_seconds,
        )

    def add(self, other: Counts) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.draft_seconds += other.draft_seconds
        self.verify_seconds += other.verify_seconds
