"""APRIL (arXiv 2509.18521): start more groups than are needed, and stop as soon as enough of them are complete."""

from __future__ import annotations

from longtail.partial_rollout.strategies.base import BatchStrategy, positive


class OverIssue(BatchStrategy):
    """An iteration hands over exactly `groups` groups (fewer only when there are no more), the oldest of those that are
    complete. What was begun besides is kept: unfinished samples are paused and continue first, and surplus groups that
    are complete wait for the next iteration, whose share is so much smaller. (APRIL's own code drops those.)

    extra: so many more groups are begun.
    """

    name = "over-issue"

    def __init__(self, groups: int, extra: int | None = None) -> None:
        super().__init__(groups)
        self.extra = positive("extra", -(-groups // 2) if extra is None else extra, 0)
        self.most_begun = groups + self.extra
