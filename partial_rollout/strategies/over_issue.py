"""APRIL (arXiv 2509.18521): start more groups than are needed, and stop as soon as enough of them are complete."""

from __future__ import annotations

from longtail.partial_rollout.groups import GroupState
from longtail.partial_rollout.strategies.base import Admit, RolloutState, Strategy, positive
from longtail.sample import Sample


class OverIssue(Strategy):
    """An iteration hands over exactly `groups` groups (fewer only when there are no more), the oldest of those that are
    complete. What was begun besides is kept: unfinished samples are paused and continue first, and surplus groups that
    are complete wait for the next iteration, whose share is so much smaller. (APRIL's own code drops those.)

    extra: so many more groups are begun.
    """

    name = "over-issue"

    def __init__(self, groups: int, extra: int | None = None) -> None:
        super().__init__(groups=positive("groups", groups))
        self.wanted = groups
        self.extra = positive("extra", -(-groups // 2) if extra is None else extra, 0)

    def admit(self, sample: Sample, state: RolloutState) -> Admit | None:
        if not state.group(sample).started and state.num_started >= self.wanted + self.extra:
            return None
        return Admit(sample)

    def stop_waiting(self, state: RolloutState) -> bool:
        return len(state.ready) >= self.wanted

    def hand_over(self, state: RolloutState) -> list[GroupState]:
        return state.oldest_ready(self.wanted)
